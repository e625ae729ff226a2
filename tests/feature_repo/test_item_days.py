"""Day-fresh features of three items, computed by hand: sales of 30 days, and the day that does not count."""

import numpy as np
import pytest

from feature_repo import transforms as t
from feature_repo.item_days import DAY_S, SPAN, ItemDays, count_daily
from feature_repo.schema import FRESH, fresh_values

BEGIN = 1_500_000_000.0
DAY = 91  # the features' day: the first that no sum holds
TYPES = np.array([1, 1, 0])  # bread and rolls are of one type, tea of an unknown one
BREAD, ROLLS, TEA = range(3)


@pytest.fixture
def days() -> ItemDays:
    """Bread sells daily in the last 30 days, cheap in the last two; rolls sold once, 8 days ago."""
    lines = [(BREAD, DAY - ago, 1.0 if ago <= 2 else 2.0, ago <= 2) for ago in range(1, 31)]
    lines += [
        (ROLLS, DAY - 8, 3.0, False),
        (TEA, DAY, 9.0, True),
        (TEA, DAY + 1, 9.0, True),
        (TEA, -1, 9.0, True),
    ]
    item, day, paid, cheap = (np.array(column) for column in zip(*lines, strict=True))
    units = np.ones(len(item))
    sales = count_daily(item, BEGIN + (day + 0.99) * DAY_S, (units, units * cheap, paid), 3, BEGIN, SPAN)
    return ItemDays(sales, DAY, TYPES)


def test_counts_end_with_the_day_before(days: ItemDays) -> None:
    assert t.item_baskets_1d(days).tolist() == [1, 0, 0]
    assert t.item_baskets_7d(days).tolist() == [7, 0, 0]
    assert t.item_baskets_14d(days).tolist() == [14, 1, 0]
    assert t.item_baskets_28d(days).tolist() == [28, 1, 0]
    assert t.item_baskets_91d(days).tolist() == [30, 1, 0]
    assert t.item_baskets_weekday(days).tolist() == [4, 0, 0]
    assert t.type_baskets_7d(days).tolist() == [7, 7, 0]
    assert t.type_baskets_28d(days).tolist() == [29, 29, 0]
    assert t.item_share_of_type_28d(days) == pytest.approx([28 / 29, 1 / 29, 0])
    assert t.item_week_trend(days)[:2] == pytest.approx([0, np.log(0.1 / (1 / 28 + 0.1))])


def test_an_item_of_unknown_type_has_no_share_of_it(days: ItemDays) -> None:
    """A share is 0 to 1; an item that joins at night may have no type, and a count would stand there."""
    untyped = ItemDays(days.sales, DAY, np.array([0, 1, 0]))
    assert t.item_share_of_type_28d(untyped).tolist() == [0, 1, 0]


def test_the_price_of_now(days: ItemDays) -> None:
    usual = 2 / 30  # of 30 units of bread two were cheap: that counts as two units more
    assert t.item_discount_3d(days) == pytest.approx([(2 + 2 * usual) / 5, 0, 0])
    assert t.item_discount_28d(days) == pytest.approx([(2 + 2 * usual) / 30, 0, 0])
    paid, month = (1 + 1 + 2 + 2 * 58 / 30) / 5, (2 + 26 * 2 + 2 * 58 / 30) / 30
    drop = np.log((paid + 0.05) / (month + 0.05))
    assert t.item_price_drop_3d(days) == pytest.approx([drop, 0, 0])
    assert drop < -0.15


def test_the_table_has_a_finite_column_for_each_feature(days: ItemDays) -> None:
    values = fresh_values(days)
    assert values.shape == (3, len(FRESH))
    assert np.isfinite(values).all()
    column = [feature.__name__ for feature in FRESH].index("item_baskets_7d")
    assert values[:, column].tolist() == [7, 0, 0]


def test_the_first_days_have_short_sums(days: ItemDays) -> None:
    young = ItemDays(days.sales, 3, TYPES)
    assert t.item_baskets_91d(young).tolist() == t.item_baskets_weekday(young).tolist() == [0, 0, 0]
    assert np.isfinite(fresh_values(ItemDays(days.sales, 0, TYPES))).all()
