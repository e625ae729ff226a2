"""Status and detail -> the problem document (RFC 9457) of every refusal, on every route."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MEDIA_TYPE = "application/problem+json"
MAX_DETAIL_LENGTH = 280  # characters; a detail never repeats the input
_Detail = Annotated[str, Meta(max_length=MAX_DETAIL_LENGTH)]


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """RFC 9457; never repeats the request."""

    type: Literal["about:blank"]
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: _Detail
    error: Annotated[_Detail, Meta(description="The detail, where clients of KServe's V1 and V2 look for it")]


def problem(status: int, detail: str) -> dict[str, Any]:
    """Return the document as plain JSON types; a longer detail is cut."""
    detail = detail[:MAX_DETAIL_LENGTH]
    document: dict[str, Any] = msgspec.to_builtins(
        Problem("about:blank", HTTPStatus(status).phrase, status, detail, detail)
    )
    return document
