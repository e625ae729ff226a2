"""Two bundles -> what an answer of each takes on this machine, asked in turns, for the gate.

A time that is measured elsewhere or earlier says more about that machine and that hour than about the bundle.
So nothing is read from an evaluation: the gate's own process asks both, one question after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from components.measurement import measured_on
from serving.answer.recommender import Recommender
from serving.release.bundle import Bundle, load_bundle
from serving.release.golden import read_golden

ROUNDS = 30  # of the 18 golden requests: 540 answers of each bundle, some seconds in all
_WARM_UP = 2  # rounds that are not counted: first calls compile loops and touch pages


def served_latency(challenger: Path, champion: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """Ask both bundles the challenger's golden requests; return milliseconds of each, and the machine.

    `added_ms` is the difference of the means: where each millisecond costs the same, the mean is paid.

    Raises:
        BundleInvalid: one of the two cannot be read by this code.
    """
    bundles = {"challenger": load_bundle(challenger), "champion": load_bundle(champion)}
    questions = {name: _questions(bundle, challenger) for name, bundle in bundles.items()}
    took: dict[str, list[float]] = {name: [] for name in bundles}
    for turn in range(_WARM_UP + rounds):
        for number, pair in enumerate(zip(*questions.values(), strict=True)):
            both = list(zip(bundles, pair, strict=True))
            for name, ask in both[:: 1 if (turn + number) % 2 else -1]:
                began = time.perf_counter()
                ask()
                if turn >= _WARM_UP:
                    took[name].append((time.perf_counter() - began) * 1e3)
    means = {name: float(np.mean(ms)) for name, ms in took.items()}
    return {
        "added_ms": round(means["challenger"] - means["champion"], 4),
        **{name: {"bundle_id": bundles[name].bundle_id, **_summary(ms)} for name, ms in took.items()},
        **measured_on(),
    }


def _questions(bundle: Bundle, examiner: Path) -> list[Callable[[], Any]]:
    """Return calls that ask a bundle each golden request of another, with its shopper's own history."""
    calls: list[Callable[[], Any]] = []
    for golden in read_golden(examiner):
        calls.append(partial(Recommender(bundle, golden.store()).recommend, golden.parse()))
    return calls


def _summary(ms: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(ms, [50, 99]).tolist()
    return {
        "answers": len(ms),
        "mean_ms": round(float(np.mean(ms)), 4),
        "p50_ms": round(p50, 4),
        "p99_ms": round(p99, 4),
    }
