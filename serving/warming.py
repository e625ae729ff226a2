"""A file of requests -> a cache that has their answers before the first shopper asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from serving.errors import InvalidRequest
from serving.schemas import Request, parse_request

BUDGET_S = 5.0  # of the time until an endpoint is ready

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Warmed:
    """What was asked in how long, and what the time was too short for."""

    asked: int
    left: int
    seconds: float


def read_warming(file: Path, now: float) -> list[Request]:
    """Return the requests in a file, one JSON object a line; no file holds none.

    Args:
        file: what `components.cluster_users` wrote.
        now: the time at which they ask, seconds since the epoch.

    Raises:
        ValueError: a line is no request; the message says which.
    """
    requests = []
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(parse_request(orjson.loads(line), now=now, default_id=f"warming-{number}"))
        except (orjson.JSONDecodeError, InvalidRequest) as error:
            raise ValueError(
                f"line {number} of {file} is no request ({error}): write the file anew, or remove it"
            ) from error
    return requests


async def warm(
    requests: list[Request],
    ask: Callable[[Request], Awaitable[object]],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Warmed:
    """Ask one request after the other until all are asked or the time is over; one that fails is left out.

    Args:
        requests: the most promising first.
        ask: answers one through the cache.
        budget_s: the last one begins before this time is over.
        clock: seconds.
    """
    began, asked, failed = clock(), 0, 0
    for request in requests:
        if clock() - began >= budget_s:
            break
        try:
            await ask(request)
        except Exception:  # noqa: BLE001 - the edge of the start: an endpoint that is cold can answer, too
            failed += 1
            if failed == 1:
                _log.exception("a request that should warm the cache failed")
        asked += 1
    return Warmed(asked, len(requests) - asked, clock() - began)
