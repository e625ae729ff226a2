"""Injected changes: nothing without a change, an alarm soon after a large one, and what no PSI can show."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, window_s
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import read_tasks
from feature_repo.events import read_dataset
from monitoring.windows import Window
from pipelines.bench.injected_drift import (
    baskets_until_detected,
    concept_drift,
    detection_delays,
    prediction_drift,
    share_power,
)
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.schemas import DEFAULT_K
from serving.stores.online_features import MemoryStore


def test_a_large_change_is_detected_sooner_and_none_is_not(
    events: Callable[..., pd.DataFrame], dataset: Callable[..., Path], day: Callable[[int], datetime]
) -> None:
    data = read_dataset(dataset(events(42)))
    rows = detection_delays(data, Window(day(0), day(28)), (0.0, 0.2, 0.6))
    none, some, large = (row["days"] for row in rows)
    assert none is None
    assert 1 <= large <= some <= 7, "after a week the whole window has changed"
    assert rows[2]["psi"] > rows[2]["alarm_at"]


def test_a_large_share_is_seen_sooner_than_a_small_one_and_no_change_is_not(
    events: Callable[..., pd.DataFrame], dataset: Callable[..., Path], day: Callable[[int], datetime]
) -> None:
    data = read_dataset(dataset(events(56)))
    rows = [row for row in share_power(data, Window(day(0), day(42)), weeks=2) if row["column"] == "store_id"]
    seen = {row["factor"]: [r["seen"] for r in rows if r["factor"] == row["factor"]] for row in rows}
    assert max(seen[1.0]) == 0
    assert np.mean(seen[3.0]) == 1
    assert np.mean(seen[1.3]) <= np.mean(seen[2.0])


def test_both_distances_of_predictions_grow_with_the_change() -> None:
    scores = np.random.default_rng(0).beta(1, 9, 4_000)
    rows = prediction_drift(scores)
    for name in ("psi", "kl"):
        values = [row[name] for row in rows]
        assert values == sorted(values)
        assert values[0] < 0.02 < values[-1]


def test_a_change_is_detected_only_while_unchanged_purchases_are_not() -> None:
    none, half, all_hit = [False] * 40, [True, False] * 20, [True] * 40
    assert baskets_until_detected(half, 0.5) is None
    assert baskets_until_detected(none, 0.5) == 10, "10 x 0.5 is more than 3 standard deviations"
    assert baskets_until_detected(none, 0.5, control=half) == 10
    assert baskets_until_detected(half, 0.9, control=none) is None, "hits fall without the change, too"
    assert baskets_until_detected(half, 0.9, control=all_hit) is not None


@pytest.mark.slow
def test_hits_show_what_requests_and_probabilities_cannot(toy_line: Path) -> None:
    data = read_dataset(toy_line / "dataset")
    rows, scores = concept_drift(toy_line / "evaluated", data, (0.0, 0.8))
    assert ((scores >= 0) & (scores <= 1)).all()
    bundle, purchases = load_bundle(toy_line / "evaluated"), purchases_of(data.events)
    tasks = read_tasks(purchases, bundle.statistics, *window_s(pd.Timestamp(bundle.manifest["cut"]))).hidden
    ranker = Recommender(bundle, MemoryStore())
    [(_, asked)] = prepared_tasks(bundle, tasks[-1:], DEFAULT_K, Nightly(bundle, purchases))
    items = ranker.finish(asked, ranker.rank(asked.dense, asked.categorical)).items
    assert scores[-len(items) :].tolist() == [item.score for item in items], "counted until the night before"
    same, other = rows
    assert same["baskets"] is None
    assert other["hit_ratio_at_10"] < same["hit_ratio_at_10"]
    assert 1 <= other["baskets"] <= 300
