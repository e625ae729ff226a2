"""Diversity by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.reranking import rerank


def test_the_second_of_a_type_pays_the_penalty() -> None:
    scores, types = np.array([0.9, 0.8, 0.5]), np.array([1, 1, 2])
    assert rerank(scores, types, 3, 0.5).tolist() == [0, 2, 1]  # 0.9, 0.5, 0.8 x 0.5
    assert rerank(scores, types, 3, 0.7).tolist() == [0, 1, 2]  # 0.8 x 0.7 is still more than 0.5


def test_a_third_pays_twice_and_unknown_types_never() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.3])
    assert rerank(scores, np.array([1, 1, 1, 0]), 4, 0.5).tolist() == [0, 1, 3, 2]
    assert rerank(scores, np.array([0, 0, 0, 0]), 4, 0.5).tolist() == [0, 1, 2, 3]


def test_penalty_one_keeps_the_order() -> None:
    assert rerank(np.array([0.1, 0.9, 0.5]), np.array([1, 1, 1]), 2, 1.0).tolist() == [1, 2]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), max_size=60),
    st.integers(0, 20),
    st.floats(0.1, 1),
)
def test_the_best_comes_first_and_no_item_twice(
    pairs: list[tuple[float, int]], k: int, penalty: float
) -> None:
    scores = np.array([score for score, _ in pairs], np.float64)
    types = np.array([kind for _, kind in pairs], np.int64)
    rows = rerank(scores, types, k, penalty)
    assert len(rows) == len(set(rows.tolist())) == min(k, len(pairs))
    if len(rows):
        assert scores[rows[0]] == scores.max()
    for kind in set(types.tolist()):  # within a type nothing overtakes
        assert (np.diff(scores[rows][types[rows] == kind]) <= 1e-12).all()
