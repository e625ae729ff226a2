"""Metrics and intervals, by hand."""

import numpy as np
import pytest

from components.evaluation.metrics import Bootstrap, Tally, auc, calibration, ratios, summary


def test_one_list_by_hand() -> None:
    tally = Tally()
    ranked = np.arange(100, 130)  # items 101 and 112 are wanted: ranks 2 and 13
    tally.add(ranked, np.array([101, 112, 999]), np.array([True, True, False]))
    recall_10, recall_20, ndcg, hit_10, hit_3, mrr = tally.rows[0]
    assert recall_10 == pytest.approx(1 / 3)
    assert recall_20 == pytest.approx(2 / 3)
    ideal = 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert ndcg == pytest.approx((1 / np.log2(3)) / ideal)
    assert (hit_10, hit_3) == (1, 1)
    assert mrr == pytest.approx(1 / 2)
    assert tally.repeat == [(2, 2)]
    assert tally.new == [(0, 1)]


def test_the_best_scores_are_listed_in_their_order() -> None:
    bought, before = np.array([3, 28]), np.array([True, False])
    tally, expected = Tally(), Tally()
    tally.add_best(np.where(np.arange(30) == 3, 28.5, np.arange(30.0)), bought, before)
    expected.add(np.array([29, 3, 28, 27]), bought, before)
    assert (tally.rows, tally.new, tally.repeat) == (expected.rows, expected.new, expected.repeat)
    few = Tally()  # fewer items than places
    few.add_best(np.arange(4.0), bought[:1], before[:1])
    assert few.rows[0][-1] == 1


def test_auc_by_hand() -> None:
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == pytest.approx(0.75)
    assert auc(np.array([0.5, 0.5]), np.array([0, 1])) == 0.5
    assert auc(np.array([0.5, 0.6]), np.array([1, 1])) == 0.5


def test_the_bootstrap_draws_users_not_baskets() -> None:
    # One user with 99 baskets of 1 and one with a single 0: whole users come and go.
    boot = Bootstrap(["a"] * 99 + ["b"])
    draws = np.unique(boot.means(np.array([1.0] * 99 + [0.0])))
    np.testing.assert_allclose(draws, [0, 0.99, 1])


def test_a_ratio_has_no_upper_end_where_many_draws_find_nothing_to_divide_by() -> None:
    """One shopper of 30 is in 64 % of the draws."""
    boot, one = Bootstrap([f"{user}" for user in range(30)]), np.eye(30)[0]
    low, high = boot.ratio_interval(np.ones(30), one)
    assert low is not None
    assert (0 < low <= 30, high) == (True, None)
    assert boot.ratio_interval(one, np.ones(30))[0] == 0


def test_ratios_and_summaries_of_two_systems_by_hand() -> None:
    """The better one finds both bought items first, the other one of them, at rank 2; both saw one user."""
    better, worse = Tally(), Tally()
    bought, before = np.array([1, 2]), np.array([True, False])
    better.add(np.array([1, 2, 3]), bought, before)
    worse.add(np.array([3, 1, 4]), bought, before)
    boot = Bootstrap(["a"])
    assert ratios(better, worse, boot)["recall_at_20"] == 2
    assert ratios(better, worse, boot)["new_recall_at_20"] is None, "the worse one finds no new item"
    nothing = Tally()
    nothing.add(np.array([7]), bought, before)
    against = ratios(better, nothing, boot)
    assert list(against.values()) == [None, [None, None]] * 3
    both = ratios(worse, better, boot)
    assert (both["new_recall_at_20"], both["new_recall_at_20_interval"]) == (0.0, [0.0, 0.0])
    found = summary(worse, boot, items=6)
    assert found["recall_at_20"] == 0.5
    assert found["interval"]["recall_at_20"] == [0.5, 0.5]
    assert (found["repeat_recall_at_20"], found["new_recall_at_20"]) == (1, 0)
    assert [found["interval"][f"{kind}_recall_at_20"] for kind in ("repeat", "new")] == [[1, 1], [0, 0]]
    assert found["coverage_at_10"] == 0.5


def test_true_probabilities_are_calibrated_and_halved_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.01, 0.5, 20_000)
    y = rng.random(20_000) < p
    right, wrong = calibration([(p, y)]), calibration([(p / 2, y)])
    assert right["expected_calibration_error"] < 0.02 < 0.1 < wrong["expected_calibration_error"]
    assert right["auc"] == wrong["auc"]  # the order is the same
    assert right["normalised_entropy"] < wrong["normalised_entropy"] < 1.2
