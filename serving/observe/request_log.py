"""An answered turn -> one line of JSON on stderr, without holding up the next request.

A line describes request and answer, and the time of each stage. It names the shopper by a keyed hash only:
the key leads from a shopper to the lines, never from a line to the shopper. The prediction log holds
requests and answers in full.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from select import PIPE_BUF
from typing import BinaryIO

import orjson

from serving.checkout.checkout import Turn
from serving.metrics import REQUEST_LOG_DROPPED
from serving.observe.stderr_log import head, write_whole
from serving.schemas import Call, Request, Response

QUEUE_LINES = 4_096  # more wait only if stderr is not read: later ones are dropped and counted
POLL_S = 0.2
CLOSE_S = 2.0


class RequestLog:
    """Writes lines from a thread of its own, some times a second; `observe` is an observer."""

    def __init__(self, stream: BinaryIO, key: str = "") -> None:
        """Take the stream of the lines and the key of the users' hashes; empty: a new one, not stored."""
        self._stream = stream
        self._key = key.encode() or os.urandom(32)
        # A deque and a poll, as in the prediction log: waking a thread would cost the request more.
        # Of each answer: the time, the request, its call, the wait in milliseconds, and the response.
        self._answered: deque[tuple[float, Request, Call, float, Response]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def observe(self, turn: Turn) -> None:
        """Queue one turn and return at once; it is dropped when too many wait."""
        if len(self._answered) < QUEUE_LINES:
            assert turn.response is not None
            # Not the turn itself: it holds the features, and a full queue of those is a gigabyte.
            waited_ms = (turn.began - turn.call.arrived) * 1e3
            self._answered.append((time.time(), turn.request, turn.call, waited_ms, turn.response))
        else:
            REQUEST_LOG_DROPPED.inc()

    def close(self) -> None:
        """Write the queued lines; give up after CLOSE_S if they are not read."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        lines: list[bytes] = []
        while self._answered:
            answered = self._answered.popleft()
            line = orjson.dumps(_line(*answered, self._key), option=orjson.OPT_APPEND_NEWLINE)
            # The processes of an endpoint share one pipe: longer writes would get into each other's lines.
            if lines and sum(map(len, lines)) + len(line) > PIPE_BUF:
                self._put(lines)
                lines = []
            lines.append(line)
        if lines:
            self._put(lines)

    def _put(self, lines: list[bytes]) -> None:
        try:
            write_whole(self._stream, b"".join(lines))
        except (OSError, ValueError):  # a closed pipe; the endpoint answers all the same
            REQUEST_LOG_DROPPED.inc(len(lines))


def _line(
    at: float, request: Request, call: Call, queue_ms: float, response: Response, key: bytes
) -> dict[str, object]:
    user = request.user_id
    return {
        **head("answered", at, traceparent=call.traceparent),
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
        "queue_ms": round(queue_ms, 3),
        "stage_ms": {stage: round(ms, 3) for stage, ms in response.stage_ms.items()},
    }


def hash_user(user_id: str, key: bytes) -> str:
    """Return 16 hexadecimal digits that cannot be made without the key (keyed BLAKE2b, RFC 7693).

    Of the key at most 64 bytes count.
    """
    return hashlib.blake2b(user_id.encode(), digest_size=8, key=key[:64]).hexdigest()
