"""The list that is cached: the best candidates of an answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import no_events
from feature_repo.queries import Query
from serving.stages.reranking import (
    KEPT,
    OBJECTS_BYTES,
    REPEAT,
    RESERVED,
    Ranked,
    SlotRules,
    WeighedCandidates,
    best_of,
    fill_slots,
)
from serving.stages.retrieval import Candidates, build_query
from tests.serving.conftest import CUT, build_statistics
from tests.serving.stages.conftest import rerank

ITEMS = 240
STATISTICS = build_statistics()[0]


def ranked_of(codes: list[int], history: bool, whole: bool) -> Ranked:
    m = len(codes)
    return Ranked(
        codes=np.array(codes, np.int32),
        scores=np.linspace(0.9, 0.1, m, dtype=np.float32),
        source=np.array([0 if history else 1 + at % 4 for at in range(m)], np.int8),
        times=np.full(m, 3 if history else 0, np.uint16),
        last_at=np.full(m, 1e9 if history else 0.0),
        worth=np.linspace(0.9, 0.1, m),
        best=m,
        whole=whole,
    )


@pytest.mark.parametrize("size", [0, 1, KEPT])
def test_its_size_is_that_of_its_columns_and_objects(size: int) -> None:
    assert ranked_of(list(range(size)), history=True, whole=False).size_bytes == OBJECTS_BYTES + 27 * size


@pytest.mark.parametrize(
    ("score", "expected"), [(0.0, True), (1.0, True), (-1e-6, False), (1.1, False), (np.nan, False)]
)
def test_scores_outside_0_to_1_are_no_probabilities(score: float, expected: bool) -> None:
    ranked = ranked_of([1, 2, 3], history=False, whole=True)
    ranked.scores[1] = score
    assert ranked.holds_probabilities() == expected


@pytest.fixture
def query(row_of) -> Query:  # type: ignore[no-untyped-def]
    at = CUT.timestamp()
    row = row_of([(at - 3 * 86_400, ["1000005", "1000050"], 9.0, 0.0), (at - 86_400, ["1000005"], 4.0, 0.0)])
    return build_query(STATISTICS, ("1000010",), row, at)


def test_the_best_are_kept_in_the_order_of_their_scores(query: Query) -> None:
    codes = np.array([5, 50, *range(100, 200)], np.int64)
    source = np.array([0, 0, *[4] * 100], np.int8)
    scores = np.random.default_rng(0).random(102).astype(np.float32)
    scores[0], scores[1] = 1.5, 0.5
    scores[10] = scores[20]  # equal ones stay in the order of retrieval
    ranked = best_of(query, Candidates(codes, source), scores)
    order = np.argsort(-scores, kind="stable")[:KEPT]
    assert ranked.codes.tolist() == codes[order].tolist()
    assert (ranked.scores == scores[order]).all()
    assert not ranked.whole
    assert (ranked.codes[0], ranked.times[0], ranked.last_at[0]) == (5, 2, CUT.timestamp() - 86_400)
    bought = ranked.source == 0
    assert ranked.times[~bought].sum() == 0
    assert ranked.times[ranked.codes == 50].tolist() in ([1], [])


def test_an_item_that_joined_leaves_the_purchases_of_the_others_alone(row_of) -> None:  # type: ignore[no-untyped-def]
    """The new item has the largest code and the smallest id: its shopper's codes are not sorted."""
    ids = np.array([*STATISTICS.item_ids[:-1], "0000001"])
    statistics = replace(STATISTICS, item_ids=ids, new_items=1)
    at = CUT.timestamp()
    row = row_of([(at - 86_400, ["0000001", "1000003", "1000007"], 9.0, 0.0)])
    query = build_query(statistics, (), row, at)
    codes = query.history.items
    assert codes.tolist() == [ITEMS - 1, 3, 7]
    ranked = best_of(query, Candidates(codes, np.zeros(3, np.int8)), np.ones(3, np.float32))
    assert ranked.times.tolist() == [1, 1, 1]
    assert ranked.last_at.tolist() == [at - 86_400] * 3


def test_a_list_of_few_candidates_is_complete(query: Query) -> None:
    ranked = best_of(query, Candidates(np.array([7]), np.array([4], np.int8)), np.array([0.1], np.float32))
    assert ranked.whole
    assert ranked.suffices(10)
    nobody = best_of(query, Candidates(np.empty(0, np.int64), np.empty(0, np.int8)), np.empty(0, np.float32))
    assert nobody.whole


def test_a_complete_list_with_items_removed_is_no_longer_complete(query: Query) -> None:
    codes, scores = np.arange(100, 140), np.linspace(1, 0.1, 40, dtype=np.float32)
    ranked = best_of(query, Candidates(codes, np.full(40, 4, np.int8)), scores)
    assert ranked.without(np.array([5])).suffices(20), "nothing was taken out"
    assert ranked.without(codes[:36]).suffices(1)
    assert not ranked.without(codes[:36]).suffices(10)


def test_a_pinned_item_is_not_among_the_best_of_few_candidates(query: Query) -> None:
    """Exploration draws from the best, and a pin stands in its slot or not at all."""
    codes, scores = np.arange(100, 108), np.linspace(1, 0.1, 8, dtype=np.float32)
    ranked = best_of(query, Candidates(codes, np.full(8, 4, np.int8)), scores, pinned=np.array([101]))
    assert ranked.best == 7
    assert 101 not in ranked.codes[: ranked.best]
    assert 101 in ranked.codes
    assert ranked.whole


def test_a_reserved_slot_keeps_its_kind_when_the_best_of_it_is_sold_out(query: Query) -> None:
    codes, scores = np.arange(150), np.linspace(1, 0.1, 150, dtype=np.float32)
    scores[[5, 50]] = 0.02, 0.01  # the two that the shopper bought
    reserved = np.array([REPEAT], np.int8)
    ranked = best_of(query, Candidates(codes, np.full(150, 4, np.int8)), scores, reserved=reserved)
    left = ranked.without(np.array([5]))
    assert left.suffices(10)
    pool = WeighedCandidates(left.worth, np.zeros(len(left.codes), np.int64), bought=left.times > 0)
    rows, why = fill_slots(pool, SlotRules(reserved=reserved), 10, 1.0)
    assert (left.codes[rows[0]], why[0]) == (50, RESERVED)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 10), st.integers(0, 30))
def test_the_shown_list_is_the_one_computed_from_all_candidates(seed: int, k: int, gone: int) -> None:
    """Sold-out items leave the cached list; while it suffices, the answer is the computed one."""
    rng = np.random.default_rng(seed)
    statistics = STATISTICS
    nobody = build_query(statistics, (), no_events(), 0.0)
    codes = rng.permutation(ITEMS)[:150].astype(np.int64)
    scores = rng.random(150).astype(np.float32)
    ranked = best_of(nobody, Candidates(codes, np.full(150, 4, np.int8)), scores)
    barred = rng.choice(codes, gone, replace=False)
    left = ranked.without(barred)
    kept = ~np.isin(codes, barred)
    types = statistics.categorical[:, 0]
    expected = codes[kept][rerank(scores[kept], types[codes[kept]], k, 0.95)]
    if left.suffices(k):
        assert left.codes[rerank(left.scores, types[left.codes], k, 0.95)].tolist() == expected.tolist()
    else:
        assert len(left.codes) < 4 * k
