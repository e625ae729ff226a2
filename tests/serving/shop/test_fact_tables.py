"""The facts in force for an item, a time and a store, against a plain scan of the same facts."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.facts import Fact
from serving.shop.facts import Coupons, Numbers

N = 6
stores = st.sampled_from([None, "s1", "s2"])
times = st.none() | st.sampled_from([10.0, 20.0, 30.0])


@st.composite
def said(draw: st.DrawFn) -> list[tuple[int, Fact]]:
    """Facts of one kind, each known at a time of its own."""
    facts = []
    for number in range(draw(st.integers(0, 25))):
        code, store = draw(st.integers(0, N - 1)), draw(stores)
        value = draw(st.sampled_from([0.0, 1.0, 2.5, None]))
        fact = Fact(f"f{number}", "stock", str(code), value, 0.0, store, None, draw(times), draw(times))
        facts.append((code, fact))
    order = draw(st.permutations(range(len(facts))))
    return [(code, replace(fact, at=float(at))) for (code, fact), at in zip(facts, order, strict=True)]


def holds(fact: Fact, at: float) -> bool:
    return (fact.valid_from is None or fact.valid_from <= at) and (
        fact.valid_until is None or at < fact.valid_until
    )


def standing(facts: list[tuple[int, Fact]], code: int, store: str | None) -> Fact | None:
    mine = [fact for other, fact in facts if other == code and fact.store_id == store]
    return max(mine, key=lambda fact: fact.at, default=None)


@settings(max_examples=150, deadline=None)
@given(facts=said(), cuts=st.lists(st.integers(0, 25), max_size=3), at=st.sampled_from([5.0, 10, 15, 20, 30]))
def test_numbers_equal_a_scan_of_the_facts(facts: list[tuple[int, Fact]], cuts: list[int], at: float) -> None:
    numbers = Numbers(excludes=0.0)
    edges = [0, *sorted(cuts), len(facts)]
    for start, end in pairwise(edges):
        numbers.add(facts[start:end])
    codes = np.array([3, 0, 5, 3, 1, 2, 4])
    for store in (None, "s1", "nowhere"):
        expected_value, expected_out = [], set()
        for code in range(N):
            places = [standing(facts, code, place) for place in dict.fromkeys([store, None])]
            known = [f for f in places if f and f.value is not None]
            valid = [f for f in known if holds(f, at)]
            # One that lies ahead replaced the value of before: nothing is known until it begins.
            begun = [f for f in known if (f.valid_from is not None and at < f.valid_from) or holds(f, at)]
            expected_value.append(begun[0].value if begun and holds(begun[0], at) else np.nan)
            if any(f.value == 0 for f in valid):
                expected_out.add(code)
        np.testing.assert_array_equal(
            numbers.look_up(codes, at, store), np.array(expected_value, float)[codes]
        )
        parts = numbers.excluded(at, store)
        assert {int(code) for part in parts for code in part} == expected_out


def coupon(
    code: str | None, at: float, store: str | None = None, user: str | None = None, until: float | None = None
) -> tuple[int, Fact]:
    return 0, Fact(f"f-{at}", "coupon", "a", code, at, store, user, None, until)


def shown(
    facts: list[tuple[int, Fact]], at: float, user: str | None = None, store: str | None = None
) -> object:
    coupons = Coupons()
    for fact in facts:
        coupons.add([fact])
    found = coupons.look_up(np.array([0, 1]), at, user, store)
    assert found[1] is None
    return found[0]


def test_the_shoppers_coupon_precedes_the_stores_and_the_latest() -> None:
    facts = [
        coupon("OLD", 1.0),
        coupon("NEW", 2.0),
        coupon("STORE", 0.5, "s1"),
        coupon("MINE", 0.4, None, "u1"),
        coupon("MINE-HERE", 0.3, "s1", "u1"),
    ]
    assert shown(facts, 5.0) == "NEW"
    assert shown(facts, 5.0, "u2", "s2") == "NEW"
    assert shown(facts, 5.0, "u2", "s1") == "STORE"
    assert shown(facts, 5.0, "u1", "s2") == "MINE"
    assert shown(facts, 5.0, "u1", "s1") == "MINE-HERE"


def test_null_withdraws_earlier_coupons() -> None:
    facts = [coupon("OLD", 1.0), coupon("MINE", 1.0, None, "u1"), coupon(None, 2.0)]
    assert shown(facts, 5.0) is None
    assert shown(facts, 5.0, "u1") == "MINE"
    assert shown([*facts, coupon("NEW", 3.0)], 5.0) == "NEW"
    assert shown([*facts, coupon("NEW", 3.0)][::-1], 5.0) == "NEW"


def test_a_coupon_ends_by_a_repeated_fact_with_an_end_time() -> None:
    facts = [coupon("A", 1.0), coupon("B", 2.0), coupon("B", 3.0, until=4.0)]
    assert [shown(facts, at) for at in (3.5, 4.0)] == ["B", "A"]
