"""A key -> the ranked list that some replica of the endpoint has left in Redis; never worth waiting for.

A Redis that is dead, frozen or full is a miss: after a few failures in a row, or many among the latest
look-ups, it is not asked until it has answered in the background.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import random
import threading
import time

from serving.cache.entries import JITTER_RATIO
from serving.metrics import CACHE_LOOKUPS, CACHE_WRITES
from serving.redis.address import parse_redis_url
from serving.redis.commands import RedisCommands
from serving.redis.connection import ReplyError
from serving.redis.pool import CONNECT_S
from serving.stores.circuit_breaker import PROBE_S, CircuitBreaker

TIMEOUT_MS = 2.0  # an answer is computed anew in about that time
PREFIX = b"reco:answer:"
MAX_WAITING = 1_000  # lists that wait to be written; more are not kept
_PROBE = PREFIX + b"probe"  # which nobody writes

_log = logging.getLogger(__name__)
_outcomes = {name: CACHE_LOOKUPS.labels("redis", name) for name in ("hit", "miss", "failed", "refused")}
_writes = {name: CACHE_WRITES.labels(name) for name in ("written", "failed", "dropped")}


class RedisAnswers:
    """Lists under keys, each for a time; a thread writes them, so that no answer waits for that."""

    def __init__(
        self, url: str, keep_s: float, timeout_ms: float = TIMEOUT_MS, *, probe_s: float = PROBE_S
    ) -> None:
        """Take the address and how long a list is kept; the first connection is opened in the background.

        Raises:
            ValueError: the URL is not one of Redis.
        """
        address = parse_redis_url(url)
        self._name = str(address)
        self._commands = RedisCommands(address)
        self._keep_s, self._timeout_s = keep_s, timeout_ms / 1e3
        self._waiting: queue.Queue[tuple[bytes, bytes]] = queue.Queue(MAX_WAITING)
        self._breaker = CircuitBreaker("answer_cache", self._ask, is_open=True, probe_s=probe_s)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="answer-writer", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is: look-ups miss without asking Redis."""
        return self._breaker.is_open

    def get(self, key: bytes, deadline: float = math.inf) -> bytes | None:
        """Return what stands under a key; None if nothing does, or Redis does not say in time.

        Args:
            key: of the list.
            deadline: the moment of `time.perf_counter()` when it is of no use; the time-out may be before.
        """
        if self._breaker.is_open:
            _outcomes["refused"].inc()
            return None
        now = time.perf_counter()
        if deadline <= now:
            _outcomes["refused"].inc()
            return None
        try:
            reply = self._commands.ask(min(now + self._timeout_s, deadline), b"GET", PREFIX + key)
        except (OSError, ReplyError, ValueError) as error:
            if not isinstance(error, TimeoutError) or now + self._timeout_s <= deadline:
                self._failed(error)  # else it is the caller's hurry
            _outcomes["failed"].inc()
            return None
        self._breaker.succeeded()
        found = reply if isinstance(reply, bytes) else None
        _outcomes["miss" if found is None else "hit"].inc()
        return found

    def put(self, key: bytes, value: bytes) -> None:
        """Have a value written under a key, unless Redis is not well or too many wait."""
        try:
            if self._breaker.is_open:
                raise queue.Full
            self._waiting.put_nowait((key, value))
        except queue.Full:
            _writes["dropped"].inc()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put is written; return whether it is."""
        until = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.001)
        return not self._waiting.unfinished_tasks

    def close(self) -> None:
        """Stop writing and close the connections; what still waits is not written."""
        self._closing.set()
        self._breaker.close()
        self._thread.join()
        self._commands.close()

    def _write(self) -> None:
        while not self._closing.is_set():
            if self._breaker.is_open:
                self._closing.wait(PROBE_S)
                continue
            with contextlib.suppress(queue.Empty):
                self._write_one(*self._waiting.get(timeout=PROBE_S))  # not for ever: the breaker may open
                self._waiting.task_done()

    def _write_one(self, key: bytes, value: bytes) -> None:
        spread = random.uniform(1 - JITTER_RATIO, 1 + JITTER_RATIO)
        keep_ms = b"%d" % max(int(self._keep_s * spread * 1e3), 1)
        try:
            self._commands.ask(time.perf_counter() + CONNECT_S, b"SET", PREFIX + key, value, b"PX", keep_ms)
        except (OSError, ReplyError, ValueError) as error:
            if isinstance(error, ReplyError):  # it is full, or read only: what it has can still be read
                _log.warning("a cached answer could not be written into Redis at %s: %s", self._name, error)
            else:
                self._failed(error)
            _writes["failed"].inc()
            return
        _writes["written"].inc()

    def _ask(self) -> str:
        """Look up what nobody writes, patiently; return what is wrong."""
        try:
            self._commands.ask(time.perf_counter() + CONNECT_S, b"GET", _PROBE)
        except (OSError, ReplyError, ValueError) as error:
            return self._describe(error)
        return ""

    def _failed(self, error: Exception) -> None:
        self._breaker.failed(self._describe(error))

    def _describe(self, error: Exception) -> str:
        return f"Redis at {self._name}: {type(error).__name__}: {error}"
