"""The models' inputs: their order, hash and padding."""

from collections.abc import Callable

import numpy as np
import pytest

from feature_repo import schema
from feature_repo.aggregates import UserEvents, no_events
from feature_repo.queries import Query, Rows, User
from feature_repo.schema import (
    BASKET_LENGTH,
    DENSE_NAMES,
    FRESH,
    HISTORY_LENGTH,
    ITEM,
    REQUEST,
    USER,
    item_values,
    model_inputs,
    tower_inputs,
)
from feature_repo.statistics import SOLD_7D, SOLD_28D, Statistics

DAY = 86_400


History = Callable[..., UserEvents]


@pytest.fixture
def history(row_of: Callable[..., UserEvents]) -> History:
    """Make a row of baskets of item codes: the day of each, and its items."""

    def make(*baskets: tuple[float, list[int]]) -> UserEvents:
        if not baskets:
            return no_events(np.int64)
        return row_of([(day * DAY, items, 1.0, 0.0) for day, items in baskets])

    return make


def query(toy_tables: Statistics, basket: list[int], row: UserEvents) -> Query:
    at = 100.0 * DAY
    return Query(toy_tables, at, np.array(basket, np.int64), len(basket), User(row, at))


def test_each_feature_has_one_column() -> None:
    assert len(set(DENSE_NAMES)) == len(DENSE_NAMES)
    assert all(feature.__doc__ for feature in (*USER, *ITEM, *FRESH, *REQUEST))


def test_the_hash_changes_with_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema.schema_hash()
    assert before == schema.schema_hash()
    monkeypatch.setattr(schema, "DENSE_NAMES", (DENSE_NAMES[1], DENSE_NAMES[0], *DENSE_NAMES[2:]))
    assert schema.schema_hash() != before


def test_columns_are_the_features_in_order(toy_tables: Statistics, history: History) -> None:
    rows = Rows(query(toy_tables, [3], history((90, [1, 2]), (95, [2]))), np.array([1, 2, 5]))
    dense, categorical = model_inputs(rows)
    assert dense.shape == (3, len(DENSE_NAMES))
    assert dense.dtype == np.float32
    assert dense[:, DENSE_NAMES.index("user_item_count")].tolist() == [1, 2, 0]
    assert dense[:, DENSE_NAMES.index("basket_size")].tolist() == [1, 1, 1]
    assert categorical.dtype == np.int64
    assert categorical[:, 0].tolist() == [2, 3, 6], "item codes are shifted by one: 0 is an unknown item"
    np.testing.assert_array_equal(categorical[:, 1:], toy_tables.categorical[[1, 2, 5]])
    for position, feature in enumerate(USER):
        assert dense[:, position].tolist() == [np.float32(feature(rows.query.user))] * 3, feature.__name__
    for position, item_feature in enumerate(ITEM, len(USER)):
        expected = item_feature(toy_tables)[[1, 2, 5]].astype(np.float32)
        np.testing.assert_array_equal(dense[:, position], expected, err_msg=item_feature.__name__)
    assert item_values(toy_tables) is item_values(toy_tables), "computed once"
    first = len(USER) + len(ITEM)
    np.testing.assert_array_equal(dense[:, first : first + len(FRESH)], toy_tables.fresh[[1, 2, 5]])
    assert [FRESH[column].__name__ for column in (SOLD_7D, SOLD_28D)] == [
        "item_baskets_7d",
        "item_baskets_28d",
    ]
    for position, feature_of_both in enumerate(REQUEST, first + len(FRESH)):
        both = np.broadcast_to(np.asarray(feature_of_both(rows), np.float32), 3)
        np.testing.assert_array_equal(dense[:, position], both, err_msg=feature_of_both.__name__)


def test_the_tower_sees_the_history_in_the_order_of_the_last_purchases_and_zero_is_padding(
    toy_tables: Statistics, history: History
) -> None:
    """An old favourite has a larger weight than an item bought once yesterday, but comes after it."""
    bought = history((80, [7]), (85, [7]), (90, [7]), (99, [4]))
    inputs = tower_inputs(query(toy_tables, [0, 9], bought))
    assert inputs["history"].shape == (1, HISTORY_LENGTH)
    assert inputs["history"][0, :3].tolist() == [5, 8, 0], "codes are shifted by one"
    yesterday, favourite, padding = inputs["history_weight"][0, :3]
    assert favourite > yesterday > padding == 0
    assert inputs["basket"][0, :3].tolist() == [1, 10, 0]


def test_a_long_history_keeps_the_largest_weights(toy_tables: Statistics, history: History) -> None:
    """An item bought once long ago is dropped first, at any place of its code."""
    bought = history((1, [0]), *((50, list(range(1, HISTORY_LENGTH + 1))) for _ in range(2)))
    inputs = tower_inputs(query(toy_tables, [], bought))
    assert sorted(inputs["history"][0].tolist()) == [item + 1 for item in range(1, HISTORY_LENGTH + 1)]


def test_a_long_basket_keeps_its_last_items(toy_tables: Statistics, history: History) -> None:
    basket = list(range(BASKET_LENGTH + 5))
    inputs = tower_inputs(query(toy_tables, basket, history()))
    assert inputs["basket"][0].tolist() == [item + 1 for item in basket[5:]]
    assert not inputs["history"].any()
