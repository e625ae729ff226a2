"""Eight retrainings on purchases from shown lists: candidates stay as many."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from feature_repo.aggregates import pack
from feature_repo.events import Dataset, iso, write_dataset
from feature_repo.stream.archive import EVENTS, read_archive, rows_of
from feature_repo.toy_shop import START, favourite_items, item_name, toy_dataset, user_name
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.schemas import Request
from serving.stores.online_features import MemoryStore, UserRow
from tests.operators import read_operators_once

pytestmark = pytest.mark.slow

USERS, ITEMS, WEEKS, CYCLES, K = 40, 240, 10, 8, 5
WEEK = pd.Timedelta(weeks=1)
# So few candidates that not every item is one for every request.
TREES = {"gradient_boosting": {"size": {"trees": 40, "leaves": 15}}}
QUOTAS = {"history": 10, "together": 8, "week": 4, "tower": 6, "store": 4, "candidates": 30}


def retrain(folder: Path, events: pd.DataFrame, cut: pd.Timestamp) -> Recommender:
    """Return the recommender of a training on all events before the cut."""
    from components.data.build_examples import build_examples
    from components.data.fit_statistics import fit_statistics
    from components.data.materialize_features import materialize_features
    from components.ranker.ranker_artefact import ENGINES
    from components.ranker.train_ranker import train_ranker
    from components.release.assemble_bundle import assemble_bundle
    from components.retriever.build_index import build_index
    from components.retriever.export_retriever import export_retriever
    from components.retriever.train_retriever import train_retriever

    at = iso(cut)
    data, statistics, examples = folder / "dataset", folder / "statistics", folder / "examples"
    items = toy_dataset(1, ITEMS, 1).items
    write_dataset(data, Dataset(events, items, {"name": "loop", "timezone": "UTC"}))
    fit_statistics(data, statistics, at)
    materialize_features(data, statistics, folder / "features", at)
    build_examples(data, statistics, examples, at, {"windows": 1, "masks": 1})
    train_retriever(examples, statistics, folder / "retriever", {"epochs": 2, "batch_size": 64})
    train_ranker(examples, statistics, folder / "ranker", "gradient_boosting", TREES)
    (folder / "ranker" / ENGINES).write_text("{}")
    export_retriever(folder / "retriever", examples, folder / "graphs")
    build_index(folder / "retriever", examples, folder / "index", {})
    parts = (
        examples,
        statistics,
        folder / "graphs",
        folder / "ranker",
        folder / "index",
        folder / "features",
    )
    assemble_bundle(*parts, folder / "bundle", at, "loop", QUOTAS)
    store, end = MemoryStore(), cut.timestamp()
    # The rows that `publish_features` gives the store: see test_publish_features.py.
    for user, row in rows_of(read_archive(folder / "features" / EVENTS)):
        store.write(user, UserRow(pack(row, user), end))
    return Recommender(load_bundle(folder / "bundle"), store)


def week_of(
    recommender: Recommender, begin: pd.Timestamp, rng: np.random.Generator
) -> tuple[pd.DataFrame, set[str], set[str]]:
    """Return a week's purchases, the items that were candidates, and those that were shown.

    Each shopper makes two trips with an own taste: favourites, and a pair of items as in the toy shop. Half
    of the basket is scanned when the till asks. Of the shown items, shoppers take most favourites, and some
    others of their kind (even or odd).
    """
    baskets, candidates, shown = list[tuple[Any, ...]](), set[str](), set[str]()
    for user in range(USERS):
        favourites = favourite_items(user, ITEMS)
        for _ in range(2):
            at = begin + pd.Timedelta(seconds=int(rng.integers(WEEK.total_seconds())))
            start = int(rng.integers(ITEMS // 4)) * 4 + user % 2
            wanted = {item for item in favourites if rng.random() < 0.6} | {start, (start + 2) % ITEMS}
            basket = rng.permutation(sorted(wanted))
            scanned = tuple(item_name(item) for item in basket[: len(basket) // 2 + 1])
            number = f"{begin:%j}-{user}-{len(baskets)}"
            request = Request(scanned, at.timestamp(), user_name(user), f"store-{user % 3}", K, number)
            prepared = recommender.prepare(request)
            answer = recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
            items = [item.item_id for item in answer.items]
            candidates |= set(recommender.bundle.statistics.item_ids[prepared.candidates.codes].tolist())
            shown |= set(items)
            chance = {item_name(item): 0.9 for item in favourites}
            taken = {i for i in items if rng.random() < chance.get(i, 0.1 * (int(i[5:]) % 2 == user % 2))}
            bought = {item_name(item) for item in basket} | taken
            baskets += [(number, user_name(user), item, at, f"store-{user % 3}") for item in sorted(bought)]
    events = pd.DataFrame(baskets, columns=["basket_id", "user_id", "item_id", "at", "store_id"])
    events["event_id"] = [f"{begin:%j}-{row}" for row in range(len(events))]
    price = 1.0 + events["item_id"].str[5:].astype(int) % 7
    return events.assign(event_type="purchase", quantity=1, price=price, discount=0.0), candidates, shown


def test_eight_retrainings_keep_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a fifth is lost. Shoppers that buy favourites and shown items alone would lose a quarter."""
    monkeypatch.setattr("components.ranker.scoring.REPEATS", 3)  # no latency matters here
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # LightGBM's threads would wait for each other
    read_operators_once(monkeypatch)
    rng, cut = np.random.default_rng(0), START + WEEKS * WEEK
    events = toy_dataset(USERS, ITEMS, WEEKS).events
    candidates, shown = list[float](), list[float]()
    for cycle in range(CYCLES + 1):
        recommender = retrain(tmp_path / str(cycle), events[events["at"] >= cut - WEEKS * WEEK], cut)
        week, offered, seen = week_of(recommender, cut, rng)
        candidates.append(len(offered) / ITEMS)
        shown.append(len(seen) / ITEMS)
        events, cut = pd.concat([events, week]), cut + WEEK
    assert candidates[0] < 0.95, "else nothing could be seen"
    assert min(candidates) >= 0.8 * candidates[0]
    assert min(shown) >= 0.8 * shown[0]
