"""Look-ups and choices of candidates against a few lines of plain Python."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.candidates import best, choose
from feature_repo.kernels.pairs import find
from feature_repo.statistics import Statistics

codes = st.lists(st.integers(0, 11), max_size=12)
distinct = st.lists(st.integers(0, 11), max_size=12, unique=True)


@given(st.lists(st.integers(0, 11), unique=True), st.lists(st.integers(-2, 11)))
def test_find_gives_places_and_wipes_its_marks(there: list[int], wanted: list[int]) -> None:
    marks = np.zeros(12, np.int32)
    found = find(np.array(there, np.int64), np.array(wanted, np.int64), marks)
    assert found.tolist() == [there.index(code) if code in there else -1 for code in wanted]
    assert not marks.any()


@given(codes, st.none() | codes, codes, distinct, codes, codes, st.integers(0, 5), st.integers(0, 12))
def test_candidates_come_from_the_sources_in_order(
    barred: list[int],
    offered: list[int] | None,
    bought: list[int],
    partners: list[int],
    near: list[int],
    popular: list[int],
    most_partners: int,
    most: int,
) -> None:
    """Strengths grow from partner to partner, so that the last partner is the best."""
    marks = np.zeros(12, np.int32)
    lists = [np.array(given_codes, np.int64) for given_codes in (bought, partners, near, popular)]
    favourites = np.arange(len(bought))[::-1]
    found, sources = choose(
        np.array(barred[:1], np.int64),
        np.array(barred[1:], np.int64),
        np.empty(0, bool) if offered is None else np.isin(np.arange(12), offered),
        lists[0],
        favourites,
        lists[1],
        np.arange(len(partners), dtype=np.float32),
        most_partners,
        lists[2][::-1][:2],
        lists[2],
        lists[2][:0],
        lists[3],
        most,
        marks,
    )
    seen, expected = set(barred) | (set() if offered is None else set(range(12)) - set(offered)), []
    strongest, others = partners[::-1][:most_partners], partners[::-1][most_partners:]
    order = ((0, bought[::-1]), (1, strongest), (6, near[::-1][:2]), (2, near), (1, others), (4, popular))
    for source, given_codes in order:
        for code in given_codes:
            if code not in seen:
                seen.add(code)
                expected.append((code, source))
    assert list(zip(found.tolist(), sources.tolist(), strict=True)) == expected[:most]
    assert not marks.any()


@given(st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0, np.nan]), max_size=40), st.integers(0, 45))
def test_the_best_values_are_those_of_a_stable_sort(values: list[float], k: int) -> None:
    array = np.array(values, np.float32)
    expected = np.argsort(np.where(np.isnan(array), np.inf, -array), kind="stable")[:k]
    assert best(array, k).tolist() == expected.tolist()


def test_each_thread_has_its_own_marks(toy_tables: Statistics) -> None:
    everything = np.arange(80)

    def ask(seed: int) -> bool:
        there = np.random.default_rng(seed).permutation(80)[:40]
        return all((there[toy_tables.find(there, there)] == there).all() for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(8)))
    assert (toy_tables.find(everything[:0], everything) == -1).all(), "all marks are wiped"


def test_marks_are_not_used_again_after_an_error(toy_tables: Statistics) -> None:
    def leave(marks: np.ndarray) -> None:
        marks[3] = 1
        raise RuntimeError

    with pytest.raises(RuntimeError):
        toy_tables.marked(leave)
    assert toy_tables.find(np.array([5]), np.array([3])).tolist() == [-1]
