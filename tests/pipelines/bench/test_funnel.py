"""The toy shop: every item is a candidate, so two stages lose nothing; a new item sells after the cut."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.evaluate_bundle import window_s
from components.evaluation.protocol import Task, read_tasks
from feature_repo.events import read_dataset
from pipelines.bench.funnel import (
    LENGTHS,
    SHAPES,
    compare_sources,
    compare_with_whole_catalogue,
    evaluate_new_items,
    find_ceiling,
    map_hidden_items,
    sample,
)
from serving.release.bundle import Bundle, load_bundle
from serving.stores.online_features import MemoryStore, UserRow


def asked(toy_line: Path, *most: int) -> tuple[Bundle, list[Task], Purchases]:
    """The evaluated bundle, a sample of its test baskets, and all purchases."""
    bundle = load_bundle(toy_line / "evaluated")
    purchases = purchases_of(read_dataset(toy_line / "dataset").events)
    window = window_s(pd.Timestamp(bundle.manifest["cut"]))
    return bundle, sample(read_tasks(purchases, bundle.statistics, *window).hidden, *most), purchases


@pytest.mark.parametrize(("count", "most"), [(990, 500), (8_068, 1_500), (500, 500), (3, 500), (0, 500)])
def test_a_sample_is_of_the_whole_window(count: int, most: int) -> None:
    rows: list[Any] = list(sample(cast(list[Task], list(range(count))), most))
    assert len(set(rows)) == min(count, most)
    assert rows == sorted(rows)
    assert rows[:1] + rows[-1:] == ([0, count - 1] if count else [])


@pytest.mark.slow
def test_two_stages_with_room_for_all_items_answer_as_the_ranker_alone(
    toy_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowStore(MemoryStore):
        def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
            time.sleep(0.02)
            return super().read(user_id, deadline)

    monkeypatch.setattr("components.evaluation.evaluate_bundle.MemoryStore", SlowStore)
    bundle, tasks, purchases = asked(toy_line)
    found = compare_with_whole_catalogue(bundle, tasks[:40], purchases)
    assert found["funnel"] == found["whole_catalogue"]
    assert (found["kept"]["recall_at_20"], found["baskets"], found["items"]) == (1.0, 40, 80)
    areas = {name: row["auc"] for name, row in found["auc"].items()}
    assert areas["popularity"] < 0.7 < 0.85 < areas["served"], "the toy shop sells all items alike"
    assert all(ms > 20 for ms in found["ms"].values()), "both read the shopper's row"


@pytest.mark.slow
def test_each_source_and_each_hidden_item_has_its_place(toy_line: Path) -> None:
    """A fifth of the favourites are hidden: the shoppers bought them, so history brings them first."""
    bundle, tasks, purchases = asked(toy_line, 30)
    rows = {(row["requests"], row["source"]): row for row in compare_sources(bundle, tasks, purchases)}
    shapes = {shape for shape, _ in rows}
    assert shapes == {*SHAPES, "profile clearance", "profile premium"}, "each shape has a row"
    # Without the source that holds the favourites the list loses them; of a stranger there is no history.
    lost = rows["as they are", "history"]
    assert lost["recall_at_20_interval"][1] < 0.5
    assert rows["last 5 baskets", "history"]["recall_at_20"] < 1
    assert rows["no history, one item", "together"]["recall_at_20_interval"][1] < 1
    assert not {("no history", "history"), ("no history, one item", "history")} & set(rows)
    assert rows["as they are", "tower"]["ndcg_at_10"] == 1.0, "all 80 items are candidates before"
    assert (rows["as they are", "tower"]["quota"], lost["quota"]) == (60, 0)
    shares = map_hidden_items(bundle, tasks, purchases)
    for found in shares.values():
        for kind in ("all", "repeat"):
            assert sum(row[kind] for row in found.values()) == pytest.approx(1.0)
    assert shares["first found by"]["history"]["repeat"] == 1.0
    assert shares["place in the ranking"]["to 20"]["all"] > 0.8
    lengths = {kind for kind in shares["first found by"]["history"] if kind.endswith(" baskets")}
    assert lengths <= {f"{length} baskets" for length in LENGTHS}
    assert lengths


@pytest.mark.slow
def test_a_perfect_ranker_is_the_ceiling(toy_line: Path) -> None:
    bundle, tasks, purchases = asked(toy_line, 30)
    found = find_ceiling(bundle, tasks, purchases)
    assert found["a perfect ranker"]["recall_at_20"] == 1.0, "every item is a candidate"
    plain, truth = found["the ranker's order"], found["with the truth among the candidates"]
    assert truth["recall_at_20"] == plain["recall_at_20"]
    few = replace(bundle.settings, quotas=replace(bundle.settings.quotas, total=10))
    found = find_ceiling(replace(bundle, settings=few), tasks, purchases)
    plain, truth = found["the ranker's order"], found["with the truth among the candidates"]
    assert plain["recall_at_20"] < truth["recall_at_20"] > found["a perfect ranker"]["recall_at_20"]
    assert truth["ratios"]["recall_at_20"] > 1


@pytest.mark.slow
def test_an_item_that_first_sells_after_the_cut_is_among_the_candidates(
    toy_line: Path, tmp_path: Path
) -> None:
    bundle, data = load_bundle(toy_line / "evaluated"), read_dataset(toy_line / "dataset")
    assert evaluate_new_items(bundle, toy_line / "retriever", data, tmp_path / "same")["lines"] == 0
    events = data.events.copy()
    later = (events["at"] >= pd.Timestamp(bundle.manifest["cut"])) & (events["item_id"] == "item-000")
    events.loc[later, "item_id"] = "fresh"
    like = data.items[data.items["item_id"] == "item-000"].assign(item_id="fresh")
    changed = replace(data, events=events, items=pd.concat([data.items, like]))
    found = evaluate_new_items(bundle, toy_line / "retriever", changed, tmp_path / "extended")
    assert (found["items"], found["lines"]) == (1, found["baskets"])
    assert found["lines"] > 0
    # The week's best sellers hold it from the day after its first sale.
    assert 0.7 < found["recall_at_500"] <= 1.0
    assert 0 <= found["recall_at_20"] <= 1
    again = evaluate_new_items(
        load_bundle(tmp_path / "extended"), toy_line / "retriever", changed, tmp_path / "again"
    )
    assert (again["items"], again["lines"]) == (0, 0), "that bundle knows the item"
