"""In a burst, who has begun is done before who came last begins. Steps take virtual milliseconds."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serving.checkout.loop_admission import MOST, SLICE_S, Turnstile
from tests.serving.checkout.virtual_time import VirtualLoop

STEP_MS = SLICE_S * 1e3 / 4  # four first steps fill a slice


def run(test: Callable[[VirtualLoop, Turnstile], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(test(loop, Turnstile(loop.time)))


def test_who_comes_alone_waits_for_nobody() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        for _ in range(3):
            assert turnstile.enter(urgent=True) is None
            loop.work(10 * STEP_MS)
            await asyncio.sleep(0)
        assert turnstile.wait_s() == 0

    run(test)


def test_a_few_that_come_together_begin_together() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        for _ in range(4):
            assert turnstile.enter(urgent=True) is None
            loop.work(STEP_MS)
        assert turnstile.enter(urgent=True) is not None

    run(test)


def test_in_a_burst_who_has_begun_goes_on_before_the_others_begin() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        begun: list[int] = []
        begun_at_end: list[int] = []

        async def request(number: int) -> None:
            if (turn := turnstile.enter(urgent=True)) is not None:
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

    run(test)


def test_a_slice_is_as_long_as_the_slowest_of_late_allow() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        begun = 0

        async def request(ms: float) -> None:
            nonlocal begun
            if (turn := turnstile.enter(urgent=True)) is not None:
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
        assert most <= MOST, "who was quick before is not taken at his word"
        assert counts[-1] == 100
        assert counts[-1] - counts[-20] < 40, "then one in each turn"

    run(test)


def test_those_whom_nobody_waits_for_come_after_the_others() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        begun: list[str] = []

        async def request(kind: str) -> None:
            if (turn := turnstile.enter(urgent=kind == "checkout")) is not None:
                await turn
            begun.append(kind)
            loop.work(5 * STEP_MS)

        await asyncio.gather(*map(request, ["first", *["prefetch"] * 5, *["checkout"] * 5]))
        assert begun == ["first", *["checkout"] * 5, *["prefetch"] * 5]

    run(test)


def test_who_has_left_takes_no_turn() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        assert turnstile.enter(urgent=True) is None
        loop.work(5 * STEP_MS)
        waiting = [turnstile.enter(urgent=True) for _ in range(3)]
        left, *stay = (one for one in waiting if one is not None)
        left.cancel()
        for one in stay:
            await one
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert turnstile.enter(urgent=True) is None, "nobody queues any more"

    run(test)


def test_how_long_a_newcomer_would_queue_is_learnt() -> None:
    async def test(loop: VirtualLoop, turnstile: Turnstile) -> None:
        waits: list[float] = []

        async def request() -> None:
            began = loop.time()
            expected = turnstile.wait_s()
            if (turn := turnstile.enter(urgent=True)) is not None:
                await turn
            waits.append(loop.time() - began)
            loop.work(4 * STEP_MS)
            told.append(expected)

        for _ in range(2):  # the first burst is learnt from
            told: list[float] = []
            waits.clear()
            await asyncio.gather(*(request() for _ in range(100)))
        assert told[-1] == pytest.approx(waits[-1], rel=0.2)

    run(test)
