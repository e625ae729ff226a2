"""Every fact store behaves the same: facts in force, changes, and failures."""

import math
import multiprocessing
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from feature_repo.facts import Fact
from serving.errors import FactsUnavailable
from serving.redis.client import RedisClient
from serving.shop import fact_store
from serving.shop.fact_store import (
    FactStore,
    RedisFactStore,
    SqliteFactStore,
    complete_until,
    open_fact_store,
)
from tests.chaos.procs import eventually, valkey_server

AT = 1_700_000_000.0


def price(
    item: str = "a", value: float | None = 1.0, at: float = AT, fact_id: str = "f", store: str | None = None
) -> Fact:
    return Fact(fact_id, "price", item, value, at, store)


def all_of(store: FactStore, sequence: int = 0) -> tuple[list[Fact], int]:
    found: list[Fact] = []
    while True:
        facts, last = store.changed_since(sequence)
        if last == sequence:
            return found, sequence
        found, sequence = found + facts, last


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FactStore]:
    in_redis = request.param == "redis"
    store = open_fact_store(
        request.getfixturevalue("valkey")[0] if in_redis else f"sqlite:///{tmp_path}/new/facts.db"
    )
    yield store
    store.close()


# --------------------------------------------------------------------------------------- every store


def test_an_empty_store_holds_nothing(store: FactStore) -> None:
    assert store.changed_since(0) == ([], 0)
    assert store.write([]) == 0


def test_the_facts_of_one_user_can_be_found_and_removed(store: FactStore) -> None:
    assert store.of_user("u1") == {}
    store.remove([])
    for_one = [Fact(str(n), "coupon", "a", f"C{n}", AT, None, "u1") for n in range(3)]
    rest = [Fact("9", "coupon", "a", "C0", AT, None, "u10"), Fact("8", "coupon", "a", "C0", AT), price("a")]
    store.write([*for_one, *rest])
    assert store.of_user("u1") == {fact.key: fact for fact in for_one}
    store.remove(store.of_user("u1"))
    store.remove([fact.key for fact in for_one])
    assert store.of_user("u1") == {}
    assert {fact.fact_id for fact in all_of(store)[0]} == {"9", "8", "f"}
    assert store.write(for_one[:1]) == 1  # the store looks as if the fact had never existed


@pytest.mark.slow
def test_a_removal_that_is_cut_can_be_made_again(valkey: tuple[str, subprocess.Popen[bytes]]) -> None:
    own = Fact("1", "coupon", "a", "TEA", AT, None, "u1")
    with closing(open_fact_store(valkey[0])) as store, redis.Redis.from_url(valkey[0]) as client:
        assert isinstance(store, RedisFactStore)
        store.write([own])
        ask = store._ask

        def cut(*command: Any) -> Any:
            ask(*command)
            raise FactsUnavailable("no answer in time")

        store._ask = cut  # type: ignore[method-assign]
        with pytest.raises(FactsUnavailable):
            store.remove([own.key])
        store._ask = ask  # type: ignore[method-assign]
        store.remove(store.of_user("u1"))
        assert client.keys() == [], "nothing is left of the shopper"


def put(store: FactStore, folder: Path, entries: Mapping[str, bytes], first: float = 1) -> None:
    """Put entries into a store as they are, whether they are facts or not, with numbers from `first` on."""
    numbered = [(key, ranked, first + at) for at, (key, ranked) in enumerate(entries.items())]
    if isinstance(store, RedisFactStore):
        for key, ranked, number in numbered:
            store._ask("HSET", "{checkout:facts}:ranked", key, ranked)
            store._ask("ZADD", "{checkout:facts}:sequence", str(number), key)
        return
    with closing(sqlite3.connect(folder / "new" / "facts.db")) as file, file:
        file.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", numbered)


def test_an_entry_that_is_no_fact_does_not_hide_the_facts_of_a_user(store: FactStore, tmp_path: Path) -> None:
    own = Fact("1", "coupon", "a", "TEA", AT, None, "u1")
    store.write([own])
    put(store, tmp_path, {"stray": b"", "other": b'{"user_id":"u10"}'})
    if isinstance(store, RedisFactStore):
        store._ask("HSET", "{checkout:facts}:ranked", b"\xff", own.ranked())  # invalid UTF-8
    else:
        with closing(sqlite3.connect(tmp_path / "new" / "facts.db")) as file, file:
            file.execute("INSERT INTO facts VALUES (CAST(x'ff' AS TEXT), ?, 3)", (own.ranked(),))
            file.execute("INSERT INTO facts VALUES (x'fe', '', 4)")
    assert store.of_user("u1") == {own.key: own, "\udcff": own}
    store.remove(store.of_user("u1"))
    assert store.of_user("u1") == {}


def test_a_damaged_entry_that_names_a_user_can_be_removed(store: FactStore, tmp_path: Path) -> None:
    own, other = (Fact("1", "coupon", "a", "TEA", AT, None, user) for user in ("u1", "u10"))
    store.write([own, other])
    damaged = {own.key: own.ranked()[:30], "no key": b"half of " + own.ranked()[:-1]}
    put(store, tmp_path, damaged)
    assert store.of_user("u1") == dict.fromkeys(damaged)
    store.remove(store.of_user("u1"))
    assert store.of_user("u1") == {}
    assert all_of(store)[0] == [other]


def test_only_changed_facts_are_read_again(store: FactStore) -> None:
    assert store.write([price("a"), price("b"), price("b", store="s1")]) == 3
    found, sequence = all_of(store)
    assert {fact.key for fact in found} == {price("a").key, price("b").key, price("b", store="s1").key}
    assert all_of(store, sequence) == ([], sequence)
    assert store.write([price("a", 2.0, AT + 1), price("b")]) == 1
    assert all_of(store, sequence)[0] == [price("a", 2.0, AT + 1)]


def test_a_change_whose_number_is_not_finite_is_refused(store: FactStore, tmp_path: Path) -> None:
    store.write([price("a")])
    found, sequence = all_of(store)
    put(store, tmp_path, {"b": b"\0"}, math.inf)
    for after in (0, sequence):
        with pytest.raises(
            FactsUnavailable, match=r"change with the number \S*inf\S*, .* send all facts again"
        ):
            store.changed_since(after)
    assert found == [price("a")]


def test_a_reader_that_is_ahead_of_all_facts_begins_again(store: FactStore) -> None:
    """The store was lost, and the clock of the one that wrote it again is slow."""
    store.write([price("a"), price("b")])
    sequence = store.changed_since(0)[1]
    assert store.changed_since(sequence) == ([], sequence)
    assert store.changed_since(sequence + 1) == ([], 0)


def test_every_field_of_a_fact_round_trips(store: FactStore) -> None:
    fact = Fact("ä-1", "coupon", "item 7", "SAVE", AT + 1e-6, "s1", "u1", AT, AT + 0.25)
    store.write([fact])
    assert store.changed_since(0)[0] == [fact]


def test_facts_are_complete_until_the_oldest_beat_of_a_partition(store: FactStore, tmp_path: Path) -> None:
    assert complete_until(store) == 0  # no stream
    now = time.time()
    store.beat([], now)
    assert complete_until(store) == 0
    store.beat([0, 1], now - 10.25)
    store.beat([1, 2], now)
    assert complete_until(store) == now - 10.25
    assert store.beats() == {0: now - 10.25, 1: now, 2: now}
    store.beat([0], now - fact_store.GONE_S - 1)  # its stream ended a day ago
    assert complete_until(store) == now
    for damaged in (math.inf, now * 1e3, b"x"):
        if isinstance(damaged, float):
            store.beat([3], damaged)
        elif isinstance(store, RedisFactStore):
            store._ask("HSET", "{checkout:facts}:beats", 3, damaged)
        else:
            with closing(sqlite3.connect(tmp_path / "new" / "facts.db")) as file, file:
                file.execute("INSERT OR REPLACE INTO beats VALUES (3, ?)", (damaged,))
        with pytest.raises(FactsUnavailable, match="the beat of a partition is damaged"):
            complete_until(store)
    store.beat([3], now - 1)
    assert complete_until(store) == now - 1
    assert store.write([price("a")]) == 1
    assert all_of(store)[0] == [price("a")]


def standing(said: list[Fact]) -> dict[str, Fact]:
    """The fact of each key with the highest rank."""
    return {fact.key: fact for fact in sorted(said, key=Fact.ranked)}


@pytest.mark.parametrize("batches", [1, 3, 40])
def test_the_latest_fact_wins_in_any_order_of_writes(store: FactStore, batches: int) -> None:
    chance = random.Random(batches)
    said = [
        price(item, float(value), AT + chance.choice([0, 0, 1e-6, 1]), chance.choice(["f1", "f10", "f2"]))
        for item in "abc"
        for value in range(14)
    ]
    chance.shuffle(said)
    for start in range(batches):
        store.write(said[start::batches])
    assert {fact.key: fact for fact in all_of(store)[0]} == standing(said)
    assert store.write(said) == 0


def test_a_long_answer_is_read_in_pages(store: FactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fact_store, "PAGE", 7)
    monkeypatch.setattr(fact_store, "WRITE_PAGE", 5)
    assert store.write([price(str(n)) for n in range(30)]) == 30
    assert len(store.changed_since(0)[0]) == 7
    assert {fact.item_id for fact in all_of(store)[0]} == {str(n) for n in range(30)}


def test_an_invalid_store_is_reported_without_its_password() -> None:
    with pytest.raises(ValueError, match="'mysql' is no scheme") as found:
        open_fact_store("mysql://app:hunter2@db")
    assert "hunter2" not in str(found.value)


# -------------------------------------------------------------------------------------------- SQLite


def test_reading_does_not_create_a_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "facts.db"
    store = SqliteFactStore(file)
    assert store.changed_since(5) == ([], 0)
    assert not file.exists()


def test_readers_follow_a_recreated_file(tmp_path: Path) -> None:
    file = tmp_path / "facts.db"
    reader, writer = SqliteFactStore(file), SqliteFactStore(file)
    writer.write([price(str(n)) for n in range(100)])
    sequence = all_of(reader)[1]
    writer.close()
    for part in tmp_path.iterdir():
        part.unlink()
    SqliteFactStore(file).write([price("new")])
    assert all_of(reader, sequence)[0] == [price("new")]


@pytest.mark.parametrize("content", [b"no database" * 100, b""])
def test_an_invalid_database_is_reported_until_a_valid_one_replaces_it(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "facts.db"
    file.write_bytes(content)
    store = SqliteFactStore(file)
    if content:
        with pytest.raises(FactsUnavailable, match=r"facts\.db cannot be used"):
            store.changed_since(0)
        with pytest.raises(FactsUnavailable):
            store.write([price()])
        file.unlink()
    assert store.changed_since(0) == ([], 0)
    assert store.write([price()]) == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteFactStore(tmp_path / "facts.db")
    store.write([price("a")])
    good = fact_store._KEEP
    monkeypatch.setattr(fact_store, "_KEEP", good + " AND 1 / (excluded.key <> ?)")
    with pytest.raises(FactsUnavailable):
        store.write([price("b"), price("c")])
    monkeypatch.setattr(fact_store, "_KEEP", good)
    assert [fact.item_id for fact in all_of(store)[0]] == ["a"]


def test_a_corrupt_row_is_skipped_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteFactStore(tmp_path / "facts.db")
    store.write([price("a"), price("b")])
    with sqlite3.connect(tmp_path / "facts.db") as file:
        file.execute("UPDATE facts SET ranked = ? WHERE key = ?", (b"0\x00{}", price("b").key))
    file.close()
    found, sequence = all_of(store)
    assert [fact.item_id for fact in found] == ["a"]
    assert "a stored fact is left out: no fact: Object missing required field `fact_id`" in caplog.text
    caplog.clear()
    assert all_of(store, sequence) == ([], sequence)
    assert not caplog.records, "it is told once"


def write_from_a_process(url: str, said: list[Fact]) -> None:
    store = open_fact_store(url)
    for fact in said:
        store.write([fact])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_concurrent_writers_keep_the_latest_and_readers_miss_nothing(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/facts.db" if kind == "sqlite" else request.getfixturevalue("valkey")[0]
    chance = random.Random(5)
    said = [price(chance.choice("abcdef"), float(n), AT + chance.randrange(60)) for n in range(300)]
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_from_a_process, args=(url, said[n::3])) for n in range(3)]
    for writer in writers:
        writer.start()
    reader, seen, sequence = open_fact_store(url), list[Fact](), 0
    while any(writer.is_alive() for writer in writers):
        facts, sequence = reader.changed_since(sequence)
        seen += facts
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    seen += all_of(reader, sequence)[0]
    assert standing(seen) == standing(said)
    assert {fact.key: fact for fact in all_of(reader)[0]} == standing(said)
    reader.close()


# --------------------------------------------------------------------------------------------- Redis


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "error"), [(signal.SIGSTOP, "Timeout"), (signal.SIGKILL, "Connection")])
def test_a_stopped_redis_is_reported_at_the_deadline_of_one_call(
    valkey: tuple[str, subprocess.Popen[bytes]],
    stop: signal.Signals,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a call ends at its deadline is tested in test_client."""
    url, server = valkey
    store = open_fact_store(url)
    assert isinstance(store, RedisFactStore)
    store.write([price()])
    server.send_signal(stop)
    if stop == signal.SIGKILL:
        server.wait()
    deadlines, ask_now = list[float](), RedisClient.ask_now

    def asked(client: RedisClient, deadline: float, *command: str | bytes | int) -> Any:
        if client is store._client:  # another test's endpoint may still look at its own store
            deadlines.append(deadline - time.perf_counter())
        return ask_now(client, deadline, *command)

    monkeypatch.setattr(RedisClient, "ask_now", asked)
    for _ in range(2):
        with pytest.raises(FactsUnavailable, match=f"fact store in Redis: {error}Error"):
            store.changed_since(0)
    assert len(deadlines) == 2, "a call is not tried again"
    assert max(deadlines) <= fact_store.TIMEOUT_S
    store.close()


@pytest.mark.slow
def test_an_emptied_redis_continues_with_larger_sequences(
    valkey: tuple[str, subprocess.Popen[bytes]],
) -> None:
    store = open_fact_store(valkey[0])
    store.write([price(str(n)) for n in range(100)])
    sequence = all_of(store)[1]
    with redis.Redis.from_url(valkey[0]) as client:
        client.flushall()
    store.write([price("new")])
    assert all_of(store, sequence)[0] == [price("new")]
    store.close()


@pytest.mark.slow
def test_a_redis_that_is_full_is_read_and_its_facts_are_not_complete(
    valkey: tuple[str, subprocess.Popen[bytes]],
) -> None:
    store, before = open_fact_store(valkey[0]), time.time()
    store.write([price()])
    store.beat([0], before)
    with redis.Redis.from_url(valkey[0]) as client:
        client.config_set("maxmemory", 1)
    for write in (lambda: store.write([price("b")]), lambda: store.beat([0], before + 1)):
        with pytest.raises(FactsUnavailable, match="fact store in Redis: ReplyError OOM"):
            write()
    assert all_of(store)[0] == [price()]
    assert complete_until(store) == before
    store.close()


@pytest.mark.slow
def test_facts_live_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    clustered = ("--cluster-enabled", "yes", "--save", "")
    with valkey_server(tmp_path, *clustered) as server, server.client() as node:
        node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        store = open_fact_store(f"redis+cluster://127.0.0.1:{server.port}")
        assert isinstance(store, RedisFactStore)
        assert store.write([price("a"), price("b"), price("a", 2.0, AT + 1)]) == 2
        assert {fact.item_id: fact.value for fact in all_of(store)[0]} == {"a": 2.0, "b": 1.0}
        server.kill()
        with pytest.raises(FactsUnavailable):
            store.changed_since(0)
        store.close()
