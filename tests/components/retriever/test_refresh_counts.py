"""The toy shop after its cut: the counts end with the last whole day, and an item sold five times joins."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from components.retriever.refresh_counts import DAY, are_named, counted_since, days_over, refresh_counts
from feature_repo.events import Dataset, read_dataset, write_dataset
from feature_repo.item_days import DAY_S
from feature_repo.schema import DENSE_NAMES, FRESH, LEVELS
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.release.manifest import read_manifest
from serving.schemas import Request
from serving.stores.online_features import MemoryStore

pytestmark = pytest.mark.slow
NAMES = [feature.__name__ for feature in FRESH]


@pytest.fixture
def cut(toy_line: Path) -> pd.Timestamp:
    return pd.Timestamp(read_manifest(toy_line / "evaluated")["cut"])


@pytest.fixture
def data(toy_line: Path, cut: pd.Timestamp) -> Dataset:
    """Open from 8 to 21. After the cut some items are sold under new names, and item-000 under two.

    "rare" is sold four times. Of "nameless" nothing is known, and of "unheard" names that are new themselves.
    """
    data = read_dataset(toy_line / "dataset")
    events = data.events[data.events["at"].dt.hour.between(8, 20)].copy()
    after, names = events["at"] >= cut, {"item-000": "fresh", "item-016": "nameless", "item-022": "unheard"}
    events.loc[after, "item_id"] = events.loc[after, "item_id"].replace(names)
    events.loc[events.index[events["item_id"] == "fresh"][:4], "item_id"] = "rare"
    like = data.items[data.items["item_id"] == "item-000"]
    unheard, nameless = (dict.fromkeys(LEVELS, name) for name in ("new to the shop", ""))
    new = {"fresh": {}, "rare": {}, "unheard": unheard, "nameless": nameless}
    items = pd.concat([data.items, *(like.assign(item_id=item, **levels) for item, levels in new.items())])
    return replace(data, events=events, items=items)


def refreshed(toy_line: Path, dataset: Path, place: Path, until: pd.Timestamp) -> dict[str, Any]:
    """Refresh the evaluated bundle."""
    return refresh_counts(toy_line / "evaluated", toy_line / "retriever", dataset, place, until)


def test_a_refreshed_bundle_has_last_nights_counts_and_new_items(
    toy_line: Path, data: Dataset, cut: pd.Timestamp, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "dataset", data)
    done = refreshed(toy_line, tmp_path / "dataset", tmp_path / "new", cut + 10.3 * DAY)
    before, after = load_bundle(toy_line / "evaluated"), load_bundle(tmp_path / "new")
    end = cut + 10 * DAY
    assert done == {"bundle_id": after.bundle_id, "until": end.isoformat(), "joined": 1, "waiting": 2}
    assert set(after.statistics.code_of) - set(before.statistics.code_of) == {"fresh"}
    fresh, like = (after.statistics.code_of[item] for item in ("fresh", "item-000"))
    assert after.statistics.manufacturer[fresh] == after.statistics.manufacturer[like] > 0
    counted = data.events[(data.events["at"] < end) & (data.events["at"] >= end - 7 * DAY)]
    baskets = counted.groupby("item_id")["basket_id"].nunique()
    expected = baskets.reindex(after.statistics.item_ids).fillna(0).to_numpy()
    week = after.statistics.fresh[:, NAMES.index("item_baskets_7d")]
    assert week.tolist() == expected.tolist()
    assert expected[after.statistics.code_of["fresh"]] > 0
    assert (tmp_path / "new" / "ranker.onnx").read_bytes() == before.path.joinpath("ranker.onnx").read_bytes()
    recommender = Recommender(after, MemoryStore())
    prepared = recommender.prepare(Request(("item-002",), end.timestamp(), k=100))
    column = prepared.dense[:, DENSE_NAMES.index("item_baskets_7d")]
    assert column.tolist() == expected[prepared.candidates.codes].tolist()
    # A second night starts from the first. The shop has closed at 21 h.
    midnight = data.events["at"].max().normalize() + DAY
    night = (toy_line / "retriever", tmp_path / "dataset", tmp_path / "next", midnight + DAY / 9)
    assert refresh_counts(tmp_path / "new", *night)["until"] == midnight.isoformat()
    assert "rare" not in load_bundle(tmp_path / "next").statistics.code_of


def test_an_item_needs_a_name_at_each_level_at_which_the_catalogue_has_names(toy_line: Path) -> None:
    bundle = load_bundle(toy_line / "evaluated")
    types, categories, departments = (bundle.vocabulary[level][1].lower() for level in LEVELS)
    new = pd.DataFrame(
        {
            "type": [types, types, "", ""],
            "category": [categories, "", categories, ""],
            "department": [departments, departments, "new to the shop", ""],
        }
    )

    def named(categorical: np.ndarray) -> list[bool]:
        statistics = replace(bundle.statistics, categorical=categorical)
        return are_named(new, statistics, bundle.vocabulary).tolist()

    levels = np.asarray(bundle.statistics.categorical)
    assert named(levels) == [True, False, False, False]
    assert named(levels * np.array([1, 0, 0])) == [True, True, False, False], "a shop with types alone"
    assert named(np.zeros_like(levels)) == [True] * 4, "a shop without names"


@pytest.mark.parametrize(
    ("sold", "morning", "over"),
    [
        ([day for day in range(-7, 27) if day % 7 != 6], 28, 28),
        ([day for day in range(-7, 26) if day % 7 < 5], 28, 28),
        ([day for day in range(-7, 27) if day % 7 != 6], 99, 28),
        (range(-7, 27), 28, 27),
        (range(-7, 30), 28, 28),
        (range(24, 27), 99, 31),
    ],
    ids=["closed on Sundays", "on weekends", "the data end", "a delivery is missing", "later sales", "young"],
)
def test_a_day_of_the_week_on_which_nothing_is_ever_sold_is_over(
    sold: Iterable[int], morning: int, over: int
) -> None:
    """Day 0 is a Monday; sales are at 20 h."""
    cut = pd.Timestamp("2024-06-03", tz="UTC")
    at = np.array([cut.timestamp() + day * DAY_S + 72_000 for day in sold])
    assert days_over(at, cut, cut + (morning + 0.1) * DAY) == over


def test_data_that_do_not_reach_back_are_refused(
    toy_line: Path, data: Dataset, cut: pd.Timestamp, tmp_path: Path
) -> None:
    end, statistics = cut + 8 * DAY, load_bundle(toy_line / "evaluated").statistics
    assert counted_since(statistics, cut, end) == end - 91 * DAY
    young = replace(statistics, age_days=np.linspace(9, 30, 80, dtype=np.float32))
    assert counted_since(young, cut, end) == cut - 30 * DAY
    events = data.events[data.events["at"] >= cut - 60 * DAY]
    write_dataset(tmp_path / "dataset", replace(data, events=events))
    begin, expected = events["at"].min().floor("min"), end - 91 * DAY
    with pytest.raises(ValueError, match=re.escape(f"begin at {begin}, expected those since {expected}")):
        refreshed(toy_line, tmp_path / "dataset", tmp_path / "new", end)
    assert not (tmp_path / "new").exists()


def test_without_a_day_since_the_cut_nothing_is_written(
    toy_line: Path, cut: pd.Timestamp, tmp_path: Path
) -> None:
    early = cut + pd.Timedelta(hours=23)
    with pytest.raises(ValueError, match="expected a day or more after the bundle's cut"):
        refreshed(toy_line, toy_line / "dataset", tmp_path / "new", early)
    assert not (tmp_path / "new").exists()
