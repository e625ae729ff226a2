"""An answered turn -> OpenTelemetry spans: one for the request, one for each stage and for its wait.

Spans are made after the answer, from times that are taken anyway, and sent by a thread. Needs the extra
`trace`.
"""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.checkout.checkout import Turn

_parent = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans; `observe` is one of the checkout's observers."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Take the receiver of finished spans."""
        # The names of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before ours.
        resource = Resource.create({"service.name": "checkout"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(__name__)

    def observe(self, turn: Turn) -> None:
        """Make the spans of one turn, under the caller's span if the call names one."""
        assert turn.response is not None
        carrier = {} if turn.call.traceparent is None else {"traceparent": turn.call.traceparent}
        ended = turn.stages[-1][2]
        # Spans have wall-clock times; stages were timed by perf_counter.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        request = self._tracer.start_span(
            "recommend",
            _parent.extract(carrier),
            SpanKind.SERVER,
            start_time=_ns(turn.call.arrived, offset_ns),
            attributes={
                ("http.route" if turn.call.route.startswith("/") else "rpc.method"): turn.call.route,
                "reco.priority": turn.call.priority,
                "reco.request_id": turn.response.request_id,
                "reco.bundle_id": turn.response.bundle_id,
                "reco.rung": turn.response.rung,
                "reco.degraded_reason": turn.response.degraded_reason or "",
                "reco.items": len(turn.response.items),
            },
        )
        under = set_span_in_context(request)
        for name, began, end in (("queue", turn.call.arrived, turn.began), *turn.stages):
            span = self._tracer.start_span(name, under, start_time=_ns(began, offset_ns))
            span.end(_ns(end, offset_ns))
        request.end(_ns(ended, offset_ns))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def trace_to(url: str) -> Tracing:
    """Return tracing that sends spans to a collector, in batches and from a thread of its own.

    Args:
        url: of OTLP over HTTP, for example http://127.0.0.1:4318/v1/traces; empty: that of OTEL_EXPORTER_*.

    Raises:
        ImportError: the extra `trace` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url or None)))


def _ns(seconds: float, offset_ns: int) -> int:
    return int(seconds * 1e9) + offset_ns
