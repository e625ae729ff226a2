"""Features -> both of Feast's stores, read back through Feast and through the endpoint's own reader."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import redis

from components.fit_statistics import purchases_of
from components.materialize_features import WEEK_S, write_snapshots
from components.publish_features import connection_string, feature_store, publish_features, quiet_feast
from feature_repo.aggregates import unpack
from serving.online_features import UserRow, entity_key, open_store

START = 1_700_000_000
CUT = START + 30 * WEEK_S
LATER = CUT + 2 * WEEK_S
STAMPS = [CUT - weeks * WEEK_S for weeks in (20, 16, 12, 8, 4, 0)]
USERS = [str(user) for user in range(12)]
NEWCOMER = "30"  # buys for the first time between the two cuts
PROMOTED = {"version": "7", "bundle_id": "abc"}
# Feast's dependencies warn of one another's deprecations on import and on each query.
with_feast = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def events() -> pd.DataFrame:
    """25 baskets of each user over 32 weeks."""
    random = np.random.default_rng(0)
    bought = [(user, int(at)) for user in USERS for at in random.integers(START, LATER, 25)]
    bought += [(NEWCOMER, CUT + 3_600)]
    rows = [
        (user, f"b{number:04}", str(item), at)
        for number, (user, at) in enumerate(bought)
        for item in random.choice(40, random.integers(1, 8), replace=False)
    ]
    frame = pd.DataFrame(rows, columns=["user_id", "basket_id", "item_id", "at"])
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True).astype("datetime64[us, UTC]")
    frame["event_id"] = frame["basket_id"] + "-" + frame["item_id"]
    frame = frame.assign(event_type="purchase", quantity=2, price=1.5, discount=0.5, store_id="")
    return frame.sort_values(["at", "basket_id", "item_id"], ignore_index=True)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two trainings made: `earlier` as of CUT, `later` as of two weeks after it."""
    root = tmp_path_factory.mktemp("features")
    write_snapshots(purchases_of(events()), STAMPS, root / "earlier")
    write_snapshots(purchases_of(events()), [at + 2 * WEEK_S for at in STAMPS], root / "later")
    return root


def published(features: Path, at: int) -> dict[str, UserRow]:
    """What the store must hold: the rows that are stamped with the cut."""
    rows = pq.read_table(features / "user_history" / "snapshots.parquet").to_pylist()
    return {
        row["user_id"]: UserRow(row["history"], float(at))
        for row in rows
        if row["event_timestamp"].timestamp() == at
    }


def held(url: str) -> dict[str, UserRow]:
    store = open_store(url)
    found = {user: row for user in [*USERS, NEWCOMER, "absent"] if (row := store.read(user))}
    store.close()
    return found


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://:a,b@localhost:6379"])
def test_an_online_store_url_that_cannot_work_is_refused_first(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="online store"):
        publish_features(tmp_path / "absent", iso(CUT), PROMOTED, str(tmp_path / "home"), url)
    assert not (tmp_path / "home").exists()


def test_a_url_becomes_feasts_notation() -> None:
    said = connection_string("rediss://shop:p%40ss@cache:6380/2")
    assert said.startswith("cache:6380,db=2,")
    assert said.endswith(",ssl=true,username=shop,password=p@ss,retry=null")


def test_features_of_another_cut_are_refused(features: Path, tmp_path: Path) -> None:
    """They hold nobody as of this one: all rows would be deleted."""
    with pytest.raises(ValueError, match="holds no user as of"):
        publish_features(features / "earlier", iso(LATER), PROMOTED, str(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


def test_a_redis_that_cannot_be_reached_says_so_and_changes_nothing(features: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"redis://:word@127.0.0.1:{port}"
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} cannot be reached") as caught:
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path / "home"), url)
    assert "word" not in str(caught.value)
    assert not (tmp_path / "home").exists()


# --------------------------------------------------------------------------------------------- SQLite


@pytest.fixture(scope="module")
def home(features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home after two promotions: the later cut first, then an earlier one."""
    home = tmp_path_factory.mktemp("published") / "home"
    publish_features(features / "later", iso(LATER), PROMOTED, str(home))
    publish_features(features / "earlier", iso(CUT), PROMOTED, str(home))
    return home


class TestSqlite:
    pytestmark = with_feast

    def test_an_earlier_cut_replaces_all_that_a_later_one_left(self, home: Path, features: Path) -> None:
        expected = published(features / "earlier", CUT)
        assert held(f"sqlite:///{home / 'online_store.db'}") == expected
        assert set(expected) == set(USERS)
        assert published(features / "later", LATER).keys() == {*USERS, NEWCOMER}, "that did know more"
        assert {path.name for path in home.iterdir()} == {
            "offline_store", "registry.db", "online_store.db", "online_store.json",
        }  # fmt: skip

    def test_the_note_says_what_the_store_holds(self, home: Path) -> None:
        note = json.loads((home / "online_store.json").read_text())
        assert note.pop("created_at") <= iso(int(time.time()))
        assert note.pop("items") > 30
        assert note == {
            "kind": "online_store",
            "store": "sqlite",
            "cut": iso(CUT),
            "bundle_id": "abc",
            "users": 12,
        }

    def test_again_is_harmless_and_a_reader_keeps_its_rows(self, features: Path, tmp_path: Path) -> None:
        first = publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path))
        store = open_store(f"sqlite:///{tmp_path / 'online_store.db'}")
        row = store.read("1")
        assert publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path)) == first
        assert store.read("1") == row == published(features / "earlier", CUT)["1"]
        store.close()

    def test_a_stop_while_writing_leaves_the_old_file(
        self, home: Path, features: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = (home / "online_store.db").read_bytes(), (home / "online_store.json").read_bytes()

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        from feast import FeatureStore

        monkeypatch.setattr(FeatureStore, "materialize", stop)
        with pytest.raises(KeyboardInterrupt):
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(home))
        assert ((home / "online_store.db").read_bytes(), (home / "online_store.json").read_bytes()) == before
        assert not list(home.glob(".feast-*"))

    def test_our_reads_equal_feasts(self, home: Path) -> None:
        assert_reads_equal_feasts(home, f"sqlite:///{home / 'online_store.db'}", "")

    def test_historical_join_keeps_each_row_and_equals_merge_asof(self, home: Path) -> None:
        random = np.random.default_rng(1)
        edges = [at + shift for at in STAMPS for shift in (-1, 0, 1)]
        times = np.r_[random.integers(START, CUT + WEEK_S, 400), random.choice(edges, 200)]
        requests = pd.DataFrame(
            {
                "row": np.arange(len(times)),
                "user_id": random.integers(0, 14, len(times)).astype(str),  # two of them are unknown
                "item_id": random.integers(0, 45, len(times)).astype(str),
                "event_timestamp": pd.to_datetime(times, unit="s", utc=True).astype("datetime64[us, UTC]"),
            }
        )
        requests = pd.concat([requests, requests.iloc[:50].assign(row=lambda f: f["row"] + 10_000)])
        with quiet_feast():
            store = feature_store(home)
            service = store.get_feature_service("checkout")
            joined = store.get_historical_features(requests, service, full_feature_names=True).to_df()
        assert len(joined) == len(requests)
        joined = joined.set_index("row").sort_index()
        for view, key in (("user_history", "user_id"), ("item_statistics", "item_id")):
            rows = pq.read_table(home / "offline_store" / view / "snapshots.parquet").to_pandas()
            expected = pd.merge_asof(
                requests.sort_values("event_timestamp"),
                rows.sort_values("event_timestamp"),
                on="event_timestamp",
                by=key,
                allow_exact_matches=True,
            ).set_index("row")
            expected = expected.sort_index()
            assert 0.1 < expected.iloc[:, -1].notna().mean() < 0.99  # both kinds of row are there
            for name in rows.columns.drop([key, "event_timestamp"]):
                got, want = joined[f"{view}__{name}"], expected[name]
                assert (got.isna() == want.isna()).all(), name
                known = want.notna()
                assert [as_plain(one) for one in got[known]] == [as_plain(one) for one in want[known]], name
        known = joined[joined["user_history__history"].notna()]
        asked = known["event_timestamp"].astype("int64") // 1_000_000
        last = [unpack(bytes(row)).last_basket_at for row in known["user_history__history"]]
        assert (np.array(last) < asked.to_numpy()).all()


# ---------------------------------------------------------------------------------------------- Redis


class TestRedis:
    pytestmark = with_feast

    def test_it_holds_the_earlier_cut_and_leaves_other_keys_alone(
        self, cache: tuple[str, redis.Redis], features: Path, tmp_path: Path
    ) -> None:
        url, client = cache
        client.set("somebody else's", "stays")
        # Another project's rows, of a user who is here and of one who is gone: they end in the same letters.
        others = [entity_key(user) + b"other_checkout" for user in ("0", NEWCOMER)]
        for key in others:
            client.set(key, "stays")
        home = tmp_path / "home"
        publish_features(features / "later", iso(LATER), PROMOTED, str(home), url)
        assert held(url) == published(features / "later", LATER)
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(home), url)
        assert client.get("somebody else's") == b"stays"
        assert [client.get(key) for key in others] == [b"stays"] * 2
        assert held(url) == published(features / "earlier", CUT)
        note = json.loads((home / "online_store.json").read_text())
        assert (note["store"], note["users"]) == ("redis", 12)
        assert client.dbsize() == 12 + note["items"] + 3, "the newcomer's row is gone"
        assert_reads_equal_feasts(home, url, url)
        assert not (home / "online_store.db").exists()

    def test_a_running_endpoint_always_finds_its_users(
        self, cache: tuple[str, redis.Redis], features: Path, tmp_path: Path
    ) -> None:
        url, _ = cache
        publish_features(features / "later", iso(LATER), PROMOTED, str(tmp_path), url)
        allowed = [published(features / "later", LATER), published(features / "earlier", CUT)]
        over, wrong, reads = threading.Event(), [], 0

        def ask() -> None:
            nonlocal reads
            store = open_store(url)
            while not over.is_set():
                for user in USERS:
                    row, reads = store.read(user), reads + 1
                    if row not in [rows[user] for rows in allowed]:
                        wrong.append((user, row))
            store.close()

        endpoint = threading.Thread(target=ask)
        endpoint.start()
        try:
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path), url)
        finally:
            over.set()
            endpoint.join()
        assert not wrong
        assert reads > 100
        assert held(url) == allowed[1]

    def test_a_stop_while_writing_leaves_no_user_without_a_row(
        self,
        cache: tuple[str, redis.Redis],
        features: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        url, _ = cache
        publish_features(features / "later", iso(LATER), PROMOTED, str(tmp_path), url)
        replace, before = os.replace, (tmp_path / "online_store.json").read_bytes()

        def stop(source: Any, target: Any) -> None:
            if Path(target).name == "registry.db":  # the rows are written, those of the gone are still there
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr("components.publish_features.os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path), url)
        assert held(url).keys() == {*USERS, NEWCOMER}
        assert (tmp_path / "online_store.json").read_bytes() == before
        monkeypatch.undo()
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path), url)
        assert held(url) == published(features / "earlier", CUT)


def assert_reads_equal_feasts(home: Path, url: str, redis_url: str) -> None:
    users = [*USERS, "absent"]
    feast = feature_store(home, redis_url).get_online_features(
        ["user_history:history", "user_history:basket_count"], [{"user_id": user} for user in users]
    )
    histories = feast.to_dict()["history"]
    store = open_store(url)
    ours = [store.read(user) for user in users]
    store.close()
    assert [row and row.history for row in ours] == histories
    assert histories[-1] is None
    assert [row and unpack(row.history).basket_count for row in ours] == feast.to_dict()["basket_count"]
    written = [feast.proto.results[-1].event_timestamps[number].seconds for number in range(12)]
    assert [row and row.written_at for row in ours[:-1]] == written


def as_plain(value: object) -> object:
    """A value without the type that Arrow or pandas put around it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, pd.Timestamp | datetime):
        return pd.Timestamp(value).tz_convert("UTC")
    return float(value)  # type: ignore[arg-type]


@pytest.fixture
def cache(valkey: tuple[str, subprocess.Popen[bytes]]) -> Iterator[tuple[str, redis.Redis]]:
    with redis.Redis.from_url(valkey[0]) as client:
        yield valkey[0], client
