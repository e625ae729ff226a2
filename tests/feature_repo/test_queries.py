"""A request and its candidates: partners, tables and rows."""

from collections.abc import Callable

import numpy as np

from feature_repo import transforms as t
from feature_repo.aggregates import UserEvents, no_events
from feature_repo.queries import Query, Rows, bought_together
from feature_repo.schema import model_inputs
from feature_repo.statistics import Statistics
from feature_repo.users import User

NOW = 1_511_740_800
BREAD, BUTTER, JAM, MILK, TEA = range(5)
UNKNOWN = -1  # an item that the catalogue lacks
MakeRow = Callable[..., UserEvents]


def test_partners_of_several_items_add_up(statistics: Statistics) -> None:
    partners = bought_together(statistics, np.array([BUTTER, JAM]))
    assert partners.codes.tolist() == [BREAD]
    np.testing.assert_allclose(partners.sums[0], [4 / (4**0.7 * 16**0.3) + 2 / (4**0.7 * 16**0.3)], rtol=1e-6)
    np.testing.assert_allclose(partners.largest[0], [4 / (4**0.7 * 16**0.3)], rtol=1e-6)
    assert partners.links.tolist() == [2]


def test_one_candidate_alone_has_the_same_features_as_among_others(rows: Rows) -> None:
    together, _ = model_inputs(rows)
    for position, code in enumerate(rows.candidates):
        alone, _ = model_inputs(Rows(rows.query, np.array([code])))
        np.testing.assert_array_equal(alone[0], together[position])


def test_a_large_basket_keeps_the_partners_among_the_candidates(statistics: Statistics) -> None:
    """More partners than candidates: the table of partners shrinks, the features stay."""
    query = Query(statistics, float(NOW), np.array([BREAD, BUTTER, JAM]), 3, User(no_events(np.int64), NOW))
    assert sorted(query.together.codes.tolist()) == [BREAD, BUTTER, JAM]
    few, many = Rows(query, np.array([JAM])), Rows(query, np.array([MILK, TEA, JAM, BREAD]))
    assert few.places["together"].tolist() == [0]
    assert t.together_sum(few)[0] == t.together_sum(many)[2] > 0


def test_the_history_of_a_query_lacks_unknown_items(statistics: Statistics, row_of: MakeRow) -> None:
    row = row_of([(NOW - 60, [UNKNOWN, TEA], 2.0, 0.0)])
    query = Query(statistics, float(NOW), np.empty(0, np.int64), 0, User(row, NOW))
    assert query.history.items.tolist() == [TEA]
    assert query.says_something
    stranger = Query(statistics, float(NOW), np.empty(0, np.int64), 4, User(no_events(np.int64), NOW))
    assert not stranger.says_something
