"""A row is a set: the same events make the same row in any order, with any repetitions and batches."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo import aggregates
from feature_repo.aggregates import (
    CLICK,
    DAY_S,
    IMPRESSION,
    PURCHASE,
    UserEvents,
    check_owner,
    fold,
    hash_ids,
    make_events,
    merge_lines,
    no_events,
    pack,
    summary_of,
    unpack,
)

MONDAY = 1_704_067_200.0

Line = tuple[float, str, int, int, float]  # at, item, kind, basket, paid


def row_of(lines: list[tuple[int, Line]], version: int = -1) -> UserEvents:
    """Make a row of numbered lines; the number is the event's key."""
    columns = list(zip(*[line for _, line in lines], strict=True)) if lines else [()] * 5
    at, items, kind, basket, paid = columns
    return make_events(
        np.array(items, dtype=str),
        np.array(at, np.float64),
        np.array(kind, np.uint8),
        np.array(basket, np.uint32),
        np.array([key for key, _ in lines], np.uint64),
        np.array(paid, np.float32),
        np.zeros(len(lines), np.float32),
        version=version,
    )


def same(first: UserEvents, second: UserEvents) -> bool:
    return pack(first) == pack(second)


lines = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda hour: MONDAY + 3_600.0 * hour),
        st.sampled_from(["tea", "milk", "bread", "eggs"]),
        st.sampled_from([PURCHASE, PURCHASE, CLICK]),
        st.integers(0, 5),
        st.floats(0, 100, width=32),
    ),
    max_size=30,
)


@given(lines, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_order_repetition_and_batches_do_not_matter(events: list[Line], random: object) -> None:
    numbered = list(enumerate(events))
    whole = row_of(numbered)
    messages = numbered + random.sample(numbered, len(numbered) // 2)  # type: ignore[attr-defined]
    random.shuffle(messages)  # type: ignore[attr-defined]
    row = no_events()
    while messages:
        size = random.randint(1, len(messages))  # type: ignore[attr-defined]
        batch, messages = messages[:size], messages[size:]
        row = fold(row, row_of(batch))
    assert same(row, whole)
    assert same(unpack(pack(row)), whole)


@given(lines)
@settings(deadline=None, max_examples=100)
def test_a_full_row_keeps_the_latest_lines_in_any_order_of_arrival(events: list[Line]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregates, "MAX_PURCHASES", 6)
        patch.setattr(aggregates, "MAX_VIEWS", 2)
        numbered = list(enumerate(events))
        row = no_events()
        for one in reversed(numbered):
            row = fold(row, row_of([one]))
        assert same(row, row_of(numbered))
        assert (row.kind == PURCHASE).sum() <= 6
        assert (row.kind != PURCHASE).sum() <= 2
        assert len(row.items) == len(np.unique(row.item))
        dropped = [line for key, line in numbered if key not in row.key]
        for kind in (PURCHASE, CLICK):
            kept = row.at[row.kind == kind]
            assert all(at <= kept.min() for at, _, other, *_ in dropped if other == kind)


def test_the_first_of_two_events_with_one_id_stays() -> None:
    row = fold(
        row_of([(1, (MONDAY, "tea", PURCHASE, 1, 2.0))]), row_of([(1, (MONDAY, "milk", PURCHASE, 1, 9.0))])
    )
    assert row.items.tolist() == ["tea"]
    assert row.paid.tolist() == [2.0]


def test_a_batch_with_more_items_than_a_row_can_name_keeps_the_last() -> None:
    """A repeated event among 70,000 items: numbers of 16 bits would name others."""
    numbered = [(key, (MONDAY + key, f"i{key:05d}", PURCHASE, key, 1.0)) for key in range(70_000)]
    row = row_of([*numbered, numbered[-1]])
    assert row.codes().tolist() == [f"i{key:05d}" for key in range(70_000 - aggregates.MAX_PURCHASES, 70_000)]


def test_the_version_is_the_newest_and_a_repetition_alone_keeps_the_lines() -> None:
    one = (1, (MONDAY, "tea", PURCHASE, 1, 2.0))
    row = row_of([one], version=5)
    assert fold(row, row_of([one], version=3)) is row
    assert fold(row, row_of([one], version=9)).version == 9
    assert unpack(pack(row)).version == 5


def test_folding_leaves_both_rows_alone() -> None:
    first, second = (row_of([(i, (MONDAY + i, "tea", PURCHASE, i, 1.0))]) for i in range(2))
    before = pack(first), pack(second)
    fold(first, second)
    assert (pack(first), pack(second)) == before


def test_history_counts_baskets_decays_them_and_knows_first_and_last() -> None:
    row = row_of(
        [
            (1, (MONDAY, "milk", PURCHASE, 1, 2.0)),
            (2, (MONDAY, "tea", PURCHASE, 1, 3.0)),
            (3, (MONDAY, "tea", PURCHASE, 1, 3.0)),  # scanned twice: one line, paid twice
            (4, (MONDAY + DAY_S, "cake", CLICK, 7, 0.0)),
            (5, (MONDAY + 15 * DAY_S, "milk", PURCHASE, 2, 2.5)),
        ]
    )
    assert len(row) == 5
    history, totals = summary_of(merge_lines(row), MONDAY + 30 * DAY_S)
    assert history.items.tolist() == ["milk", "tea"]
    assert history.count.tolist() == [2, 1]
    assert (totals.baskets, totals.lines, totals.spend) == (2, 3, 10.5)
    np.testing.assert_allclose(history.decayed[:, 0], np.exp([-2, -0.5, -0.25]) + np.exp([-1, -0.25, -0.125]))
    np.testing.assert_allclose(history.decayed[:, 1], np.exp([-2, -0.5, -0.25]))
    assert history.first_at.tolist() == [MONDAY, MONDAY]
    assert history.last_at.tolist() == [MONDAY + 15 * DAY_S, MONDAY]
    assert (totals.first_basket_at, totals.last_basket_at) == (MONDAY, MONDAY + 15 * DAY_S)


def test_a_history_without_seen_items_has_the_layout_of_any_other() -> None:
    """numba compiles its loops again for another layout, which takes seconds inside a request."""
    bought: list[tuple[int, Line]] = [
        (1, (MONDAY, "tea", PURCHASE, 0, 1.0)),
        (2, (MONDAY, "milk", PURCHASE, 0, 1.0)),
    ]
    seen: tuple[int, Line] = (3, (MONDAY, "bread", CLICK, 0, 0.0))
    layouts = []
    for events in (bought, [*bought, seen]):
        history, _ = summary_of(row_of(events), MONDAY + DAY_S)
        assert history.items.tolist() == ["milk", "tea"]
        columns = history.count, history.decayed, history.first_at, history.last_at
        layouts.append([numba.typeof(column) for column in columns])
    assert layouts[0] == layouts[1]


def test_repeated_scans_become_one_line_with_the_sum_of_both() -> None:
    row = row_of(
        [
            (1, (MONDAY, "tea", PURCHASE, 1, 3.0)),
            (2, (MONDAY, "tea", IMPRESSION, 1, 0.0)),  # an impression of the same basket, between the scans
            (3, (MONDAY, "tea", PURCHASE, 1, 2.5)),
            (4, (MONDAY, "tea", PURCHASE, 2, 3.0)),
            (5, (MONDAY + 9, "cake", CLICK, 7, 0.0)),
            (6, (MONDAY + 9, "cake", CLICK, 7, 0.0)),  # two clicks stay two
        ]
    )
    found = merge_lines(row)
    assert found.kind.tolist().count(PURCHASE) == 2
    assert found.kind.tolist().count(CLICK) == 2
    assert sorted(found.paid[found.kind == PURCHASE].tolist()) == [3.0, 5.5]
    assert len(row) == 6
    assert row.paid.sum() == 8.5
    assert merge_lines(found) is found


@given(lines)
def test_baskets_and_distinct_items_of_a_row(events: list[Line]) -> None:
    row = row_of(list(enumerate(events)))
    assert row.baskets == len({(at, basket) for at, _, _, basket, _ in events})
    assert row.distinct().tolist() == sorted({item for _, item, *_ in events})


def test_before_is_strict_and_the_packed_part_drops_later_items() -> None:
    row = row_of([(1, (MONDAY, "tea", PURCHASE, 1, 1.0)), (2, (MONDAY + 60, "milk", PURCHASE, 2, 1.0))])
    assert len(row.before(MONDAY)) == 0
    past = row.before(MONDAY + 60)
    assert past.distinct().tolist() == ["tea"]
    assert b"milk" not in pack(past)
    assert summary_of(past, MONDAY + 60)[0].items.tolist() == ["tea"]


def test_codes_and_ids_fold_to_the_same_row() -> None:
    ids = np.array(["bread", "milk", "tea"])
    named = row_of([(i, (MONDAY + i, str(ids[i % 3]), PURCHASE, i, 1.0)) for i in range(9)])
    coded = make_events(
        np.arange(9) % 3, *(getattr(named, n) for n in ("at", "kind", "basket", "key", "paid", "discount"))
    )
    assert same(coded.named(ids), named)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: row[:10], "at least"),
        (lambda row: b"\x07" + row[1:], "publish the features again"),
        (lambda row: row[:40], "cut short"),
        (lambda row: row + b"\nmore", "it is damaged"),
    ],
)
def test_a_damaged_row_is_refused(damage: object, message: str) -> None:
    row = pack(row_of([(i, (MONDAY + i, "tea", PURCHASE, i, 1.0)) for i in range(3)]))
    with pytest.raises(ValueError, match=message):
        unpack(damage(row))  # type: ignore[operator]


def test_a_packed_row_says_whose_it_is() -> None:
    events = row_of([(i, (MONDAY + i, "tea", PURCHASE, i, 1.0)) for i in range(3)])
    row = pack(events, "ann")
    check_owner(row, "ann")
    assert same(unpack(row), events)
    for other in ("bob", "", "ann "):
        with pytest.raises(ValueError, match="of another user"):
            check_owner(row, other)
    with pytest.raises(ValueError, match="of another user, or of nobody: publish the features again"):
        check_owner(pack(events), "ann")


def test_an_id_has_the_same_hash_everywhere() -> None:
    # printf tea | b2sum -l 64
    assert hash_ids(["", "tea"]).tobytes().hex() == "e4a6a0577479b2b4ba6587c1bb84c490"
