"""A bundle and real requests -> measured latency: in process, and one at a time over HTTP.

The endpoint runs in a process of its own, and so does the load generator (`pipelines.bench.load.generator`).
`reco bench load` measures the effect of load.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.measurement import machine_state
from pipelines.bench.load.generator import LoadPlan, bodies_of, load_generator
from pipelines.bench.load.measured_server import private, started
from pipelines.bench.report import fixed, machine_line, percentiles, table, write_report
from serving.answer.recommender import open_recommender
from serving.schemas import parse_request
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store
from serving.stores.online_features import open_store

STAGES = ("features", "retrieval", "ranking", "reranking", "total")
WARM_UP = 200  # requests before each arm is measured
SHOWN = ("p50", "p95", "p99", "mean", "max")


Sample = tuple[float, dict[str, Any]]  # the client's ms, and the answer: empty where it was refused or broke


def bench_latency(
    bundle_path: Path,
    requests: Sequence[dict[str, Any]],
    out_dir: Path,
    seconds: float = 20.0,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Measure and write `latency.json` and `latency.md`; return the content of the JSON.

    Args:
        bundle_path: of the bundle to serve.
        requests: request lines, asked in turn; real baskets give real numbers.
        out_dir: of the two files.
        seconds: how long each arm runs.
        settings: deadline, online store and the like; ports, host and log directory are chosen here.

    Raises:
        ValueError: no requests were given.
        RuntimeError: the endpoint did not start; the message holds its output.
    """
    before, bodies = machine_state(), bodies_of(requests)
    with tempfile.TemporaryDirectory() as scratch:
        # A few shoppers send all requests.
        given = private(settings or Settings(), log=True, log_dir=Path(scratch), user_limit_per_s=0.0)
        arms = {"in_process": _summary(_ask_in_process(bundle_path, requests, given, seconds))}
        command = [sys.executable, "-P", "-m", "serving.server", "--bundle", str(bundle_path)]
        with (
            load_generator() as generator,
            started(command, given.to_env(), Path(scratch) / "endpoint.log") as server,
        ):
            cpu_before = server.cpu_ms()
            url = f"{server.ready['http']}/v1/models/checkout:predict"
            plan = LoadPlan(url, bodies, seconds, connections=1, warm_up=WARM_UP, keep=True)
            samples = generator.run(plan).responses()
            cpu_ms = (server.cpu_ms() - cpu_before) / (len(samples) + WARM_UP)
            arms["http_one_at_a_time"] = {**_summary(samples), "server_cpu_ms_per_request": cpu_ms}
            memory, ready = server.memory_mb()["rss"], server.ready
    figures = {
        "bundle_id": ready["bundle_id"],
        "seconds_per_arm": seconds,
        "distinct_requests": len(requests),
        "deadline_ms": given.deadline_ms,
        "endpoint": {"ready_s": ready["ready_s"], "memory_mb": memory, "online_store": ready["online_store"]},
        "arms": arms,
    }
    return write_report(out_dir, "latency", figures, latency_table, before)


def latency_table(result: dict[str, Any]) -> str:
    """Return the result of `bench_latency` as Markdown."""
    endpoint, arms = result["endpoint"], result["arms"]
    counts = [
        f"{name}: {arm['requests']} requests, {arm['failed']} failed, {arm['degraded']} degraded"
        for name, arm in arms.items()
    ]
    rows = [
        [name, row, *(fixed(numbers[n]) for n in SHOWN)]
        for name, arm in arms.items()
        for row, numbers in arm["ms"].items()
    ]
    lines = [
        f"# Latency of bundle {result['bundle_id']}",
        "",
        f"{machine_line(result)}; Python {result['software']['python']}; {result['measured_at']}. "
        f"{result['seconds_per_arm']:g} s an arm, {result['distinct_requests']} different requests, deadline "
        f"{result['deadline_ms']:g} ms; ready after {endpoint['ready_s']:g} s, "
        f"{endpoint['memory_mb']:.0f} MiB, online store {endpoint['online_store']}.",
        "",
        f"{'; '.join(counts)}. Server CPU of a request over HTTP: "
        f"{arms['http_one_at_a_time']['server_cpu_ms_per_request']:.2f} ms.",
        "",
        *table(["arm", "ms", *SHOWN], rows),
        "",
        "`client` is the time that the caller waits; `unexplained` is `client` less the stages' `total`:",
        "network, HTTP, JSON, KServe. `in_process` keeps no prediction log. Under load: `reco bench load`.",
        "",
    ]
    return "\n".join(lines)


def _ask_in_process(
    bundle_path: Path, requests: Sequence[dict[str, Any]], settings: Settings, seconds: float
) -> list[Sample]:
    store, facts = open_store(settings.online_store_url), open_fact_store(settings.fact_store_url)
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        recommender = open_recommender(bundle_path, store, None, facts)
        stack.callback(recommender.facts.close)
        asked = [parse_request(request, now=time.time(), default_id="bench") for request in requests]
        for request in asked[:WARM_UP]:
            recommender.recommend(request)
        samples: list[Sample] = []
        gc.collect()
        gc.disable()  # the client's own collections are no part of a measurement
        stack.callback(gc.enable)
        until = time.perf_counter() + seconds
        for request in itertools.cycle(asked):
            began = time.perf_counter()
            if began > until:
                break
            response = recommender.recommend(request)
            samples.append(((time.perf_counter() - began) * 1e3, response.to_dict()))
    return samples


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    answered = [(ms, answer) for ms, answer in samples if answer]
    rows = {"client": [ms for ms, _ in answered]}
    for stage in STAGES:
        rows[stage] = [one["stage_ms"][stage] for _, one in answered if stage in one["stage_ms"]]
    rows["unexplained"] = [ms - answer["stage_ms"]["total"] for ms, answer in answered]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(answered),
        "degraded": sum(answer["degraded"] for _, answer in answered),
        "ms": {name: percentiles(values) for name, values in rows.items()},
    }
