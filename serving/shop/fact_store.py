"""Facts on their way from their writers to the endpoint: a table in SQLite or a hash in Redis.

Each change gets the next `sequence`, so a reader can ask for the changes since its last read. The sequence is
the clock in microseconds, plus one where two changes share a value. A store that was lost and created again
therefore continues with larger numbers. If its writer's clock lags, the reader finds nothing from its own
number on, not even the fact it read last: then it begins again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from feature_repo.facts import Fact, parse_fact, subject_of, unranked, valid_facts
from serving.errors import FactsUnavailable
from serving.metrics import FACT_READS
from serving.redis.address import parse_redis_url
from serving.redis.client import RedisClient, ReplyError

_log = logging.getLogger(__name__)

PAGE = 2_000  # facts in one read: about 10 ms, so that requests run in between
WRITE_PAGE = 1_000  # facts in one call of Redis's script
TIMEOUT_S = 1.0
WRITE_TIMEOUT_S = 10.0  # how long a writer waits for another writer
GONE_S = 86_400.0  # a partition without a beat for so long has no stream any more
DAMAGED = -math.inf  # the time of a beat that is damaged


class FactStore(Protocol):
    """A store that sources of facts write and the endpoint reads.

    Each method raises FactsUnavailable if the store is broken or did not answer in time; writing or removing
    again does no harm.
    """

    def write(self, facts: Sequence[Fact]) -> int:
        """Keep the facts that win against the stored ones; return the number of changes."""

    def changed_since(self, sequence: int) -> tuple[list[Fact], int]:
        """Return up to PAGE facts that changed after `sequence`, 0 for all, and the sequence of the last.

        Call it again with that sequence until the sequence stays the same. An invalid stored fact is left
        out, so a page may be short, or empty, while more follow. The sequence is 0 if the store has no fact
        from `sequence` on: it was lost, or that fact was removed.
        """

    def of_user(self, user_id: str) -> dict[str, Fact | None]:
        """Return by key the facts that are for one user alone; None is one that is damaged."""

    def remove(self, keys: Collection[str]) -> None:
        """Delete facts without a trace; readers keep the facts they have read, so withdraw them first."""

    def beat(self, partitions: Sequence[int], at: float) -> None:
        """Note until when all facts in these partitions of the topic are stored, seconds since the epoch."""

    def beats(self) -> dict[int, float]:
        """Return each partition that had a beat, and until when its facts are stored, or DAMAGED."""

    def close(self) -> None:
        """Close the connections; a later call opens them again."""


class SqliteFactStore:
    """Facts in a separate SQLite file; safe to share between threads and processes.

    A missing file holds no facts: the first writer creates it. A replaced file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None  # device and inode

    def write(self, facts: Sequence[Fact]) -> int:
        """Keep the facts that win against the stored ones; on an error, none is written."""
        rows = valid_facts(facts)
        with self._as_unavailable(), self._lock:
            connection = self._current(make=True)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_TABLE)
                connection.execute(_INDEX)
                (last,) = connection.execute("SELECT coalesce(max(sequence), 0) FROM facts").fetchone()
                sequence = first = max(last, time.time_ns() // 1_000)
                for key, ranked in rows:
                    sequence += connection.execute(_KEEP, (key, ranked, sequence + 1)).rowcount
        return int(sequence - first)

    def changed_since(self, sequence: int) -> tuple[list[Fact], int]:
        """Return up to PAGE facts that changed after `sequence`, and the sequence of the last."""
        rows = [
            (ranked, _sequence_of(at)) for ranked, at in self._read(_CHANGED, sequence, PAGE + bool(sequence))
        ]
        return _parsed(ranked for ranked, at in rows if at > sequence), rows[-1][1] if rows else 0

    def of_user(self, user_id: str) -> dict[str, Fact | None]:
        """Return by key the facts that are for one user alone; None is one that is damaged."""
        rows = self._read(_ROWS)
        return _facts_of(user_id, ((key.decode(errors=_RAW), row) for key, row in rows))

    def remove(self, keys: Collection[str]) -> None:
        """Delete facts without a trace, also from the free pages of the file."""
        with self._as_unavailable(), self._lock:
            if not self._path.exists():
                return
            connection = self._current(make=True)
            if keys:  # else there may be no table, either
                connection.execute("PRAGMA user_version = 1")  # until nothing is left in free pages
                connection.executemany(_DELETE, [(key.encode(errors=_RAW),) for key in keys])
            if connection.execute("PRAGMA user_version").fetchone() == (0,):
                return
            connection.execute("VACUUM")
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise OSError("another process reads it, so its old pages cannot be removed: try again")
            connection.execute("PRAGMA user_version = 0")

    def beat(self, partitions: Sequence[int], at: float) -> None:
        """Note until when all facts in these partitions of the topic are stored."""
        with self._as_unavailable(), self._lock:
            connection = self._current(make=True)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_BEATS)
                connection.executemany(_BEAT, [(partition, at) for partition in partitions])

    def beats(self) -> dict[int, float]:
        """Return each partition that had a beat, and until when its facts are stored."""
        return _beats_of(self._read("SELECT partition, at FROM beats"))

    def _read(self, query: str, *values: int) -> list[Any]:
        with self._as_unavailable(), self._lock:
            if not self._path.exists():
                return []
            try:
                return self._current(make=False).execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # a writer is about to create it
                    return []
                raise

    def _current(self, make: bool) -> sqlite3.Connection:
        if make:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._opened != self._inode():
            self.close()
        if self._connection is None:
            mode = "rwc" if make else "rw"
            self._connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._opened = self._inode()
        if make:  # a writer waits longer for another one than a reader does
            self._connection.execute(f"PRAGMA busy_timeout={WRITE_TIMEOUT_S * 1e3:.0f}")
            # Readers go on while a writer writes.
            self._connection.execute("PRAGMA journal_mode=WAL")
        return self._connection

    def _inode(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(self._path)
            return stat.st_dev, stat.st_ino
        return None

    @contextlib.contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, ValueError) as error:
            self.close()
            raise FactsUnavailable(f"fact store {self._path} cannot be used: {error}") from error

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


_TABLE = """
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, ranked BLOB NOT NULL, sequence INTEGER NOT NULL)
WITHOUT ROWID"""
_INDEX = "CREATE UNIQUE INDEX IF NOT EXISTS facts_sequence ON facts (sequence)"
_BEATS = "CREATE TABLE IF NOT EXISTS beats (partition INTEGER PRIMARY KEY, at REAL NOT NULL)"
_BEAT = "INSERT OR REPLACE INTO beats VALUES (?, ?)"
_KEEP = """
INSERT INTO facts VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET ranked = excluded.ranked, sequence = excluded.sequence
WHERE excluded.ranked > facts.ranked"""
_ROWS = "SELECT CAST(key AS BLOB), CAST(ranked AS BLOB) FROM facts"
_DELETE = "DELETE FROM facts WHERE key IN (CAST(?1 AS TEXT), ?1)"  # by the index, text or not
_CHANGED = "SELECT CAST(ranked AS BLOB), sequence FROM facts WHERE sequence >= ? ORDER BY sequence LIMIT ?"


class RedisFactStore:
    """Facts in Redis: a hash key -> fact and a sorted set key -> sequence, in one slot of a cluster."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def write(self, facts: Sequence[Fact]) -> int:
        """Keep the facts that win against the stored ones; each call of the script is atomic."""
        rows = valid_facts(facts)
        changed = 0
        for start in range(0, len(rows), WRITE_PAGE):
            arguments = [part for row in rows[start : start + WRITE_PAGE] for part in row]
            changed += int(self._ask("EVAL", _KEEP_SCRIPT, 2, _FACTS, _SEQUENCE, *arguments))
        return changed

    def changed_since(self, sequence: int) -> tuple[list[Fact], int]:
        """Return up to PAGE facts that changed after `sequence`, and the sequence of the last."""
        limits = sequence, "+inf", "WITHSCORES", "LIMIT", 0, PAGE + bool(sequence)
        changes = self._ask("ZRANGEBYSCORE", _SEQUENCE, *limits)
        at = [_sequence_of(score) for score in changes[1::2]]
        last = at[-1] if at else 0
        keys = [key for key, one in zip(changes[::2], at, strict=True) if one > sequence]
        # A fact that changes between the two calls is read in its new form now, and again later.
        ranked = self._ask("HMGET", _FACTS, *keys) if keys else []
        return _parsed(value for value in ranked if value is not None), last

    def of_user(self, user_id: str) -> dict[str, Fact | None]:
        """Return by key the facts that are for one user alone; None is one that is damaged."""
        rows: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            cursor, page = self._ask("HSCAN", _FACTS, cursor, "COUNT", PAGE)
            rows |= page
            if not cursor:
                return _facts_of(user_id, ((key.decode(errors=_RAW), row) for key, row in rows.items()))

    def remove(self, keys: Collection[str]) -> None:
        """Delete facts without a trace."""
        if names := [key.encode(errors=_RAW) for key in keys]:
            # First: `of_user` looks into the hash, so a removal that is cut here can be made again.
            self._ask("ZREM", _SEQUENCE, *names)
            self._ask("HDEL", _FACTS, *names)

    def beat(self, partitions: Sequence[int], at: float) -> None:
        """Note until when all facts in these partitions of the topic are stored."""
        if partitions:
            self._ask("HSET", _BEATING, *(part for one in partitions for part in (one, repr(at))))

    def beats(self) -> dict[int, float]:
        """Return each partition that had a beat, and until when its facts are stored."""
        return _beats_of(self._ask("HGETALL", _BEATING).items())

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        self._client.close()

    def _ask(self, *command: str | bytes | int) -> Any:
        try:
            return self._client.ask_now(time.perf_counter() + TIMEOUT_S, *command)
        except (ReplyError, OSError, ValueError) as error:
            code = f" {error.code}" if isinstance(error, ReplyError) else ""
            raise FactsUnavailable(f"fact store in Redis: {type(error).__name__}{code}") from error


_FACTS, _SEQUENCE = "{checkout:facts}:ranked", "{checkout:facts}:sequence"
_RAW = "surrogateescape"  # a damaged key may be no text, and must be removable
_BEATING = "{checkout:facts}:beats"  # partition -> until when its facts are stored
# Redis compares strings by the locale of its server; facts are ordered by their bytes.
_KEEP_SCRIPT = """
local function later(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return #a > #b
end
local now = redis.call('TIME')
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
local sequence = math.max(tonumber(last[2] or 0), now[1] * 1000000 + now[2])
local changed = 0
for i = 1, #ARGV, 2 do
  local standing = redis.call('HGET', KEYS[1], ARGV[i])
  if not standing or later(ARGV[i + 1], standing) then
    changed = changed + 1
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('ZADD', KEYS[2], string.format('%.0f', sequence + changed), ARGV[i])
  end
end
return changed
"""


def all_facts(store: FactStore) -> Iterator[Fact]:
    """Yield all facts of a store, page by page; one that changes meanwhile may come twice.

    Raises:
        FactsUnavailable: the store is broken or did not answer in time.
    """
    after = 0
    while True:
        page, sequence = store.changed_since(after)
        if sequence == after:
            return
        yield from page
        after = sequence


def complete_until(store: FactStore) -> float:
    """Return until when the facts of all partitions are stored, seconds since the epoch; 0 without a stream.

    A partition that got no beat for a day has no stream any more: it does not count.

    Raises:
        FactsUnavailable: the store is broken or did not answer in time, or a beat is damaged.
    """
    beats, now = store.beats().values(), time.time()
    if not all(DAMAGED < at < now + GONE_S for at in beats):
        raise FactsUnavailable("the beat of a partition is damaged: its facts may be incomplete")
    return min((at for at in beats if at > now - GONE_S), default=0.0)


def _sequence_of(stored: Any) -> int:
    try:
        return int(float(stored))
    except (TypeError, ValueError, OverflowError) as error:
        raise FactsUnavailable(
            f"the fact store has a change with the number {stored!r:.20}, expected microseconds: empty the "
            "store and send all facts again"
        ) from error


def _beats_of(rows: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Return the beats, DAMAGED for one that is: the stream reads its partition again, and notes it."""
    beats: dict[int, float] = {}
    for partition, stored in rows:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            beats[int(partition)] = DAMAGED
            if math.isfinite(at := float(stored)):
                beats[int(partition)] = at
    return beats


def _facts_of(user_id: str, rows: Iterable[tuple[str, bytes]]) -> dict[str, Fact | None]:
    """Return by key the facts of one user; None is a damaged one whose key or content names the user."""
    naming = b'"user_id":' + orjson.dumps(user_id)  # as `Fact.to_json` writes it
    own: dict[str, Fact | None] = {}
    for key, ranked in rows:
        if subject_of(key)[2] == user_id or naming in ranked:
            fact = next(iter(_parsed([ranked])), None)
            own[key] = fact if fact and fact.user_id == user_id else None
    return own


def _parsed(stored: Iterable[bytes]) -> list[Fact]:
    facts: list[Fact] = []
    for ranked in stored:
        try:
            # The writer has checked the time by its clock; ours may be wrong.
            facts.append(parse_fact(unranked(ranked), now=math.inf))
        except ValueError as error:
            # It was valid when written and is corrupt now. The other facts must still be read.
            FACT_READS.labels("invalid").inc()
            _log.warning("a stored fact is left out: %s", error)
    return facts


def open_fact_store(url: str) -> FactStore:
    """Return the store of a URL: sqlite:///PATH, or any URL that `parse_redis_url` takes.

    Raises:
        ValueError: the URL has another form.
    """
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteFactStore(Path(url.removeprefix("sqlite:///")))
    return RedisFactStore(RedisClient(parse_redis_url(url)))
