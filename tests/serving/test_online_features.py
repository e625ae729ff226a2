import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from feature_repo.aggregates import unpack
from serving.circuit_breaker import CircuitBreaker
from serving.errors import FeaturesUnavailable, RowInvalid
from serving.online_features import MemoryStore, OnlineStore, SqliteStore, UserRow, entity_key, open_store
from tests.chaos.rows import AT, packed, proto


def write_database(path: Path, rows: dict[str, bytes]) -> None:
    """A file as Feast's SQLite store lays it out."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE checkout_user_history (entity_key BLOB, feature_name TEXT, value BLOB, value_text TEXT,"
        " vector_value BLOB, event_ts timestamp, created_ts timestamp, PRIMARY KEY(entity_key, feature_name))"
    )
    naive_utc = time.mktime(time.gmtime(AT))  # Feast reads a UTC time without its zone as local time
    for user_id, history in rows.items():
        connection.execute(
            "INSERT INTO checkout_user_history VALUES (?, 'history', ?, NULL, NULL, ?, NULL)",
            (entity_key(user_id), proto(history), int(naive_utc)),
        )
    connection.commit()
    connection.close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "online_store.db"
    write_database(path, {"42": packed("apple", "bread"), "ünï": packed("x" * 300)})
    return path


def test_memory_store_returns_what_was_written() -> None:
    store = MemoryStore()
    store.write("42", UserRow(b"row", 1.0))
    assert store.read("42") == UserRow(b"row", 1.0)
    assert store.read("43") is None
    store.close()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory:", MemoryStore),
        ("sqlite:////var/lib/store.db", SqliteStore),
        ("sqlite:///store.db", SqliteStore),
        ("redis://localhost:6379/0", CircuitBreaker),
        ("rediss+cluster://u:p@a:1,b:2", CircuitBreaker),
        ("redis+sentinel://a:1,b:2/shop", CircuitBreaker),
    ],
)
def test_open_store_knows_its_urls(url: str, kind: type[OnlineStore]) -> None:
    store = open_store(url)
    assert isinstance(store, kind)
    store.close()


def test_open_store_tells_what_is_wrong_with_a_redis_url() -> None:
    with pytest.raises(ValueError, match="names no service") as caught:
        open_store("redis+sentinel://:secret@a:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "mysql://root:secret@host", "sqlite:///", "sqlite://x", "redis"])
def test_open_store_refuses_other_urls_and_keeps_passwords_to_itself(url: str) -> None:
    with pytest.raises(ValueError, match="no online store for a") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_sqlite_read_returns_the_row_with_its_time(database: Path) -> None:
    store = SqliteStore(database)
    assert store.read("42") == UserRow(packed("apple", "bread"), float(AT))
    assert unpack(store.read("42").history).items.tolist() == ["apple", "bread"]  # type: ignore[union-attr]
    assert store.read("ünï") == UserRow(packed("x" * 300), float(AT))
    assert store.read("4") is None
    store.close()


def test_sqlite_read_sees_a_replaced_file(database: Path, tmp_path: Path) -> None:
    store = SqliteStore(database)
    assert store.read("42") is not None
    write_database(tmp_path / "next.db", {"42": packed("milk")})
    os.replace(tmp_path / "next.db", database)
    assert store.read("42") == UserRow(packed("milk"), float(AT))
    assert store.read("ünï") is None
    store.close()


def test_sqlite_store_can_be_closed_and_read_again(database: Path) -> None:
    store = SqliteStore(database)
    store.close()
    store.close()
    assert store.read("42") is not None
    store.close()


def test_sqlite_is_opened_read_only(database: Path) -> None:
    store = SqliteStore(database)
    store.read("42")
    assert store._connection is not None
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store._connection.execute("DELETE FROM checkout_user_history")
    store.close()


def _missing(path: Path) -> None:
    path.unlink()


def _not_a_database(path: Path) -> None:
    path.write_bytes(b"these are no pages of a database" * 100)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5_000])


def _other_value(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE checkout_user_history SET value = ?", (b"\x12\x02ab",))
    connection.commit()
    connection.close()


def _torn_value(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE checkout_user_history SET value = ?", (b"\x0a\xff",))
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "break_it",
    [_missing, _not_a_database, _empty, _cut_short],
    ids=lambda f: f.__name__,
)
def test_a_broken_sqlite_store_is_unavailable_and_recovers(
    break_it: Callable[[Path], None], database: Path, tmp_path: Path
) -> None:
    good = tmp_path / "good.db"
    shutil.copy(database, good)
    break_it(database)
    store = SqliteStore(database)
    with pytest.raises(FeaturesUnavailable, match="cannot be read"):
        store.read("42")
    os.replace(good, database)
    assert store.read("42") is not None
    store.close()


@pytest.mark.parametrize("break_it", [_other_value, _torn_value], ids=lambda f: f.__name__)
def test_a_row_that_is_not_feasts_is_told_from_a_broken_store(
    break_it: Callable[[Path], None], database: Path
) -> None:
    break_it(database)
    store = SqliteStore(database)
    with pytest.raises(RowInvalid, match="cannot be read"):
        store.read("42")
    store.close()


def test_a_locked_sqlite_store_is_unavailable_in_time(database: Path) -> None:
    store = SqliteStore(database)
    writer = sqlite3.connect(database, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    started = time.perf_counter()
    with pytest.raises(FeaturesUnavailable, match="locked"):
        store.read("42")
    assert time.perf_counter() - started < 0.5  # the libraries' own defaults take seconds
    writer.execute("ROLLBACK")
    writer.close()
    assert store.read("42") is not None
    store.close()


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
        write_database(tmp_path / f"{number}.db", {"42": packed("milk")})
        os.replace(tmp_path / f"{number}.db", database)
    for thread in threads:
        thread.join()
    store.close()
    assert wrong == []
