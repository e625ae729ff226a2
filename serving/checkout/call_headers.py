"""Headers of HTTP or metadata of gRPC -> `Call`: the part of a request that is not its body."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from feature_repo.ids import is_id
from serving.errors import InvalidRequest

PRIORITIES = ("checkout", "prefetch")  # the first holds without the header
HEADERS = ("x-request-id", "x-deadline-ms", "x-priority", "traceparent")
# The first half of an id is this process's own, the second counts; uuid4 costs six times as much.
_PROCESS = os.urandom(8).hex()
_NUMBERS = itertools.count()


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Call:
    """A request but for its body.

    `arrived` (when its last byte was here) and `deadline` (when the client stops waiting) are
    times of perf_counter. `gone` says whether the client has left.
    """

    arrived: float
    deadline: float
    request_id: str  # for a request that brings none
    route: str = ""  # how it came, for the log and traces
    priority: str = PRIORITIES[0]
    traceparent: str | None = None  # of W3C Trace Context, unchecked
    gone: Callable[[], bool] = _never


def read_call(
    headers: Mapping[str, str],
    route: str,
    limit_s: float,
    arrived: float | None = None,
    gone: Callable[[], bool] = _never,
) -> Call:
    """Return the call that these headers describe.

    Args:
        headers: names in lower case; all but HEADERS are passed over.
        route: how it came.
        limit_s: the server's own deadline; a header may shorten it.
        arrived: perf_counter; None: now.
        gone: whether the client has left.

    Raises:
        InvalidRequest: naming the header and the expected value, never the given one.
    """
    arrived = time.perf_counter() if arrived is None else arrived
    request_id = headers.get("x-request-id", "")
    return Call(
        arrived,
        arrived + min(limit_s, _limit_s(headers.get("x-deadline-ms"))),
        request_id if is_id(request_id) else f"{_PROCESS}{next(_NUMBERS):012x}",
        route,
        _priority(headers.get("x-priority")),
        headers.get("traceparent"),
        gone,
    )


def _limit_s(text: str | None) -> float:
    if text is None:
        return math.inf
    try:
        limit_ms = float(text)
    except ValueError:
        limit_ms = math.nan
    if not limit_ms > 0:  # also refuses nan
        raise InvalidRequest("x-deadline-ms must be a number of milliseconds above 0")
    return limit_ms / 1e3


def _priority(text: str | None) -> str:
    if text is None:
        return PRIORITIES[0]
    if text not in PRIORITIES:
        raise InvalidRequest(f"x-priority must be {' or '.join(PRIORITIES)}")
    return text
