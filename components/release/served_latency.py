"""Two bundles and the same shoppers -> what an answer of each takes on this machine, asked in turns.

A time that is measured elsewhere or earlier says more about that machine and that hour than about the bundle.
So nothing is read from an evaluation: the gate's own process asks both, one question after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from components.evaluation.protocol import Task
from components.measurement import measured_on
from feature_repo.aggregates import pack
from serving.answer.recommender import Recommender
from serving.release.bundle import Bundle
from serving.stores.online_features import MemoryStore, UserRow

TURNS = 8
_WARM_UP = 2  # turns that are not counted: first calls compile loops and touch pages


def served_latency(
    challenger: Bundle, champion: Bundle | None, tasks: Sequence[Task], turns: int = TURNS
) -> dict[str, Any]:
    """Ask both bundles the same requests; return milliseconds of each, and the machine.

    What a request takes is its quickest turn: other programs of the machine only add to that. `added_ms` is
    the difference of the means: where each millisecond costs the same, the mean is paid.
    """
    bundles = {"challenger": challenger} | ({} if champion is None else {"champion": champion})
    distinct = list({task.user_id: task for task in tasks}.values())
    asks = {name: _recommender(bundle, distinct) for name, bundle in bundles.items()}
    took = {name: np.full((turns, len(distinct)), np.inf) for name in bundles}
    for turn in range(-_WARM_UP, turns):
        for number, task in enumerate(distinct):
            for name in list(asks)[:: 1 if (turn + number) % 2 else -1]:
                request = task.request()
                began = time.perf_counter()
                asks[name].recommend(request)
                if turn >= 0:
                    took[name][turn, number] = (time.perf_counter() - began) * 1e3
    found = {name: {"bundle_id": bundles[name].bundle_id, **_summary(ms.min(0))} for name, ms in took.items()}
    added = {}
    if champion is not None:
        added["added_ms"] = round(found["challenger"]["mean_ms"] - found["champion"]["mean_ms"], 4)
    return {**added, **found, **measured_on()}


def _recommender(bundle: Bundle, tasks: Sequence[Task]) -> Recommender:
    store = MemoryStore()
    for task in tasks:
        store.write(task.user_id, UserRow(pack(task.history), float(task.at)))
    return Recommender(bundle, store)


def _summary(ms: np.ndarray) -> dict[str, Any]:
    p50, p99 = np.percentile(ms, [50, 99]).tolist()
    return {
        "requests": len(ms),
        "mean_ms": round(float(np.mean(ms)), 4),
        "p50_ms": round(p50, 4),
        "p99_ms": round(p99, 4),
    }
