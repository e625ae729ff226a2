import asyncio

import pytest

from pipelines.bench.load.virtual_time import VirtualLoop


def test_a_long_wait_takes_no_time_but_on_the_loops_clock() -> None:
    loop = VirtualLoop()
    done: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        done.append((name, loop.now))

    async def both() -> None:
        await asyncio.gather(wait("late", 86_400.0), wait("early", 3_600.0))

    loop.run_until_complete(both())
    loop.close()
    assert [name for name, _ in done] == ["early", "late"]
    assert [at for _, at in done] == pytest.approx([3_600.0, 86_400.0])


def test_work_holds_the_loop() -> None:
    loop = VirtualLoop()

    async def work() -> float:
        loop.call_later(0.001, loop.work, 5.0)
        await asyncio.sleep(0.002)
        return loop.now

    assert loop.run_until_complete(work()) == pytest.approx(0.006)
    loop.close()


def test_a_wait_that_never_ends_is_told() -> None:
    loop = VirtualLoop()
    never = loop.create_future()
    with pytest.raises(RuntimeError, match="never comes"):
        loop.run_until_complete(never)
    loop.close()
