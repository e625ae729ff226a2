"""Types and limits of the request path -> the OpenAPI 3.1 document of GET /openapi.json.

The schemas come from the types that decode requests and write answers. The tests compare the document with
the endpoint: allowed requests are accepted, others are refused, real answers and refusals match.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec

from serving.api.http_routes import PREDICT, RECOMMENDATIONS
from serving.api.http_server import MAX_HEAD_BYTES
from serving.api.problems import MEDIA_TYPE, Problem
from serving.schemas import (
    DEFAULT_PROFILE,
    PRIORITIES,
    Instances,
    Predictions,
    Recommendation,
    RequestBody,
    Response,
)
from serving.settings import Settings

_REQUEST = {
    "request_id": "r1",
    "user_id": "1228",
    "basket": ["1041453", "995242"],
    "store_id": "406",
    "at": "2017-12-05T18:30:00Z",
    "k": 1,
}
_RESPONSE = {
    "request_id": "r1",
    "items": [
        {
            "item_id": "5569471",
            "score": 0.0933,
            "source": "history",
            "reason": "bought 31 times before, last 14 days ago",
            "price": 3.99,
            "promotion": 0.25,
            "coupon": "SODA25",
        }
    ],
    "bundle_id": "c31e6aa76126a01d",
    "degraded": False,
    "degraded_reason": None,
    "rung": "full",
    "stage_ms": {"features": 0.9, "retrieval": 0.7, "ranking": 0.6, "reranking": 0.2, "total": 2.4},
}
_BODIES = (RequestBody, Instances, Response, Predictions, Problem)
_REFERENCE = "#/components/schemas/{name}"
_METRICS = {
    "/metrics": {
        "get": {
            "operationId": "metrics",
            "summary": "Counters and histograms, in Prometheus's text form",
            "responses": {"200": {"description": "Metrics", "content": {"text/plain": {}}}},
        }
    }
}


_TOKENS = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
_CALLERS: dict[str, Any] = {"security": [{"token": []}]}


def openapi(settings: Settings, profiles: Iterable[str] = (DEFAULT_PROFILE,)) -> dict[str, Any]:
    """Return the document for an endpoint with these limits and profiles, as plain JSON types."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Checkout recommender",
            "version": version("checkout-recommender"),
            "description": "What goes with the basket that is being paid. The Open Inference Protocol (V2) "
            "is served as KServe describes it, under /v2.",
        },
        "paths": {
            RECOMMENDATIONS: {
                "post": _operation(
                    "recommend",
                    "Ask for recommendations",
                    "RequestBody",
                    _REQUEST,
                    "Response",
                    _RESPONSE,
                    settings,
                )
            },
            PREDICT: {
                "post": _operation(
                    "predict",
                    "Ask for recommendations in KServe's V1 form, several requests at a time",
                    "Instances",
                    {"instances": [_REQUEST]},
                    "Predictions",
                    {"predictions": [_RESPONSE]},
                    settings,
                )
            },
            "/healthz": {
                "get": {
                    "operationId": "ready",
                    "summary": "Whether requests may come",
                    "responses": {
                        "200": _content("Ready", {"type": "object"}, {"status": "ready"}),
                        "503": _refusal("Not ready, or about to stop"),
                    },
                }
            },
            **({} if settings.metrics_address else _METRICS),
        },
        "components": {"schemas": _schemas(profiles), **(_TOKENS if settings.caller_tokens else {})},
    }


def _operation(
    name: str,
    summary: str,
    asks: str,
    request: dict[str, Any],
    answers: str,
    response: dict[str, Any],
    settings: Settings,
) -> dict[str, Any]:
    body_bytes, wait_s = settings.body_limit_bytes, settings.body_timeout_ms / 1e3
    refusals = {
        400: "The body is not JSON",
        **({401: "No valid token"} if settings.caller_tokens else {}),
        **({403: "A web page asks"} if settings.is_local else {}),
        408: f"The headers or the body did not arrive within {wait_s:g} s",
        413: f"The body is longer than {body_bytes} bytes",
        422: "The body or a header is not as described here",
        429: "A prefetch without enough time, or one too many for its shopper",
        431: f"The headers are longer than {MAX_HEAD_BYTES} bytes",
    }
    return {
        "operationId": name,
        "summary": summary,
        **(_CALLERS if settings.caller_tokens else {}),
        "parameters": [
            _header("x-request-id", "Id of requests that bring none", {"type": "string"}),
            _header(
                "x-deadline-ms",
                f"Milliseconds until the answer comes from a lower rung; at most {settings.deadline_ms:g}",
                {"type": "number", "exclusiveMinimum": 0},
            ),
            _header(
                "x-priority",
                f"{PRIORITIES[1]}: no shopper waits for this answer yet",
                {"enum": list(PRIORITIES), "default": PRIORITIES[0]},
            ),
            _header("traceparent", "The caller's span, as W3C Trace Context writes it", {"type": "string"}),
        ],
        "requestBody": {
            "required": True,
            "description": f"At most {body_bytes} bytes",
            "content": {"application/json": {"schema": _ref(asks), "example": request}},
        },
        "responses": {
            "200": _content(
                "The answer; what fails in the server makes it `degraded`", _ref(answers), response
            ),
            **{str(status): _refusal(why) for status, why in refusals.items()},
        },
    }


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _content(description: str, schema: dict[str, Any], example: object) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"description": description, "content": content}


def _refusal(description: str) -> dict[str, Any]:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": _ref("Problem")}}}


def _ref(schema: str) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(name=schema)}


def _schemas(profiles: Iterable[str]) -> dict[str, Any]:
    """Return the schemas of the types that read requests and write answers, by the types' names."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REFERENCE)
    request, response, item = (schemas[kind.__name__] for kind in (RequestBody, Response, Recommendation))
    request["properties"]["profile"]["enum"] = [*profiles, None]  # the bundle's
    request["properties"]["k"]["type"] = "integer"  # decoded as a float, because 7.0 is an integer in JSON
    # Defaults are written, too, but for the one that must be asked for.
    response["required"] = [name for name in response["properties"] if name != "unknown_items"]
    for name, schema in item["properties"].items():
        if name not in item["required"]:  # unknown terms are left out, never null
            item["properties"][name] = {**schema.pop("anyOf")[0], **schema}
            del item["properties"][name]["default"]
    return schemas
