"""Features -> both of Feast's stores, read back through Feast and through the endpoint's own reader."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from components.data.feast_store import feature_store, quiet_feast
from components.home import Conflict
from components.privacy.forget_user import forget_user
from components.release import publish_features as module
from components.release.publish_features import publish_features
from feature_repo.aggregates import CLICK, KINDS, unpack
from feature_repo.queries import User
from feature_repo.schema import USER
from feature_repo.snapshots import HISTORY, user_table
from feature_repo.stream.archive import ARCHIVE_SCHEMA, BASE, EVENTS, read_archive, rows_of, write_segment
from feature_repo.stream.publication import PublicationDamaged
from serving.release.champion import Champion, write_champion
from serving.settings import Settings
from serving.stores.online_features import UserRow, entity_key
from tests.chaos.procs import eventually, free_port, valkey_server
from tests.chaos.rows import patient_store
from tests.components.conftest import whole_events
from tests.components.release.shop_features import (
    CUT,
    END,
    LATER,
    NEWCOMER,
    START,
    USERS,
    WEEK_S,
    events,
    held,
    iso,
    train,
)

PROMOTED = {"version": "7", "bundle_id": "abc"}
# Feast's dependencies warn of one another's deprecations on import and on each query.
with_feast = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two trainings made: `earlier` as of CUT, of a data set up to END; `later` of everything."""
    root = tmp_path_factory.mktemp("features")
    for name, cut, end in (("earlier", CUT, END), ("later", LATER, LATER)):
        train(
            events()[lambda frame, end=end: frame["at"] < pd.Timestamp(end, unit="s", tz="UTC")],
            cut,
            root / "made" / name,
        )
        (root / "made" / name / "features").rename(root / name)
    return root


def published(features: Path) -> dict[str, UserRow]:
    """What the store must hold: every user's row as of the end of the events."""
    end = END if features.name == "earlier" else LATER
    rows = user_table(rows_of(read_archive(features / EVENTS)), end)
    return {row["user_id"]: UserRow(row[HISTORY], float(end)) for row in rows.to_pylist()}


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://localhost", "rediss+sentinel://a/shop", "redis://[::1]"]
)
def test_an_online_store_url_that_cannot_work_is_refused_first(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="online store"):
        publish_features(tmp_path / "absent", iso(CUT), PROMOTED, str(tmp_path / "home"), url)
    assert not (tmp_path / "home").exists()


def test_features_of_another_cut_are_refused(features: Path, tmp_path: Path) -> None:
    """They hold no user as of this one: all rows would be deleted."""
    with pytest.raises(ValueError, match="holds no user as of"):
        publish_features(features / "earlier", iso(LATER), PROMOTED, str(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


def test_a_redis_that_cannot_be_reached_says_so_and_changes_nothing(features: Path, tmp_path: Path) -> None:
    port = free_port()
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
        expected = published(features / "earlier")
        assert all(unpack(row.history).at[-1] == END - 1 for row in expected.values()), "up to the very end"
        assert held(f"sqlite:///{home / 'online_store.db'}") == expected
        assert set(expected) == set(USERS)
        assert published(features / "later").keys() == {*USERS, NEWCOMER}, "that did know more"
        assert {path.name for path in home.iterdir()} == {
            "offline_store", "registry.db", "online_store.db", "online_store.json",
        }  # fmt: skip

    def test_a_run_that_is_resumed_late_replaces_nothing_of_a_later_champion(
        self, home: Path, tmp_path: Path, features: Path
    ) -> None:
        copy = tmp_path / "home"
        shutil.copytree(home, copy)
        note = json.loads((copy / "online_store.json").read_bytes())
        (copy / "online_store.json").write_text(json.dumps(note | {"cut": iso(LATER), "bundle_id": "newer"}))
        write_champion(copy, Champion("newer", "8", "m", "bundles/newer", iso(LATER), iso(LATER)))
        before = (copy / "registry.db").read_bytes()
        with pytest.raises(Conflict, match=r"newer is champion: those of bundle abc.* replace nothing"):
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(copy))
        assert (copy / "registry.db").read_bytes() == before
        (copy / "online_store.json").write_text("")  # nothing says whether it is a late one
        with pytest.raises(PublicationDamaged, match=r"online_store\.json does not say"):
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(copy))
        # After a rollback the older bundle is champion, and its run may fill the stores again; also where the
        # note is damaged, which it writes again.
        (copy / "online_store.json").write_text("{")
        write_champion(copy, Champion("abc", "7", "m", "bundles/abc", iso(CUT), iso(LATER)))
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(copy))
        assert json.loads((copy / "online_store.json").read_bytes())["cut"] == iso(CUT)

    def test_the_note_names_the_contents_of_the_store(self, home: Path) -> None:
        note = json.loads((home / "online_store.json").read_text())
        assert note.pop("created_at") <= iso(int(time.time()))
        assert note.pop("items") > 30
        assert note == {
            "kind": "online_store",
            "store": "sqlite",
            "cut": iso(CUT),
            "until": iso(END),
            "bundle_id": "abc",
            "users": 12,
        }

    def test_again_is_harmless_and_a_reader_keeps_its_rows(self, features: Path, tmp_path: Path) -> None:
        first = publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path))
        store = patient_store(f"sqlite:///{tmp_path / 'online_store.db'}")
        row = store.read("1")
        assert publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path)) == first
        assert store.read("1") == row == published(features / "earlier")["1"]
        store.close()

    @pytest.mark.parametrize("moment", ["user_table", "write_view", "_materialize"])
    def test_a_user_forgotten_meanwhile_does_not_come_back(
        self, moment: str, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Just after one of the publication's own steps."""
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path))
        step, reports = getattr(module, moment), []

        def meanwhile(*given: Any) -> Any:
            done = step(*given)
            reports.append(forget_user(Settings(home=tmp_path), "1"))
            return done

        monkeypatch.setattr(module, moment, meanwhile)
        counts = publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path))
        assert {report.exit_code for report in reports} == {0}
        assert held(f"sqlite:///{tmp_path / 'online_store.db'}").keys() == {*USERS} - {"1"}
        assert counts["users"] == len(USERS) - 1
        files = (tmp_path / "offline_store").rglob("*.parquet")
        of_users = [file for file in files if "user_id" in pq.read_schema(file).names]
        assert of_users
        for file in of_users:
            assert "1" not in pq.read_table(file, columns=["user_id"])["user_id"].to_pylist(), file

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
        edges = [at + shift for at in (CUT, END) for shift in (-1, 0, 1)]
        times = np.r_[random.integers(START, END + WEEK_S, 400), random.choice(edges, 200)]
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
        asked = known["event_timestamp"].astype("int64") / 1e6
        last = [unpack(bytes(row)).at[-1] for row in known["user_history__history"]]
        assert (np.array(last) < asked.to_numpy()).all()
        assert set(np.array(last) < CUT) == {True, False}, "rows of both stamps were joined"

    def test_streamed_events_are_in_the_rows_and_stay(self, features: Path, tmp_path: Path) -> None:
        """A click of a user, a purchase of a newcomer, and one that the data set brings as well."""
        archive = tmp_path / "offline_store" / EVENTS
        streamed = stream(
            ("s1", "click", "1", LATER + 5, 7),
            ("s2", "purchase", "40", LATER + 7, 9),
            (events()["event_id"].iloc[0], "purchase", events()["user_id"].iloc[0], START, 2),
        )
        write_segment(archive, streamed, "0-9.parquet")
        for name, cut in (("earlier", CUT), ("later", LATER), ("later", LATER)):
            counts = publish_features(features / name, iso(cut), PROMOTED, str(tmp_path))
            assert {file.name for file in archive.iterdir()} == {BASE, "0-9.parquet"}
        assert counts["users"] == 14
        rows = dict(rows_of(read_archive(archive)))
        store = patient_store(f"sqlite:///{tmp_path / 'online_store.db'}")
        found = {user: store.read(user) for user in ("1", "2", "40")}
        store.close()
        for user, row in found.items():
            assert row is not None
            assert row.written_at == LATER + 8, "just after the last event"
            events_held = unpack(row.history)
            assert events_held.at.tolist() == rows[user].at.tolist()
            assert events_held.version == {"1": 7, "2": -1, "40": 9}[user]
        assert unpack(found["1"].history).kind[-1] == CLICK  # type: ignore[union-attr]
        base = read_archive(features / "later" / EVENTS)
        assert len(read_archive(archive)) == len(base) + 2
        note = json.loads((tmp_path / "online_store.json").read_text())
        assert (note["cut"], note["until"]) == (iso(LATER), iso(LATER + 8))


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
        assert held(url) == published(features / "later")
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(home), url)
        assert client.get("somebody else's") == b"stays"
        assert [client.get(key) for key in others] == [b"stays"] * 2
        assert held(url) == published(features / "earlier")
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
        allowed = [published(features / "later"), published(features / "earlier")]
        over, wrong, reads = threading.Event(), [], 0

        def ask() -> None:
            nonlocal reads
            store = patient_store(url)
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
        assert reads > 10
        assert held(url) == allowed[1]

    def test_a_stop_while_writing_leaves_no_user_without_a_row(
        self, cache: tuple[str, redis.Redis], features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url, _ = cache
        publish_features(features / "later", iso(LATER), PROMOTED, str(tmp_path), url)
        replace, before = os.replace, (tmp_path / "online_store.json").read_bytes()

        def stop(source: Any, target: Any) -> None:
            if Path(target).name == "registry.db":  # the rows are written, those of the gone are still there
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr("components.release.publish_features.os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path), url)
        assert held(url).keys() == {*USERS, NEWCOMER}
        assert (tmp_path / "online_store.json").read_bytes() == before
        monkeypatch.undo()
        publish_features(features / "earlier", iso(CUT), PROMOTED, str(tmp_path), url)
        assert held(url) == published(features / "earlier")

    @pytest.mark.parametrize("form", ["password", "cluster", "sentinel"])
    def test_feast_fills_each_form_of_redis_and_the_endpoint_reads_it(
        self, form: str, features: Path, tmp_path: Path
    ) -> None:
        options = ("--cluster-enabled", "yes") if form == "cluster" else ()
        config = tmp_path / "sentinel.conf"
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(
                valkey_server(tmp_path / "valkey", "--save", "", *options, password="12,34")
            )
            url = f"redis://:12%2C34@127.0.0.1:{server.port}/0"
            if form == "cluster":
                url = f"redis+cluster://:12%2C34@127.0.0.1:{server.port}"
                with server.client() as client:
                    client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
                    eventually(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            if form == "sentinel":
                config.write_text(
                    f"sentinel monitor shop 127.0.0.1 {server.port} 1\n"
                    'sentinel auth-pass shop "12,34"\nrequirepass guard\n'
                )
                sentinel = stack.enter_context(
                    valkey_server(tmp_path / "guard", str(config), "--sentinel", password="guard")
                )
                url = f"redis+sentinel://:12%2C34@127.0.0.1:{sentinel.port}/shop/0?sentinel_password=guard"
            home = tmp_path / "home"
            publish_features(features / "later", iso(LATER), PROMOTED, str(home), url)
            publish_features(features / "earlier", iso(CUT), PROMOTED, str(home), url)
            assert held(url) == published(features / "earlier")
            assert_reads_equal_feasts(home, url, url)


def stream(*brought: tuple[str, str, str, int, int]) -> pa.Table:
    """Events as a stream archives them: id, type, user, time and version."""
    assert all(kind in KINDS for _, kind, *_ in brought)
    lines = pd.DataFrame(brought, columns=["event_id", "event_type", "user_id", "at", "version"])
    lines["at"] = pd.to_datetime(lines["at"], unit="s", utc=True)
    frame = whole_events(lines, basket_id="streamed", item_id="3")
    return pa.Table.from_pandas(frame, ARCHIVE_SCHEMA, preserve_index=False)


def assert_reads_equal_feasts(home: Path, url: str, redis_url: str) -> None:
    """Rows byte for byte; and what Feast says beside them is what our own functions say of those rows."""
    users = [*USERS, "absent"]
    names = [feature.__name__ for feature in USER]
    feast = feature_store(home, redis_url).get_online_features(
        [f"user_history:{name}" for name in (HISTORY, *names)], [{"user_id": user} for user in users]
    )
    found = feast.to_dict()
    store = patient_store(url)
    ours = [store.read(user) for user in users]
    store.close()
    assert [row and row.history for row in ours] == found[HISTORY]
    assert ours[-1] is None
    for feature in USER:
        said = [row and np.float32(feature(User(unpack(row.history), row.written_at))) for row in ours]
        assert said == [value if value is None else np.float32(value) for value in found[feature.__name__]]
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
