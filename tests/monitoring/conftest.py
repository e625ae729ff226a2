"""A shop of forty categories whose windows can be shifted on purpose, as frames, data sets and bundles."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.events import Dataset, write_dataset
from feature_repo.statistics import write_statistics
from serving.prediction_log import Record, records_to_table
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.manifest import read_manifest
from serving.schemas import Recommendation, Request, Response
from serving.stages.retrieval import Quotas
from tests.serving.conftest import build_statistics

CATEGORIES, ITEMS, STORES = 40, 400, 8
MONDAY = datetime(2024, 1, 1, tzinfo=UTC)
FEATURES = ("user_item_count", "item_price")
MIX = 1 / np.arange(5, 5 + CATEGORIES)

Events = Callable[..., pd.DataFrame]


@pytest.fixture
def events() -> Events:
    """Build the purchases of some days: `events(days, first_day=0, baskets_a_day=60, seed=0, mix=MIX)`."""
    return _events


def _events(
    days: int, first_day: int = 0, baskets_a_day: int = 60, seed: int = 0, mix: np.ndarray = MIX
) -> pd.DataFrame:
    rng = np.random.default_rng([seed, first_day])
    baskets = days * baskets_a_day
    lines = rng.geometric(0.25, baskets)
    basket = np.repeat(np.arange(baskets), lines)
    category = rng.choice(CATEGORIES, len(basket), p=mix / mix.sum())
    item = category + CATEGORIES * rng.integers(0, ITEMS // CATEGORIES, len(basket))
    minute = rng.integers(8 * 60, 22 * 60, baskets)
    day = first_day + np.arange(baskets) // baskets_a_day
    at = pd.Timestamp(MONDAY) + pd.to_timedelta(day * 1440 + minute, unit="min")
    basket_id = np.array([f"{first_day}-{number}" for number in range(baskets)], object)
    frame = pd.DataFrame(
        {
            "event_type": "purchase",
            "user_id": np.array([f"u{n % 97}" for n in range(baskets)], object)[basket],
            "basket_id": basket_id[basket],
            "item_id": np.array([f"i{n}" for n in range(ITEMS)], object)[item],
            "at": pd.DatetimeIndex(at)[basket].as_unit("us"),
            "quantity": 1,
            "price": np.round(rng.lognormal(0.8, 0.6, len(basket)), 2),
            "discount": np.where(rng.random(len(basket)) < 0.3, 0.5, 0.0),
            "store_id": np.array([f"s{n}" for n in rng.integers(0, STORES, baskets)], object)[basket],
        }
    ).drop_duplicates(["basket_id", "item_id"], ignore_index=True)
    return frame.assign(event_id=[f"{first_day}-{seed}-{n}" for n in range(len(frame))])


def _items() -> pd.DataFrame:
    number = np.arange(ITEMS)
    return pd.DataFrame(
        {
            "item_id": [f"i{n}" for n in number],
            "category": [f"category {n % CATEGORIES}" for n in number],
            "department": [f"department {n % 3}" for n in number],
            "type": "",
            "brand": "",
            "manufacturer": "",
        }
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    """Write frames of events as a data set: `dataset(frame, frame, ...)`."""

    def write(*frames: pd.DataFrame) -> Path:
        together = pd.concat(frames).sort_values(["at", "basket_id", "item_id"], ignore_index=True)
        manifest = {"name": "shop", "timezone": "UTC"}
        write_dataset(tmp_path / "dataset", Dataset(together, _items(), manifest))
        return tmp_path / "dataset"

    return write


@pytest.fixture
def day() -> Callable[[int], datetime]:
    """The beginning of a day of the shop; day 0 is a Monday."""
    return lambda number: MONDAY + timedelta(days=number)


Records = Callable[..., list[Record]]


@pytest.fixture
def records() -> Records:
    """Answer `count` requests, one each `minutes`."""
    return _records


def _records(
    count: int,
    bundle_id: str = "b",
    seed: int = 0,
    price: float = 1.0,
    mix: np.ndarray = MIX,
    rung: str = "full",
    minutes: int = 30,
) -> list[Record]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        items = 5
        chosen = rng.choice(CATEGORIES, items, p=mix / mix.sum())
        at = (MONDAY + timedelta(minutes=minutes * number)).timestamp()
        request = Request(tuple(f"i{n}" for n in chosen), at, f"u{number % 97}", f"s{number % STORES}", items)
        answer = tuple(Recommendation(f"i{n}", float(rng.beta(2, 9)), "history", "") for n in range(items))
        features = np.stack([rng.poisson(3, items), price * rng.lognormal(0.8, 0.6, items)], axis=1)
        rows = features.astype(np.float32) if rung == "full" else np.empty((0, len(FEATURES)), np.float32)
        response = Response(f"r{number}", answer, bundle_id, rung, rung != "full", None, {"total": 3.0})
        made.append(Record(request, response, rows, at))
    return made


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., Path]:
    """Write records as a prediction log: `log(records, ...)`, one segment for each list."""

    def write(*segments: list[Record]) -> Path:
        directory = tmp_path / "prediction_log"
        directory.mkdir(exist_ok=True)
        for number, made in enumerate(segments):
            pq.write_table(records_to_table(made, FEATURES), directory / f"{number}.parquet")
        return directory

    return write


@pytest.fixture
def bundle(tmp_path: Path, records: Records) -> Path:
    """A bundle with the references for drift, but without a model."""
    path = tmp_path / "bundle"
    path.mkdir()
    category = np.arange(ITEMS) % CATEGORIES + 1
    statistics = replace(
        build_statistics(ITEMS)[0],
        item_ids=np.array([f"i{n}" for n in range(ITEMS)]),
        categorical=np.stack([category * 0, category, category % 3], axis=1).astype(np.int32),
    )
    names = ["", *(f"category {n}" for n in range(CATEGORIES))]
    write_statistics(path / "statistics", statistics, {"type": [""], "category": names})
    pq.write_table(records_to_table(records(900, seed=1), FEATURES), path / "reference_log.parquet")
    joined = _events(28, seed=1).merge(_items()[["item_id", "category", "department"]], on="item_id")
    pq.write_table(pa.Table.from_pandas(joined, preserve_index=False), path / "reference_events.parquet")
    # Items of one category lie close to each other.
    rng = np.random.default_rng(0)
    index = faiss.IndexFlatIP(8)
    centres = rng.normal(size=(CATEGORIES, 8))
    index.add((centres[category - 1] + 0.05 * rng.normal(size=(ITEMS, 8))).astype(np.float32))
    faiss.write_index(index, str(path / "index.faiss"))
    settings = RankingSettings(Quotas(), 1.0)
    seal_bundle(path, cut=MONDAY.isoformat(), settings=settings, made_from={})
    return path


@pytest.fixture
def bundle_id(bundle: Path) -> str:
    """The id of `bundle`, which is in its answers."""
    return str(read_manifest(bundle)["bundle_id"])
