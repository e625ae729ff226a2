"""Ours alone: long baskets and endurance -> the figures of each trial.

`pipelines.bench.load.measure` gives each trial a function that sends requests, and the measured capacity.
`pipelines.bench.load.goals` judges the figures. Overload by priority, the swap
of bundles and the canary are drills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipelines.bench.load.generator import Load
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.bench.report import percentiles
from serving.release.bundle import load_bundle

OVERLOAD = 3.0  # times the capacity
OVERLOAD_CONNECTIONS = 512  # so that the requests wait at the server, not at the client
FEWEST = 20  # requests; a share of fewer means nothing
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # items in a basket
BASKETS = 200  # different ones of a length

Send = Callable[..., Load]  # seconds, rate, and other fields of a LoadPlan -> the outcome of the requests


def basket_lengths(
    send: Callable[[Sequence[bytes]], Load],
    bundle: Path,
    requests: Sequence[Mapping[str, Any]],
    rounds: int,
) -> dict[str, Any]:
    """Send baskets of each of `LENGTHS`, popular items more often, by the shoppers of the requests.

    Args:
        send: sends bodies for some time, one request after the other.
        bundle: whose items are in the baskets.
        requests: request lines.
        rounds: of all lengths.
    """
    statistics = load_bundle(bundle).statistics
    sold = np.asarray(statistics.basket_count, np.float64)
    rng = np.random.default_rng(0)
    asked = {}
    for length in (length for length in LENGTHS if length <= len(sold) // 2):
        bodies = []
        for request in requests[:BASKETS]:
            codes = rng.choice(len(sold), length, replace=False, p=sold / sold.sum())
            basket = statistics.item_ids[codes].tolist()
            bodies.append(orjson.dumps({"instances": [{**request, "basket": basket}]}))
        asked[length] = bodies
    took: dict[int, list[np.ndarray]] = {length: [] for length in asked}
    for _ in range(rounds):
        for length, bodies in asked.items():
            load = send(bodies)
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
