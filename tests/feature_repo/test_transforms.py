"""Features of a five-item shop, worked out by hand."""

import numpy as np
import pytest

from feature_repo import transforms as t
from feature_repo.aggregates import DAY_S, empty_history, fold
from feature_repo.schema import DENSE, DENSE_NAMES, model_inputs, tower_inputs
from feature_repo.statistics import Statistics
from feature_repo.transforms import Query, Rows, bought_together

NOW = 1_511_740_800
BREAD, BUTTER, JAM, MILK, TEA = range(5)


@pytest.fixture
def statistics() -> Statistics:
    """Bread and butter share 4 baskets, bread and jam 2, milk and tea none."""
    n = 5
    neighbours = np.full((n, 2), -1, np.int32)
    together = np.zeros((n, 2), np.float32)
    neighbours[BREAD], together[BREAD] = [BUTTER, JAM], [4, 2]
    neighbours[BUTTER, 0], together[BUTTER, 0] = BREAD, 4
    neighbours[JAM, 0], together[JAM, 0] = BREAD, 2
    return Statistics(
        item_ids=np.array(["bread", "butter", "jam", "milk", "tea"]),
        categorical=np.array([[1, 1, 1], [2, 2, 1], [2, 2, 1], [3, 3, 2], [4, 4, 2]], np.int32),
        is_private=np.array([0, 1, 0, 0, 1], np.float32),
        price=np.array([2, 3, 4, 1, 5], np.float32),
        discount_ratio=np.zeros(n, np.float32),
        purchases_4w=np.array([8, 4, 2, 6, 1], np.float32),
        purchases_13w=np.full(n, 13, np.float32),
        basket_count=np.array([16, 4, 4, 9, 1], np.float32),
        buyer_count=np.full(n, 3, np.float32),
        repeat_ratio=np.full(n, 0.5, np.float32),
        interval_days=np.full(n, 7, np.float32),
        age_days=np.full(n, 100, np.float32),
        neighbours=neighbours,
        together_count=together,
        type_lift=np.zeros((5, 5), np.float16),
        popular=np.array([BREAD, MILK, BUTTER, JAM, TEA], np.int32),
        store_ids=np.empty(0, "U1"),
        store_popular=np.empty((0, 5), np.int32),
        total_baskets=np.array(20.0),
    )


@pytest.fixture
def rows(statistics: Statistics) -> Rows:
    """A shopper who bought milk 30 and 10 days ago and tea 10 days ago has bread in the basket."""
    history = fold(empty_history(np.int64), NOW - 30 * DAY_S, np.array([MILK]), 1.0, 0.0)
    history = fold(history, NOW - 10 * DAY_S, np.array([MILK, TEA]), 6.0, 2.0)
    query = Query(statistics, float(NOW), np.array([BREAD]), 1, history)
    return Rows(query, np.array([BUTTER, JAM, MILK, TEA]))


def test_user_item_features(rows: Rows) -> None:
    np.testing.assert_allclose(t.user_item_count(rows), [0, 0, 2, 1])
    np.testing.assert_allclose(
        t.user_item_decayed_60d(rows), [0, 0, np.exp(-0.5) + np.exp(-1 / 6), np.exp(-1 / 6)], rtol=1e-6
    )
    np.testing.assert_allclose(t.user_item_recency_days(rows), [t.NEVER_DAYS, t.NEVER_DAYS, 10, 10])
    # Milk came twice, 20 days apart; tea once, so the catalogue's 7 days stand in.
    np.testing.assert_allclose(t.user_item_interval_days(rows)[2:], [20, 7])
    np.testing.assert_allclose(t.user_item_due_ratio(rows), [0, 0, 0.5, 10 / 7])
    np.testing.assert_allclose(t.user_item_rate(rows), [0, 0, 1, 0.5])
    np.testing.assert_allclose(t.user_item_rank(rows)[2:], [0, 1])


def test_user_features(rows: Rows) -> None:
    assert t.user_basket_count(rows) == 2
    assert t.user_recency_days(rows) == 10
    assert t.user_basket_interval_days(rows) == 20
    assert t.user_basket_size(rows) == 1.5
    assert t.user_spend_per_line(rows) == pytest.approx(7 / 3)
    assert t.user_discount_ratio(rows) == pytest.approx(2 / 9)


def test_basket_features(rows: Rows) -> None:
    assert t.basket_value(rows) == 2
    assert t.basket_known_ratio(rows) == 0
    np.testing.assert_allclose(t.basket_same_department(rows), [1, 1, 0, 0])
    np.testing.assert_allclose(
        t.together_sum(rows), [4 / (16**0.7 * 4**0.3), 2 / (16**0.7 * 4**0.3), 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(t.together_cosine_max(rows), [0.5, 0.25, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(t.together_lift_max(rows), [4 * 20 / 64, 2 * 20 / 64, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(t.together_links(rows), [1, 1, 0, 0])


def test_partners_of_several_items_add_up(statistics: Statistics) -> None:
    partners = bought_together(statistics, np.array([BUTTER, JAM]))
    assert partners.codes.tolist() == [BREAD]
    np.testing.assert_allclose(partners.sum, [4 / (4**0.7 * 16**0.3) + 2 / (4**0.7 * 16**0.3)], rtol=1e-6)
    np.testing.assert_allclose(partners.max, [4 / (4**0.7 * 16**0.3)], rtol=1e-6)
    assert partners.links.tolist() == [2]


def test_a_stranger_with_an_empty_basket_has_finite_features(statistics: Statistics) -> None:
    query = Query(statistics, float(NOW), np.empty(0, np.int64), 0, empty_history(np.int64))
    dense, categorical = model_inputs(Rows(query, np.arange(5)))
    assert dense.shape == (5, len(DENSE))
    assert np.isfinite(dense).all()
    assert categorical[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert categorical[:, 1:].tolist() == statistics.categorical.tolist()
    assert not tower_inputs(query)["history"].any()


def test_one_candidate_alone_has_the_same_features_as_among_others(rows: Rows) -> None:
    together, _ = model_inputs(rows)
    for position, code in enumerate(rows.candidates):
        alone, _ = model_inputs(Rows(rows.query, np.array([code])))
        np.testing.assert_array_equal(alone[0], together[position])


def test_absurd_numbers_are_stopped_per_row(rows: Rows) -> None:
    rows.price = np.array([np.inf, np.nan, 1e308, 4.0])
    dense, _ = model_inputs(rows)
    price = dense[:, DENSE_NAMES.index("item_price")]
    assert price.tolist() == [1e9, 0.0, 1e9, 4.0]


def test_each_feature_says_what_it_is() -> None:
    assert len(set(DENSE_NAMES)) == len(DENSE_NAMES)
    assert all(feature.__doc__ for feature in DENSE)


def test_tower_inputs_are_shifted_and_padded(rows: Rows) -> None:
    inputs = tower_inputs(rows.query)
    assert inputs["history"][0, :3].tolist() == [MILK + 1, TEA + 1, 0]
    assert inputs["basket"][0, :2].tolist() == [BREAD + 1, 0]
    assert inputs["history_weight"][0, 0] == pytest.approx(np.log1p(np.exp(-0.5) + np.exp(-1 / 6)), rel=1e-6)
