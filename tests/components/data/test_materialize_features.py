"""The offline store's files: the archive as it came, and rows that know nothing of their own moment."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.build_examples import replay
from components.data.fit_statistics import fit_statistics, purchases_of
from components.data.materialize_features import materialize_features, users_as_of
from feature_repo.aggregates import fold, make_events, no_events, pack, unpack
from feature_repo.events import EVENT_SCHEMA, Dataset, write_dataset
from feature_repo.snapshots import HISTORY, ITEM_VIEW, USER_VIEW
from feature_repo.stream.archive import ARCHIVE_SCHEMA, BASE, EVENTS, lines_of, read_archive, write_segment
from tests.components.conftest import whole_events

WEEK_S = 7 * 86_400
START = 1_700_000_000
CUT = START + 30 * WEEK_S

Basket = tuple[str, str, int, tuple[str, ...]]  # basket, user, time, items


def events_of(baskets: list[Basket]) -> pd.DataFrame:
    """Purchase events where an item's price is known from its name's length and every third is discounted."""
    rows = [
        (f"{basket}-{item}", user, basket, item, at, float(len(item)), 0.5 if number % 3 == 0 else 0.0)
        for basket, user, at, items in baskets
        for number, item in enumerate(sorted(items))
    ]
    columns = ["event_id", "user_id", "basket_id", "item_id", "at", "price", "discount"]
    frame = whole_events(pd.DataFrame(rows, columns=columns), quantity=2)
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True).astype("datetime64[us, UTC]")
    return frame.sort_values(["at", "basket_id", "item_id"], ignore_index=True)


def shop(users: int = 12, baskets_per_user: int = 25, seed: int = 0) -> list[Basket]:
    """Baskets over 31 weeks; "9" sorts behind "10", and the first user buys twice in one second."""
    random = np.random.default_rng(seed)
    baskets: list[Basket] = []
    for user in range(users):
        for at in random.integers(START, CUT + WEEK_S, baskets_per_user).tolist():
            items = random.choice(40, random.integers(1, 8), replace=False).tolist()
            baskets.append((f"b{len(baskets):04}", str(user), at, tuple(f"{item}" for item in items)))
    first = baskets[0]
    return [*baskets, ("twice", first[1], first[2], ("7", "39"))]


def row_before(baskets: list[Basket], user: str, at: float) -> bytes:
    """The oracle: one user's lines strictly before `at`, folded basket by basket, the last one first."""
    row = no_events()
    for basket, owner, when, items in sorted(baskets, key=lambda one: one[2], reverse=True):
        if owner == user and when < at:
            lines = pa.Table.from_pandas(events_of([(basket, owner, when, items)]), EVENT_SCHEMA)
            row = fold(row, make_events(*lines_of(lines)))
    return pack(row, user)


def rows_at(archive: Path, baskets: list[Basket], at: float) -> dict[str, bytes]:
    events = pa.Table.from_pandas(events_of(baskets), EVENT_SCHEMA, preserve_index=False)
    write_segment(archive, events, BASE)
    found = users_as_of(archive, at)
    assert set(found["event_timestamp"].cast(pa.int64()).to_pylist()) <= {round(at * 1e6)}
    return dict(zip(found["user_id"].to_pylist(), found[HISTORY].to_pylist(), strict=True))


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@settings(max_examples=40, deadline=None)
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
    hour=st.integers(0, 41),
)
def test_a_row_is_the_fold_of_strictly_earlier_events(
    baskets: list[tuple[str, int, frozenset[str]]], hour: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = [
        (f"b{number:02}", user, START + hour * 3_600, tuple(items))
        for number, (user, hour, items) in enumerate(baskets)
    ]
    at = START + hour * 3_600
    found = rows_at(tmp_path_factory.mktemp("archive"), world, at)
    for user in {user for _, user, _, _ in world}:
        assert found.get(user, pack(no_events(), user)) == row_before(world, user, at)


def test_a_basket_just_before_the_moment_is_in_the_row(tmp_path: Path) -> None:
    world, at = shop(), START + 10 * WEEK_S
    rows = rows_at(tmp_path, [*world, ("before", "0", at - 1, ("0", "1"))], at)
    assert unpack(rows["0"]).at[-1] == at - 1
    later = rows_at(tmp_path, [*world, ("own", "0", at, ("0", "1"))], at + 1e-6)
    assert unpack(later["0"]).at[-1] == at, "a microsecond is enough"


def test_a_row_is_the_history_that_training_replays(tmp_path: Path) -> None:
    world = shop(users=2)
    purchases = purchases_of(events_of(world))
    rows_at(tmp_path, world, CUT)
    for basket in list(replay(purchases))[::5]:
        users = users_as_of(tmp_path, basket.at)
        rows = dict(zip(users["user_id"].to_pylist(), users[HISTORY].to_pylist(), strict=True))
        packed = rows.get(purchases.user_ids[basket.user])
        row = no_events() if packed is None else unpack(packed)
        named = basket.history.named(purchases.item_ids)
        for name in ("at", "kind", "basket", "paid", "discount"):
            np.testing.assert_array_equal(getattr(row, name), getattr(named, name), err_msg=name)
        assert row.items[row.item].tolist() == named.items[named.item].tolist()


# --------------------------------------------------------------------------------------------- the step


def dataset(folder: Path, baskets: list[Basket]) -> Path:
    events = events_of(baskets)
    items = pd.DataFrame({"item_id": sorted(set(events["item_id"]))})
    write_dataset(folder / "dataset", Dataset(events, items))
    return folder / "dataset"


def materialized(folder: Path, baskets: list[Basket], at: float = CUT) -> dict[str, int]:
    data = dataset(folder, baskets)
    fit_statistics(data, folder / "statistics", iso(at))
    return materialize_features(data, folder / "statistics", folder / "features", iso(at))


def view(folder: Path, name: str) -> pa.Table:
    return pq.read_table(folder / "features" / name / "snapshots.parquet")


def test_only_the_artefact_is_written(tmp_path: Path) -> None:
    """A store that is served from changes after the gate, not before it."""
    world = shop()
    counts = materialized(tmp_path, world)
    assert {path.name for path in tmp_path.iterdir()} == {"dataset", "statistics", "features"}
    written = {path.name for path in (tmp_path / "features").iterdir()}
    assert written == {EVENTS, USER_VIEW, ITEM_VIEW, "items.parquet", "dataset.json"}
    users, items = view(tmp_path, USER_VIEW), view(tmp_path, ITEM_VIEW)
    assert counts == {"events": len(events_of(world)), "users": len(users), "items": len(items)}
    rows = dict(zip(users["user_id"].to_pylist(), users[HISTORY].to_pylist(), strict=True))
    assert rows == {user: row_before(world, user, CUT) for user in {user for _, user, _, _ in world}}
    for table in (users, items):
        assert set(table["event_timestamp"].cast(pa.int64()).to_pylist()) == {CUT * 1_000_000}


def test_the_archive_holds_every_event_also_those_after_the_cut(tmp_path: Path) -> None:
    """Publishing computes rows from it again, as of then."""
    world = shop()
    materialized(tmp_path, world)
    archive = read_archive(tmp_path / "features" / EVENTS)
    assert archive.schema == ARCHIVE_SCHEMA
    expected = events_of(world)
    found = archive.to_pandas().sort_values(["at", "basket_id", "item_id"], ignore_index=True)
    pd.testing.assert_frame_equal(found[EVENT_SCHEMA.names], expected[EVENT_SCHEMA.names])
    assert pc.max(archive["at"]).as_py().timestamp() > CUT
    assert [file.name for file in (tmp_path / "features" / EVENTS).iterdir()] == [BASE]


def test_rows_see_nothing_at_or_after_the_cut(tmp_path: Path) -> None:
    planted = [(f"p{number}", "0", CUT + number, ("0", "1", "new")) for number in range(9)]
    materialized(tmp_path / "clean", shop())
    materialized(tmp_path / "planted", [*shop(), *planted])
    for name in (USER_VIEW, ITEM_VIEW):
        assert view(tmp_path / "planted", name).equals(view(tmp_path / "clean", name)), name


def test_a_cut_before_the_first_event_is_refused(tmp_path: Path) -> None:
    data = dataset(tmp_path, shop())
    fit_statistics(data, tmp_path / "statistics", iso(CUT))
    with pytest.raises(ValueError, match="no event before"):
        materialize_features(data, tmp_path / "statistics", tmp_path / "features", iso(START - 1))
