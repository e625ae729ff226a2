"""A key -> the ranked list that some replica of the endpoint has left in Redis; never worth waiting for.

A Redis that is dead, frozen or full is a miss: after a few failures in a row, or many among the latest
look-ups, it is not asked until it has answered in the background.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections import deque

from serving.cache import JITTER_RATIO
from serving.circuit_breaker import FAILURES, PROBE_S
from serving.metrics import CACHE_LOOKUPS, CACHE_WRITES
from serving.redis_address import parse_redis_url
from serving.redis_commands import RedisCommands
from serving.redis_connection import ReplyError
from serving.redis_pool import CONNECT_S

TIMEOUT_MS = 2.0  # an answer is computed anew in about that time
PREFIX = b"reco:answer:"
MAX_WAITING = 1_000  # lists that wait to be written; more are not kept
# Of the latest look-ups: the breaker opens when so many of them failed, however many did not.
LATEST, MOST_FAILED = 20, 8
_PROBE = PREFIX + b"probe"  # which nobody writes

_log = logging.getLogger(__name__)
_outcomes = {name: CACHE_LOOKUPS.labels("redis", name) for name in ("hit", "miss", "failed", "refused")}
_writes = {name: CACHE_WRITES.labels(name) for name in ("written", "failed", "dropped")}


class RedisAnswers:
    """Lists under keys, each for a time; a thread writes them, so that no answer waits for that."""

    def __init__(self, url: str, keep_s: float, timeout_ms: float = TIMEOUT_MS) -> None:
        """Take the address and how long a list is kept; the first connection is opened in the background.

        Raises:
            ValueError: the URL is not one of Redis.
        """
        address = parse_redis_url(url)
        self._name = str(address)
        self._commands = RedisCommands(address)
        self._keep_s, self._timeout_s = keep_s, timeout_ms / 1e3
        self._waiting: queue.Queue[tuple[bytes, bytes]] = queue.Queue(MAX_WAITING)
        self._failures = 0  # in a row
        self._latest: deque[bool] = deque(maxlen=LATEST)  # look-ups: whether each failed
        self._open = True  # it is not asked before it has answered a first time
        self._unwell = False  # it has failed since, and that was told
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="answer-writer", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is: look-ups miss without asking Redis."""
        return self._open

    def get(self, key: bytes) -> bytes | None:
        """Return what stands under a key; None if nothing does, or Redis does not say in time."""
        if self.is_open:
            _outcomes["refused"].inc()
            return None
        try:
            reply = self._commands.ask(time.perf_counter() + self._timeout_s, b"GET", PREFIX + key)
        except (OSError, ReplyError, ValueError) as error:
            self._latest.append(True)
            self._failed(error)
            _outcomes["failed"].inc()
            return None
        self._latest.append(False)
        self._failures = 0
        found = reply if isinstance(reply, bytes) else None
        _outcomes["miss" if found is None else "hit"].inc()
        return found

    def put(self, key: bytes, value: bytes) -> None:
        """Have a value written under a key, unless Redis is not well or too many wait."""
        try:
            if self.is_open:
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
        self._thread.join()
        self._commands.close()

    def _write(self) -> None:
        while not self._closing.is_set():
            if self.is_open:
                if self._unwell:
                    self._closing.wait(PROBE_S * random.uniform(0.8, 1.2))  # not all replicas at once
                self._probe()
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
            self._failed(error)
            _writes["failed"].inc()
            return
        _writes["written"].inc()

    def _probe(self) -> None:
        """Ask, patiently; close the breaker if an answer comes."""
        try:
            self._commands.ask(time.perf_counter() + CONNECT_S, b"GET", _PROBE)
        except (OSError, ReplyError, ValueError) as error:
            if not self._unwell:
                _log.warning("Redis at %s does not answer, so no cached answer comes from there: %s: %s",
                             self._name, type(error).__name__, error)  # fmt: skip
            self._unwell = True
            return
        if self._unwell:
            _log.warning("cached answers are read from Redis at %s again", self._name)
        self._latest.clear()
        self._failures = 0
        self._unwell = self._open = False

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        failed = sum(self._latest)
        if not self._open and (self._failures >= FAILURES or failed >= MOST_FAILED):
            self._unwell = self._open = True
            counts = f"{self._failures} times in a row, in {failed} of {len(self._latest)} look-ups"
            _log.warning("Redis at %s failed %s; cached answers pause: %s: %s",
                         self._name, counts, type(error).__name__, error)  # fmt: skip
