"""Candidates of a small shop: the source of each, and the items that are left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from feature_repo.aggregates import DAY_S, UserEvents, no_events
from feature_repo.queries import Query
from feature_repo.schema import FRESH
from feature_repo.statistics import SOLD_7D, Statistics
from serving.stages.retrieval import SOURCES, Candidates, Quotas, build_query, retrieve, thin
from tests.serving.conftest import build_statistics

NOW = 1_511_740_800
ITEMS = 12


@pytest.fixture
def statistics() -> Statistics:
    """Item i was bought together with i + 1 and i + 2; best sellers are the high codes."""
    code = np.arange(ITEMS)
    neighbours = np.stack([np.where(code + s < ITEMS, code + s, -1) for s in (1, 2)], axis=1).astype(np.int32)
    return replace(
        build_statistics(ITEMS)[0],
        item_ids=np.array([f"i{n:02d}" for n in code]),
        basket_count=np.full(ITEMS, 9, np.float32),
        neighbours=neighbours,
        together_count=np.where(neighbours >= 0, np.array([[3, 1]], np.float32), 0).astype(np.float32),
        popular=code[::-1].astype(np.int32),
        store_ids=np.array(["s1"]),
        store_popular=np.array([[5, 0, 3]], np.int32),
        total_baskets=np.array(50.0),
        fresh=np.zeros((ITEMS, len(FRESH)), np.float32),
    )


def near(*codes: int) -> np.ndarray:
    return np.array(codes, np.int64)


Ask = Callable[[list[str], list[str]], Query]


@pytest.fixture
def query_of(statistics: Statistics, row_of: Callable[..., UserEvents]) -> Ask:
    """Make a query of a basket and of past purchases, one item a day up to yesterday."""

    def make(basket: list[str], bought: list[str]) -> Query:
        days = [(NOW - (len(bought) - day) * DAY_S, [item], 1.0, 0.0) for day, item in enumerate(bought)]
        return build_query(statistics, tuple(basket), row_of(days) if days else no_events(), NOW)

    return make


def test_sources_are_ordered_and_the_first_one_counts(statistics: Statistics, query_of: Ask) -> None:
    query = query_of(["i00"], ["i07", "i02", "i02"])
    found = retrieve(query, statistics.store_popular[0], Quotas(total=8), near(9, 1))
    assert found.codes.tolist() == [2, 7, 1, 9, 5, 3, 11, 10]
    sources = [SOURCES[source] for source in found.source]
    assert sources == ["history"] * 2 + ["together", "tower"] + ["store"] * 2 + ["popular"] * 2


def test_best_sellers_of_the_week_come_before_the_tower_and_partners_fill_up(
    statistics: Statistics, query_of: Ask
) -> None:
    fresh = np.zeros((ITEMS, len(FRESH)), np.float32)
    fresh[[8, 6, 1], SOLD_7D] = [5, 7, 9]
    query = replace(query_of(["i00"], []), statistics=statistics.as_of(fresh))
    found = retrieve(query, None, Quotas(together=1, week=2, total=6), near(4))
    # The week's best is a partner of the basket already; the second partner fills up before the chain's.
    assert found.codes.tolist() == [1, 6, 4, 2, 11, 10]
    sources = [SOURCES[source] for source in found.source]
    assert sources == ["together", "week", "tower", "together", "popular", "popular"]
    assert statistics.best_of_week.tolist() == [], "nothing was sold last week, as far as the old count knows"


def test_a_query_needs_one_known_item(query_of: Ask) -> None:
    for basket, bought in ([], []), (["unknown"], []), ([], ["unknown"]):
        assert not query_of(basket, bought).says_something
    assert query_of(["i11"], []).says_something
    assert query_of([], ["i03"]).says_something


def test_basket_and_excluded_items_are_never_retrieved(statistics: Statistics, query_of: Ask) -> None:
    query = query_of(["i00", "i02", "i11"], ["i02", "i03", "i04"])
    found = retrieve(query, statistics.store_popular[0], Quotas(), near(0, 4, 6), np.array([3, 10]))
    assert set(found.codes.tolist()) == set(range(ITEMS)) - {0, 2, 11, 3, 10}


def test_unknown_items_are_left_out_but_counted(statistics: Statistics, query_of: Ask) -> None:
    query = query_of(["i00", "nonsense", "i00x"], ["i02", "gone"])
    assert query.basket.tolist() == [0]
    assert query.basket_size == 3
    assert query.history.items.tolist() == [2]
    assert query.user.totals.baskets == 2


def test_replacing_statistics_does_not_share_its_cached_lookups(statistics: Statistics) -> None:
    assert statistics.codes(["i03"]).tolist() == [3]
    renamed = replace(statistics, item_ids=np.array([f"j{n:02d}" for n in range(ITEMS)]))
    assert renamed.codes(["i03"]).tolist() == []


def test_thinning_keeps_each_sources_share_of_best_candidates() -> None:
    source = np.repeat(np.arange(5, dtype=np.int8), [20, 10, 0, 6, 4])
    found = Candidates(np.arange(40), source)
    fewer = thin(found, 20)
    assert fewer.codes.tolist() == [*range(10), *range(20, 25), *range(30, 33), *range(36, 38)]
    assert fewer.source.tolist() == source[fewer.codes].tolist()
    assert thin(found, 40).codes.tolist() == found.codes.tolist()
    assert len(thin(found, 1).codes) == 1
    assert len(thin(Candidates(found.codes[:0], source[:0]), 0).codes) == 0


def test_thinning_accepts_interleaved_sources() -> None:
    mixed = Candidates(np.arange(8), np.array([0, 1, 0, 1, 0, 1, 0, 0], np.int8))
    assert thin(mixed, 3).codes.tolist() == [0, 1, 2]
    assert thin(mixed, 5).codes.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("quota", [-1, 2.5, True, None, "60", [], 10**9])
def test_an_invalid_quota_is_named(quota: Any) -> None:
    with pytest.raises(ValueError, match="quota tower is"):
        Quotas(tower=quota)
