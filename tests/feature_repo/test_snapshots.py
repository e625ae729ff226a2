"""The rows behind the Feast views: as of their stamp, and the same numbers that the models get."""

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.aggregates import CLICK, DAY_S, UserEvents, pack, unpack
from feature_repo.queries import Query, Rows, User
from feature_repo.schema import ITEM, USER, model_inputs
from feature_repo.snapshots import HISTORY, item_table, unpack_times, user_table
from feature_repo.statistics import Statistics

MONDAY = 1_704_067_200.0
MakeRow = Callable[..., UserEvents]


@pytest.fixture
def row(row_of: MakeRow) -> UserEvents:
    return row_of(
        [(MONDAY, ["item-002", "item-004"], 8.0, 2.0), (MONDAY + 3 * DAY_S, ["item-002"], 4.0, 0.0)],
        [(MONDAY + 3 * DAY_S + 60, "item-006", CLICK)],
    )


def test_a_row_holds_the_events_strictly_before_its_stamp(row: UserEvents) -> None:
    for at, lines in ((MONDAY + 1e-6, 2), (MONDAY + 3 * DAY_S, 2), (MONDAY + 3 * DAY_S + 1, 3)):
        [found] = user_table([("ann", row)], at).to_pylist()
        assert found["event_timestamp"].timestamp() == at
        assert found[HISTORY] == pack(row.before(at), "ann")
        assert len(unpack(found[HISTORY])) == lines
        for feature in USER:
            expected = np.float32(feature(User(row, at)))
            assert np.float32(found[feature.__name__]) == expected, feature.__name__


def test_a_user_without_events_has_no_row(row: UserEvents, row_of: MakeRow) -> None:
    later = row_of([(MONDAY + DAY_S, ["tea"], 1.0, 0.0)])
    assert user_table([("ann", row), ("bob", later)], MONDAY + 60)["user_id"].to_pylist() == ["ann"]
    assert len(user_table([("ann", row)], MONDAY)) == 0


def test_without_a_time_a_row_is_stamped_just_after_its_last_event(row: UserEvents, row_of: MakeRow) -> None:
    """Each row has its own stamp, includes its last event, and does not join a request of that moment."""
    other = row_of([(MONDAY + 0.123456, ["tea"], 1.0, 0.0)])
    ann, bob = user_table([("ann", row), ("bob", other)]).to_pylist()
    assert ann[HISTORY] == pack(row, "ann")
    assert bob[HISTORY] == pack(other, "bob")
    assert bob["event_timestamp"] == datetime(2024, 1, 1, 0, 0, 0, 123_457, UTC)
    assert ann["event_timestamp"] == datetime(2024, 1, 4, 0, 1, 0, 1, UTC)
    assert ann["user_clicks_10m"] == 1


def test_the_values_equal_the_inputs_of_the_model(row: UserEvents, toy_tables: Statistics) -> None:
    at = MONDAY + 5 * DAY_S
    codes = np.array([toy_tables.code_of[item] for item in row.items.tolist()])
    coded = UserEvents(codes, *(getattr(row, name) for name in UserEvents.__slots__ if name != "items"))
    query = Query(toy_tables, at, np.empty(0, np.int64), 0, User(coded, at))
    dense, _ = model_inputs(Rows(query, np.arange(len(toy_tables.item_ids))))
    user = user_table([("ann", row)], at).select([feature.__name__ for feature in USER])
    np.testing.assert_array_equal([list(one.values()) for one in user.to_pylist()], dense[:1, : len(USER)])
    items = item_table(toy_tables, at)
    assert items["item_id"].to_pylist() == toy_tables.item_ids.tolist()
    for position, feature in enumerate(ITEM, len(USER)):
        np.testing.assert_array_equal(
            items[feature.__name__].to_numpy(), dense[:, position], err_msg=feature.__name__
        )
    assert set(items["event_timestamp"].cast(pa.int64()).to_pylist()) == {round(at * 1e6)}


def test_times_nested_too_deep_are_damaged() -> None:
    assert unpack_times(b"[" * 100_000) is None
