"""Diversity, pins, kept slots and weights by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.reranking import (
    ANY,
    CHOSEN,
    NEW,
    PINNED,
    POOL,
    REPEAT,
    RESERVED,
    fill_slots,
    item_weights,
    of_new_manufacturers,
    rerank,
)
from tests.serving.conftest import build_statistics


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


# ------------------------------------------------------------------------------- pins and kept slots

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
NO_TYPES = np.zeros(6, np.int64)


def fill(k: int, pins: list[int], before: list[bool] | None = None, kept: list[int] | None = None) -> Any:
    rows, why = fill_slots(
        SCORES,
        NO_TYPES,
        k,
        1.0,
        np.array(pins, np.int64),
        np.array(before or [False] * 6, np.bool_),
        np.array(kept or [], np.int8),
    )
    return rows.tolist(), why.tolist()


def test_a_pin_stands_in_its_slot_and_nowhere_else() -> None:
    assert fill(4, [-1, 5, -1, 0]) == ([1, 5, 2, 0], [CHOSEN, PINNED, CHOSEN, PINNED])
    assert fill(3, [-1, 5, -1, 0]) == ([1, 5, 2], [CHOSEN, PINNED, CHOSEN]), (
        "the beginning of the longer list"
    )


def test_when_nothing_else_is_left_pins_move_forward() -> None:
    rows, why = fill(6, [-1, -1, -1, -1, -1, -1, -1, 0, 2])
    assert rows == [1, 3, 4, 5, 0, 2]
    assert why == [CHOSEN] * 4 + [PINNED] * 2


def test_a_kept_slot_takes_the_best_of_its_kind() -> None:
    before = [True, True, True, False, False, True]
    assert fill(4, [], before, [ANY, NEW, REPEAT, NEW]) == (
        [0, 3, 1, 4],
        [CHOSEN, RESERVED, CHOSEN, RESERVED],
    )
    assert fill(3, [], [True] * 6, [NEW]) == ([0, 1, 2], [CHOSEN] * 3), "there is none of its kind"
    assert fill(3, [], [False] * 6, [NEW, REPEAT]) == ([0, 1, 2], [CHOSEN] * 3)
    assert fill(3, [3], before, [NEW, NEW]) == ([3, 4, 0], [PINNED, RESERVED, CHOSEN]), "a pin comes first"


def test_a_kept_slot_reaches_beyond_the_best() -> None:
    scores = np.linspace(1, 0.1, 40)
    before = np.arange(40) < 39
    rows, _ = fill_slots(
        scores, np.zeros(40, int), 2, 1.0, np.empty(0, int), before, np.array([NEW], np.int8)
    )
    assert rows.tolist() == [39, 0]


@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 4)), max_size=60),
    st.integers(0, 20),
    st.floats(0.1, 1),
)
def test_without_rules_and_weights_it_is_what_it_always_was(
    pairs: list[tuple[float, int]], k: int, penalty: float
) -> None:
    scores = np.array([score for score, _ in pairs], np.float32)
    types = np.array([kind for _, kind in pairs], np.int32)
    pool = np.argsort(-scores, kind="mergesort")[: POOL * k]
    left = scores[pool].astype(np.float64)
    expected = []
    for _ in range(min(k, len(pool))):
        best = int(np.argmax(left))
        expected.append(int(pool[best]))
        left[best] = -1.0
        if types[pool[best]]:
            left[(types[pool] == types[pool[best]]) & (left > 0)] *= penalty
    assert rerank(scores, types, k, penalty).tolist() == expected


# -------------------------------------------------------------------------------------------- weights


def test_weights_of_nothing_are_none() -> None:
    assert item_weights(build_statistics()[0], 0.0, 0.0) is None


def test_the_rare_and_the_new_are_worth_more() -> None:
    statistics, _ = build_statistics(6)
    table = replace(
        statistics,
        basket_count=np.array([400, 4, 4, 4, 0, 4], np.float32),
        total_baskets=np.array(4_000.0),
        age_days=np.array([300, 91, 20, 10, 0, 10], np.float32),
        manufacturer=np.array([1, 2, 2, 1, 3, 0], np.int32),
    )
    # Manufacturer 1 sells for 300 days, 2 for 91, 3 since today; of the last item nobody knows it.
    assert of_new_manufacturers(table).tolist() == [False, True, True, False, True, False]
    found = item_weights(table, 0.1, 0.5)
    assert found is not None
    rare, common, none = 1_000**0.1, 10**0.1, 4_000**0.1
    assert found.tolist() == pytest.approx([common, rare * 1.5, rare * 1.5, rare, none * 1.5, rare])
    assert item_weights(statistics, 0.0, 1.0) == pytest.approx(np.ones(6)), (
        "an old bundle knows no manufacturers"
    )
