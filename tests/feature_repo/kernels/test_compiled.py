"""The compiled loops against what a few lines of plain Python say."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numba.core import caching

from components.data.fit_statistics import fit, fit_vocabulary, purchases_of
from feature_repo.kernels import compiled as kernels
from feature_repo.statistics import NO_ITEM, Statistics
from feature_repo.toy_shop import toy_dataset
from feature_repo.transforms import bought_together, link_weights, strongest_partners


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    data = toy_dataset(users=12, weeks=20)
    purchases, items = purchases_of(data.events), data.items.set_index("item_id")
    return fit(purchases, items, fit_vocabulary(purchases, items), pd.Timestamp("2024-06-01", tz="UTC"))


codes = st.lists(st.integers(0, 11), max_size=12)
names = st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1, max_size=9)


@given(st.lists(st.integers(0, 11), unique=True), st.lists(st.integers(-2, 11)))
def test_find_gives_places_and_wipes_its_marks(there: list[int], wanted: list[int]) -> None:
    marks = np.zeros(12, np.int32)
    found = kernels.find(np.array(there, np.int64), np.array(wanted, np.int64), marks)
    assert found.tolist() == [there.index(code) if code in there else -1 for code in wanted]
    assert not marks.any()


@given(codes, codes, codes, codes, codes, st.integers(0, 5), st.integers(0, 12))
def test_sources_are_chosen_from_in_their_order(
    barred: list[int],
    bought: list[int],
    partners: list[int],
    near: list[int],
    popular: list[int],
    most_partners: int,
    most: int,
) -> None:
    """Strengths grow from partner to partner, so that the last of them is the best."""
    marks = np.zeros(12, np.int32)
    lists = [np.array(given_codes, np.int64) for given_codes in (bought, partners, near, popular)]
    favourites = np.arange(len(bought))[::-1]
    found, sources = kernels.choose(
        np.array(barred[:1], np.int64),
        np.array(barred[1:], np.int64),
        lists[0],
        favourites,
        lists[1],
        np.arange(len(partners), dtype=np.float32),
        most_partners,
        lists[2],
        lists[2][:0],
        lists[3],
        most,
        marks,
    )
    seen, expected = set(barred), []
    best = partners[::-1][:most_partners]
    for source, given_codes in ((0, bought[::-1]), (1, best), (2, near), (4, popular)):
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
    assert kernels.best(array, k).tolist() == expected.tolist()


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 30), st.integers(1, 5))
def test_the_last_distinct_values(item: list[int], lines: int, most: int) -> None:
    expected = list(dict.fromkeys(item[::-1][:lines]))[:most]
    assert kernels.last_distinct(np.array(item, np.uint16), lines, most).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=20))
def test_baskets_and_repetitions(lines: list[tuple[int, int, int]]) -> None:
    lines.sort()
    columns = np.array(lines, np.int64).reshape(-1, 3).T
    at, basket, item = columns[0].astype(float), columns[1].astype("u4"), columns[2].astype("u2")
    assert kernels.count_baskets(at, basket) == len({line[:2] for line in lines})
    assert kernels.repeats(at, basket, item) == (len(set(lines)) < len(lines))
    paid = np.arange(len(lines), dtype=np.float32)
    expected = len({line[:2] for line in lines}), len({line[2] for line in lines}), sum(range(len(lines)))
    assert kernels.totals_of(at, basket, item, paid, 3) == expected


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 8)), max_size=9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=4),
)
def test_sums_by_level(lines: list[tuple[int, int, int]], wanted: list[tuple[int, int]]) -> None:
    columns = np.array(lines, np.int64).reshape(-1, 3).T
    asked = np.array(wanted, np.int64).reshape(-1, 2).T
    found = kernels.sums_by_level(columns[:2], columns[2:].astype(float), np.array([3, 2]), asked)
    for level in range(2):
        for at, codes in enumerate(wanted):
            own = [line[2] for line in lines if 0 < line[level] == codes[level]]
            assert found[level, :, at].tolist() == [sum(own), len(own)]


@given(st.lists(names, unique=True, min_size=1, max_size=20), st.lists(names, max_size=20))
def test_ids_become_codes_as_a_dict_says(known: list[str], asked: list[str]) -> None:
    """Names of any length in bytes, some in the catalogue, some only like them."""
    known.sort()
    asked = [*asked, *known[::-1], known[0] + "x", known[0][:-1] or "y"]
    text = np.frombuffer("".join(known).encode(), np.uint8)
    ends = np.cumsum([len(name.encode()) for name in known])
    slots = np.empty((64, 2), np.int64)
    assert kernels.index_ids(text, ends, slots) == -1
    found = kernels.codes_of(np.frombuffer("\n".join(asked).encode(), np.uint8), len(asked), slots)
    code_of = {name: code for code, name in enumerate(known)}
    assert found.tolist() == [code_of.get(name, -1) for name in asked]


def test_two_ids_with_one_hash_are_told() -> None:
    text, slots = np.frombuffer(b"aba", np.uint8), np.empty((8, 2), np.int64)
    assert kernels.index_ids(text, np.array([1, 2, 3]), slots) == 2, "the third is the first again"


@given(st.lists(st.tuples(*[st.floats(width=32)] * 3), max_size=5))
def test_numbers_within_a_limit(rows: list[tuple[float, float, float]]) -> None:
    array = np.array(rows, np.float32).reshape(-1, 3)
    expected = bool((np.abs(array) <= 1e9).all())
    assert kernels.within(array, 1e9) == expected
    assert not kernels.within(np.array([[0.0, np.nan]], np.float32), 1e9)
    assert kernels.within(np.array([[-1e9, 1e9]], np.float32), 1e9)


def test_rows_are_filled_from_their_parts() -> None:
    rows = np.zeros((3, 6), np.float32)
    table = np.array([[10, 11], [20, 21]], np.float32)
    kernels.begin_rows(rows, np.array([1.5, 2.5]), table, np.array([1, 0, 1]))
    kernels.put_columns(rows, np.array([5, -1, 4]), np.array([[7, 8, 9], [6, 6, 6], [0, 1, 2]], np.float32))
    assert rows.tolist() == [[1.5, 2.5, 20, 21, 0, 7], [1.5, 2.5, 10, 11, 1, 8], [1.5, 2.5, 20, 21, 2, 9]]


def test_lift_and_levels_are_what_the_tables_say(statistics: Statistics) -> None:
    basket, types = np.array([1, 3, 1]), np.array([0, 2, 3, 1])
    found = kernels.lift(statistics.type_lift.view(np.uint16), basket, types)
    expected = statistics.type_lift[np.ix_(basket, types)].astype(np.float32)
    assert found.tolist() == [expected.mean(0).tolist(), expected.max(0).tolist()]
    codes = np.array([5, 0, 5, 79])
    levels = statistics.categorical[codes].T.astype(np.int64)
    assert kernels.categories(codes, 79, levels).tolist() == np.vstack([[6, 1, 6, 0], levels]).T.tolist()
    assert (
        kernels.levels_of(statistics.categorical, codes).tolist() == statistics.categorical[codes].T.tolist()
    )


def test_every_float16_is_read_as_it_is() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    table = np.resize(finite, (252, 252))
    found = np.stack([kernels.lift(table, np.array([row]), np.arange(252)) for row in range(252)])
    expected = table.view(np.float16).astype(np.float32)
    assert (found[:, 0] == expected).all()
    assert (found[:, 1] == expected).all()


def test_a_text_with_another_number_of_ids_gives_none(statistics: Statistics) -> None:
    assert statistics.codes_in(b"item-001\nitem-000", 2).tolist() == [1, 0]
    assert statistics.codes_in(b"item-001\nitem-000", 1).tolist() == []
    assert statistics.codes_in(b"item-001\nitem-000", 3).tolist() == []
    assert statistics.codes_in(b"", 1).tolist() == [NO_ITEM]


@given(st.lists(st.integers(0, 79), unique=True, max_size=12))
def test_partners_are_those_that_a_dictionary_collects(statistics: Statistics, items: list[int]) -> None:
    partners = bought_together(statistics, np.array(items, np.int64))
    weights = link_weights(statistics)
    expected: dict[int, list[np.ndarray]] = {}
    for item in items:
        for partner, count in zip(statistics.neighbours[item], statistics.together_count[item], strict=True):
            if partner != NO_ITEM:
                strength = count * weights[item, :3] * weights[partner, 3:]
                expected.setdefault(int(partner), []).append(strength)
    assert partners.codes.tolist() == list(expected)
    assert partners.links.tolist() == [len(links) for links in expected.values()]
    if expected:
        sums = np.array([np.sum(links, 0) for links in expected.values()]).T
        largest = np.array([np.max(links, 0) for links in expected.values()]).T
        np.testing.assert_allclose(partners.sums, sums, rtol=1e-5)
        np.testing.assert_allclose(partners.largest, largest, rtol=1e-5)
        codes = np.array(list(expected))
        for code, strongest in zip(
            codes, strongest_partners(statistics, np.array(items), codes).tolist(), strict=True
        ):
            by_item = {
                item: float(count * weights[item, 0])
                for item in items
                for partner, count in zip(
                    statistics.neighbours[item], statistics.together_count[item], strict=True
                )
                if partner == code
            }
            assert by_item[strongest] == max(by_item.values())
    wanted = np.arange(80)
    weights, given_items = link_weights(statistics), np.array(items, np.int64)
    found = statistics.marked(
        kernels.link_to,
        wanted,
        given_items,
        weights[given_items, 0],
        statistics.neighbours,
        statistics.together_count,
    )
    np.testing.assert_allclose(
        found * weights[wanted, 3],
        [sum(link[0] for link in expected.get(code, [])) for code in range(80)],
        rtol=1e-5,
    )


def test_nobody_links_to_an_item_without_partners(statistics: Statistics) -> None:
    lonely = replace(statistics, neighbours=np.full_like(statistics.neighbours, NO_ITEM))
    assert len(bought_together(lonely, np.arange(5)).codes) == 0
    assert strongest_partners(lonely, np.arange(5), np.array([7, 9])).tolist() == [NO_ITEM, NO_ITEM]


@given(st.lists(st.integers(0, 79), unique=True), st.lists(st.integers(0, 79), unique=True))
def test_a_few_are_found_as_many_are(statistics: Statistics, codes: list[int], wanted: list[int]) -> None:
    places = [codes.index(code) if code in codes else -1 for code in wanted]
    given_codes, asked = np.array(codes, np.int64), np.array(wanted, np.int64)
    assert statistics.marked(kernels.find_few, given_codes, asked).tolist() == places
    assert statistics.find(given_codes, asked).tolist() == places


def test_threads_have_marks_of_their_own(statistics: Statistics) -> None:
    everything = np.arange(80)

    def ask(seed: int) -> bool:
        there = np.random.default_rng(seed).permutation(80)[:40]
        return all((there[statistics.find(there, there)] == there).all() for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(8)))
    assert (statistics.find(everything[:0], everything) == -1).all(), "all marks are wiped"


def test_marks_that_an_error_left_dirty_are_not_lent_again(statistics: Statistics) -> None:
    def leave(marks: np.ndarray) -> None:
        marks[3] = 1
        raise RuntimeError

    with contextlib.suppress(RuntimeError):
        statistics.marked(leave)
    assert statistics.find(np.array([5]), np.array([3])).tolist() == [-1]


def test_where_nothing_can_be_written_it_is_compiled_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to define a function whose code it cannot keep."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def twice(number: int) -> int:
        return 2 * number

    with pytest.raises(RuntimeError, match="no locator"):
        njit(cache=True)(twice)
    assert kernels.compiled(twice)(21) == 42
