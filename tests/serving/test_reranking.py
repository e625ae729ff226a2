"""Diversity by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.reranking import rerank


def test_the_second_of_a_type_pays_the_penalty() -> None:
    scores, types = np.array([0.9, 0.8, 0.5]), np.array([1, 1, 2])
    rows, shown = rerank(scores, types, 3, 0.5)
    assert rows.tolist() == [0, 2, 1]
    assert shown.tolist() == pytest.approx([0.9, 0.5, 0.4])


def test_a_third_pays_twice_and_unknown_types_never() -> None:
    rows, shown = rerank(np.array([0.9, 0.8, 0.7, 0.3]), np.array([1, 1, 1, 0]), 4, 0.5)
    assert rows.tolist() == [0, 1, 3, 2]
    assert shown.tolist() == pytest.approx([0.9, 0.4, 0.3, 0.175])


def test_penalty_one_keeps_the_order() -> None:
    rows, shown = rerank(np.array([0.1, 0.9, 0.5]), np.array([1, 1, 1]), 2, 1.0)
    assert rows.tolist() == [1, 2]
    assert shown.tolist() == [0.9, 0.5]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), max_size=60),
    st.integers(0, 20),
    st.floats(0.1, 1),
)
def test_shown_scores_fall_and_no_item_comes_twice(
    pairs: list[tuple[float, int]], k: int, penalty: float
) -> None:
    scores = np.array([score for score, _ in pairs], np.float64)
    types = np.array([kind for _, kind in pairs], np.int64)
    rows, shown = rerank(scores, types, k, penalty)
    assert len(rows) == len(set(rows.tolist())) == min(k, len(pairs))
    assert (np.diff(shown) <= 1e-12).all()
    assert (shown <= scores[rows] + 1e-12).all()
