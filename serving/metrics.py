"""What happened on the request path -> Prometheus metrics, shown by `/metrics`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

# KServe's own histograms begin at 5 ms; a whole answer takes less than that here.
BUCKETS_S = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075),
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0),
)
MAX_LABELS = 32  # values that one label may take; later ones are counted as "other"

STAGE_SECONDS = Histogram(
    "reco_stage_seconds", "Time spent in one stage of an answer", ["stage"], buckets=BUCKETS_S
)
ANSWER_SECONDS = Histogram(
    "reco_answer_seconds", "Time from a checked request to its answer", buckets=BUCKETS_S
)
RESPONSES = Counter("reco_responses", "Answers given, by rung of the ladder", ["rung", "degraded_reason"])
REJECTED = Counter("reco_rejected", "Requests refused because of what the caller sent", ["reason"])
LOG_RECORDS = Counter("reco_log_records", "Prediction-log records, by what became of them", ["outcome"])
FEATURES_AGE = Gauge(
    "reco_features_age_seconds", "Time since the stream's last heartbeat in the online store"
)
STORE_READS = Counter(
    "reco_store_reads", "Reads of a user's row in the online store, by outcome", ["outcome"]
)
STORE_BREAKER_OPEN = Gauge("reco_store_breaker_open", "1 while the online store fails and is not asked")
BUNDLE = Gauge("reco_bundle_info", "1 for the bundle that answers", ["bundle_id"])
FACT_READS = Counter("reco_fact_reads", "Looks for changed facts, by outcome", ["outcome"])
FACTS_READ_AT = Gauge(
    "reco_facts_read_timestamp_seconds", "When the store of facts was last read whole, Unix time"
)
CACHE_LOOKUPS = Counter(
    "reco_cache_lookups",
    "Looks for a cached answer, by level (process, redis) and outcome",
    ["level", "outcome"],
)
CACHE_WRITES = Counter(
    "reco_cache_writes", "Answers on their way into Redis, by what became of them", ["outcome"]
)
CACHE_ENTRIES = Gauge("reco_cache_entries", "Answers cached in this process")
CACHE_BYTES = Gauge("reco_cache_bytes", "Memory of the answers cached in this process, as estimated")

_seen: dict[str, set[str]] = {"stage": set(), "rung": set(), "degraded_reason": set(), "rejected": set()}


def bounded(label: str, value: str) -> str:
    """Return `value`, or "other" once `label` has taken MAX_LABELS different values.

    A reason is cut at its first colon: what stands behind it may name a single request's detail.
    """
    value = value.partition(":")[0].strip()[:64]
    seen = _seen[label]
    if value not in seen:
        if len(seen) >= MAX_LABELS:
            return "other"
        seen.add(value)
    return value


def count_response(rung: str, degraded_reason: str | None, stage_ms: dict[str, float]) -> None:
    """Count one answer and the time of each of its stages; `total` goes to its own histogram."""
    RESPONSES.labels(bounded("rung", rung), bounded("degraded_reason", degraded_reason or "none")).inc()
    for stage, ms in stage_ms.items():
        if stage == "total":
            ANSWER_SECONDS.observe(ms / 1e3)
        else:
            STAGE_SECONDS.labels(bounded("stage", stage)).observe(ms / 1e3)


def count_rejected(reason: str) -> None:
    """Count one request that was refused, `reason` being a short fixed word."""
    REJECTED.labels(bounded("rejected", reason)).inc()
