"""User id -> the user's history row, in one round trip to the online store.

Feast defines and writes the store. A read through its SDK imports 400 MB of libraries and costs ten times
the lookup. The reader here therefore decodes Feast's layout itself (entity key serialisation version 3);
the tests hold the two byte-equal.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.metrics import STORE_READS
from serving.redis.address import is_redis_url
from serving.stores.circuit_breaker import PROBE_S, CircuitBreaker
from serving.stores.feast_layout import HISTORY, JOIN_KEY, PROJECT, VIEW, UserRow, bytes_value, entity_key
from serving.stores.redis_store import TIMEOUT_MS, RedisStore

__all__ = [
    "HISTORY",
    "JOIN_KEY",
    "PROJECT",
    "TIMEOUT_MS",
    "VIEW",
    "GuardedStore",
    "MemoryStore",
    "OnlineStore",
    "RedisStore",
    "SqliteStore",
    "UserRow",
    "entity_key",
    "open_store",
]


_PROBE_USER = ""  # no store holds a row for it
_reads = {
    name: STORE_READS.labels(name) for name in ("found", "absent", "invalid", "failed", "late", "refused")
}


class OnlineStore(Protocol):
    """The store from which the request path reads a user's row."""

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Args:
            user_id: the user of the row.
            deadline: the value of `time.perf_counter()` after which the row is useless; a store may give up
                earlier.

        Raises:
            RowInvalid: the store works, but its value for this user is invalid.
            FeaturesLate: the deadline left less time than the store may take.
            FeaturesUnavailable: the store is broken, or did not answer in time.
        """

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""

    async def aclose(self) -> None:
        """Close the connections of the running loop; a later read opens them again."""

    def close(self) -> None:
        """Close the connections, from a thread without an event loop; a later read opens them again."""


class LocalStore:
    """A store in this process or on this disk; its `fetch` does not wait."""

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        return self.read(user_id, deadline)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: no connection belongs to an event loop."""

    def close(self) -> None:
        """Do nothing: there is no connection."""


class MemoryStore(LocalStore):
    """An online store in a dict: for tests and for serving without a store."""

    def __init__(self) -> None:
        self._rows: dict[str, UserRow] = {}

    def write(self, user_id: str, row: UserRow) -> None:
        """Keep the row as the user's latest."""
        self._rows[user_id] = row

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        return self._rows.get(user_id)


class SqliteStore(LocalStore):
    """Feast's SQLite online store, read-only; safe to share between threads.

    A run replaces the whole file. The reader notices the new inode and opens the new file.
    """

    def __init__(self, path: Path, *, project: str = PROJECT, timeout_ms: float = TIMEOUT_MS) -> None:
        self._path = path
        self._timeout_s = timeout_ms / 1_000
        self._query = (
            f'SELECT value, event_ts FROM "{project}_{VIEW}" WHERE entity_key = ? AND feature_name = ?'
        )
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened = (0, 0)  # device and inode

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row; raises `FeaturesUnavailable` when the file is missing, locked or broken.

        A lock on the file itself may block for the timeout, even past the deadline.
        """
        patience_s = min(self._timeout_s, deadline - time.perf_counter())
        if patience_s <= 0:
            raise FeaturesLate("no time is left to read the online store")
        if not self._lock.acquire(timeout=patience_s):
            raise FeaturesUnavailable(f"online store {self._path} is busy")
        try:
            found = self._current().execute(self._query, (entity_key(user_id), HISTORY)).fetchone()
        except (OSError, sqlite3.Error) as error:
            self._close()
            raise FeaturesUnavailable(f"online store {self._path} cannot be read: {error}") from error
        finally:
            self._lock.release()
        try:
            return None if found is None else UserRow(bytes_value(found[0]), _local_naive(found[1]))
        except ValueError as error:
            raise RowInvalid(f"a row of online store {self._path} cannot be read: {error}") from error

    def _current(self) -> sqlite3.Connection:
        stat = os.stat(self._path)
        if self._connection is None or self._opened != (stat.st_dev, stat.st_ino):
            self._close()
            self._connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=self._timeout_s,
                check_same_thread=False,
            )
            self._opened = (stat.st_dev, stat.st_ino)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        with self._lock:
            self._close()


class GuardedStore:
    """Reads from a store while it works and fails at once while it does not; safe to share by threads.

    An invalid row is no failure of the store: it must not cost other shoppers their rows. A request with
    too little time is no failure either.
    """

    def __init__(self, store: OnlineStore, *, probe_s: float = PROBE_S) -> None:
        self._store = store
        self._breaker = CircuitBreaker("online_store", self._ask, probe_s=probe_s)

    @property
    def is_open(self) -> bool:
        """Whether reads fail without asking the store."""
        return self._breaker.is_open

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Raises:
            RowInvalid: the user's row is invalid.
            FeaturesLate: the deadline left less time than the store may take.
            FeaturesUnavailable: this read failed, or the breaker is open after earlier failures.
        """
        with self._counted():
            row = await self._store.fetch(user_id, deadline)
        return self._answered(row)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        with self._counted():
            row = self._store.read(user_id, deadline)
        return self._answered(row)

    async def aclose(self) -> None:
        """Close the store's connections of the running loop."""
        await self._store.aclose()

    def close(self) -> None:
        """Stop probing and close the store's connections; a later read opens them again."""
        self._breaker.close()  # first: a read in flight would open connections again
        self._store.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the failures of a read and report them to the breaker."""
        if self._breaker.is_open:
            _reads["refused"].inc()
            raise FeaturesUnavailable("the online store failed repeatedly and is not asked until it is back")
        try:
            yield
        except RowInvalid:
            self._breaker.succeeded()
            _reads["invalid"].inc()
            raise
        except FeaturesLate:
            _reads["late"].inc()
            raise
        except FeaturesUnavailable as error:
            _reads["failed"].inc()
            self._breaker.failed(error)
            raise

    def _answered(self, row: UserRow | None) -> UserRow | None:
        self._breaker.succeeded()
        _reads["absent" if row is None else "found"].inc()
        return row

    def _ask(self) -> str:
        try:
            self._store.read(_PROBE_USER)
        except RowInvalid:
            pass  # also a reply: the store works
        except FeaturesUnavailable as error:
            return str(error)
        return ""


def open_store(url: str) -> OnlineStore:
    """Return the store of a URL: sqlite:///relative, sqlite:////absolute, a Redis URL, or memory:.

    Redis gets a circuit breaker; SQLite fails at once anyway.

    Raises:
        ValueError: the URL has another form.
    """
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteStore(Path(url.removeprefix("sqlite:///")))
    if is_redis_url(url):
        return GuardedStore(RedisStore(url))
    if url == "memory:":
        return MemoryStore()
    # The URL may hold a password, so the message shows only its scheme.
    scheme = url.split(":", 1)[0]
    raise ValueError(
        f"no online store for a {scheme!r} URL: use sqlite:///PATH, redis://HOST:PORT/DB or memory:"
    )


def _local_naive(seconds: int) -> float:
    """Undo Feast's SQLite writer, which reads a UTC time without its zone as local time."""
    return datetime.fromtimestamp(seconds).replace(tzinfo=UTC).timestamp()
