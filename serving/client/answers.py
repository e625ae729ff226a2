"""The endpoint's answer as bytes -> `Recommendations`, or `NotAnswered` with its reason."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

# Limits of the endpoint's own; a test compares them with `serving.schemas`.
DEFAULT_K = 10
MAX_K = 100

# Reasons that the client gives itself; all other values of `degraded_reason` come from the endpoint.
INVALID_REQUEST = "invalid_request"  # the caller must correct the request
DEADLINE_EXCEEDED = "deadline_exceeded"
NAME_UNRESOLVED = "name_unresolved"
CONNECTION_FAILED = "connection_failed"
OVERLOADED = "overloaded"  # 429, 503
SERVER_ERROR = "server_error"  # other 5xx
UNEXPECTED_STATUS = "unexpected_status"  # the address is not an endpoint's
MALFORMED_ANSWER = "malformed_answer"
CIRCUIT_OPEN = "circuit_open"
CLOSED = "closed"
CLIENT_ERROR = "client_error"  # a bug in this package; the log has the traceback


class NotAnswered(Exception):
    """The endpoint gave no answer; only a `strict` client raises it. `reason` is one of those above."""

    def __init__(self, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.retry_after_s = retry_after_s  # as the answer said


@dataclass(frozen=True, slots=True)
class RecommendedItem:
    """One item of the answer: its purchase probability, the source that found it, and why it is shown.

    Price, promotion (discount as a share of the price) and coupon are None if the endpoint knows none.
    Name and reason code are there if the request said `explain`.
    """

    item_id: str
    score: float
    source: str
    reason: str
    price: float | None = None
    promotion: float | None = None
    coupon: str | None = None
    name: str | None = None
    reason_code: str | None = None


@dataclass(frozen=True, slots=True)
class Recommendations:
    """The answer: items best first, the bundle that ranked them, and the rung of the fallback ladder.

    `degraded` is true if the answer is less than it should be; `degraded_reason` then says why. With
    `explain`, `unknown_items` says how many items of the basket the bundle does not know.
    """

    request_id: str
    items: tuple[RecommendedItem, ...]
    bundle_id: str
    rung: str = "full"
    degraded: bool = False
    degraded_reason: str | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    unknown_items: int | None = None


def read_answer(content: bytes, request_id: str) -> Recommendations:
    """Read the body of an answer; unknown fields are ignored.

    Raises:
        NotAnswered: the body is malformed, or answers another request.
    """
    try:
        document = json.loads(content)
        if document.get("request_id", request_id) != request_id:
            raise ValueError("this is the answer to another request")
        reason = document.get("degraded_reason")
        return Recommendations(
            request_id,
            tuple(map(_read_item, document["items"])),
            str(document.get("bundle_id", "")),
            str(document.get("rung", "full")),
            document.get("degraded", False) is True,
            None if reason is None else str(reason),
            {str(stage): _finite(ms) for stage, ms in (document.get("stage_ms") or {}).items()},
            None if (unknown := document.get("unknown_items")) is None else int(unknown),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise NotAnswered(MALFORMED_ANSWER, repr(error)[:300]) from error


def _read_item(row: dict[str, Any]) -> RecommendedItem:
    price, promotion = row.get("price"), row.get("promotion")
    item_id = row["item_id"]
    if not isinstance(item_id, str) or not item_id:
        raise TypeError("item_id is not a text")
    return RecommendedItem(
        item_id,
        _finite(row["score"]),
        str(row.get("source", "")),
        str(row.get("reason", "")),
        None if price is None else _finite(price),
        None if promotion is None else _finite(promotion),
        *(
            None if (text := row.get(name)) is None else str(text)
            for name in ("coupon", "name", "reason_code")
        ),
    )


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a number is missing or not finite")
    return float(value)
