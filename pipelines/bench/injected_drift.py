"""A change of known size -> the days until the drift check alarms, and a change that no PSI shows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, window_s
from components.evaluation.protocol import read_tasks
from feature_repo.events import Dataset
from monitoring.drift import compare
from monitoring.psi import encode, shares
from monitoring.verdict import judge
from monitoring.windows import EventFrames, Window, event_tables, purchases
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.schemas import DEFAULT_K
from serving.stores.online_features import MemoryStore

LADDER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # of lines, of the probability, or of purchases
DAYS = 14  # after the change
SLIDING = timedelta(days=7)  # the window of a check
SIGMAS = 3.0  # below the expected hits: the change is detected


def detection_delays(
    data: Dataset, reference: Window, ladder: Sequence[float] = LADDER, days: int = DAYS
) -> list[dict[str, Any]]:
    """Return for each share the days until a daily check of the last week alarms; None: in none of the days.

    From the end of the reference on, the share of all lines turns into lines of its most common category.
    """
    assert reference.until is not None
    start, timezone = reference.until, str(data.manifest["timezone"])
    expected = EventFrames.of(purchases(data, reference), timezone)
    events = purchases(data, Window(start - SLIDING, start + timedelta(days=days)))
    common = expected.lines["category"].mode()[0]
    chance = np.random.default_rng(0).random(len(events))  # a higher rung changes the same lines and more
    rows = []
    for share in ladder:
        is_hit = (events["at"] >= start).to_numpy() & (chance < share)
        changed = events.assign(category=events["category"].where(~is_hit, common))
        delay, psis = None, []
        for day in range(1, days + 1):
            end = start + timedelta(days=day)
            found = EventFrames.of(changed[Window(end - SLIDING, end).holds(changed["at"])], timezone)
            tables = [table.only(["category"]) for table in event_tables(found, expected)]
            column = judge(compare(tables)).column("category")
            psis.append(column.psi)
            if column.status == "alarm":
                delay = day
                break
        rows.append({"share": share, "days": delay, "psi": psis[-1], "alarm_at": column.alarm_at})
    return rows


def prediction_drift(scores: np.ndarray, ladder: Sequence[float] = LADDER) -> list[dict[str, float]]:
    """Return PSI and KL divergence of later probabilities against earlier ones, lowered by each share.

    Both are of the same bins: the deciles of the earlier probabilities.
    """
    earlier, later = np.array_split(scores.astype(np.float64), 2)
    rows = []
    for share in ladder:
        bins = encode(pd.Series(later * (1 - share)), pd.Series(earlier)).histogram("score")
        p, q = shares(bins.current), shares(bins.reference)
        rows.append({"share": share, "psi": bins.psi(), "kl": float((p * np.log(p / q)).sum())})
    return rows


def concept_drift(
    bundle_path: Path, data: Dataset, ladder: Sequence[float] = LADDER
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return hits where shoppers answer differently to the same requests; and all probabilities.

    Of the purchases of the later half of the test baskets, each share becomes another item of the catalogue,
    any with the same chance. Requests and probabilities stay, so that no PSI of them can move.
    """
    bundle = load_bundle(bundle_path)
    window = window_s(pd.Timestamp(bundle.manifest["cut"]))
    tasks = read_tasks(purchases_of(data.events), bundle.statistics, *window).hidden
    store = MemoryStore()
    recommender = Recommender(bundle, store)
    shown, scores = [], []
    for _, prepared in prepared_tasks(recommender, store, tasks, DEFAULT_K):
        answer = recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
        shown.append(bundle.statistics.codes([item.item_id for item in answer.items]))
        scores.append([item.score for item in answer.items])
    half, rng = len(tasks) // 2, np.random.default_rng(0)
    chance = [rng.random(len(task.hidden)) for task in tasks]
    other = [rng.integers(len(bundle.statistics.item_ids), size=len(task.hidden)) for task in tasks]

    def hits(number: int, share: float) -> bool:
        bought = np.where(chance[number] < share, other[number], tasks[number].hidden)
        return bool(np.isin(bought, shown[number]).any())

    base = float(np.mean([hits(number, 0.0) for number in range(half)]))
    rows = []
    for share in ladder:
        found = np.array([hits(number, share) for number in range(half, len(tasks))])
        count = np.arange(1, len(found) + 1)
        low = base * count - SIGMAS * np.sqrt(base * (1 - base) * count)
        below = np.flatnonzero(np.cumsum(found) < low)
        first = int(count[below[0]]) if len(below) else None
        rows.append(
            {"share": share, "hit_ratio_at_10": float(found.mean()), "before": base, "baskets": first}
        )
    return rows, np.concatenate(scores)
