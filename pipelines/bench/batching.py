"""A bundle and real requests -> what joining them for one ranker call saves here, and what the steering does.

Three questions. What does a request cost when 1, 4, 16 or 64 share a call of the served ranker? What does
the way through the batcher cost by itself? And what does the steering make of it under load: of the ranker on
this processor, and of an artificial device, a formula of a fixed cost and a cost per row, which no machine
was measured for.

The load is virtual (pipelines.bench.load.virtual_time): requests come at random times of a clock that only
model
calls and waiting move. The ranker's calls move it by what calls of their size took when they were measured,
with the
scatter of those measurements, so that all policies meet the same ranker; the device's by its formula.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import orjson

from pipelines.bench.load.virtual_time import VirtualLoop
from serving.answer.recommender import open_recommender
from serving.checkout.batch_steering import Steering
from serving.checkout.batching import Batcher
from serving.errors import Overloaded
from serving.measurement import measured_on, write_result
from serving.schemas import parse_request
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store
from serving.stages.ranking import Inputs, rank_joined
from serving.stores.online_features import open_store

JOINED = (1, 4, 16, 64)  # requests that share a call
LOADS = (0.1, 0.5, 0.9, 1.5)  # requests a second, as a share of what one request a call could answer
POLICIES = ("one a call", "all that is ready", "steered")
GOAL_MS = 15.0  # p99 of ranking, waiting included
DEVICE_FIXED_MS, DEVICE_ROW_MS = 1.0, 0.001  # the artificial device
_WARM_UP = 3  # rounds

Calls = dict[int, list[tuple[int, float]]]  # requests a call -> rows and milliseconds of each call
Cost = Callable[[int], float]  # rows -> milliseconds of a call


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
        calls = _measure_calls(session, works, rounds)
    rows = [len(dense) for dense, _ in works]
    ranker = {str(k): _per_request(calls[k], k, len(works)) for k in JOINED}
    alone_ms = {"ranker": ranker["1"]["p50"], "device": _device_ms(round(np.mean(rows)))}
    costs: dict[str, Callable[[], Cost]] = {
        "ranker": lambda: _as_measured(calls),
        "device": lambda: _device_ms,
    }
    loads = {name: _measure_loads(cost, alone_ms[name], rows, settings, asks) for name, cost in costs.items()}
    result = {
        "bundle_id": bundle_id,
        **measured_on(),
        "load_average_before": load_before,
        "rounds": rounds,
        "asks": asks,
        "rows_per_request": float(np.mean(rows)),
        "goal_ms": GOAL_MS,
        "device": {"fixed_ms": DEVICE_FIXED_MS, "row_ms": DEVICE_ROW_MS},
        "ranker_ms_per_request": ranker,
        "cheapest": min(JOINED, key=lambda k: ranker[str(k)]["p50"]),
        "device_ms_per_request": {str(k): _device_ms(round(np.mean(rows) * k)) / k for k in JOINED},
        "way_us": _measure_way(),
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
        f"Cheapest here: {result['cheapest']} a call, where a request takes "
        f"{(alone - cheapest) * 1e3:.0f} µs less than alone, before it has paid for that way.",
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
        f"request came to its scores; the goal is a p99 of {result['goal_ms']:g}. The load is virtual: a",
        "call takes what calls of its size took when they were measured, or what the device's formula says;",
        "the endpoint's other work is left out.",
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


def _measure_calls(session: ort.InferenceSession, works: Sequence[Inputs], rounds: int) -> Calls:
    """Rank all `works` in calls for 1, 4, 16 and 64 of them, in turns; the processor time of each call."""
    calls: Calls = {k: [] for k in JOINED}
    for turn in range(_WARM_UP + rounds):
        for k in np.roll(JOINED, turn).tolist():
            for first in range(0, len(works), k):
                joined = works[first : first + k]
                began = time.thread_time()  # the session has one thread, this one
                rank_joined(session, joined)
                ms = (time.thread_time() - began) * 1e3
                if turn >= _WARM_UP:
                    calls[k].append((sum(len(dense) for dense, _ in joined), ms))
    return calls


def _per_request(calls: Sequence[tuple[int, float]], joined: int, works: int) -> dict[str, float]:
    """Return the milliseconds of a request, over the means of the rounds."""
    rounds = np.array([ms for _, ms in calls]).reshape(-1, works // joined).sum(1) / works
    return dict(zip(("p50", "p95"), np.percentile(rounds, [50, 95]).tolist(), strict=True))


def _as_measured(calls: Calls) -> Cost:
    """Return what a call takes: the median of its size, times how far a measured call was from its median."""
    measured = [np.array(calls[k]) for k in JOINED]  # (calls, 2) each
    sizes, medians = np.array([np.median(each, axis=0) for each in measured]).T
    scatter = measured[0][:, 1] / medians[0]
    rng = np.random.default_rng(0)
    return lambda rows: float(np.interp(rows, sizes, medians / sizes)) * rows * float(rng.choice(scatter))


def _device_ms(rows: int) -> float:
    return DEVICE_FIXED_MS + DEVICE_ROW_MS * rows


def _measure_way(asks: int = 2_000, rounds: int = 5) -> dict[str, float]:
    """Return the median microseconds of asking a model that does nothing: plainly, alone, by the queue."""

    def run(bundle_id: str, works: Sequence[int]) -> list[Exception | None]:
        return [None] * len(works)

    async def ask(batcher: Batcher[int, None]) -> None:
        for _ in range(asks):
            await batcher.ask(500, rows=500, bundle_id="")

    took: dict[str, list[float]] = {"call": [], "alone": [], "queue": []}
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(asks):
            run("", [500])
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

    def batch_rows(self) -> int:
        return self.limit_rows


def _measure_loads(
    cost: Callable[[], Cost], alone_ms: float, rows: Sequence[int], settings: Settings, asks: int
) -> list[dict[str, Any]]:
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
        arms = {name: _measure_load(cost(), rows, policy, per_s, asks) for name, policy in policies.items()}
        found.append({"load": load, "requests_per_s": per_s, "policies": arms})
    return found


def _measure_load(
    cost: Cost, rows: Sequence[int], steering: Steering, per_s: float, asks: int
) -> dict[str, Any]:
    """Let requests come at random; count the second half, when the steering has learnt."""
    loop = VirtualLoop()
    calls: list[tuple[float, int, float]] = []  # when it began, its requests, its milliseconds
    outcomes: Counter[str] = Counter()
    waits_ms: list[float] = []

    def run(bundle_id: str, works: Sequence[int]) -> list[Exception | None]:
        began, ms = loop.now, cost(sum(works))
        loop.work(ms)
        calls.append((began, len(works), ms))
        return [None] * len(works)

    batcher = Batcher(run, steering, stage="bench", clock=loop.time)

    async def ask(number: int, at: float) -> None:
        await asyncio.sleep(at - loop.now)
        work = rows[number % len(rows)]
        try:
            await batcher.ask(work, rows=work, bundle_id="")
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
