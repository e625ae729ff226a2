"""Ours alone: long baskets, a canary beside it, endurance -> the figures of each trial.

`pipelines.bench.load.measure` gives each trial a function that sends requests, and the measured capacity.
`pipelines.bench.load.goals` judges the figures. Overload by priority and the swap of bundles are drills.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipelines.bench.load.generator import Load, LoadGenerator
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.bench.report import percentiles
from serving.release.bundle import load_bundle

OVERLOAD = 3.0  # times the capacity
OVERLOAD_CONNECTIONS = 512  # so that the requests wait at the server, not at the client
FEWEST = 20  # requests; a share of fewer means nothing
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # items in a basket
BASKETS = 200  # different ones of a length
AHEAD_S = 0.5  # a canary gets requests before and after the measured ones of stable
CANARY = 0.1  # of the rate of stable

Send = Callable[..., Load]  # seconds, rate, and other fields of a LoadPlan -> the outcome of the requests


def tail_ms(ms: np.ndarray) -> float:
    """Return the 99th percentile, of few values the largest; infinite without values."""
    found = percentiles(ms)
    tail = found["max"] if found["p99"] is None else found["p99"]
    return float("inf") if tail is None else tail


def basket_lengths(
    send: Callable[[str], Load],
    generator: LoadGenerator,
    bundle: Path,
    requests: Sequence[Mapping[str, Any]],
    rounds: int,
) -> dict[str, Any]:
    """Send baskets of each of `LENGTHS`, popular items more often, by the shoppers of the requests.

    Args:
        send: sends a file of bodies for some time, one request after the other.
        generator: keeps the bodies.
        bundle: whose items are in the baskets.
        requests: request lines.
        rounds: of all lengths.
    """
    statistics = load_bundle(bundle).statistics
    sold = np.asarray(statistics.basket_count, np.float64)
    rng = np.random.default_rng(0)
    files = {}
    for length in (length for length in LENGTHS if length <= len(sold) // 2):
        bodies = []
        for request in requests[:BASKETS]:
            codes = rng.choice(len(sold), length, replace=False, p=sold / sold.sum())
            basket = statistics.item_ids[codes].tolist()
            bodies.append(orjson.dumps({"instances": [{**request, "basket": basket}]}))
        files[length] = generator.bodies(bodies)
    took: dict[int, list[np.ndarray]] = {length: [] for length in files}
    for _ in range(rounds):
        for length, file in files.items():
            load = send(file)
            took[length].append(load.client_ms[load.answered])
    rows = {str(length): percentiles(np.concatenate(ms)) for length, ms in took.items()}
    first, *_, last = rows.values()
    growth = {
        name: (last[name] or 0.0) / (first[name] or np.inf) if last[name] and first[name] else None
        for name in ("p50", "p99")
    }
    return {"ms": rows, "growth": growth}


def memory_growth(send: Send, server: MeasuredServer, requests: int, steps: int = 20) -> dict[str, Any]:
    """Send requests without a pause, four at a time; return memory and its slope after the first quarter."""
    each = max(requests // steps, 1)
    points = [(0, server.memory_mb()["rss"])]
    failed = 0
    for _ in range(steps):
        load = send(3_600.0, requests=each, connections=4, warm_up=0, patience_s=60.0)
        failed += int((~load.answered).sum())
        points.append((points[-1][0] + len(load.status), server.memory_mb()["rss"]))
    counts, rss = np.array(points[steps // 4 :], np.float64).T
    slope = float(np.polyfit(counts, rss, 1)[0])
    return {
        "requests": points[-1][0],
        "failed": failed,
        "rss_mb": points,
        "mb_per_1000_requests": slope * 1e3,
        "mb_after_warm_up": float(rss[-1] - rss[0]),
    }


def _counts(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return counts of outcomes; an unanswered request has failed."""
    failed = summary["failed"] + summary["unanswered"]
    return {**{name: summary[name] for name in ("requests", "degraded", "late")}, "failed": failed}


def beside_a_canary(
    stable: Send, canary: Send, rate: float, goal_ms: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Send requests to stable, with and without a canary that gets a tenth of the rate at the same time.

    Args:
        stable: to ours.
        canary: to another of ours on the same machine, by another generator.
        rate: requests a second.
        goal_ms: an answer in time.
        seconds: each time.
        rounds: of both, in turn; which comes first changes.
    """
    canary(seconds, CANARY * rate, seed=600)  # a warm-up
    found: list[dict[str, Any]] = []
    canary_ms: list[np.ndarray] = []
    for number in range(rounds):
        loads: dict[str, Load] = {}
        for kind in ("without", "with") if number % 2 == 0 else ("with", "without"):
            with contextlib.ExitStack() as stack:
                if kind == "with":
                    beside = stack.enter_context(_sent_beside(canary, seconds, rate, number))
                loads[kind] = stable(seconds, rate, seed=610 + number)  # the same times in both
            if kind == "with":
                canary_ms.append(beside[0].client_ms)
        without_ms, with_ms = (percentiles(loads[kind].client_ms)["p99"] for kind in ("without", "with"))
        summary = loads["with"].summary(goal_ms)
        found.append(
            {
                "without_p99_ms": without_ms,
                "with_p99_ms": with_ms,
                "ratio": with_ms / without_ms if with_ms and without_ms else None,
                **_counts(summary),
            }
        )
    medians: dict[str, float | None] = {}
    for name in ("without_p99_ms", "with_p99_ms", "ratio"):
        values = [one[name] for one in found]
        medians[name] = None if None in values else float(np.median(values))
    canary_p99_ms = tail_ms(np.concatenate(canary_ms))
    return {
        "rate": rate,
        "canary_rate": CANARY * rate,
        **medians,
        "canary_p99_ms": canary_p99_ms,
        "rounds": found,
    }


@contextlib.contextmanager
def _sent_beside(canary: Send, seconds: float, rate: float, seed: int) -> Iterator[list[Load]]:
    """Send requests to the canary from shortly before the block on; its load is there after the block."""
    loads: list[Load] = []
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(canary, seconds + 2 * AHEAD_S, CANARY * rate, seed=620 + seed)
        time.sleep(AHEAD_S)
        yield loads
        loads.append(asking.result())
