"""An answered turn -> one line of JSON on stderr, without holding up the next request.

A line tells what was asked and answered, how and how long, and no more of the shopper than a hash whose key
stays here: who has the key finds the lines of a shopper, nobody finds the shopper of a line. What was asked
and answered in full stands in the prediction log.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

import orjson

from serving.checkout.call_headers import Call
from serving.checkout.checkout import Turn
from serving.metrics import REQUEST_LOG_DROPPED
from serving.schemas import Request, Response

QUEUE_LINES = 4_096  # more wait only if nobody reads stderr: later ones are dropped and counted
POLL_S = 0.2
CLOSE_S = 2.0
_CHUNK = 64  # lines written at a time; each turn holds the interpreter for some 0.3 ms


@dataclass(frozen=True, slots=True)
class Answered:
    """What a line is made of; `at` in seconds since the epoch."""

    at: float
    request: Request
    call: Call
    queue_ms: float  # waited for others before its turn came
    response: Response


class RequestLog:
    """Writes lines from a thread of its own, some times a second; `observe` is an observer."""

    def __init__(self, stream: BinaryIO, key: str = "") -> None:
        """Take where the lines go, and the key of the users' hashes; empty: a new one, kept by nobody."""
        self._stream = stream
        self._key = key.encode() or os.urandom(32)
        # As in the prediction log: a deque and a nap cost the request less than waking a thread.
        self._answered: deque[Answered] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def observe(self, turn: Turn) -> None:
        """Hand one turn over; returns at once, and drops it when too many wait."""
        if len(self._answered) < QUEUE_LINES:
            assert turn.response is not None
            # Not the turn itself: it holds the features, and a full queue of those is a gigabyte.
            waited_ms = (turn.began - turn.call.arrived) * 1e3
            self._answered.append(Answered(time.time(), turn.request, turn.call, waited_ms, turn.response))
        else:
            REQUEST_LOG_DROPPED.inc()

    def close(self) -> None:
        """Write what waits; gives up after CLOSE_S if nobody reads it."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        while self._answered:
            chunk = [self._answered.popleft() for _ in range(min(_CHUNK, len(self._answered)))]
            lines = [orjson.dumps(describe(a, self._key), option=orjson.OPT_APPEND_NEWLINE) for a in chunk]
            try:
                self._stream.write(b"".join(lines))
                self._stream.flush()
            except (OSError, ValueError):  # a closed pipe; the endpoint answers all the same
                REQUEST_LOG_DROPPED.inc(len(lines))


def describe(answered: Answered, key: bytes) -> dict[str, object]:
    """Return what a line tells of an answer; of the key at most 64 bytes count."""
    request, response, call = answered.request, answered.response, answered.call
    user = request.user_id
    return {
        "event": "answered",
        "at": round(answered.at, 3),
        "request_id": response.request_id,
        "route": call.route,
        "priority": call.priority,
        "user": None if user is None else hash_user(user, key),
        "store_id": request.store_id,
        "basket_lines": len(request.basket),
        "k": request.k,
        "items": len(response.items),
        "bundle_id": response.bundle_id,
        "rung": response.rung,
        "degraded_reason": response.degraded_reason,
        "queue_ms": round(answered.queue_ms, 3),
        "stage_ms": {stage: round(ms, 3) for stage, ms in response.stage_ms.items()},
    }


def hash_user(user_id: str, key: bytes) -> str:
    """Return 16 hexadecimal digits that only who has the key can make of the id (keyed BLAKE2b, RFC 7693)."""
    return hashlib.blake2b(user_id.encode(), digest_size=8, key=key[:64]).hexdigest()
