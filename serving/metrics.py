"""Events of the request path -> Prometheus metrics, shown by `/metrics`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    start_http_server,
    values,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

# KServe's own histograms begin at 5 ms; a whole answer takes less here.
BUCKETS_S = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075),
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0),
)
REQUEST_BUCKETS_S = (0.01, 0.05)  # few: three labels multiply them; the second is the deadline of the SLO
FOLDER = "reco-metrics-"  # of the files of several processes; then the process id of their parent
ROUTES = ("recommendations", "kserve", "grpc")  # our REST route, KServe's protocols, our gRPC service
STAGES = ("features", "retrieval", "ranking", "reranking", "cache", "fallback")
REFUSALS = (  # values of the label `reason` of reco_rejected_total
    *("binary_tensors", "body_timeout", "body_too_large", "caller", "client_gone", "connections"),
    *("head_timeout", "head_too_large", "http", "invalid_input", "not_http", "not_json", "not_offered"),
    *("not_ready", "overloaded", "route", "schema", "unknown_model", "user_over_limit", "web_page"),
)

disable_created_metrics()  # a series more for each counter and histogram, and no query reads it

STAGE_SECONDS = Histogram(
    "reco_stage_seconds", "Time spent in one stage of an answer", ["stage"], buckets=BUCKETS_S
)
ANSWER_SECONDS = Histogram(
    "reco_answer_seconds", "Time from a request's last byte to its answer", buckets=BUCKETS_S
)
REQUEST_SECONDS = Histogram(
    "reco_request_seconds",
    "The time of reco_answer_seconds in few buckets, by route, priority and rung",
    ["route", "priority", "rung"],
    buckets=REQUEST_BUCKETS_S,
)
FAULTS = Counter(
    "reco_faults",
    "Requests that got an error of ours (HTTP 5xx, gRPC INTERNAL or UNAVAILABLE) and no answer",
    ["protocol"],
)
REQUESTS_IN_FLIGHT = Gauge(
    "reco_requests_in_flight", "HTTP requests that are being answered", multiprocess_mode="livesum"
)
CONNECTIONS = Gauge("reco_connections", "Open HTTP connections", multiprocess_mode="livesum")
LOOP_LAG_SECONDS = Histogram(
    "reco_loop_lag_seconds",
    "Lateness of a timer of the event loop, ten times a second: how saturated a process is",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
QUEUE_SECONDS = Histogram(
    "reco_queue_seconds", "Time that a request waited for other requests before it began", buckets=BUCKETS_S
)
STAGE_BUDGET_SECONDS = Gauge(
    "reco_stage_budget_seconds",
    "95th percentile of a stage's time, learnt from recent answers and their number of candidates",
    ["stage"],
    multiprocess_mode="livemax",
)
RESPONSES = Counter("reco_responses", "Answers given, by rung of the ladder", ["rung", "degraded_reason"])
REJECTED = Counter("reco_rejected", "Refused requests, by reason", ["reason"])
LOG_RECORDS = Counter(
    "reco_log_records",
    "Prediction-log records: taken, and by outcome (written, dropped, recovered)",
    ["outcome"],
)
# With it, killed processes are counted too: lost = taken - written - dropped - recovered - open.
LOG_OPEN = Gauge(
    "reco_log_records_open",
    "Prediction-log records that living processes have not published yet",
    multiprocess_mode="livesum",
)
REQUEST_LOG_DROPPED = Counter(
    "reco_request_log_dropped", "Lines of the request and process logs that could not be written to stderr"
)
# Of several processes, a counter is the sum and a gauge the worst of those that live.
FEATURES_AGE = Gauge(
    "reco_features_age_seconds",
    "Time since the stream's last heartbeat in the online store; 0 in a store without a stream",
    multiprocess_mode="livemax",
)
STORE_READS = Counter(
    "reco_store_reads", "Reads of a user's row in the online store, by outcome", ["outcome"]
)
RANKER_CALLS = Counter("reco_ranker_calls", "Calls of the remote ranker, by outcome", ["outcome"])
BREAKER_OPEN = Gauge(
    "reco_breaker_open",
    "1 while a dependency of answers (online_store, ranker) fails and is not called",
    ["dependency"],
    multiprocess_mode="livemax",
)
BUNDLE = Gauge("reco_bundle_info", "1 for a bundle that answers", ["bundle_id"], multiprocess_mode="livemax")
BUNDLE_CUT_AT = Gauge(
    "reco_bundle_cut_timestamp_seconds",
    "Unix time up to which the bundle that answers has learnt",
    multiprocess_mode="livemin",
)
CHAMPION_READ_AT = Gauge(
    "reco_champion_read_timestamp_seconds",
    "Unix time when the pointer to the champion was last read",
    multiprocess_mode="livemin",
)
CHAMPION_SERVED = Gauge(
    "reco_champion_served",
    "1 while the champion answers, 0 while another bundle does",
    multiprocess_mode="livemin",
)
BUNDLE_UPDATES = Counter("reco_bundle_updates", "Changes of champion, by outcome", ["outcome"])
FACT_READS = Counter(
    "reco_fact_reads", "Polls for changed facts, by outcome; invalid: stored facts left out", ["outcome"]
)
RULES_BROKEN = Gauge(
    "reco_rules_broken",
    "1 while the rules file can't be read and the rules last read stay in force",
    multiprocess_mode="livemax",
)
FACTS_READ_AT = Gauge(
    "reco_facts_read_timestamp_seconds",
    "Unix time when the store of facts was last read completely",
    multiprocess_mode="livemin",
)
FACTS_COMPLETE_UNTIL = Gauge(
    "reco_facts_complete_timestamp_seconds",
    "Unix time until which the stream has stored all facts; 0 without a stream",
    multiprocess_mode="livemin",
)
FACTS_KNOWN = Gauge(
    "reco_facts",
    "Facts that are known, by kind, once all were read; 1 if all are about items outside the bundle",
    ["fact"],
    multiprocess_mode="livemin",
)
BATCH_ROWS = Histogram(
    "reco_batch_rows", "Rows of one call of a remote ranker", buckets=[2**power for power in range(15)]
)
BATCH_REQUESTS = Histogram(
    "reco_batch_requests",
    "Requests that shared one call of a remote ranker",
    buckets=[1, 2, 4, 8, 16, 32, 64, 128],
)
BATCH_QUEUE_SECONDS = Histogram(
    "reco_batch_queue_seconds", "Time a request waited to share a call of a remote ranker", buckets=BUCKETS_S
)
CACHE_LOOKUPS = Counter(
    "reco_cache_lookups",
    "Look-ups of a cached list, by level (process) and outcome (hit, miss, refused)",
    ["level", "outcome"],
)
CACHE_COMPUTED = Counter(
    "reco_cache_computed",
    "Lists whose computation for the cache began, also where no request waited for its end",
)
CACHE_ENTRIES = Gauge("reco_cache_entries", "Ranked lists in the caches", multiprocess_mode="livesum")
CACHE_BYTES = Gauge(
    "reco_cache_bytes",
    "Memory of the ranked lists in the caches, estimated",
    multiprocess_mode="livesum",
)

# A rate needs the zero before the first event, which may stay the only one.
_RARE = {
    FAULTS: ("http", "grpc"),
    BUNDLE_UPDATES: ("done", "refused"),
    LOG_RECORDS: ("taken", "written", "dropped", "recovered"),
}
for _counter, _words in _RARE.items():
    for _word in _words:
        _counter.labels(_word)
RESPONSES.labels("full", "none")  # two alerts add other series to it: without it they have no sum


class ProcessMetrics:
    """The processes of one endpoint, as Prometheus' usual metrics of a process.

    The client library leaves these out where several processes share a folder of counters.
    """

    def __init__(self, parent: int | None = None, folder: str | None = None) -> None:
        """Take the process that starts the others, and their folder; None: there is this process alone."""
        self._parent, self._folder = parent, folder

    def describe(self) -> list[Metric]:
        """Return the families, without values."""
        return self._families([], 0)

    def collect(self) -> list[Metric]:
        """Read them all from the system: no process holds the sums."""
        if self._parent is None or self._folder is None:
            return self._families([psutil.Process()], 0)
        parent = psutil.Process(self._parent)
        living, usage, ran = list[psutil.Process](), list[tuple[int, int, int]](), list[Any]()
        for pid in _pids(self._folder, "gauge_livesum"):
            with contextlib.suppress(psutil.NoSuchProcess):
                living.append(psutil.Process(pid))
        for child in living:
            with contextlib.suppress(psutil.Error):
                files = child.num_fds(), child.rlimit(psutil.RLIMIT_NOFILE)[0]
                usage.append((child.memory_info().rss, *files))
        deaths = len(_pids(self._folder, "counter")) - len(living)  # at once: a new process has a file, too
        # With the children of each that are no more: the fork server's are those that answered.
        for process in {parent, *parent.children(recursive=True), *living}:
            with contextlib.suppress(psutil.Error):
                ran.append(process.cpu_times())
        cpu_s = sum(t.user + t.system + t.children_user + t.children_system for t in ran)
        memory, opened, most = zip(*usage, strict=True) if usage else ((0,), (0,), (0,))
        return [
            *self._families(living, deaths),
            CounterMetricFamily("process_cpu_seconds", "Processor time of all processes", cpu_s),
            GaugeMetricFamily("process_resident_memory_bytes", "Memory of all processes", sum(memory)),
            GaugeMetricFamily("process_open_fds", "Open files, of the process with most", max(opened)),
            GaugeMetricFamily("process_max_fds", "Most files that one may open", min(most)),
            GaugeMetricFamily(
                "process_start_time_seconds", "Unix time of the start of the first", parent.create_time()
            ),
        ]

    @staticmethod
    def _families(living: list[psutil.Process], deaths: int) -> list[Metric]:
        return [
            GaugeMetricFamily("reco_processes", "Processes that answer", len(living)),
            CounterMetricFamily("reco_process_deaths", "Processes that ended while the endpoint ran", deaths),
        ]


def _pids(folder: str, kind: str) -> set[int]:
    """Return the processes with a file of a kind of metrics; that of a live gauge is removed at their end."""
    return {int(file.stem.rpartition("_")[2]) for file in Path(folder).glob(f"{kind}_*.db")}


def drop_own_files() -> None:
    """Remove this process's files of metrics: it has none, and its forks begin their own."""
    for file in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob(f"*_{os.getpid()}.db"):
        file.unlink()


def parent_of(folder: str) -> int:
    """Return the process that made a folder of metrics, from its name."""
    return int(Path(folder).name.removeprefix(FOLDER).partition("-")[0])


PROCESSES = ProcessMetrics()
REGISTRY.register(PROCESSES)


def exposition(accept: str = "") -> tuple[bytes, str]:
    """Return all metrics as text and its content type; those of all processes that share the port.

    Args:
        accept: the HTTP header of that name: Prometheus' text or OpenMetrics.
    """
    encoder, content_type = choose_encoder(accept)
    is_shared = values.ValueClass is not values.MutexValue  # each process has its own values in a folder
    registry = registry_of(os.environ["PROMETHEUS_MULTIPROC_DIR"]) if is_shared else REGISTRY
    return encoder(registry), content_type


def registry_of(folder: str) -> CollectorRegistry:
    """Return the metrics of the processes that share a folder."""
    MultiProcessCollector(registry := CollectorRegistry(), folder)
    registry.register(ProcessMetrics(parent_of(folder), folder))
    return registry


@contextlib.contextmanager
def shown(address: str, registry: CollectorRegistry = REGISTRY) -> Iterator[None]:
    """Show metrics at an address HOST:PORT, from a thread, until the end of the block; empty: nowhere."""
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]"), registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@functools.cache  # looking up a label's counter costs more than counting
def _labelled(metric: Any, *values: str) -> Any:
    return metric.labels(*values)


def count_response(
    rung: str,
    degraded_reason: str | None,
    stage_ms: Mapping[str, float],
    took_s: float,
    route: str,
    priority: str,
) -> None:
    """Count one answer, how long it took, and the time of each of its stages but `total`.

    Args:
        rung: one of `schemas.RUNGS`.
        degraded_reason: why it is not full, if it is not: one of `schemas.REASONS`.
        stage_ms: of its stages.
        took_s: since the request's last byte.
        route: one of ROUTES.
        priority: of the call.
    """
    _labelled(RESPONSES, rung, degraded_reason or "none").inc()
    ANSWER_SECONDS.observe(took_s)
    _labelled(REQUEST_SECONDS, route, priority, rung).observe(took_s)
    for stage, ms in stage_ms.items():
        if stage != "total":
            _labelled(STAGE_SECONDS, stage).observe(ms / 1e3)


def count_rejected(reason: str) -> None:
    """Count one refused request; `reason` is one of REFUSALS."""
    REJECTED.labels(reason).inc()


def count_fault(protocol: str) -> None:
    """Count a request that an error of ours left without an answer; `http` or `grpc`."""
    FAULTS.labels(protocol).inc()
