"""Rows of users as Feast 0.67 writes them, by hand; the slow tests of `publish_features` hold Feast to it."""

import contextlib
import sqlite3
import time
from pathlib import Path

import numpy as np
import redis

from feature_repo.aggregates import make_events, pack
from serving.stores.online_features import RedisStore, SqliteStore, UserRow, entity_key

AT = 1_700_000_000
HISTORY_FIELD = bytes.fromhex("0601f0f8")
TIMESTAMP = b"\x08\x80\xe2\xcf\xaa\x06"  # protobuf Timestamp(seconds=AT)


def packed(*items: str, user: str = "42") -> bytes:
    """The row of a user that bought these a minute ago, in one basket, at 3.5 each."""
    n = len(items)
    kind, basket = np.zeros(n, np.uint8), np.zeros(n, np.uint32)
    price, discount = np.full(n, 3.5, np.float32), np.full(n, 0.5, np.float32)
    return pack(
        make_events(
            items, np.full(n, AT - 60.0), kind, basket, np.arange(n, dtype=np.uint64), price, discount
        ),
        user,
    )


def proto(value: bytes) -> bytes:
    """A Feast ValueProto that holds bytes."""
    length, out = len(value), bytearray(b"\x0a")
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes(out) + bytes([length]) + value


def row_of(user_id: str) -> UserRow:
    return UserRow(packed("apple", user=user_id), float(AT))


ROW_42 = row_of("42")


def put_row(client: redis.Redis | redis.RedisCluster, user_id: str, row: bytes | None = None) -> None:
    key = entity_key(user_id) + b"checkout"
    client.execute_command(
        "HSET", key, HISTORY_FIELD, proto(row or row_of(user_id).history), b"_ts:user_history", TIMESTAMP
    )


def write_store(file: Path, rows: dict[str, bytes], at: float = AT) -> None:
    """Write packed rows as Feast's SQLite online store holds them; `at` is in seconds since the epoch."""
    naive_utc = time.mktime(time.gmtime(at))  # Feast reads a UTC time without its zone as local time
    with contextlib.closing(sqlite3.connect(file)) as store, store:
        store.execute(
            "CREATE TABLE checkout_user_history (entity_key BLOB, feature_name TEXT, value BLOB,"
            " value_text TEXT, vector_value BLOB, event_ts timestamp, created_ts timestamp,"
            " PRIMARY KEY(entity_key, feature_name))"
        )
        for user_id, row in rows.items():
            store.execute(
                "INSERT INTO checkout_user_history VALUES (?, 'history', ?, NULL, NULL, ?, NULL)",
                (entity_key(user_id), proto(row), int(naive_utc)),
            )


def patient_store(url: str) -> RedisStore | SqliteStore:
    """The store behind a URL with a long timeout: on a busy machine the endpoint's 5 ms pass quickly."""
    if url.startswith("sqlite:///"):
        return SqliteStore(Path(url.removeprefix("sqlite:///")), timeout_ms=5_000)
    return RedisStore(url, timeout_ms=5_000)
