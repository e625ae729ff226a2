"""Labels are bounded, answers are counted, and the exposition has the accepted format."""

import pytest
from prometheus_client import REGISTRY

from serving import metrics


def test_a_label_has_a_limited_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics._seen, "rejected", set())  # else later tests count their refusals as "other"
    seen = {metrics.bounded("rejected", f"reason {n}") for n in range(200)}
    assert len(seen) <= metrics.MAX_LABELS + 1
    assert "other" in seen


def test_a_reason_loses_its_detail() -> None:
    assert metrics.bounded("degraded_reason", "features: user 17 is gone") == "features"


def test_an_answer_is_counted_with_the_time_of_each_stage() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    answers = value("reco_responses_total", rung="full", degraded_reason="none")
    stage = value("reco_stage_seconds_sum", stage="ranking")
    total, took_s = value("reco_answer_seconds_count"), value("reco_answer_seconds_sum")
    metrics.count_response("full", None, {"ranking": 2.0, "total": 3.0}, 0.004)
    assert value("reco_responses_total", rung="full", degraded_reason="none") == answers + 1
    assert value("reco_stage_seconds_sum", stage="ranking") - stage == pytest.approx(0.002)
    assert value("reco_answer_seconds_count") == total + 1
    assert value("reco_answer_seconds_sum") - took_s == pytest.approx(0.004)
    assert not value("reco_stage_seconds_count", stage="total")


def test_the_metrics_are_shown_in_the_accepted_format() -> None:
    text, kind = metrics.exposition()
    assert b"# TYPE reco_answer_seconds histogram" in text
    assert kind.startswith("text/plain")
    text, kind = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert kind.startswith("application/openmetrics-text")


def test_a_call_that_requests_share_is_counted_once() -> None:
    def value(name: str) -> float:
        return REGISTRY.get_sample_value(name, {"stage": "metrics"}) or 0.0

    batch = metrics.batch_metrics("metrics", ["checkout"])
    rows, requests = value("reco_batch_rows_sum"), value("reco_batch_requests_sum")
    batch.count_call(1_500, 3)
    assert value("reco_batch_rows_sum") - rows == 1_500
    assert value("reco_batch_requests_sum") - requests == 3
    assert value("reco_batch_rows_count") == value("reco_batch_requests_count")
    assert list(batch.refused) == ["checkout"]
