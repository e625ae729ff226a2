"""One shopper who asks without end is given less; nobody else is, and nothing is remembered for ever."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from serving.answer.recommender import Recommender, open_recommender
from serving.checkout.call_headers import Call
from serving.checkout.checkout import Checkout
from serving.checkout.shopper_limits import BURST_S, MOST, UserLimits
from serving.errors import UserOverLimit
from serving.schemas import Request
from serving.stores.online_features import MemoryStore

REQUEST = Request(("1000005",), 1_512_498_600.0, "greedy", None, 4, "r1")
BURST = 50  # of ten a second


@pytest.fixture(scope="module")
def recommender(toy_bundle: Path) -> Recommender:
    return open_recommender(toy_bundle, MemoryStore())


def spent(limits: UserLimits, user: str, now: float) -> int:
    """Ask until it is refused; return how often it was not."""
    count = 0
    while limits.allows(user, now) and count < 1_000:
        limits.spend(user, now)
        count += 1
    return count


def test_a_burst_at_once_and_the_limit_after_it() -> None:
    limits = UserLimits(10.0)
    assert spent(limits, "u1", 100.0) == BURST + 1  # the one that reaches the limit is the last
    assert spent(limits, "u1", 101.0) == 10
    assert spent(limits, "u1", 101.05) == 0
    assert spent(limits, "u1", 101.0 + BURST_S + 0.1) == BURST + 1


def test_others_and_those_without_a_name_are_not_touched() -> None:
    limits = UserLimits(10.0)
    spent(limits, "u1", 100.0)
    assert limits.allows("u2", 100.0)
    for _ in range(1_000):
        limits.spend(None, 100.0)
    assert limits.allows(None, 100.0)


def test_without_a_limit_nobody_is_refused() -> None:
    assert spent(UserLimits(0.0), "u1", 100.0) == 1_000


def test_who_is_within_the_limit_again_is_forgotten() -> None:
    limits = UserLimits(10.0)
    spent(limits, "greedy", 100.0)
    for number in range(2 * MOST):
        limits.spend(f"u{number}", 100.0 + number / 10_000)
    assert not limits.allows("greedy", 100.0)
    assert len(limits._paid_at) <= MOST + 1


def test_many_who_are_not_within_the_limit_are_looked_through_seldom() -> None:
    limits, seen = UserLimits(10.0), list[dict[str, float]]()
    for number in range(MOST + 1_000):
        limits.spend(f"u{number}", 100.0)
        if not seen or limits._paid_at is not seen[-1]:
            seen.append(limits._paid_at)
    assert len(seen) == 2  # at MOST once, and then when they are twice as many
    assert len(limits._paid_at) == MOST + 1_000
    for number in range(2 * MOST):
        limits.spend(f"v{number}", 200.0 + number / 1_000)
    assert len(limits._paid_at) <= 2 * MOST + 2


def call(priority: str = "checkout") -> Call:
    return Call(0.0, 1e9, "given", priority=priority)


def test_an_endpoint_computes_no_more_for_one_and_all_for_the_others(recommender: Recommender) -> None:
    checkout = Checkout(recommender, 1e12, user_limit_per_s=0.01 / BURST_S)  # none comes back meanwhile
    reasons: dict[str, Counter[str | None]] = {"greedy": Counter(), "other": Counter()}

    async def ask() -> None:
        for number in range(5):
            for user in ("greedy", f"other-{number}"):
                answer = await checkout.answer(replace(REQUEST, user_id=user), call())
                assert answer.items
                assert answer.degraded == (answer.degraded_reason is not None)
                reasons[user.partition("-")[0]][answer.degraded_reason] += 1
        with pytest.raises(UserOverLimit):
            await checkout.answer(REQUEST, call("prefetch"))
        await checkout.answer(replace(REQUEST, user_id=None), call("prefetch"))

    asyncio.run(ask())
    assert reasons["greedy"] == {None: 1, "user_over_limit": 4}
    assert reasons["other"] == {None: 5}


def test_a_rehearsal_spends_nothing(recommender: Recommender) -> None:
    checkout = Checkout(recommender, 1e12, user_limit_per_s=1e-3)

    async def ask() -> list[str | None]:
        with checkout.rehearsing(recommender):
            before = [(await checkout.answer(REQUEST, call())).degraded_reason for _ in range(3)]
        return [*before, (await checkout.answer(REQUEST, call())).degraded_reason]

    assert asyncio.run(ask()) == [None] * 4
