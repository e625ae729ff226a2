"""A bundle and real requests -> what joining them for one ranker call saves here, and what the steering does.

Three questions. What does a request cost when 1, 4, 16 or 64 share a call of the served ranker? What does
the way through the batcher cost by itself? And what does the steering make of it under load: of the ranker on
this processor, and of an artificial device, a formula of a fixed cost and a cost per row, which no machine
was measured for.

The load is virtual (serving.virtual_time): requests come at random times of a clock that only model calls and
waiting move. The ranker's calls are real and move it by the processor time they take, the device's by its
formula.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import orjson

from serving.batch_steering import Steering
from serving.batching import Batcher
from serving.errors import Overloaded
from serving.fact_store import open_fact_store
from serving.measurement import measured_on, write_result
from serving.online_features import open_store
from serving.ranking import Inputs, rank_joined
from serving.recommender import open_recommender
from serving.schemas import parse_request
from serving.settings import Settings
from serving.virtual_time import VirtualLoop

JOINED = (1, 4, 16, 64)  # requests that share a call
LOADS = (0.1, 0.5, 0.9, 1.5)  # requests a second, as a share of what one request a call could answer
POLICIES = ("one a call", "all that is ready", "steered")
GOAL_MS = 15.0  # p99 of ranking, waiting included
DEVICE_FIXED_MS, DEVICE_ROW_MS = 1.0, 0.001  # the artificial device
_WARM_UP = 3  # rounds

Model = Callable[[Sequence[Inputs]], float]  # answers requests and returns what that took, milliseconds


def bench_batching(
    bundle_path: Path,
    requests: Sequence[dict[str, Any]],
    out_dir: Path,
    settings: Settings | None = None,
    rounds: int = 40,
    asks: int = 3_000,
) -> dict[str, Any]:
    """Measure and write `batching.json` and `batching.md`; return what the JSON holds.

    Args:
        bundle_path: the bundle whose ranker is measured.
        requests: request lines; the rows that they make are what is ranked.
        out_dir: directory of the two files.
        settings: online store, longest wait and most rows.
        rounds: how often each number of joined requests is measured, in turns.
        asks: requests under each load.

    Raises:
        ValueError: no requests were given.
    """
    if not requests:
        raise ValueError("no requests to ask: give at least one request line")
    settings = settings or Settings()
    load_before = os.getloadavg()
    with _prepared(bundle_path, requests, settings) as (bundle_id, session, works):
        models: dict[str, Model] = {"ranker": partial(_ranker_ms, session), "device": _device_ms}
        joined = _measure_joined(models["ranker"], works, rounds)
        way_us = _measure_way(works[0])
        loads = {name: _measure_loads(model, works, settings, asks) for name, model in models.items()}
    result = {
        "bundle_id": bundle_id,
        **measured_on(),
        "load_average_before": load_before,
        "rounds": rounds,
        "asks": asks,
        "rows_per_request": float(np.mean([len(dense) for dense, _ in works])),
        "goal_ms": GOAL_MS,
        "device": {"fixed_ms": DEVICE_FIXED_MS, "row_ms": DEVICE_ROW_MS},
        "ranker_ms_per_request": joined,
        "cheapest": min(JOINED, key=lambda k: joined[str(k)]["p50"]),
        "device_ms_per_request": {str(k): _device_ms(works[:1] * k) / k for k in JOINED},
        "way_us": way_us,
        "loads": loads,
    }
    write_result(out_dir / "batching.json", orjson.dumps(result, option=orjson.OPT_INDENT_2))
    write_result(out_dir / "batching.md", batching_table(result).encode())
    return result


def batching_table(result: dict[str, Any]) -> str:
    """Return the result of `bench_batching` as Markdown."""
    machine, way, device = result["machine"], result["way_us"], result["device"]
    before, after = (load[0] for load in (result["load_average_before"], machine["load_average"]))
    lines = [
        f"# Requests that share a ranker call, bundle {result['bundle_id']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, load average {before:.2f} before, {after:.2f} after; "
        f"Python {result['software']['python']}; commit {result['commit']}; {result['measured_at']}. "
        f"{result['rows_per_request']:.0f} rows a request, one thread, processor time, "
        f"{result['rounds']} rounds in turns.",
        "",
        "| requests a call | ranker here, ms a request: p50 | p95 | artificial device |",
        "|---|---|---|---|",
    ]
    for k, found in result["ranker_ms_per_request"].items():
        modelled = result["device_ms_per_request"][k]
        lines.append(f"| {k} | {found['p50']:.3f} | {found['p95']:.3f} | {modelled:.3f} |")
    alone, cheapest = (result["ranker_ms_per_request"][str(k)]["p50"] for k in (1, result["cheapest"]))
    lines += [
        "",
        f"The artificial device is a formula, {device['fixed_ms']:g} ms a call and "
        f"{device['row_ms'] * 1e3:g} µs a row; nothing was measured for it.",
        "",
        f"The way through the batcher itself takes {way['alone']:.1f} µs of a request that is run alone, "
        f"{way['queue']:.1f} µs of one that goes through the queue (a plain call: {way['call']:.1f} µs). "
        f"Cheapest here: {result['cheapest']} a call, where a request takes {(alone - cheapest) * 1e3:.0f} µs "
        "less than alone, before it has paid for that way.",
    ]
    for name, loads in result["loads"].items():
        lines += [
            "",
            f"## Under load: {'the ranker here' if name == 'ranker' else 'the artificial device'}",
            "",
            "| load | policy | requests a call | p50 ms | p99 ms | busy | refused | decided |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(load, policy, arm) for load in loads for policy, arm in load["policies"].items()]
    lines += [
        "",
        "A load of 1 x is what one request a call could answer at most. Milliseconds run from the time a",
        f"request came to its scores; the goal is a p99 of {result['goal_ms']:g}. The load is virtual: the",
        "ranker's calls are real and count by their processor time, the device's by its formula, and the",
        "endpoint's other work is left out.",
        "",
    ]
    return "\n".join(lines)


def _row(load: dict[str, Any], policy: str, arm: dict[str, Any]) -> str:
    cells = [
        f"{load['requests_per_s']:.0f} /s, {load['load']:g} x",
        policy,
        f"{arm['requests_per_call']:.1f}",
        f"{arm['p50_ms']:.2f}",
        f"{arm['p99_ms']:.2f}",
        f"{arm['busy_ratio']:.0%}",
        str(arm["refused"]),
        _decided(arm["state"]) if policy == "steered" else "",
    ]
    return f"| {' | '.join(cells)} |"


def _decided(state: dict[str, Any]) -> str:
    wait = f" {state['window_ms']:.1f} ms" if state["decision"] == "wait" else ""
    return f"{state['decision']}{wait}: {state['why']}; up to {state['limit_rows']} rows"


@contextlib.contextmanager
def _prepared(
    bundle_path: Path, requests: Sequence[dict[str, Any]], settings: Settings
) -> Iterator[tuple[str, ort.InferenceSession, list[Inputs]]]:
    """Give the bundle's id, its ranker, and the rows of as many requests as ever share a call."""
    store, facts = open_store(settings.online_store_url), open_fact_store(settings.fact_store_url)
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        recommender = open_recommender(bundle_path, store, None, settings.availability_path, facts)
        stack.callback(recommender.facts.close)
        works = []
        for number in range(JOINED[-1]):
            line = requests[number % len(requests)]
            prepared = recommender.prepare(parse_request(line, now=time.time(), default_id="bench"))
            works.append((prepared.dense, prepared.categorical))
        yield recommender.bundle.bundle_id, recommender.bundle.ranker, works


def _ranker_ms(session: ort.InferenceSession, works: Sequence[Inputs]) -> float:
    began = time.thread_time()  # the session has one thread, this one
    rank_joined(session, works)
    return (time.thread_time() - began) * 1e3


def _device_ms(works: Sequence[Inputs]) -> float:
    return DEVICE_FIXED_MS + DEVICE_ROW_MS * sum(len(dense) for dense, _ in works)


def _measure_joined(model: Model, works: Sequence[Inputs], rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each request by how many share a call, over all `works` each round."""
    took: dict[int, list[float]] = {k: [] for k in JOINED}
    for turn in range(_WARM_UP + rounds):
        for k in np.roll(JOINED, turn).tolist():
            ms = sum(model(works[first : first + k]) for first in range(0, len(works), k))
            if turn >= _WARM_UP:
                took[k].append(ms / len(works))
    return {
        str(k): dict(zip(("p50", "p95"), np.percentile(ms, [50, 95]).tolist(), strict=True))
        for k, ms in took.items()
    }


def _measure_way(work: Inputs, asks: int = 2_000, rounds: int = 5) -> dict[str, float]:
    """Return the median microseconds of asking a model that does nothing: plainly, alone, by the queue."""

    def run(bundle_id: str, works: Sequence[Inputs]) -> list[Exception | None]:
        return [None] * len(works)

    async def ask(batcher: Batcher[Inputs, None]) -> None:
        for _ in range(asks):
            await batcher.ask(work, rows=len(work[0]), bundle_id="")

    took: dict[str, list[float]] = {"call": [], "alone": [], "queue": []}
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(asks):
            run("", [work])
        took["call"].append(time.thread_time() - began)
        for name in ("alone", "queue"):
            batcher = Batcher(run, _Fixed(alone=name == "alone"), stage="bench")
            began = time.thread_time()
            asyncio.run(ask(batcher))
            took[name].append(time.thread_time() - began)
    return {name: float(np.median(seconds)) / asks * 1e6 for name, seconds in took.items()}


class _Fixed(Steering):
    """Decides once for all: one request a call, or all that is ready."""

    def __init__(self, *, alone: bool, max_rows: int = 8_192) -> None:
        super().__init__(GOAL_MS, max_wait_ms=0.0, max_rows=max_rows)
        self.limit_rows = max_rows
        self._alone = alone

    def alone(self) -> bool:
        return self._alone


def _measure_loads(
    model: Model, works: Sequence[Inputs], settings: Settings, asks: int
) -> list[dict[str, Any]]:
    alone_ms = float(np.median([model([work]) for work in works]))
    found = []
    for load in LOADS:
        policies = {
            "one a call": _Fixed(alone=True),
            "all that is ready": _Fixed(alone=False, max_rows=settings.batch_max_rows),
            "steered": Steering(
                GOAL_MS, max_wait_ms=settings.batch_max_wait_ms, max_rows=settings.batch_max_rows
            ),
        }
        per_s = load * 1e3 / alone_ms
        arms = {name: _measure_load(model, works, policy, per_s, asks) for name, policy in policies.items()}
        found.append({"load": load, "requests_per_s": per_s, "policies": arms})
    return found


def _measure_load(
    model: Model, works: Sequence[Inputs], steering: Steering, per_s: float, asks: int
) -> dict[str, Any]:
    """Let requests come at random; count the second half, when the steering has learnt."""
    loop = VirtualLoop()
    calls: list[tuple[float, int, float]] = []  # when it began, its requests, its milliseconds
    outcomes: Counter[str] = Counter()
    waits_ms: list[float] = []

    def run(bundle_id: str, joined: Sequence[Inputs]) -> list[Exception | None]:
        began, ms = loop.now, model(joined)
        loop.work(ms)
        calls.append((began, len(joined), ms))
        return [None] * len(joined)

    batcher = Batcher(run, steering, stage="bench", clock=loop.time)

    async def ask(number: int, at: float) -> None:
        await asyncio.sleep(at - loop.now)
        work = works[number % len(works)]
        try:
            await batcher.ask(work, rows=len(work[0]), bundle_id="")
        except Overloaded:
            outcomes["refused"] += 1
        else:
            if number >= asks // 2:
                waits_ms.append((loop.now - at) * 1e3)

    async def ask_all(times: Sequence[float]) -> None:
        await asyncio.gather(*(ask(number, at) for number, at in enumerate(times)))

    times = np.cumsum(np.random.default_rng(0).exponential(1 / per_s, asks)).tolist()
    try:
        loop.run_until_complete(ask_all(times))
    finally:
        loop.close()
    counted = [call for call in calls if call[0] >= times[asks // 2]]
    p50, p99 = np.percentile(waits_ms, [50, 99]).tolist()
    return {
        "requests_per_call": sum(requests for _, requests, _ in counted) / len(counted),
        "p50_ms": p50,
        "p99_ms": p99,
        "busy_ratio": sum(ms for *_, ms in counted) / 1e3 / (loop.now - times[asks // 2]),
        "refused": outcomes["refused"],
        "state": steering.state(),
    }
