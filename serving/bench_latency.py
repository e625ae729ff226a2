"""A bundle and real requests -> measured latency: in process, one at a time over HTTP, and under open load.

The endpoint runs in a process of its own. Under open load requests are sent at the times of a Poisson
process whatever the answers do, and a latency counts from the time its request was due: a server that
stalls is charged for all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from serving.fact_store import open_fact_store
from serving.measurement import measured_on, write_result
from serving.online_features import open_store
from serving.recommender import open_recommender
from serving.schemas import parse_request
from serving.settings import Settings

STAGES = ("features", "retrieval", "ranking", "reranking", "total")
WARM_UP = 200  # requests asked before each arm is measured
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request."""

    client_ms: float  # from the time it was due (open load) or sent (one at a time) to the answer's last byte
    late_ms: float  # how much later than due the client sent it; part of `client_ms`
    answer: dict[str, Any]  # the response as JSON; empty when the endpoint refused or broke


def bench_latency(
    bundle_path: Path,
    requests: Sequence[dict[str, Any]],
    out_dir: Path,
    seconds: float = 20.0,
    rps: float = 50.0,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Measure and write `latency.json` and `latency.md`; return what the JSON holds.

    Args:
        bundle_path: the bundle to serve.
        requests: request lines, asked in turn; real baskets give real numbers.
        out_dir: directory of the two files.
        seconds: how long each arm runs.
        rps: requests per second under open load.
        settings: deadline, online store and the like; ports, host and log directory are chosen here.

    Raises:
        ValueError: no requests were given.
        RuntimeError: the endpoint did not start; the message holds what it said.
    """
    if not requests:
        raise ValueError("no requests to ask: give at least one request line")
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        given = replace(
            settings or Settings(),
            host="127.0.0.1",
            http_port=0,
            grpc_port=0,
            log=True,
            log_dir=Path(scratch),
        )
        arms = {"in_process": _summary(_ask_in_process(bundle_path, requests, given, seconds))}
        with _endpoint(bundle_path, given, Path(scratch)) as (process, ready):
            for name, rate in (("http_one_at_a_time", None), (f"http_{rps:g}_per_s", rps)):
                before = _cpu_ms(process.pid)
                samples = asyncio.run(_ask_over_http(ready["http"], requests, seconds, rate))
                arms[name] = _summary(samples)
                arms[name]["server_cpu_ms_per_request"] = (_cpu_ms(process.pid) - before) / max(
                    len(samples), 1
                )
            memory = _memory_mb(process.pid)
    result = {
        "bundle_id": ready["bundle_id"],
        **measured_on(),
        "load_average_before": load_before,
        "seconds_per_arm": seconds,
        "distinct_requests": len(requests),
        "deadline_ms": given.deadline_ms,
        "endpoint": {"ready_s": ready["ready_s"], "memory_mb": memory, "online_store": ready["online_store"]},
        "arms": arms,
    }
    write_result(out_dir / "latency.json", orjson.dumps(result, option=orjson.OPT_INDENT_2))
    write_result(out_dir / "latency.md", latency_table(result).encode())
    return result


def latency_table(result: dict[str, Any]) -> str:
    """Return the result of `bench_latency` as Markdown."""
    machine, endpoint = result["machine"], result["endpoint"]
    before, after = (load[0] for load in (result["load_average_before"], machine["load_average"]))
    lines = [
        f"# Latency of bundle {result['bundle_id']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, load average {before:.2f} before, {after:.2f} after; "
        f"Python {result['software']['python']}; commit {result['commit']}; {result['measured_at']}. "
        f"{result['seconds_per_arm']:g} s an arm, {result['distinct_requests']} different requests, deadline "
        f"{result['deadline_ms']:g} ms; ready after {endpoint['ready_s']:g} s, "
        f"{endpoint['memory_mb']:.0f} MB, online store {endpoint['online_store']}.",
    ]
    for name, arm in result["arms"].items():
        counts = f"{arm['requests']} requests, {arm['failed']} failed, {arm['degraded']} degraded"
        if "server_cpu_ms_per_request" in arm:
            counts += f", {arm['server_cpu_ms_per_request']:.2f} ms of server CPU each"
        lines += [
            "",
            f"## {name}",
            "",
            counts,
            "",
            "| ms | p50 | p95 | p99 | mean | max |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row} | " + " | ".join(f"{value:.2f}" for value in numbers.values()) + " |"
            for row, numbers in arm["ms"].items()
        ]
    lines += [
        "",
        "`client` is what the caller waits; `unexplained` is `client` less the stages' `total`: network,",
        "HTTP, JSON, KServe, and waiting for the request before. `late` is the part of `client` that the",
        "load generator itself came too late; it is 0 one at a time. `in_process` keeps no prediction log.",
        "",
    ]
    return "\n".join(lines)


def _ask_in_process(
    bundle_path: Path, requests: Sequence[dict[str, Any]], settings: Settings, seconds: float
) -> list[Sample]:
    store, facts = open_store(settings.online_store_url), open_fact_store(settings.fact_store_url)
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        recommender = open_recommender(bundle_path, store, None, settings.availability_path, facts)
        stack.callback(recommender.facts.close)
        asked = [parse_request(request, now=time.time(), default_id="bench") for request in requests]
        for request in asked[:WARM_UP]:
            recommender.recommend(request)
        samples: list[Sample] = []
        with _quiet_memory():
            until = time.perf_counter() + seconds
            for request in itertools.cycle(asked):
                began = time.perf_counter()
                if began > until:
                    break
                response = recommender.recommend(request)
                samples.append(Sample((time.perf_counter() - began) * 1e3, 0.0, response.to_dict()))
    return samples


async def _ask_over_http(
    http: str, requests: Sequence[dict[str, Any]], seconds: float, rps: float | None
) -> list[Sample]:
    bodies = [orjson.dumps({"instances": [request]}) for request in requests]
    async with _clients(http) as clients:
        for body in bodies[:WARM_UP]:
            await clients.ask(body)
        with _quiet_memory():
            if rps is None:
                return await _one_at_a_time(clients, bodies, seconds)
            return await _open_load(clients, bodies, seconds, rps)


async def _one_at_a_time(clients: _Clients, bodies: Sequence[bytes], seconds: float) -> list[Sample]:
    samples: list[Sample] = []
    until = time.perf_counter() + seconds
    for body in itertools.cycle(bodies):
        began = time.perf_counter()
        if began > until:
            break
        answer = await clients.ask(body)
        samples.append(Sample((time.perf_counter() - began) * 1e3, 0.0, _first(answer)))
    return samples


async def _open_load(clients: _Clients, bodies: Sequence[bytes], seconds: float, rps: float) -> list[Sample]:
    samples: list[Sample] = []

    async def ask(body: bytes, due: float) -> None:
        late = time.perf_counter() - due
        answer = await clients.ask(body)
        samples.append(Sample((time.perf_counter() - due) * 1e3, late * 1e3, _first(answer)))

    gaps = np.random.default_rng(0).exponential(1 / rps, int(seconds * rps))
    dues = time.perf_counter() + 0.1 + np.cumsum(gaps)
    async with asyncio.TaskGroup() as tasks:
        for due, body in zip(dues.tolist(), itertools.cycle(bodies), strict=False):
            # Timers come up to a millisecond late: nap until shortly before, then look at the clock.
            await asyncio.sleep(max(due - time.perf_counter() - 0.002, 0))
            while time.perf_counter() < due:
                await asyncio.sleep(0)
            tasks.create_task(ask(body, due))
    return samples


class _Clients:
    """Keep-alive HTTP/1.1 connections, opened as needed: a bare client, so that its own time is small."""

    def __init__(self, address: str) -> None:
        self._host, port = address.removeprefix("http://").rsplit(":", 1)
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: bytes) -> bytes:
        """Return the body of a 200, else nothing."""
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        )
        head = f"POST /v1/models/checkout:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answered.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        self._idle.append((reader, writer))
        return answer if answered.startswith(b"http/1.1 200") else b""

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()


@contextlib.asynccontextmanager
async def _clients(address: str) -> AsyncIterator[_Clients]:
    clients = _Clients(address)
    try:
        yield clients
    finally:
        clients.close()


@contextlib.contextmanager
def _endpoint(
    bundle: Path, settings: Settings, scratch: Path
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    said = scratch / "endpoint.log"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.server", "--bundle", str(bundle)],
            env=settings.to_env(),
            stderr=stderr,
        )
    try:
        yield process, _wait_ready(process, said)
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], said: Path) -> dict[str, Any]:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        for line in said.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"event": "ready"') and line.endswith(b"\n"):
                ready: dict[str, Any] = orjson.loads(line)
                return ready
        time.sleep(0.05)
    raise RuntimeError(
        f"the endpoint did not start: {said.read_text().strip()[-2_000:] or 'it said nothing'}"
    )


@contextlib.contextmanager
def _quiet_memory() -> Iterator[None]:
    """Keep the client's own garbage collections out of what it measures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _first(answer: bytes) -> dict[str, Any]:
    first: dict[str, Any] = orjson.loads(answer)["predictions"][0] if answer else {}
    return first


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    answered = [sample for sample in samples if sample.answer]
    stages = [sample.answer["stage_ms"] for sample in answered]
    client = [sample.client_ms for sample in answered]
    rows = {"client": client, "late": [sample.late_ms for sample in answered]}
    rows |= {stage: [times[stage] for times in stages if stage in times] for stage in STAGES}
    rows["unexplained"] = [ms - times["total"] for ms, times in zip(client, stages, strict=True)]
    reasons = Counter(sample.answer["degraded_reason"] for sample in answered if sample.answer["degraded"])
    return {
        "requests": len(samples),
        "failed": len(samples) - len(answered),
        "degraded": sum(reasons.values()),
        "degraded_reasons": dict(reasons),
        "ms": {name: _percentiles(values) for name, values in rows.items()},
    }


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    array = np.array(list(values) or [np.nan])
    p50, p95, p99 = np.percentile(array, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "mean": float(array.mean()), "max": float(array.max())}


def _cpu_ms(pid: int) -> float:
    """Return the processor time a process has used, on Linux; elsewhere 0."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")
    return 0.0


def _memory_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return float("nan")
