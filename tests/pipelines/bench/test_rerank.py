"""Benefit and cost of re-ranking: its metrics by hand, its choice, and a report of a real bundle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.evaluation.metrics import DISCOUNT
from components.evaluation.protocol import Task
from feature_repo.aggregates import no_events
from feature_repo.statistics import Statistics, read_statistics
from pipelines.bench.rerank import (
    METRICS,
    RerankWeights,
    ScoredLists,
    bench_rerank,
    choose,
    frontier,
    judge,
)
from serving.stages.reranking import UNBOUNDED


def task(hidden: list[int], before: list[bool]) -> Task:
    return Task(0, "u", "b", "s", 0.0, (), np.array(hidden), np.array(before), no_events())


def small(toy: Statistics) -> ScoredLists:
    """Two lists over twelve items: 11 is in one basket of 128 and of a new manufacturer, others in all."""
    statistics = replace(
        toy,
        item_ids=toy.item_ids[:12],
        categorical=np.stack([np.arange(12) // 2 + 1] * 3, axis=1).astype(np.int32),
        basket_count=np.array([128.0] * 11 + [1.0], np.float32),
        total_baskets=np.array(128.0),
        manufacturer=np.array([1] * 11 + [2], np.int32),
        age_days=np.array([300.0] * 11 + [10.0], np.float32),
    )
    codes = np.concatenate([np.arange(12), np.arange(12)])
    scores = np.concatenate([np.linspace(0.9, 0.1, 12)] * 2).astype(np.float32)
    hidden, new = codes * 0 > 0, codes * 0 > 0
    hidden[[0, 11, 12 + 1]] = True
    new[[11]] = True
    tasks = [task([0, 11], [True, False]), task([1], [True])]
    bought = codes % 2 == 0  # the first of each type
    return ScoredLists(statistics, tasks, 1.0, np.array([0, 12, 24]), codes, scores, hidden, new, bought)


@pytest.mark.slow
def test_metrics_by_hand(toy_line: Path) -> None:
    lists = small(read_statistics(toy_line / "statistics"))
    found, ndcg = judge(lists, RerankWeights())
    ideal = DISCOUNT[0] + DISCOUNT[1]
    assert ndcg.tolist() == pytest.approx([DISCOUNT[0] / ideal, DISCOUNT[1] / DISCOUNT[0]])
    assert found == pytest.approx(
        {
            "ndcg_at_10": ndcg.mean(),
            "recall_at_10": 0.75,
            "new_recall_at_10": 0.0,
            "coverage": 10 / 12,
            "new_manufacturers": 0.0,
            "novelty": 0.0,
            "types": 5.0,
        }
    )
    # 0.1 x 128^0.5 = 1.13: item 11 ranks first, and item 9 is dropped.
    found, ndcg = judge(lists, RerankWeights(novelty=0.5, novel_slots=(1,)))
    assert ndcg.tolist() == pytest.approx([1.0, DISCOUNT[2] / DISCOUNT[0]])
    assert (found["coverage"], found["new_recall_at_10"], found["new_manufacturers"]) == (10 / 12, 1.0, 0.1)
    assert found["novelty"] == pytest.approx(0.7)  # log2(128) in one place of ten
    found, ndcg = judge(lists, RerankWeights(novelty=0.5, novel_slots=(10,)))
    assert ndcg.tolist() == pytest.approx([(DISCOUNT[0] + DISCOUNT[9]) / ideal, DISCOUNT[1] / DISCOUNT[0]])
    assert judge(lists, RerankWeights(exposure=10.0))[0]["new_manufacturers"] == 0.1
    found, _ = judge(lists, RerankWeights(novelty=0.5, novel_slots=(1,), novel_loss=0.7))
    assert found["new_recall_at_10"] == 0.0, "0.1 instead of 0.9 would lose 0.8"
    assert judge(lists, RerankWeights(type_penalty=0.5, spares_new=False))[0]["types"] == 6.0
    assert judge(lists, RerankWeights(type_penalty=0.5))[0]["types"] == 5.0, "all that would pay are new"


def point(ndcg: float, coverage: float, new: float) -> tuple[dict[str, float], Any]:
    found = dict.fromkeys(METRICS, 1.0)
    return {**found, "ndcg_at_10": ndcg, "coverage": coverage, "new_manufacturers": new}, None


def test_the_cheapest_weights_that_reach_the_goals_are_chosen() -> None:
    points = {
        RerankWeights(): point(1.0, 0.5, 0.010),
        RerankWeights(novelty=0.1): point(0.9997, 0.55, 0.010),
        RerankWeights(novelty=0.2): point(0.9982, 0.58, 0.012),
        RerankWeights(novelty=0.2, exposure=1): point(0.9979, 0.61, 0.014),
        RerankWeights(novelty=0.2, exposure=2): point(0.9976, 0.62, 0.020),  # more than requested
        RerankWeights(novelty=0.3, exposure=1): point(0.9967, 0.70, 0.020),  # loses too much
        RerankWeights(exposure=2): point(0.9996, 0.5, 0.100),  # one goal many times over is not two
    }
    assert choose(points) == RerankWeights(novelty=0.2, exposure=1)
    assert [(one.novelty, one.exposure) for one in frontier(points)] == [
        (0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.2, 1), (0.2, 2), (0.3, 1),
    ]  # fmt: skip
    near = {weights: found for weights, found in points.items() if found[0]["coverage"] < 0.6}
    assert choose(near) == RerankWeights(novelty=0.2), "0.8 of one goal and 2/3 of the other"


@pytest.mark.slow
def test_the_result_files_hold_the_figures(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("NOVELTIES", (0.2,)), ("LOSSES", (UNBOUNDED,)), ("SLOTS", ((10,),))):
        monkeypatch.setattr(f"pipelines.bench.rerank.{name}", few)
    results = bench_rerank(toy_line / "evaluated", toy_line / "dataset", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rerank.json", "rerank.md"]
    assert json.loads((tmp_path / "rerank.json").read_text())["judged_on"] == results["judged_on"] > 0
    assert results["chosen_on"] > 0
    assert results["frontier"][0]["metrics"].keys() == set(METRICS)
    table = (tmp_path / "rerank.md").read_text()
    assert "| **chosen** |" in table
    assert "| as the bundle serves |" in table
