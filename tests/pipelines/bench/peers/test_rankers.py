"""Peers on shops so small that the scores are worked out by hand."""

import numpy as np
import pytest

from pipelines.bench.peers.rankers import (
    PEERS,
    fit_als,
    fit_bpr,
    fit_ease,
    fit_item_knn,
    fit_personal,
    fit_tifu_knn,
    fit_up_cf,
)
from tests.pipelines.bench.peers.worlds import apart, asked, shop, two_worlds


def test_personal_counts_decay_with_age() -> None:
    seen = shop([[0]], items=3)
    request = asked([], [[0, 1], [1]])
    assert fit_personal(seen, np.inf)(request).tolist() == [1, 2, 0]
    np.testing.assert_allclose(fit_personal(seen, 10.0)(request), [np.exp(-2), np.exp(-2) + np.exp(-1), 0])


def test_item_knn_sums_cosines_of_the_basket() -> None:
    seen = shop([[0, 1], [0, 1], [0, 2]], [[2, 3]], items=4)
    scores = fit_item_knn(seen, "cosine", 4)(asked([0, 3]))
    np.testing.assert_allclose(scores[1:3], [2 / np.sqrt(6), 1 / np.sqrt(6) + 1 / np.sqrt(2)], rtol=1e-6)


def test_ease_has_the_closed_form() -> None:
    seen = shop([[0, 1], [0, 1], [0, 2], [2]], items=3)
    baskets = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]])
    inverse = np.linalg.inv(baskets.T @ baskets + 2.0 * np.eye(3))
    expected = -inverse / np.diag(inverse)
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(fit_ease(seen, 2.0)(asked([0, 2])), expected[[0, 2]].sum(0), atol=1e-6)


def test_up_cf_adds_the_baskets_of_like_shoppers() -> None:
    seen = shop([[0]], [[0, 1], [0, 1]], [[2]], items=3)
    # Shopper 0 has (1, 0, 0), shopper 1 has (1, 1, 0): the cosine is 1 / 2 ** .5, its square 1 / 2.
    scores = fit_up_cf(seen, 25, 0.5, 2.0)(asked([], [[0]]))
    np.testing.assert_allclose(scores, [1.5, 0.5, 0])


def test_tifu_knn_mixes_own_and_nearest_baskets() -> None:
    seen = shop([[0]], [[0], [1]], [[2]], items=3)
    # The vector of shopper 1, the nearest, is (.5, 1, 0) / 7: one group, the earlier basket decayed.
    scores = fit_tifu_knn(seen, 1, 0.5, 0.5, 0.9)(asked([], [[0], [0]]))
    np.testing.assert_allclose(scores, np.array([0.5 * 1.5 + 0.5 * 0.5, 0.5, 0]) / 7)


@pytest.mark.parametrize(
    "fit",
    [
        lambda seen: fit_als(seen, "baskets", 4),
        lambda seen: fit_als(seen, "users", 4),
    ],
    ids=["ALS on baskets", "ALS on users"],
)
def test_two_worlds_stay_apart(fit: object) -> None:
    apart(fit(two_worlds()))  # type: ignore[operator]


def test_bpr_knows_the_shopper() -> None:
    worlds = [[[5 * (user % 2) + item] for item in range(4)] for user in range(40)]
    seen = shop(*worlds, items=10)
    scores = fit_bpr(seen, 0.05, 200)(asked([], user=1))
    assert scores[5:9].min() > scores[:4].max()


def test_strangers_get_finite_scores() -> None:
    seen = shop([[0, 1], [1]], [[1, 2], [2]], items=4)
    for name in ("UP-CF", "TIFU-kNN", "EASE", "item-kNN"):
        peer = PEERS[name]
        scores = peer.fit(seen, **peer.grid[0])(asked([]))
        assert np.isfinite(scores).all(), name
