"""`fold` against numbers worked out by hand, and against itself in another order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.aggregates import DAY_S, MAX_ITEMS, UserHistory, empty_history, fold, pack, unpack

MONDAY = 1_511_740_800


def history_of(*baskets: tuple[int, list[str]]) -> UserHistory:
    history = empty_history()
    for at, items in baskets:
        history = fold(history, at, np.array(sorted(items)), spend=10.0, discount=1.0)
    return history


def test_two_baskets_by_hand() -> None:
    history = history_of((MONDAY, ["bread", "milk"]), (MONDAY + 60 * DAY_S, ["milk"]))
    assert history.items.tolist() == ["bread", "milk"]
    assert history.count.tolist() == [1, 2]
    # Milk was bought 60 days apart: its 60-day decayed count is exp(-60 / 60) + 1.
    assert history.decayed[1, 1] == pytest.approx(np.exp(-1) + 1)
    assert history.decayed[0].tolist() == [1, 1, 1]
    assert history.first_at.tolist() == [MONDAY, MONDAY]
    assert history.last_at.tolist() == [MONDAY, MONDAY + 60 * DAY_S]
    assert (history.basket_count, history.line_count) == (2, 3)
    assert (history.spend, history.discount) == (20.0, 2.0)


def test_decayed_at_moves_every_item_to_one_time() -> None:
    history = history_of((MONDAY, ["bread"]), (MONDAY + 30 * DAY_S, ["milk"]))
    now = history.decayed_at(MONDAY + 30 * DAY_S)
    np.testing.assert_allclose(now[:, 0], [np.exp(-2), 1.0])


def test_fold_leaves_the_old_history_alone() -> None:
    before = history_of((MONDAY, ["milk"]))
    packed = pack(before)
    fold(before, MONDAY + DAY_S, np.array(["milk"]), 1.0, 0.0)
    assert pack(before) == packed


def test_a_late_basket_gives_the_same_state() -> None:
    baskets = [(MONDAY, ["milk"]), (MONDAY + 9 * DAY_S, ["milk", "tea"]), (MONDAY + 20 * DAY_S, ["tea"])]
    in_order, late = history_of(*baskets), history_of(baskets[0], baskets[2], baskets[1])
    assert late.items.tolist() == in_order.items.tolist()
    np.testing.assert_allclose(late.decayed, in_order.decayed, rtol=1e-6)
    assert late.last_at.tolist() == in_order.last_at.tolist()
    assert late.first_at.tolist() == in_order.first_at.tolist()
    assert late.last_basket_at == in_order.last_basket_at


def test_history_is_capped_at_the_items_bought_most_lately() -> None:
    history = fold(empty_history(np.int64), MONDAY, np.arange(MAX_ITEMS), 0.0, 0.0)
    history = fold(history, MONDAY + DAY_S, np.arange(MAX_ITEMS, MAX_ITEMS + 10), 0.0, 0.0)
    assert len(history.items) == MAX_ITEMS
    assert set(range(MAX_ITEMS, MAX_ITEMS + 10)) <= set(history.items.tolist())


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sets(st.sampled_from("abcdefgh"), min_size=1)), max_size=12)
)
def test_pack_and_unpack_are_inverse(baskets: list[tuple[int, set[str]]]) -> None:
    history = history_of(*((MONDAY + day * DAY_S, sorted(items)) for day, items in baskets))
    again = unpack(pack(history))
    assert again.items.tolist() == history.items.tolist()
    for column in ("count", "decayed", "first_at", "last_at"):
        np.testing.assert_array_equal(getattr(again, column), getattr(history, column))
    assert pack(again) == pack(history)


@given(st.lists(st.tuples(st.integers(0, 400), st.sets(st.integers(0, 30), min_size=1)), max_size=12))
def test_codes_and_ids_fold_alike(baskets: list[tuple[int, set[int]]]) -> None:
    ids = np.array(sorted(str(i) for i in range(31)))
    by_code, by_id = empty_history(np.int64), empty_history()
    for day, items in baskets:
        codes = np.array(sorted(items))
        by_code = fold(by_code, MONDAY + day * DAY_S, codes, 1.0, 0.0)
        by_id = fold(by_id, MONDAY + day * DAY_S, ids[codes], 1.0, 0.0)
    assert ids[by_code.items].tolist() == by_id.items.tolist()
    np.testing.assert_array_equal(by_code.decayed, by_id.decayed)


@pytest.mark.parametrize("broken", [b"", b"\x09" * 60, pack(empty_history())[:-3]])
def test_broken_rows_are_refused(broken: bytes) -> None:
    with pytest.raises(ValueError, match="packed history"):
        unpack(broken)


def test_a_truncated_row_is_refused() -> None:
    with pytest.raises(ValueError, match="cut short"):
        unpack(pack(history_of((MONDAY, ["milk", "tea"])))[:70])
