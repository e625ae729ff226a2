"""The requests that a bundle names -> a cache that has their answers before the first shopper asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from serving.answer.recommender import Recommender
from serving.errors import InvalidRequest
from serving.release.bundle import WARMING
from serving.schemas import Request, parse_request

BUDGET_S = 5.0  # of the time until an endpoint is ready, or a new bundle takes over

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
        file: what `components.evaluation.cluster_users` wrote.
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


def warm_up(recommender: Recommender, rest: Callable[[float], None]) -> None:
    """Have a recommender keep the answers to its bundle's warming requests; a broken file warms nothing.

    Args:
        recommender: that nobody uses yet.
        rest: see `warm`.
    """
    if recommender.answers is None:
        return
    try:
        requests = read_warming(recommender.bundle.path / WARMING, time.time())
    except ValueError as error:
        _log.error("answers begin cold: %s", error)
        return
    done = warm(requests, recommender.warm, rest=rest)
    kept = len(recommender.answers)
    _log.info("%d answers are cached after %.1f s; %d requests were left", kept, done.seconds, done.left)


def warm(
    requests: Sequence[Request],
    ask: Callable[[Request], None],
    budget_s: float = BUDGET_S,
    rest: Callable[[float], None] = lambda took_s: None,
    clock: Callable[[], float] = time.monotonic,
) -> Warmed:
    """Ask one request after the other until all are asked or the time is over; one that fails is left out.

    Args:
        requests: the most promising first.
        ask: answers one through the cache.
        budget_s: the last one begins before this time is over.
        rest: called between two with the seconds that the first took: where others need the processor.
        clock: seconds.
    """
    began, asked, failed = clock(), 0, 0
    for request in requests:
        turn = clock()
        if turn - began >= budget_s:
            break
        try:
            ask(request)
        except Exception:  # noqa: BLE001 - the edge of the start: an endpoint that is cold can answer, too
            failed += 1
            if failed == 1:
                _log.exception("a request that should warm the cache failed")
        asked += 1
        rest(clock() - turn)
    return Warmed(asked, len(requests) - asked, clock() - began)
