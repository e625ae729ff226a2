"""Spans of a request, its wait and its stages, under the caller's trace."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving.checkout.checkout import Turn
from serving.observe.tracing import Tracing
from serving.schemas import Call, Request, Response
from serving.settings import names_collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans(traceparent: str | None) -> dict[str, ReadableSpan]:
    """Return the spans of a request that waited 1 ms, was prepared in 2, ranked in 3 and finished in 4."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    call = Call(100.0, 100.05, "given", "/v1/recommendations", traceparent=traceparent)
    turn = Turn(Request((), 1e9), call, None, 100.001, response=Response("r1", (), "b1"))  # type: ignore[arg-type]
    turn.stages = [
        ("preprocess", 100.001, 100.003),
        ("predict", 100.003, 100.006),
        ("postprocess", 100.006, 100.010),
    ]
    tracing.observe(turn)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def length_ms(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e6, 3)


def test_a_request_has_a_span_for_its_wait_and_each_stage() -> None:
    by_name = spans(None)
    assert {name: length_ms(span) for name, span in by_name.items()} == {
        "recommend": 10.0,
        "queue": 1.0,
        "preprocess": 2.0,
        "predict": 3.0,
        "postprocess": 4.0,
    }
    root = by_name.pop("recommend")
    assert root.parent is None
    assert {span.parent.span_id for span in by_name.values() if span.parent} == {root.context.span_id}
    assert root.attributes
    assert (root.attributes["reco.bundle_id"], root.attributes["reco.rung"]) == ("b1", "full")


def test_the_caller_s_trace_is_continued() -> None:
    root = spans(f"00-{TRACE}-{PARENT}-01")["recommend"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT


def test_the_names_of_the_environment_come_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans(None)["queue"].resource.attributes["service.name"] == "checkout"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "till")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    attributes = spans(None)["queue"].resource.attributes
    assert attributes["service.name"] == "till"
    assert attributes["deployment.environment.name"] == "staging"
    assert not names_collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert names_collector()


def test_an_invalid_trace_header_begins_a_new_trace() -> None:
    assert spans("nonsense")["recommend"].parent is None
