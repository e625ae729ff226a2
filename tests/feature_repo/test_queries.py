"""A request and its candidates: partners, tables and rows."""

from collections.abc import Callable

import numpy as np
import pytest

from feature_repo import transforms as t
from feature_repo.aggregates import CLICK, IMPRESSION, UserEvents
from feature_repo.queries import Rows, User
from feature_repo.schema import model_inputs
from tests.feature_repo.conftest import JAM, MILK, NOW, TEA, UNKNOWN

MakeRow = Callable[..., UserEvents]


def test_a_single_candidate_has_the_same_features_as_among_others(rows: Rows) -> None:
    together, _ = model_inputs(rows)
    for position, code in enumerate(rows.candidates):
        alone, _ = model_inputs(Rows(rows.query, np.array([code])))
        np.testing.assert_array_equal(alone[0], together[position])


def user(row: UserEvents) -> User:
    return User(row, float(NOW))


def test_a_very_long_session_is_counted_to_its_end(row_of: MakeRow) -> None:
    row = row_of([(NOW - second, [TEA], 1.0, 0.0) for second in range(1, 1_201)])
    assert t.session_events(user(row)) == 1_200
    assert t.session_minutes(user(row)) == 20


def test_repeated_scans_are_one_line(row_of: MakeRow) -> None:
    """Scans of one moment and basket are merged; a scan in another basket or after a view is not."""
    row = row_of(
        [(NOW - 60, [TEA, TEA, MILK], 6.0, 3.0), (NOW - 60, [TEA], 1.0, 0.0)], [(NOW - 60, TEA, IMPRESSION)]
    )
    twice = user(row)
    assert (twice.totals.lines, twice.totals.baskets, twice.totals.session_lines) == (3, 2, 3)
    assert twice.totals.spend == pytest.approx(float(row.paid.sum()))
    assert twice.history.count.tolist() == [1, 2], "of milk and tea"
    assert twice.totals.spend == twice.totals.spend_7d
    assert len(twice.session) == 3


def test_the_last_items_are_bought_or_clicked(row_of: MakeRow) -> None:
    views = [(NOW - 20, JAM, IMPRESSION), (NOW - 10, UNKNOWN, CLICK)]
    assert user(row_of([(NOW - 60, [TEA], 1.0, 0.0)], views)).last_items.tolist() == [UNKNOWN, TEA]


@pytest.mark.parametrize("views", [[], [(NOW - 20, TEA, IMPRESSION)]], ids=["no view", "an impression"])
def test_the_last_items_do_not_depend_on_how_often_one_is_scanned(
    views: list[tuple[float, int, int]], row_of: MakeRow
) -> None:
    row = row_of([(NOW - 90, [MILK], 1.0, 0.0), (NOW - 60, [TEA] * 300, 1.0, 0.0)], views)
    assert user(row).last_items.tolist() == [TEA, MILK]
