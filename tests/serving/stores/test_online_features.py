import contextlib
import math
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from feature_repo.aggregates import unpack
from feature_repo.snapshots import HEARTBEAT
from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.stores.online_features import (
    GuardedStore,
    MemoryStore,
    OnlineStore,
    RedisStore,
    SqliteStore,
    UserRow,
    bytes_value,
    entity_key,
    open_store,
    timestamp,
)
from tests.chaos.procs import eventually
from tests.chaos.rows import AT, TIMESTAMP, packed, proto, write_store
from tests.serving.conftest import metric

# Feast 0.67's bytes for user "42"; the slow tests of `publish_features` check Feast itself against them.
KEY_42 = bytes.fromhex("010000000200000007000000") + b"user_id" + bytes.fromhex("0200000002000000") + b"42"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "online_store.db"
    write_store(path, {"42": packed("apple", "bread"), "ünï": packed("x" * 300, user="ünï")})
    return path


@pytest.fixture
def sqlite(database: Path) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(database)) as store:
        yield store


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory:", MemoryStore),
        ("sqlite:////var/lib/store.db", SqliteStore),
        ("sqlite:///store.db", SqliteStore),
        ("redis://localhost:6379/0", RedisStore),
        ("rediss+cluster://u:p@a:1,b:2", RedisStore),
        ("redis+sentinel://a:1,b:2/shop", RedisStore),
    ],
)
def test_open_store_knows_its_urls(url: str, kind: type[OnlineStore]) -> None:
    store = open_store(url)
    assert isinstance(store, GuardedStore), "its reads are counted"
    assert isinstance(store._store, kind)
    store.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *(
            (url, "no online store for a")
            for url in ("", "mysql://root:secret@host", "sqlite:///", "sqlite://x", "redis")
        ),
        ("redis+sentinel://:secret@a:1", "names no service"),
    ],
)
def test_open_store_refuses_other_urls_without_showing_passwords(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_sqlite_read_returns_the_row_with_its_time(sqlite: SqliteStore) -> None:
    assert sqlite.read("42") == UserRow(packed("apple", "bread"), float(AT))
    assert unpack(sqlite.read("42").history).items.tolist() == ["apple", "bread"]  # type: ignore[union-attr]
    assert sqlite.read("ünï") == UserRow(packed("x" * 300, user="ünï"), float(AT))
    assert sqlite.read("4") is None


def test_sqlite_read_sees_a_replaced_file(database: Path, sqlite: SqliteStore, tmp_path: Path) -> None:
    assert sqlite.read("42") is not None
    write_store(tmp_path / "next.db", {"42": packed("milk")})
    os.replace(tmp_path / "next.db", database)
    assert sqlite.read("42") == UserRow(packed("milk"), float(AT))
    assert sqlite.read("ünï") is None


def test_sqlite_is_opened_read_only_and_again_after_it_was_closed(sqlite: SqliteStore) -> None:
    sqlite.close()
    sqlite.close()
    assert sqlite.read("42") is not None
    assert sqlite._connection is not None
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        sqlite._connection.execute("DELETE FROM checkout_user_history")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"these are no pages of a database" * 100),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:5_000]),
    ],
    ids=["missing", "no database", "empty", "cut short"],
)
def test_a_broken_sqlite_store_is_unavailable_and_recovers(
    break_it: Callable[[Path], object], database: Path, sqlite: SqliteStore, tmp_path: Path
) -> None:
    good = tmp_path / "good.db"
    shutil.copy(database, good)
    break_it(database)
    with pytest.raises(FeaturesUnavailable, match="cannot be read"):
        sqlite.read("42")
    os.replace(good, database)
    assert sqlite.read("42") is not None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("value", value) for value in (b"\x12\x02ab", b"\x0a\xff", None, "text")),
        ("value", proto(packed("apple", user="another"))),
        *(("event_ts", at) for at in (None, "yesterday", 2**40, 2**62, -(2**62), math.inf)),
    ],
)
def test_an_invalid_row_is_no_store_failure(
    column: str, value: object, database: Path, sqlite: SqliteStore
) -> None:
    """No Feast value, a torn one, the row of another shopper, or no time."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"UPDATE checkout_user_history SET {column} = ?", (value,))
    with pytest.raises(RowInvalid, match="cannot be read"):
        sqlite.read("42")


def test_a_locked_sqlite_store_is_unavailable_in_time(database: Path, sqlite: SqliteStore) -> None:
    writer = sqlite3.connect(database, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    with pytest.raises(FeaturesUnavailable, match="locked"):  # it gives up while the lock is held
        sqlite.read("42")
    writer.execute("ROLLBACK")
    writer.close()
    assert sqlite.read("42") is not None


def test_threads_share_one_sqlite_store_while_its_file_is_replaced(database: Path, tmp_path: Path) -> None:
    store = SqliteStore(database, timeout_ms=5_000)
    allowed = {packed("apple", "bread"), packed("milk")}
    wrong: list[object] = []

    def read_often() -> None:
        for _ in range(300):
            row = store.read("42")
            if row is None or row.history not in allowed:
                wrong.append(row)

    threads = [threading.Thread(target=read_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(5):
        write_store(tmp_path / f"{number}.db", {"42": packed("milk")})
        os.replace(tmp_path / f"{number}.db", database)
    for thread in threads:
        thread.join()
    store.close()
    assert wrong == []


def test_sqlite_is_not_read_without_time(sqlite: SqliteStore) -> None:
    with pytest.raises(FeaturesLate):
        sqlite.read("42", time.perf_counter() - 1)
    assert sqlite.read("42", time.perf_counter() + 60) is not None


# ------------------------------------------------------------------------------------- behind a breaker


class FailingStore(OnlineStore):
    """Has user 42; fails while `failure` is set."""

    def __init__(self) -> None:
        self.failure: Callable[[], Exception] | None = None
        self.reads = 0
        self.closed = False
        self.deadline = 0.0

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        self.reads += 1
        self.deadline = deadline
        if self.failure:
            raise self.failure()
        return UserRow(b"row", 1.0) if user_id == "42" else None

    def close(self) -> None:
        self.closed = True


def down() -> Exception:
    return FeaturesUnavailable("down")


@pytest.fixture
def failing() -> FailingStore:
    return FailingStore()


@pytest.fixture
def guarded(failing: FailingStore) -> Iterator[GuardedStore]:
    store = GuardedStore(failing, probe_s=0.02)
    yield store
    store.close()
    assert failing.closed
    assert not [one for one in threading.enumerate() if one.name == "online-store-probe"]


def fail(store: GuardedStore, times: int) -> None:
    for _ in range(times):
        with pytest.raises(FeaturesUnavailable):
            store.read("42")


def test_a_guarded_store_reads_through(guarded: GuardedStore, failing: FailingStore) -> None:
    assert guarded.read("42", 7.0) == UserRow(b"row", 1.0)
    assert failing.deadline == 7.0
    assert guarded.read("43") is None


def test_a_probe_reads_again_because_its_first_read_may_only_connect(failing: FailingStore) -> None:
    guarded = GuardedStore(failing, probe_s=600.0)
    failing.failure = down
    fail(guarded, 3)
    eventually(lambda: failing.reads == 4)
    failing.failure = None
    eventually(lambda: not guarded._breaker.is_open)  # in the same probe: the next one is ten minutes away
    assert failing.reads == 5
    guarded.close()


@pytest.mark.parametrize("error", [RowInvalid("torn"), FeaturesLate("in a hurry")])
def test_invalid_rows_and_short_deadlines_do_not_open_the_breaker(
    guarded: GuardedStore, failing: FailingStore, error: Exception
) -> None:
    failing.failure = lambda: error
    fail(guarded, 10)
    assert not guarded._breaker.is_open
    failing.failure = None
    assert guarded.read("42") == UserRow(b"row", 1.0)


def test_any_answer_of_the_store_closes_the_breaker(guarded: GuardedStore, failing: FailingStore) -> None:
    failing.failure = down
    fail(guarded, 3)
    failing.failure = lambda: RowInvalid("torn")
    eventually(lambda: not guarded._breaker.is_open)


def test_reads_are_counted_by_outcome(guarded: GuardedStore, failing: FailingStore) -> None:
    names = ("found", "absent", "invalid", "late", "failed", "refused")

    def counted() -> dict[str, float]:
        return {name: metric("reco_store_reads_total", outcome=name) for name in names}

    before = counted()
    guarded.read("42")
    guarded.read("43")
    guarded.read(HEARTBEAT)
    for error in (RowInvalid("torn"), FeaturesLate("in a hurry")):
        failing.failure = lambda error=error: error
        fail(guarded, 1)
    failing.failure = down
    fail(guarded, 4)
    with pytest.raises(FeaturesUnavailable):
        guarded.read(HEARTBEAT)
    gained = {name: value - before[name] for name, value in counted().items()}
    assert gained == {"found": 1, "absent": 1, "invalid": 1, "late": 1, "failed": 3, "refused": 1}


# -------------------------------------------------------------------------------------- Feast's layout


def test_the_entity_key_equals_feast_s() -> None:
    assert entity_key("42") == KEY_42


def test_a_user_id_that_is_not_unicode_has_no_row() -> None:
    with pytest.raises(RowInvalid, match="no valid Unicode"):
        entity_key("\ud800")


@pytest.mark.parametrize("value", [b"", b"a", b"x" * 300])
def test_a_bytes_value_is_read(value: bytes) -> None:
    assert bytes_value(proto(value)) == value


@pytest.mark.parametrize("torn", [b"\x0a", b"\x0a\xff", b"\x0a\x09abc", b"\x0a\x01ab"])
def test_a_truncated_value_is_reported(torn: bytes) -> None:
    with pytest.raises(ValueError, match="stored value"):
        bytes_value(torn)


def test_a_timestamp_is_read_and_a_truncated_one_is_reported() -> None:
    assert timestamp(TIMESTAMP) == AT
    assert timestamp(TIMESTAMP + b"\x10\x80\xca\xb5\xee\x01") == AT + 0.5
    for torn in (b"\x08", b"\x22\x01"):
        with pytest.raises(ValueError, match="stored"):
            timestamp(torn)
