"""Benefit and cost of re-ranking: its metrics by hand, its choice, and a report of a real bundle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.data.examples import RankerExamples
from components.evaluation.metrics import DISCOUNT, Bootstrap
from components.evaluation.protocol import Task
from feature_repo.aggregates import no_events
from pipelines.bench.judged_lists import JudgedLists
from pipelines.bench.rerank import (
    METRICS,
    RerankWeights,
    bench_rerank,
    choose,
    frontier,
    judge,
)
from serving.release.bundle import load_bundle
from serving.stages.reranking import UNBOUNDED


def task(hidden: list[int], before: list[bool]) -> Task:
    return Task(0, "u", "b", "s", 0.0, (), np.array(hidden), np.array(before), no_events())


@pytest.fixture
def small(toy_line: Path) -> tuple[JudgedLists, np.ndarray]:
    """Two lists over twelve items: 11 is in one basket of 128 and of a new manufacturer, others in all."""
    bundle = load_bundle(toy_line / "evaluated")
    types = np.arange(12) // 2 + 1
    statistics = replace(
        bundle.statistics,
        item_ids=bundle.statistics.item_ids[:12],
        categorical=np.stack([types] * 3, axis=1).astype(np.int32),
        basket_count=np.array([128.0] * 11 + [1.0], np.float32),
        total_baskets=np.array(128.0),
        manufacturer=np.array([1] * 11 + [2], np.int32),
        age_days=np.array([300.0] * 11 + [10.0], np.float32),
    )
    bundle = replace(bundle, statistics=statistics, settings=replace(bundle.settings, new_gain=1.0))
    label = np.zeros(24, np.int8)
    label[[0, 11, 12 + 1]] = 1
    categorical = np.tile(np.stack([np.arange(12) + 1, types], axis=1), (2, 1))
    none = np.empty(0)
    examples = RankerExamples(none, categorical, label, np.array([0, 12, 24]), none, none, none)
    tasks = [task([0, 11], [True, False]), task([1], [True])]
    bought = np.arange(24) % 2 == 0  # the first of each type
    codes = np.tile(np.arange(12), 2)
    lists = JudgedLists(tasks, examples, codes, bought, bundle, Bootstrap(["u", "u"]))
    return lists, np.concatenate([np.linspace(0.9, 0.1, 12)] * 2).astype(np.float32)


@pytest.mark.slow
def test_metrics_by_hand(small: tuple[JudgedLists, np.ndarray]) -> None:
    found, ndcg = judge(*small, RerankWeights())
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
    found, ndcg = judge(*small, RerankWeights(novelty=0.5, novel_slots=(1,)))
    assert ndcg.tolist() == pytest.approx([1.0, DISCOUNT[2] / DISCOUNT[0]])
    assert (found["coverage"], found["new_recall_at_10"], found["new_manufacturers"]) == (10 / 12, 1.0, 0.1)
    assert found["novelty"] == pytest.approx(0.7)  # log2(128) in one place of ten
    found, ndcg = judge(*small, RerankWeights(novelty=0.5, novel_slots=(10,)))
    assert ndcg.tolist() == pytest.approx([(DISCOUNT[0] + DISCOUNT[9]) / ideal, DISCOUNT[1] / DISCOUNT[0]])
    assert judge(*small, RerankWeights(exposure=10.0))[0]["new_manufacturers"] == 0.1
    found, _ = judge(*small, RerankWeights(novelty=0.5, novel_slots=(1,), novel_loss=0.7))
    assert found["new_recall_at_10"] == 0.0, "0.1 instead of 0.9 would lose 0.8"
    assert judge(*small, RerankWeights(type_penalty=0.5, spares_new=False))[0]["types"] == 6.0
    assert judge(*small, RerankWeights(type_penalty=0.5))[0]["types"] == 5.0, "all that would pay are new"


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
