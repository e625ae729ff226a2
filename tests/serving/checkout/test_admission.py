"""Requests start now, later or never: by their time in the queue, the loop's turn, and their shopper."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from serving.answer.recommender import Recommender
from serving.checkout.admission import (
    BURST_S,
    CALM_S,
    MOST_BEGUN,
    MOST_SHOPPERS,
    PATIENT,
    PREFETCH,
    SLICE_S,
    STANDING_S,
    STRICT,
    Admission,
    LoopAdmission,
    ShopperLimits,
)
from serving.checkout.checkout import Checkout
from serving.errors import UserOverLimit
from serving.schemas import Call, Request
from tests.serving.checkout.virtual_time import VirtualLoop
from tests.serving.conftest import call

# ----------------------------------------------------------- by time; each request has 100 seconds


def waited(seconds: float, now: float, priority: str = "checkout", given_s: float = 100.0) -> Call:
    arrived = now - seconds
    return Call(arrived, arrived + given_s, "r", priority=priority)


def overloaded(until: float) -> Admission:
    """Return an admission that has refused without a pause for longer than a burst takes."""
    admission, now = Admission(100.0), until - 2 * STANDING_S
    while now < until:
        assert not admission.admits(waited(99.0, now), now)
        now += CALM_S / 2
    return admission


@contextlib.contextmanager
def computing(admission: Admission, answers: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(answers):
            stack.enter_context(admission.computing())
        yield


@pytest.mark.parametrize(("priority", "limit"), [("checkout", 100 * PATIENT), ("prefetch", 100 * PREFETCH)])
def test_a_burst_may_wait_most_of_the_deadline(priority: str, limit: float) -> None:
    assert Admission(100.0).admits(waited(limit - 1, 1e3, priority), 1e3)
    assert not Admission(100.0).admits(waited(limit + 1, 1e3, priority), 1e3)


def test_one_refusal_does_not_tighten_the_limit() -> None:
    admission = Admission(100.0)
    assert not admission.admits(waited(99, 1e3), 1e3)
    assert admission.admits(waited(100 * PATIENT - 1, 1e3), 1e3)


def test_a_standing_queue_is_kept_short_and_refuses_prefetches() -> None:
    admission = overloaded(until=1e3)
    assert admission.admits(waited(100 * STRICT - 1, 1e3), 1e3)
    assert not admission.admits(waited(100 * STRICT + 1, 1e3), 1e3)
    assert not admission.admits(waited(1, 1e3, "prefetch"), 1e3)


def test_the_expected_wait_counts_but_is_no_calm_period() -> None:
    admission = overloaded(until=1e3)
    assert not admission.admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=2 * CALM_S)
    assert Admission(100.0).admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=100 * PREFETCH - 2)
    assert not Admission(100.0).admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=100 * PREFETCH)


def test_the_limit_relaxes_after_a_calm_period() -> None:
    admission, now = overloaded(until=1e3), 1e3 + 2 * CALM_S
    assert admission.admits(waited(100 * PATIENT - 1, now), now)
    assert admission.admits(waited(100 * PREFETCH - 1, now, "prefetch"), now)


def test_refused_prefetches_do_not_tighten_the_limit() -> None:
    admission, now = overloaded(until=1e3), 1e3
    while now < 1e3 + 4 * STANDING_S:
        admission.admits(waited(1, now, "prefetch"), now)
        now += CALM_S / 4
    assert admission.admits(waited(1, now, "prefetch"), now)
    assert admission.admits(waited(100 * PATIENT - 1, now), now)


def test_a_short_deadline_does_not_tighten_the_limit() -> None:
    admission, now = Admission(100.0), 1e3
    while now < 1e3 + 4 * STANDING_S:
        assert not admission.admits(waited(1, now, given_s=1.0), now)
        now += CALM_S / 4
    assert admission.admits(waited(100 * PATIENT - 1, now), now)


def test_separate_refusals_count_as_bursts() -> None:
    admission = Admission(100.0)
    for now in range(1_000, 1_100):
        assert not admission.admits(waited(99, now), now)
    assert admission.admits(waited(100 * PATIENT - 1, 1_100), 1_100)


@pytest.mark.parametrize(
    ("together", "each_s"), [(1, 2), (2, 1)], ids=["alone", "joined: the second costs nothing more"]
)
def test_started_requests_count_as_ahead_with_their_share_of_a_service_time(
    together: int, each_s: float
) -> None:
    admission = Admission(100.0)
    for second in range(0, 4_000, 4):  # each takes two seconds and is followed by two idle ones
        for _ in range(together):
            admission.served(second, second + 2)
    now = 5_000
    with computing(admission, 10):
        assert admission.admits(waited(100 * PATIENT - 10 * each_s - 1, now), now)
        assert not admission.admits(waited(100 * PATIENT - 10 * each_s + 1, now), now)
    assert admission.admits(waited(100 * PATIENT - 1, now + 1), now + 1)


# -------------------------------------- by turn of the event loop; steps take virtual milliseconds

STEP_MS = SLICE_S * 1e3 / 4  # four first steps fill a slice


def on_a_virtual_loop(
    test: Callable[[VirtualLoop, LoopAdmission], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            runner.run(test(loop, LoopAdmission(loop.time)))

    return run


@on_a_virtual_loop
async def test_a_single_request_does_not_wait(loop: VirtualLoop, admission: LoopAdmission) -> None:
    for _ in range(3):
        assert admission.enter(urgent=True) is None
        loop.work(10 * STEP_MS)
        await asyncio.sleep(0)
    assert admission.wait_s() == 0


@on_a_virtual_loop
async def test_a_few_simultaneous_requests_start_together(
    loop: VirtualLoop, admission: LoopAdmission
) -> None:
    for _ in range(4):
        assert admission.enter(urgent=True) is None
        loop.work(STEP_MS)
    assert admission.enter(urgent=True) is not None


@on_a_virtual_loop
async def test_in_a_burst_started_requests_continue_before_new_ones_start(
    loop: VirtualLoop, admission: LoopAdmission
) -> None:
    begun: list[int] = []
    begun_at_end: list[int] = []

    async def request(number: int) -> None:
        if (turn := admission.enter(urgent=True)) is not None:
            await turn
        begun.append(number)
        loop.work(STEP_MS)
        for _ in range(3):
            await asyncio.sleep(0)
            loop.work(STEP_MS / 10)
        begun_at_end.append(len(begun))

    await asyncio.gather(*map(request, range(200)))
    assert begun == list(range(200)), "each in the order in which they came"
    # Three turns of the loop after it, with four first steps in each at most.
    for number, at_end in enumerate(begun_at_end):
        assert at_end - number <= 4 * 4


@on_a_virtual_loop
async def test_a_slice_follows_the_slowest_recent_steps(loop: VirtualLoop, admission: LoopAdmission) -> None:
    begun = 0

    async def request(ms: float) -> None:
        nonlocal begun
        if (turn := admission.enter(urgent=True)) is not None:
            await turn
        begun += 1
        loop.work(ms)

    await asyncio.gather(*(request(STEP_MS / 100) for _ in range(100)))
    slow = asyncio.gather(*(request(STEP_MS * 10) for _ in range(100)))
    begun, counts = 0, []
    while not slow.done():
        await asyncio.sleep(0)
        counts.append(begun)
    most = max(after - before for before, after in itertools.pairwise(counts[3:]))
    assert most <= MOST_BEGUN, "who was quick before is not taken at his word"
    assert counts[-1] == 100
    assert counts[-1] - counts[-20] < 40, "then one in each turn"


@on_a_virtual_loop
async def test_prefetches_start_after_checkouts(loop: VirtualLoop, admission: LoopAdmission) -> None:
    begun: list[str] = []

    async def request(kind: str) -> None:
        if (turn := admission.enter(urgent=kind == "checkout")) is not None:
            await turn
        begun.append(kind)
        loop.work(5 * STEP_MS)

    await asyncio.gather(*map(request, ["first", *["prefetch"] * 5, *["checkout"] * 5]))
    assert begun == ["first", *["checkout"] * 5, *["prefetch"] * 5]


@on_a_virtual_loop
async def test_a_cancelled_request_takes_no_turn(loop: VirtualLoop, admission: LoopAdmission) -> None:
    assert admission.enter(urgent=True) is None
    loop.work(5 * STEP_MS)
    waiting = [admission.enter(urgent=True) for _ in range(3)]
    left, *stay = (one for one in waiting if one is not None)
    left.cancel()
    for one in stay:
        await one
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert admission.enter(urgent=True) is None, "nobody queues any more"


@on_a_virtual_loop
async def test_the_queueing_time_of_a_new_request_is_estimated(
    loop: VirtualLoop, admission: LoopAdmission
) -> None:
    waits: list[float] = []

    async def request() -> None:
        began = loop.time()
        expected = admission.wait_s()
        if (turn := admission.enter(urgent=True)) is not None:
            await turn
        waits.append(loop.time() - began)
        loop.work(4 * STEP_MS)
        told.append(expected)

    for _ in range(2):  # the first burst only trains the estimate
        told: list[float] = []
        waits.clear()
        await asyncio.gather(*(request() for _ in range(100)))
    assert told[-1] == pytest.approx(waits[-1], rel=0.2)


# -------------------------------------------------------------------------------------- by shopper

REQUEST = Request(("1000005",), 1_512_498_600.0, "greedy", None, 4, "r1")
BURST = 50  # of ten a second


def spent(limits: ShopperLimits, user: str, now: float) -> int:
    """Send requests until a refusal; return the number of admitted ones."""
    count = 0
    while limits.admits(user, now) and count < 1_000:
        limits.spend(user, now)
        count += 1
    return count


def test_a_shopper_may_burst_once_and_then_keeps_to_the_limit() -> None:
    limits = ShopperLimits(10.0)
    assert spent(limits, "u1", 100.0) == BURST + 1  # the request that reaches the limit is the last
    assert spent(limits, "u1", 101.0) == 10
    assert spent(limits, "u1", 101.05) == 0
    assert spent(limits, "u1", 101.0 + BURST_S + 0.1) == BURST + 1


def test_the_limit_does_not_affect_other_or_anonymous_shoppers() -> None:
    limits = ShopperLimits(10.0)
    spent(limits, "u1", 100.0)
    assert limits.admits("u2", 100.0)
    for _ in range(1_000):
        limits.spend(None, 100.0)
    assert limits.admits(None, 100.0)


def test_without_a_limit_no_request_is_refused() -> None:
    assert spent(ShopperLimits(0.0), "u1", 100.0) == 1_000


def test_a_shopper_back_within_the_limit_is_forgotten() -> None:
    limits = ShopperLimits(10.0)
    spent(limits, "greedy", 100.0)
    for number in range(2 * MOST_SHOPPERS):
        limits.spend(f"u{number}", 100.0 + number / 10_000)
    assert not limits.admits("greedy", 100.0)
    assert len(limits._paid_at) <= MOST_SHOPPERS + 1


def test_many_shoppers_above_the_limit_are_scanned_rarely() -> None:
    limits, seen = ShopperLimits(10.0), list[dict[str, float]]()
    for number in range(MOST_SHOPPERS + 1_000):
        limits.spend(f"u{number}", 100.0)
        if not seen or limits._paid_at is not seen[-1]:
            seen.append(limits._paid_at)
    assert len(seen) == 2  # at MOST_SHOPPERS once, and then when they are twice as many
    assert len(limits._paid_at) == MOST_SHOPPERS + 1_000
    for number in range(2 * MOST_SHOPPERS):
        limits.spend(f"v{number}", 200.0 + number / 1_000)
    assert len(limits._paid_at) <= 2 * MOST_SHOPPERS + 2


async def test_only_the_shopper_above_the_limit_loses_computed_answers(recommender: Recommender) -> None:
    checkout = Checkout(
        recommender, 1e12, user_limit_per_s=0.01 / BURST_S
    )  # no request is given back in the meantime
    reasons: dict[str, Counter[str | None]] = {"greedy": Counter(), "other": Counter()}
    for number in range(5):
        for user in ("greedy", f"other-{number}"):
            answer = await checkout.answer(replace(REQUEST, user_id=user), call())
            assert answer.items
            assert answer.degraded == (answer.degraded_reason is not None)
            reasons[user.partition("-")[0]][answer.degraded_reason] += 1
    with pytest.raises(UserOverLimit):
        await checkout.answer(REQUEST, call(priority="prefetch"))
    await checkout.answer(replace(REQUEST, user_id=None), call(priority="prefetch"))
    assert reasons["greedy"] == {None: 1, "user_over_limit": 4}
    assert reasons["other"] == {None: 5}
