"""A status and what is wrong -> the problem document (RFC 9457) that every refusal is, on every route.

`error` repeats `detail`: it is what clients of KServe's V1 and of the Open Inference Protocol (V2) look for.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

MEDIA_TYPE = "application/problem+json"
MAX_DETAIL_LENGTH = 280  # characters; nothing that is sent here comes back in them


def problem(status: int, detail: str) -> dict[str, Any]:
    """Return the document, as plain JSON types; a longer detail is cut."""
    detail = detail[:MAX_DETAIL_LENGTH]
    return {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "error": detail,
    }
