"""The user's row and coupons leave the stores, the others' stay, and no byte of them is left in a file."""

import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.data.feast_store import open_feature_store, quiet_feast
from components.privacy.erased_stores import erase_coupons, erase_row
from feature_repo.aggregates import no_events
from feature_repo.facts import CLOCK_SKEW_S, Fact
from feature_repo.stream.online_rows import OnlineRows
from serving.shop.fact_store import open_fact_store
from serving.shop.facts import Coupons
from tests.chaos.listening import listening

AT = 1_700_000_000.0
UNTIL = round(AT * 1e6)


def fill(home: Path, url: str, row_of: Callable[..., Any], at: float = AT) -> OnlineRows:
    with quiet_feast():
        rows = OnlineRows(lambda: open_feature_store(home, url))
        rows.put({user: row_of([(at, ["tea"], 1.0, 0.0)]) for user in ("u1", "u10", "forget me")})
    return rows


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def test_one_users_row_goes(
    kind: str, tmp_path: Path, row_of: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    url = "" if kind == "sqlite" else request.getfixturevalue("valkey")[0]
    place = url or f"sqlite:///{tmp_path / 'online_store.db'}"
    assert erase_row(place, "u1", UNTIL) == 0  # nothing there yet
    rows = fill(tmp_path, url, row_of)
    counted = erase_row(place, "u1", UNTIL, dry_run=True)
    assert counted > 10
    assert erase_row(place, "u1", UNTIL) == counted
    assert erase_row(place, "u1", UNTIL) == 0
    assert erase_row(place, "forget me", UNTIL) == counted
    rows.reopen()
    left = {user: len(row) for user, row in rows.get(["u1", "u10", "forget me"]).items()}
    assert left == {"u1": len(no_events()), "u10": 1, "forget me": 0}
    if kind == "sqlite":
        assert b"forget me" not in (tmp_path / "online_store.db").read_bytes()


def test_a_row_that_began_after_the_time_stays(tmp_path: Path, row_of: Callable[..., Any]) -> None:
    fill(tmp_path, "", row_of, AT + 1)
    url = f"sqlite:///{tmp_path / 'online_store.db'}"
    assert erase_row(url, "u1", UNTIL) == 0
    assert erase_row(url, "u1", UNTIL + 1_000_000) > 0


def test_a_row_that_cannot_be_read_goes_too(tmp_path: Path, row_of: Callable[..., Any]) -> None:
    fill(tmp_path, "", row_of)
    with sqlite3.connect(tmp_path / "online_store.db") as connection:
        connection.execute("UPDATE checkout_user_history SET value = x'00' WHERE feature_name = 'history'")
    assert erase_row(f"sqlite:///{tmp_path / 'online_store.db'}", "u1", UNTIL) > 0


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "InvalidResponse"), (b"-NOPERM hunter2\r\n", "NoPermissionError")],
)
def test_a_server_that_answers_otherwise_is_reported(reply: bytes, kind: str) -> None:
    def serve(client: socket.socket) -> None:
        while client.recv(4_096):
            client.sendall(reply)

    with (
        listening(serve) as (host, port),
        pytest.raises(ConnectionError, match=f"cannot be reached: {kind}$"),
    ):
        erase_row(f"redis://{host}:{port}/0", "u1", UNTIL)


@contextmanager
def reading(url: str, sequence: int, heard: list[Fact]) -> Iterator[None]:
    """Read what changes in a fact store, as an endpoint does, until the block ends."""
    done = threading.Event()

    def work() -> None:
        last, reader = sequence, open_fact_store(url)
        while last and not done.wait(0.05):  # 0: the last change that it saw was removed
            facts, last = reader.changed_since(last)
            heard.extend(facts)
        reader.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def test_coupons_of_one_user_go_and_readers_see_them_expire(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'facts.db'}" if kind == "sqlite" else request.getfixturevalue("valkey")[0]
    assert erase_coupons(url, "forget me", UNTIL) == 0
    store = open_fact_store(url)
    users = ["forget me", "forget me", "forget me too", None]
    coupons = [Fact(str(n), "coupon", "tea", f"TEA{n}", AT, None, user) for n, user in enumerate(users)]
    later = Fact("9", "coupon", "tea", "NEW", AT + 1, None, "forget me")
    store.write([*coupons, Fact("p", "price", "tea", 1.0, AT)])
    assert erase_coupons(url, "forget me", UNTIL, dry_run=True) == 2
    heard: list[Fact] = []
    with reading(url, store.changed_since(0)[1], heard):
        assert erase_coupons(url, "forget me", UNTIL) == 2
    assert [(fact.user_id, fact.value) for fact in heard] == [("forget me", None)]
    left = store.changed_since(0)[0]
    assert sorted(fact.fact_id for fact in left) == ["2", "3", "p"]
    store.write([later])
    assert erase_coupons(url, "forget me", UNTIL) == 0
    store.remove([later.key])
    store.close()
    for file in tmp_path.glob("facts.db*"):
        assert b"forget me\x1f" not in file.read_bytes()


def test_what_a_failed_erasure_left_in_free_pages_goes_when_it_is_repeated(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path / 'facts.db'}", tmp_path / "facts.db"
    with closing(open_fact_store(url)) as store:
        store.beat([0], AT)
        assert erase_coupons(url, "forget me", UNTIL) == 0  # the file has no table of facts yet
        users = ["forget me", "u1"]
        store.write([Fact(user, "coupon", "tea", "TEA", AT, None, user) for user in users])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA user_version = 1")  # as an erasure does that ends here
        connection.execute("DELETE FROM facts WHERE key LIKE '%forget me%'")
    assert b"forget me\x1f" in path.read_bytes()
    assert erase_coupons(url, "forget me", UNTIL) == 0
    for file in tmp_path.glob("facts.db*"):
        assert b"forget me\x1f" not in file.read_bytes()


def test_a_damaged_coupon_goes_too(tmp_path: Path) -> None:
    """Its key still names the user. The clock of its writer was ahead."""
    url, at = f"sqlite:///{tmp_path / 'facts.db'}", time.time()
    ahead = at + CLOCK_SKEW_S - 60
    coupons = [Fact(user, "coupon", "tea", "TEA", ahead, "s", user) for user in ("u1", "u10")]
    shown, heard = Coupons(), list[Fact]()
    shown.add([(0, coupon) for coupon in coupons])
    with closing(open_fact_store(url)) as store:
        store.write(coupons)
        last = store.changed_since(0)[1]
    with closing(sqlite3.connect(tmp_path / "facts.db")) as file, file:
        file.execute("UPDATE facts SET ranked = substr(ranked, 1, 30)")
    assert erase_coupons(url, "u1", round(at * 1e6), dry_run=True) == 1
    with reading(url, last, heard):
        assert erase_coupons(url, "u1", round(at * 1e6)) == 1
    assert [(fact.user_id, fact.item_id, fact.store_id, fact.value) for fact in heard] == [
        ("u1", "tea", "s", None)
    ]
    shown.add([(0, fact) for fact in heard])
    found = [shown.look_up(np.array([0]), at, user, "s") for user in ("u1", "u10")]
    assert found == [[None], ["TEA"]], "an endpoint that read it while it was whole lets it go"
    with closing(sqlite3.connect(tmp_path / "facts.db")) as file:
        assert [key.split("\x1f")[3] for (key,) in file.execute("SELECT key FROM facts")] == ["u10"]


def test_endpoints_let_go_of_a_coupon_from_a_clock_ahead(tmp_path: Path) -> None:
    """Its id sorts behind those of withdrawals."""
    url, at = f"sqlite:///{tmp_path / 'facts.db'}", time.time()
    coupon = Fact("z", "coupon", "tea", "TEA", at + 3_600, None, "u1")
    shown, heard = Coupons(), list[Fact]()
    with closing(open_fact_store(url)) as store:
        store.write([coupon])
        facts, last = store.changed_since(0)
    shown.add([(0, fact) for fact in facts])
    with reading(url, last, heard):
        assert erase_coupons(url, "u1", round((at + 3_601) * 1e6)) == 1
    shown.add([(0, fact) for fact in heard])
    assert shown.look_up(np.array([0]), at, "u1", "s") == [None]


def test_a_coupon_goes_whose_key_is_no_text(tmp_path: Path) -> None:
    url, heard = f"sqlite:///{tmp_path / 'facts.db'}", list[Fact]()
    own = Fact("1", "coupon", "tea", "TEA", AT, None, "u1")
    with closing(open_fact_store(url)) as store:
        store.write([Fact("p", "price", "tea", 1.0, AT)])
        last = store.changed_since(0)[1]
    rows = [(b"zz\xff", own.ranked()), (own.key.encode().replace(b"tea", b"te\xff"), own.ranked()[:30])]
    with closing(sqlite3.connect(tmp_path / "facts.db")) as file, file:
        for number, (key, ranked) in enumerate(rows):
            file.execute("INSERT INTO facts VALUES (CAST(? AS TEXT), ?, ?)", (key, ranked, number))
    with reading(url, last, heard):
        assert erase_coupons(url, "u1", UNTIL) == 2
    assert [(fact.user_id, fact.item_id, fact.value) for fact in heard] == [("u1", "tea", None)]
    with closing(open_fact_store(url)) as store:
        assert [fact.fact_id for fact in store.changed_since(0)[0]] == ["p"]


def test_a_coupon_under_the_key_of_another_shopper_takes_none_of_theirs_along(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.db'}"
    bob, alice = (Fact(user, "coupon", "tea", "TEA", AT, None, user) for user in ("bob", "alice"))
    withdrawn = Fact("w", "coupon", "tea", None, AT + 1, None, "alice")
    with closing(open_fact_store(url)) as store:
        store.write([bob, alice, withdrawn])
        with closing(sqlite3.connect(tmp_path / "facts.db")) as file, file:
            odd = bob.key.replace("TEA", "ODD")
            file.execute("INSERT INTO facts VALUES (?, ?, 1)", (odd, alice.ranked()))
        assert erase_coupons(url, "bob", UNTIL) == 2
        left = store.changed_since(0)[0]
    assert sorted(fact.fact_id for fact in left) == ["alice", "w"]
