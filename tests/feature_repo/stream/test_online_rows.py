"""Rows go through Feast's own view and back; the heartbeat is a row without a user."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.data.feast_store import open_feature_store
from feature_repo.aggregates import BATCH, pack
from feature_repo.snapshots import PARTITIONS, unpack_times
from feature_repo.stream import online_rows
from feature_repo.stream.online_rows import OnlineRows, RowsDamaged
from serving.stores.online_features import SqliteStore, entity_key

AT = 1_717_977_600.0


@pytest.fixture
def rows(tmp_path: Path) -> OnlineRows:
    return OnlineRows(lambda: open_feature_store(tmp_path, ""))


def test_a_row_survives_a_round_trip_and_the_endpoint_reads_the_same(
    rows: OnlineRows, tmp_path: Path, row_of: Callable[..., Any]
) -> None:
    row = row_of([(AT, ["milk", "tea"], 3.0, 0.5)], version=7)
    assert rows.get(["ann"])["ann"].version == BATCH
    rows.put({"ann": row})
    rows.reopen()
    assert pack(rows.get(["ann"])["ann"]) == pack(row)
    read = SqliteStore(tmp_path / "online_store.db").read("ann")
    assert read is not None
    assert read.history == pack(row, "ann")
    assert read.written_at == pytest.approx(AT, abs=1e-3)


def test_a_row_copied_under_another_user_is_damaged(rows: OnlineRows, row_of: Callable[..., Any]) -> None:
    """Folding it would hand one user's purchases to the other for good."""
    rows.put({"ann": row_of([(AT, ["milk"], 1.0, 0.0)])})
    read = rows._read
    rows.reopen()
    rows._read = lambda users: read(["ann" if user == "bob" else user for user in users])  # type: ignore[method-assign]
    with pytest.raises(RowsDamaged) as caught:
        rows.get(["ann", "bob"])
    assert caught.value.users == ["bob"]


def test_a_row_that_feast_cannot_decode_is_damaged_and_can_be_replaced(
    rows: OnlineRows, tmp_path: Path, row_of: Callable[..., Any]
) -> None:
    row = row_of([(AT, ["milk"], 1.0, 0.0)])
    rows.put({"ann": row, "bob": row})
    with sqlite3.connect(tmp_path / "online_store.db") as file:
        file.execute(
            "UPDATE checkout_user_history SET value = x'ff' WHERE entity_key = ?", (entity_key("bob"),)
        )
    file.close()
    rows.reopen()
    with pytest.raises(RowsDamaged) as caught:
        rows.get(["ann", "bob"])
    assert caught.value.users == ["bob"]
    rows.put({"bob": row_of([(AT + 1, ["tea"], 1.0, 0.0)])})
    rows.reopen()
    assert {user: len(found) for user, found in rows.get(["ann", "bob"]).items()} == {"ann": 1, "bob": 1}


def test_a_cached_row_is_not_read_again_and_the_oldest_is_evicted(
    rows: OnlineRows, row_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_rows, "ROWS_KEPT", 2)
    made = {user: row_of([(AT + i, ["milk"], 1.0, 0.0)]) for i, user in enumerate("abc")}
    rows.put(made)
    asked: list[list[str]] = []
    read = rows._read
    monkeypatch.setattr(rows, "_read", lambda users: asked.append(users) or read(users))  # type: ignore[func-returns-value]
    found = rows.get("abc")
    assert asked == [["a"]]
    assert {user: pack(row) for user, row in found.items()} == {u: pack(r) for u, r in made.items()}
    rows.drop("b")
    rows.get("b")
    assert asked[-1] == ["b"]


def test_each_partition_keeps_the_time_of_its_last_beat(rows: OnlineRows, tmp_path: Path) -> None:
    def until() -> dict[int, float] | None:
        read = SqliteStore(tmp_path / "online_store.db").read(PARTITIONS)
        assert read is not None
        return unpack_times(read.history)

    rows.beat(AT, b"one", [0, 1])
    rows.beat(AT + 60, b"one", [2])
    rows.beat(AT + 60, b"one", [0])
    assert until() == {0: AT + 60, 1: AT, 2: AT + 60}
    rows.beat(AT + 61, b"two")  # of a consumer without partitions
    assert (until(), rows.name()) == ({0: AT + 60, 1: AT, 2: AT + 60}, b"two")
    rows.beat(AT + 61, b"two", [0], {0, 1})
    assert until() == {0: AT + 61, 1: AT}, "the topic was made again with two partitions"
    rows.beat(AT + 90_000, b"two", [0])
    assert until() == {0: AT + 90_000}, "no consumer has had the other for a day"
    assert unpack_times(b"damaged") is unpack_times(b"[]") is unpack_times(b'{"0": NaN}') is None
