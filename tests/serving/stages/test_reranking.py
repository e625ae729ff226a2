"""Diversity, pins, reserved slots and weights by hand."""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.stages.reranking import (
    ANY,
    CHOSEN,
    NEW,
    NO_RARITY,
    NOVEL,
    PINNED,
    POOL,
    REPEAT,
    RESERVED,
    SlotRules,
    WeighedCandidates,
    exposure_weights,
    fill_slots,
    item_rarity,
    of_new_manufacturers,
    rare_pool,
    weigh,
)
from tests.serving.conftest import build_statistics
from tests.serving.stages.conftest import rerank


def test_an_item_new_to_the_shopper_pays_no_penalty() -> None:
    scores, types = np.array([0.9, 0.8, 0.5, 0.45]), np.array([1, 1, 2, 2])
    bought = np.array([True, False, True, True])
    assert rerank(scores, types, 3, 0.5, bought=bought).tolist() == [0, 1, 2]
    assert rerank(scores, types, 3, 0.5, bought=~bought).tolist() == [0, 2, 3], "0.45 is spared, 0.8 pays"
    assert rerank(scores, types, 3, 0.5, bought=bought & False).tolist() == [0, 2, 1], (
        "of a stranger all are new"
    )


# ------------------------------------------------------------------------------- pins and reserved slots

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
NO_TYPES = np.zeros(6, np.int64)


def fill(k: int, pins: list[int], bought: list[bool] | None = None, reserved: list[int] | None = None) -> Any:
    pool = WeighedCandidates(SCORES, NO_TYPES, bought=np.array(bought or [False] * 6, np.bool_))
    slots = SlotRules(np.array(pins, np.int64), np.array(reserved or [], np.int8))
    rows, why = fill_slots(pool, slots, k, 1.0)
    return rows.tolist(), why.tolist()


def test_a_pin_is_in_its_slot_only() -> None:
    assert fill(4, [-1, 5, -1, 0]) == ([1, 5, 2, 0], [CHOSEN, PINNED, CHOSEN, PINNED])
    assert fill(3, [-1, 5, -1, 0]) == ([1, 5, 2], [CHOSEN, PINNED, CHOSEN]), (
        "the beginning of the longer list"
    )


def test_pins_move_forward_if_other_items_run_out() -> None:
    rows, why = fill(6, [-1, -1, -1, -1, -1, -1, -1, 0, 2])
    assert rows == [1, 3, 4, 5, 0, 2]
    assert why == [CHOSEN] * 4 + [PINNED] * 2


def test_a_reserved_slot_takes_the_best_of_its_kind() -> None:
    bought = [True, True, True, False, False, True]
    assert fill(4, [], bought, [ANY, NEW, REPEAT, NEW]) == (
        [0, 3, 1, 4],
        [CHOSEN, RESERVED, CHOSEN, RESERVED],
    )
    assert fill(3, [], [True] * 6, [NEW]) == ([0, 1, 2], [CHOSEN] * 3), "there is none of its kind"
    assert fill(3, [], [False] * 6, [NEW, REPEAT]) == ([0, 1, 2], [CHOSEN] * 3)
    assert fill(3, [3], bought, [NEW, NEW]) == ([3, 4, 0], [PINNED, RESERVED, CHOSEN]), "a pin comes first"


def test_a_reserved_slot_reaches_beyond_the_best() -> None:
    worth, types, bought = np.linspace(1, 0.1, 40), np.zeros(40, np.int64), np.arange(40) < 39
    slots = SlotRules(reserved=np.array([NEW], np.int8))
    rows, _ = fill_slots(WeighedCandidates(worth, types, bought=bought), slots, 2, 1.0)
    assert rows.tolist() == [39, 0]


# ---------------------------------------------------------------------------------------- novel slots


def test_in_a_novel_slot_rare_items_are_worth_more() -> None:
    rarity = np.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0])  # 0.5 and 0.4 are worth 1.5 and 1.2 there
    slots = SlotRules(novel=np.array([1, 3]))
    rows, why = fill_slots(WeighedCandidates(SCORES, NO_TYPES, rarity), slots, 4, 1.0)
    assert rows.tolist() == [0, 4, 1, 5]
    assert why.tolist() == [CHOSEN, NOVEL, CHOSEN, NOVEL]
    assert rerank(SCORES, NO_TYPES, 2, 1.0, rarity, np.array([3])).tolist() == [0, 1], "there is no such slot"
    same = rerank(SCORES, NO_TYPES, 4, 1.0, np.full(6, 2.0), np.array([1, 3]))
    assert same.tolist() == [0, 1, 2, 3], "where all are as rare the best is the best"


def test_a_novel_slot_loses_at_most_so_much() -> None:
    rarity, novel = np.array([1.0, 1.0, 1.0, 1.0, 3.0, 9.0]), np.array([1])
    lists = [
        rerank(SCORES, NO_TYPES, 2, 1.0, rarity, novel, novel_loss=most).tolist()
        for most in (0.2, 0.31, 0.41)
    ]
    assert lists == [[0, 1], [0, 4], [0, 5]], "0.8 is usual there; 0.5 and 0.4 are rare"


def test_a_novel_slot_reaches_beyond_the_best_after_pins_and_reserved_slots() -> None:
    worth, types, rarity = np.linspace(1, 0.1, 40), np.zeros(40, np.int64), np.ones(40)
    rarity[39] = 100.0
    assert rerank(worth, types, 2, 1.0, rarity, np.array([1])).tolist() == [0, 39]
    pool = WeighedCandidates(worth, types, rarity, bought=np.arange(40) > 20)
    slots = SlotRules(reserved=np.array([ANY, NEW], np.int8), novel=np.array([1]))
    rows, why = fill_slots(pool, slots, 2, 1.0)
    assert (rows.tolist(), why.tolist()) == ([0, 1], [CHOSEN, RESERVED])
    rows, why = fill_slots(pool, SlotRules(np.array([-1, 7]), novel=np.array([1])), 2, 1.0)
    assert (rows.tolist(), why.tolist()) == ([0, 7], [CHOSEN, PINNED])


@given(st.integers(0, 2**32 - 1), st.integers(0, 15), st.floats(0.1, 1))
def test_every_candidate_of_a_novel_slot_is_cached(seed: int, k: int, penalty: float) -> None:
    """The preselected rows give the same list as all rows."""
    rng = np.random.default_rng(seed)
    worth, rarity, types = rng.random(200), rng.uniform(1, 9, 200), rng.integers(0, 9, 200)
    novel = np.array([3, 8, 9])
    few = np.sort(np.union1d(np.argsort(-worth)[: POOL * k], np.argsort(-worth * rarity)[: rare_pool(novel)]))
    expected = rerank(worth, types, k, penalty, rarity, novel)
    rows = rerank(worth[few], types[few], k, penalty, rarity[few], novel)
    assert few[rows].tolist() == expected.tolist()


@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 4)), max_size=60),
    st.integers(0, 20),
    st.floats(0.1, 1),
)
def test_without_rules_and_weights_the_choice_is_greedy_by_type(
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


# ------------------------------------------------------------------------- the list that bundles promise


def any_case(rng: np.random.Generator) -> tuple[WeighedCandidates, SlotRules, int, float]:
    """Return candidates with equal worths among them, and any mixture of pins, kinds and novel slots."""
    n, pins = int(rng.integers(0, 120)), np.full(16, -1)
    some = min(int(rng.integers(0, 8)), n)
    pins[rng.permutation(16)[:some]] = rng.permutation(n)[:some]
    pool = WeighedCandidates(
        np.round(rng.random(n), int(rng.integers(1, 6))),
        rng.integers(0, 9, n),
        np.round(rng.uniform(1, 9, n), 1) if rng.random() < 0.5 else NO_RARITY,
        rng.random(n) < rng.random(),
    )
    reserved = rng.integers(0, 3, int(rng.integers(0, 12))).astype(np.int8)
    slots = SlotRules(pins, reserved, np.sort(rng.permutation(16)[: int(rng.integers(0, 5))]))
    return pool, slots, int(rng.integers(0, 16)), float(rng.choice([1.0, 0.95, 0.5]))


def test_the_lists_equal_the_recorded_ones() -> None:
    """A bundle's golden requests hold few rules; the sum was recorded before the slots were functions."""
    rng, recorded = np.random.default_rng(0), 0
    for _ in range(2_000):
        rows, why = fill_slots(*any_case(rng))
        recorded = zlib.crc32(rows.tobytes() + why.tobytes(), recorded)
    assert recorded == 2_700_505_103


# -------------------------------------------------------------------------------------------- weights


def test_items_new_to_the_shopper_gain_and_a_stranger_s_do_not() -> None:
    statistics, _ = build_statistics(6)
    codes, scores = np.array([3, 1]), np.array([0.25, 0.5], np.float32)
    weights = np.arange(1.0, len(statistics.item_ids) + 1)
    nothing = codes[:0]
    assert weigh(statistics, codes, scores, None, 1.5, np.array([0, 3])).tolist() == [0.25, 0.75]
    assert weigh(statistics, codes, scores, None, 1.5, nothing).tolist() == [0.25, 0.5]
    assert weigh(statistics, codes, scores, weights, 1.5, np.array([0, 3])).tolist() == [1.0, 1.5]
    assert weigh(statistics, codes, scores, weights, 1.0, np.array([0, 3])).tolist() == [1.0, 1.0]


def test_rare_and_new_items_are_worth_more() -> None:
    statistics, _ = build_statistics(6)
    table = replace(
        statistics,
        basket_count=np.array([400, 4, 4, 4, 0, 4], np.float32),
        total_baskets=np.array(4_000.0),
        age_days=np.array([300, 91, 20, 10, 0, 10], np.float32),
        manufacturer=np.array([1, 2, 2, 1, 3, 0], np.int32),
    )
    # Manufacturer 1 sells for 300 days, 2 for 91, 3 since today; that of the last item is unknown.
    assert of_new_manufacturers(table).tolist() == [False, True, True, False, True, False]
    assert exposure_weights(table, 0.5) == pytest.approx([1.0, 1.5, 1.5, 1.0, 1.5, 1.0])
    rare = 1_000**0.1
    assert item_rarity(table, 0.1) == pytest.approx([10**0.1, rare, rare, rare, 4_000**0.1, rare])
