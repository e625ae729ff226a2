import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.build_examples import replay
from components.fit_statistics import fit, fit_vocabulary, purchases_of
from components.materialize_features import (
    USER_COLUMNS,
    WEEK_S,
    check_point_in_time,
    item_table,
    materialize_features,
    user_tables,
    write_snapshots,
)
from feature_repo.aggregates import empty_history, fold, pack, unpack
from feature_repo.events import Dataset, write_dataset

START = 1_700_000_000
CUT = START + 30 * WEEK_S

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
        materialize_features(dataset(tmp_path), tmp_path / "features", iso(START - 1))


def dataset(tmp_path: Path) -> Path:
    events = events_of(shop())
    items = pd.DataFrame({"item_id": sorted(set(events["item_id"]))})
    write_dataset(tmp_path / "dataset", Dataset(events, items))
    return tmp_path / "dataset"


def test_only_the_artefact_is_written(tmp_path: Path) -> None:
    """A store that is served from changes after the gate, not before it."""
    data = dataset(tmp_path)
    counts = materialize_features(data, tmp_path / "features", iso(CUT))
    assert {path.name for path in tmp_path.iterdir()} == {"dataset", "features"}
    for view, name in (("user_history", "user_snapshots"), ("item_statistics", "item_snapshots")):
        assert pq.read_table(tmp_path / "features" / view / "snapshots.parquet").num_rows == counts[name]
    world = shop()
    rows = pq.read_table(tmp_path / "features" / "user_history" / "snapshots.parquet").to_pylist()
    latest = {row["user_id"]: row["history"] for row in rows if row["event_timestamp"].timestamp() == CUT}
    assert latest == {user: history_before(world, user, CUT) for user in {user for _, user, _, _ in world}}
