"""User id -> the user's history row, in one round trip to the online store: Redis, SQLite or memory.

Feast defines and writes the store. Its SDK would bring 400 MB of libraries into the endpoint. The
reader here therefore decodes Feast's layout itself (entity key serialisation version 3); the tests hold the
two byte-equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import BytesValue

from feature_repo.aggregates import check_owner
from feature_repo.snapshots import HEARTBEAT, HISTORY, USER_VIEW
from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.metrics import STORE_READS
from serving.redis.address import is_redis_url, parse_redis_url
from serving.redis.client import CONNECT_S, RedisClient, Reply, ReplyError
from serving.stores.circuit_breaker import PROBE_S, CircuitBreaker

PROJECT = "checkout"
JOIN_KEY = "user_id"

_STRING = 2  # Feast's ValueType.STRING
# The same in every user's key: one entity, its type, its name, the type of its value.
_KEY_HEAD = b"".join(
    (struct.pack("<III", 1, _STRING, len(JOIN_KEY)), JOIN_KEY.encode(), struct.pack("<I", _STRING))
)
HISTORY_FIELD = bytes.fromhex("0601f0f8")  # murmur3 of "user_history:history", little endian
WRITTEN_FIELD = f"_ts:{USER_VIEW}".encode()

TIMEOUT_MS = 5.0
FAIR = 0.5  # share of the timeout; a store that got less time than that from a late request is not at fault
_THREADS = 0  # one reader: all threads without an event loop
CONNECTED_S = 0.03  # from a read that only connected to the next
_PROBE_USER = ""  # no store holds a row for it
_reads = {
    name: STORE_READS.labels(name) for name in ("found", "absent", "invalid", "failed", "late", "refused")
}


@dataclass(frozen=True, slots=True)
class UserRow:
    """The row that the store holds for one user: the packed history and its time."""

    history: bytes
    written_at: float  # seconds since the epoch; the history holds purchases strictly before it


class OnlineStore:
    """The store from which the request path reads a user's row.

    A store in this process or on this disk needs a `read` only: its `fetch` does not wait.
    """

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
        return self.read(user_id, deadline)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close the connections of the running loop; a later read opens them again."""

    def close(self) -> None:
        """Close the connections, from a thread without an event loop; a later read opens them again."""


class MemoryStore(OnlineStore):
    """An online store in a dict: for tests and for serving without a store."""

    def __init__(self) -> None:
        self._rows: dict[str, UserRow] = {}

    def write(self, user_id: str, row: UserRow) -> None:
        """Keep the row as the user's latest."""
        self._rows[user_id] = row

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        return self._rows.get(user_id)


class SqliteStore(OnlineStore):
    """Feast's SQLite online store, read-only; safe to share between threads.

    A run replaces the whole file. The reader notices the new inode and opens the new file.
    """

    def __init__(self, path: Path, timeout_ms: float = TIMEOUT_MS) -> None:
        self._path = path
        self._timeout_s = timeout_ms / 1_000
        self._lock = threading.RLock()
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
            found = self._current().execute(_QUERY, (entity_key(user_id), HISTORY)).fetchone()
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise FeaturesUnavailable(f"online store {self._path} cannot be read: {error}") from error
        finally:
            self._lock.release()
        try:
            return None if found is None else _row(user_id, found[0], _local_naive(found[1]))
        # A column may hold a value of any type, and a time of any year.
        except (ValueError, TypeError, OverflowError, OSError) as error:
            raise RowInvalid(f"a row of online store {self._path} cannot be read: {error}") from error

    def _current(self) -> sqlite3.Connection:
        stat = os.stat(self._path)
        if self._connection is None or self._opened != (stat.st_dev, stat.st_ino):
            self.close()
            self._connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=self._timeout_s,
                check_same_thread=False,
            )
            self._opened = (stat.st_dev, stat.st_ino)
        return self._connection

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


_QUERY = f'SELECT value, event_ts FROM "{PROJECT}_{USER_VIEW}" WHERE entity_key = ? AND feature_name = ?'


class RedisStore(OnlineStore):
    """Feast's Redis online store: in a server, in a cluster, or in the master that sentinels name.

    The first read of an event loop, and the first read by threads, may take CONNECT_S seconds. It is the
    warm-up; the endpoint is not ready before it. Each later read takes at most the timeout, or the time that
    its request has left, even if the server hangs. Meanwhile the loop that awaits `fetch` runs other tasks.
    """

    def __init__(self, url: str, timeout_ms: float = TIMEOUT_MS) -> None:
        """Take the address; nothing is connected yet.

        Raises:
            ValueError: it is no Redis URL.
        """
        self._address = parse_redis_url(url)
        self._timeout_s = timeout_ms / 1e3
        self._warm: set[int] = set()  # ids of event loops, and _THREADS
        self._client = RedisClient(self._address)

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        command = _command(user_id)
        with self._in_time(deadline, id(asyncio.get_running_loop())) as until:
            reply = await self._client.ask(until, *command)
        return _reply_row(user_id, reply)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        command = _command(user_id)
        with self._in_time(deadline, _THREADS) as until:
            reply = self._client.ask_now(until, *command)
        return _reply_row(user_id, reply)

    async def aclose(self) -> None:
        """Close the connections of the running loop; a later read opens them again."""
        await self._client.aclose()
        self._warm.clear()

    def close(self) -> None:
        """Close the connections, from a thread without an event loop; a later read opens them again."""
        self._client.close()
        self._warm.clear()

    @contextlib.contextmanager
    def _in_time(self, deadline: float, reader: int) -> Iterator[float]:
        """Yield the deadline of one read, and say what its failure means."""
        patience_s = self._timeout_s if reader in self._warm else CONNECT_S
        given_s = min(patience_s, deadline - time.perf_counter())
        if given_s <= 0:
            raise FeaturesLate("no time is left to read the online store")
        self._warm.add(reader)
        try:
            yield time.perf_counter() + given_s
        except TimeoutError as error:
            if given_s < FAIR * patience_s:
                raise FeaturesLate("the online store did not answer in the little time left") from error
            raise self._failure(f"no answer in {given_s * 1e3:g} ms") from error
        except ReplyError as error:
            if error.code == "WRONGTYPE":
                raise RowInvalid("the online store holds no hash under a user's key") from error
            raise self._failure(f"it answers {error.code}") from error
        except (OSError, ValueError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error

    def _failure(self, reason: str) -> FeaturesUnavailable:
        return FeaturesUnavailable(f"online store in Redis at {self._address}: {reason}")


class GuardedStore(OnlineStore):
    """Reads from a store while it works and fails at once while it does not; safe to share by threads.

    An invalid row is no failure of the store: it must not cost other shoppers their rows. A request with
    too little time is no failure either.
    """

    def __init__(self, store: OnlineStore, *, probe_s: float = PROBE_S) -> None:
        self._store = store
        self._breaker = CircuitBreaker("online_store", self._probe, probe_s=probe_s)

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        with self._counted(user_id):
            row = await self._store.fetch(user_id, deadline)
        return self._answered(user_id, row)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        with self._counted(user_id):
            row = self._store.read(user_id, deadline)
        return self._answered(user_id, row)

    async def aclose(self) -> None:
        """Close the store's connections of the running loop."""
        await self._store.aclose()

    def close(self) -> None:
        """Stop probing and close the store's connections; a later read opens them again."""
        self._breaker.close()  # first: a read in flight would open connections again
        self._store.close()

    @contextlib.contextmanager
    def _counted(self, user_id: str) -> Iterator[None]:
        """Count the failures of a read and report them to the breaker."""
        if self._breaker.is_open:
            _count(user_id, "refused")
            raise FeaturesUnavailable("the online store failed repeatedly and is not asked until it is back")
        try:
            yield
        except RowInvalid:
            self._breaker.succeeded()
            _count(user_id, "invalid")
            raise
        except FeaturesLate:
            _count(user_id, "late")
            raise
        except FeaturesUnavailable as error:
            _count(user_id, "failed")
            self._breaker.failed(error)
            raise

    def _answered(self, user_id: str, row: UserRow | None) -> UserRow | None:
        if self._breaker.failures_lately:
            self._breaker.succeeded()
        _count(user_id, "absent" if row is None else "found")
        return row

    def _probe(self) -> bool:
        """Return whether the store answers.

        A read has no time to connect, but it leaves the connection to the next read.
        """
        if self._answers():
            return True
        time.sleep(CONNECTED_S)
        return self._answers()

    def _answers(self) -> bool:
        try:
            self._store.read(_PROBE_USER)
        except RowInvalid:
            pass  # also a reply: the store works
        except FeaturesUnavailable:
            return False
        return True


def _count(user_id: str, outcome: str) -> None:
    if not user_id.startswith(HEARTBEAT):  # a thread reads that every second; it is no user's row
        _reads[outcome].inc()


def open_store(url: str) -> OnlineStore:
    """Return the store of a URL: sqlite:///relative, sqlite:////absolute, a Redis URL, or memory:.

    Its reads are counted, and a circuit breaker skips it while it fails.

    Raises:
        ValueError: the URL has another form.
    """
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return GuardedStore(SqliteStore(Path(url.removeprefix("sqlite:///"))))
    if is_redis_url(url):
        return GuardedStore(RedisStore(url))
    if url == "memory:":
        return GuardedStore(MemoryStore())
    # The URL may hold a password, so the message shows only its scheme.
    scheme = url.split(":", 1)[0]
    raise ValueError(
        f"no online store for a {scheme!r} URL: use sqlite:///PATH, redis://HOST:PORT/DB or memory:"
    )


# -------------------------------------------------------------------------------------- Feast's layout


def entity_key(user_id: str) -> bytes:
    """Return Feast's key of a user: counts, types and lengths as little-endian 32-bit numbers.

    Raises:
        RowInvalid: the id cannot be encoded, so no user has a row under it.
    """
    try:
        value = user_id.encode()
    except UnicodeEncodeError as error:
        raise RowInvalid("a user id that is no valid Unicode") from error
    return _KEY_HEAD + len(value).to_bytes(4, "little") + value


def bytes_value(proto: bytes) -> bytes:
    """Return the bytes in a serialised ValueProto of Feast; raises ValueError if it is no message."""
    try:
        # The same field has the same number in both messages.
        return BytesValue.FromString(proto).value
    except DecodeError as error:
        raise ValueError("the stored value is not a Feast bytes value") from error


def timestamp(proto: bytes) -> float:
    """Return the seconds since the epoch in a serialised protobuf Timestamp."""
    try:
        at = Timestamp.FromString(proto)
    except DecodeError as error:
        raise ValueError("the stored time is not a protobuf Timestamp") from error
    return at.seconds + at.nanos / 1e9


def _command(user_id: str) -> tuple[str, bytes, bytes, bytes]:
    return "HMGET", entity_key(user_id) + PROJECT.encode(), HISTORY_FIELD, WRITTEN_FIELD


def _row(user_id: str, value: bytes, written_at: float) -> UserRow:
    """Return the row in Feast's value; raises ValueError unless it is this user's."""
    history = bytes_value(value)
    if not user_id.startswith(HEARTBEAT):
        check_owner(history, user_id)
    return UserRow(history, written_at)


def _reply_row(user_id: str, reply: Reply) -> UserRow | None:
    match reply:
        case [bytes(history), bytes(written)]:
            try:
                return _row(user_id, history, timestamp(written))
            except ValueError as error:
                raise RowInvalid(f"the online store's row of a user: {error}") from error
        case [None, _] | [_, None]:
            return None
    raise RowInvalid("the online store gave something else than the two fields of a row")


def _local_naive(seconds: int) -> float:
    """Undo Feast's SQLite writer, which reads a UTC time without its zone as local time."""
    return datetime.fromtimestamp(seconds).replace(tzinfo=UTC).timestamp()
