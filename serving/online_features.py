"""User id -> the user's history row, in one round trip to the online store.

Feast defines and writes the store; a read through its SDK imports 400 MB of libraries and costs ten
times the lookup, so the reader here speaks Feast's own layout (entity key serialisation version 3)
and the tests hold the two byte-equal.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import redis

from serving.errors import FeaturesUnavailable

PROJECT = "checkout"
VIEW = "user_history"
HISTORY = "history"
JOIN_KEY = "user_id"
TIMEOUT_MS = 5.0

_STRING = 2  # Feast's ValueType.STRING
_BYTES_TAG = 0x0A  # ValueProto field 1, length-delimited
_HISTORY_FIELD = bytes.fromhex("0601f0f8")  # murmur3 of "user_history:history", little endian
_WRITTEN_FIELD = f"_ts:{VIEW}".encode()


@dataclass(frozen=True, slots=True)
class UserRow:
    """What the store holds of one user: `aggregates.pack`ed history, and the time it speaks of."""

    history: bytes
    written_at: float  # seconds since the epoch; the history holds purchases strictly before it


class OnlineStore(Protocol):
    """Where the request path reads a user's row."""

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Raises:
            FeaturesUnavailable: the store is broken, or did not answer in time.
        """

    def close(self) -> None:
        """Let go of connections; a later read opens them again."""


class MemoryStore:
    """An online store in a dict: for tests and for serving without a store."""

    def __init__(self) -> None:
        self._rows: dict[str, UserRow] = {}

    def write(self, user_id: str, row: UserRow) -> None:
        """Keep the row as the user's latest."""
        self._rows[user_id] = row

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        return self._rows.get(user_id)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class SqliteStore:
    """Feast's SQLite online store, read only; safe to share between threads.

    A run replaces the whole file. The reader sees this by the file's inode and opens the new one.
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

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row; raises `FeaturesUnavailable` when the file is missing, locked or broken."""
        if not self._lock.acquire(timeout=self._timeout_s):
            raise FeaturesUnavailable(f"online store {self._path} is busy")
        try:
            found = self._current().execute(self._query, (entity_key(user_id), HISTORY)).fetchone()
            return None if found is None else UserRow(_bytes_value(found[0]), _local_naive(found[1]))
        except (OSError, sqlite3.Error, ValueError) as error:
            self._close()
            raise FeaturesUnavailable(f"online store {self._path} cannot be read: {error}") from error
        finally:
            self._lock.release()

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


class RedisStore:
    """Feast's Redis online store: one HMGET per read, never longer than the time-out allows."""

    def __init__(self, url: str, timeout_ms: float = TIMEOUT_MS, *, project: str = PROJECT) -> None:
        self._project = project.encode()
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_ms / 1_000,
            socket_connect_timeout=timeout_ms / 1_000,
            # The library's default retries with a second's back-off whatever the time-outs say.
            retry=None,
            # Its self-introduction costs a new connection a round trip.
            driver_info=None,
        )

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row; raises `FeaturesUnavailable` when Redis is gone, late or not Feast's."""
        try:
            key = entity_key(user_id) + self._project
            history, written = self._client.execute_command("HMGET", key, _HISTORY_FIELD, _WRITTEN_FIELD)
            if history is None or written is None:
                return None
            return UserRow(_bytes_value(history), _timestamp(written))
        except (redis.RedisError, OSError, ValueError) as error:
            raise FeaturesUnavailable(f"online store in Redis: {type(error).__name__}") from error

    def close(self) -> None:
        """Close the connections; a later read opens them again."""
        self._client.close()


def open_store(url: str) -> OnlineStore:
    """Return the store behind a URL: sqlite:///relative, sqlite:////absolute, redis://host:port/db, memory:.

    Raises:
        ValueError: the URL is none of these.
    """
    scheme = url.split(":", 1)[0]
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteStore(Path(url.removeprefix("sqlite:///")))
    if scheme in ("redis", "rediss") and "://" in url:
        return RedisStore(url)
    if url == "memory:":
        return MemoryStore()
    # The URL itself may hold a password: only its scheme is named.
    raise ValueError(
        f"no online store for a {scheme!r} URL: use sqlite:///PATH, redis://HOST:PORT/DB or memory:"
    )


def entity_key(user_id: str) -> bytes:
    """Return Feast's key of a user: counts, types and lengths as little-endian 32-bit numbers."""
    name, value = JOIN_KEY.encode(), user_id.encode()
    return b"".join(
        (struct.pack("<III", 1, _STRING, len(name)), name, struct.pack("<II", _STRING, len(value)), value)
    )


def _bytes_value(proto: bytes) -> bytes:
    """Return the bytes in a serialised ValueProto that holds bytes and nothing else."""
    if not proto or proto[0] != _BYTES_TAG:
        raise ValueError("the stored value is not a Feast bytes value")
    length, start = _varint(proto, 1)
    if start + length != len(proto):
        raise ValueError(f"the stored value announces {length} bytes and has {len(proto) - start}")
    return proto[start:]


def _timestamp(proto: bytes) -> float:
    """Return the seconds since the epoch in a serialised protobuf Timestamp."""
    values = {0x08: 0, 0x10: 0}  # field 1 seconds, field 2 nanoseconds
    at = 0
    while at < len(proto):
        tag = proto[at]
        if tag not in values:
            raise ValueError("the stored time is not a protobuf Timestamp")
        values[tag], at = _varint(proto, at + 1)
    return values[0x08] + values[0x10] / 1e9


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position behind it."""
    value = shift = 0
    while True:
        if at >= len(proto) or shift > 63:
            raise ValueError("a number in the stored value is cut short")
        byte = proto[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _local_naive(seconds: int) -> float:
    """Undo Feast's SQLite writer, which reads a UTC time without its zone as local time."""
    return datetime.fromtimestamp(seconds).replace(tzinfo=UTC).timestamp()
