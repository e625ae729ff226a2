"""What stays, for how long, and that each value is made once however many ask."""

import asyncio
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.cache.entries import ENTRY_BYTES, JITTER_RATIO, RETRY_S, UNTIL_BYTES, Cache, Entry, Life, Sketch

FRESH_S, DEAD_S = 100.0, 1_000.0
LIFE = Life(FRESH_S, DEAD_S)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_cache(
    max_entries: int = 1_000, max_bytes: int = 1 << 30, seed: int = 0, clock: Clock | None = None
) -> Cache:
    clock = Clock() if clock is None else clock
    return Cache(max_entries=max_entries, max_bytes=max_bytes, clock=clock, chance=random.Random(seed))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Maker:
    """Makes a value for a key, counts how often, and waits until the test lets it go on."""

    def __init__(self) -> None:
        self.made = 0
        self.may_go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> bytes:
        self.made += 1
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        return b"value %d" % self.made


async def turns(count: int = 5) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


# --------------------------------------------------------------------------------------- one flight


def test_500_who_ask_for_one_cold_key_have_it_made_once() -> None:
    async def act() -> None:
        cache, make = make_cache(), Maker()
        asking = [asyncio.create_task(cache.get_or_make(b"key", make, LIFE)) for _ in range(500)]
        await turns()
        make.may_go.set()
        assert set(await asyncio.gather(*asking)) == {b"value 1"}
        assert make.made == 1
        assert await cache.get_or_make(b"key", make, LIFE) == b"value 1"
        assert make.made == 1

    asyncio.run(act())


def test_after_a_flush_each_of_5_000_keys_is_made_once_however_many_ask() -> None:
    async def act() -> None:
        cache = make_cache(20_000)
        made: dict[bytes, int] = {}

        def maker(one: bytes) -> Callable[[], Any]:
            async def make() -> bytes:
                made[one] = made.get(one, 0) + 1
                await asyncio.sleep(0)
                return one

            return make

        for number in range(5_000):
            cache.put(key(number), b"old", LIFE)
        cache.clear()
        asked = [key(number % 5_000) for number in range(15_000)]
        random.Random(0).shuffle(asked)
        answers = await asyncio.gather(*(cache.get_or_make(one, maker(one), LIFE) for one in asked))
        assert answers == asked
        assert len(made) == 5_000
        assert set(made.values()) == {1}

    asyncio.run(act())


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    async def act() -> None:
        cache, make = make_cache(), Maker()
        make.error = ValueError("no answer")
        asking = [asyncio.create_task(cache.get_or_make(b"key", make, LIFE)) for _ in range(20)]
        await turns()
        make.may_go.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [str(one) for one in found] == ["no answer"] * 20
        assert make.made == 1
        assert cache.get(b"key") is None
        make.error = None
        assert await cache.get_or_make(b"key", make, LIFE) == b"value 2"

    asyncio.run(act())


def test_who_asked_first_may_give_up_and_the_others_still_get_it() -> None:
    async def act() -> None:
        cache, make = make_cache(), Maker()
        first, *others = [asyncio.create_task(cache.get_or_make(b"key", make, LIFE)) for _ in range(10)]
        await turns()
        first.cancel()
        await turns()
        make.may_go.set()
        assert set(await asyncio.gather(*others)) == {b"value 1"}
        assert first.cancelled()
        assert make.made == 1

    asyncio.run(act())


def test_when_all_give_up_the_value_is_kept_all_the_same_and_a_failure_makes_no_noise() -> None:
    async def act(error: Exception | None) -> tuple[bytes, bool] | None:
        cache, make = make_cache(), Maker()
        make.error = error
        asking = [asyncio.create_task(cache.get_or_make(b"key", make, LIFE)) for _ in range(3)]
        await turns()
        for task in asking:
            task.cancel()
        await turns()
        make.may_go.set()
        await turns()
        return cache.get(b"key")

    assert asyncio.run(act(None)) == (b"value 1", True)
    assert asyncio.run(act(ValueError())) is None


# -------------------------------------------------------------------------------- fresh, stale, dead


def test_a_stale_value_is_answered_at_once_and_made_anew_once() -> None:
    async def act() -> None:
        clock = Clock()
        cache, make = make_cache(clock=clock), Maker()
        make.may_go.set()
        assert await cache.get_or_make(b"key", make, LIFE) == b"value 1"
        clock.now = FRESH_S * (1 + JITTER_RATIO)
        make.may_go.clear()
        found = [await cache.get_or_make(b"key", make, LIFE) for _ in range(50)]
        assert set(found) == {b"value 1"}, "nobody waits for the new one"
        await turns()
        assert make.made == 2
        make.may_go.set()
        await turns()
        assert cache.get(b"key") == (b"value 2", True)

    asyncio.run(act())


def test_a_refresh_that_fails_leaves_the_stale_value_and_is_tried_again_later() -> None:
    async def act() -> None:
        clock = Clock()
        cache, make = make_cache(clock=clock), Maker()
        make.may_go.set()
        await cache.get_or_make(b"key", make, LIFE)
        clock.now = FRESH_S * (1 + JITTER_RATIO)
        make.error = ValueError("not now")
        for _ in range(20):
            assert await cache.get_or_make(b"key", make, LIFE) == b"value 1"
            await turns()
        assert make.made == 2, "not again at once"
        clock.now += RETRY_S
        make.error = None
        assert await cache.get_or_make(b"key", make, LIFE) == b"value 1"
        await turns()
        assert cache.get(b"key") == (b"value 3", True)

    asyncio.run(act())


def test_a_dead_value_is_no_answer() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    cache.put(b"key", b"value", LIFE)
    clock.now = DEAD_S * (1 - JITTER_RATIO) - 1
    found = cache.get(b"key")
    assert found is not None
    assert found[0] == b"value"
    clock.now = DEAD_S * (1 + JITTER_RATIO)
    assert cache.get(b"key") is None
    assert not cache.is_alive(b"key")
    assert cache.last_kept(b"key") == b"value", "for want of a better one"
    assert cache.last_kept(b"other") is None
    cache.put(b"key", b"another", LIFE)
    assert (len(cache), cache.last_kept(b"key"), cache.is_alive(b"key")) == (1, b"another", True)


def test_what_may_not_stay_is_no_answer_after_its_time_and_goes_with_the_next_questions() -> None:
    clock = Clock()
    cache, bounded = make_cache(clock=clock), Life(FRESH_S, DEAD_S, kept_s=5_000.0)
    cache.put(b"stays", b"value", LIFE)
    for number in range(100):
        cache.put(key(number), b"value", bounded)
        cache.get(key(number))
    cache.put(key(0), b"made again", bounded)
    clock.now = 4_999.0
    assert cache.last_kept(key(7)) == b"value"
    cache.put(key(1), b"made anew", bounded)
    clock.now = 5_000.0
    assert {cache.last_kept(key(number)) for number in range(100)} == {None, b"made anew"}
    for _ in range(10):
        cache.get(b"another")
    assert sorted(cache._all) == [key(1), b"stays"]
    assert len(cache._until) == 1
    kept = len(key(1)) + len(b"made anew") + len(b"stays") + len(b"value")
    assert cache.size_bytes == 2 * ENTRY_BYTES + UNTIL_BYTES + kept
    assert cache.last_kept(b"stays") == b"value"


def test_what_was_written_at_once_is_not_made_anew_at_once() -> None:
    """10,000 keys that are asked for all the time: the busiest sixtieth of a life against the mean."""
    clock = Clock()
    cache = make_cache(20_000, clock=clock)
    stale_at = []
    for number in range(10_000):
        cache.put(key(number), b"value", Life(3_600.0, 36_000.0))
        stale_at.append(cache._all[key(number)].stale_at)
    made, _ = np.histogram(stale_at, bins=60, range=(3_600 * (1 - JITTER_RATIO), 3_600 * (1 + JITTER_RATIO)))
    width_s = 3_600 * 2 * JITTER_RATIO / 60
    assert made.max() / width_s <= 2 * 10_000 / 3_600
    assert min(stale_at) >= 3_600 * (1 - JITTER_RATIO)
    assert max(stale_at) <= 3_600 * (1 + JITTER_RATIO)


# ----------------------------------------------------------------------------------------- what stays


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(ENTRY_BYTES + 1, 40_000),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 4_000), st.integers(0, 300)), max_size=200
    ),
)
def test_it_keeps_its_bounds_and_never_answers_with_another_keys_value(
    max_entries: int, max_bytes: int, acts: list[tuple[bool, int, int, int]]
) -> None:
    clock = Clock()
    cache = make_cache(max_entries, max_bytes, clock=clock)
    written: dict[bytes, bytes] = {}
    for puts, number, size, later_s in acts:
        clock.now += later_s
        if puts:
            value = b"%d:" % number + bytes(size)
            assert cache.put(key(number), value, LIFE) == (cache.get(key(number)) is not None)
            written[key(number)] = value
        elif (found := cache.get(key(number))) is not None:
            assert found[0] == written[key(number)]
        assert len(cache) <= max_entries
        assert cache.size_bytes <= max_bytes
        sizes = [ENTRY_BYTES + len(one) + len(entry.value) for one, entry in cache._all.items()]
        assert cache.size_bytes == sum(sizes)
        parts = (cache._window, cache._probation, cache._protected)
        assert sorted(one for part in parts for one in part.entries) == sorted(cache._all)


def test_what_is_dropped_is_freed_at_once() -> None:
    """No cycle holds an entry: of what is frozen before the first request, the collector frees none."""

    def entries() -> int:
        return sum(type(one) is Entry for one in gc.get_objects())

    async def use() -> None:
        cache, make = make_cache(100), Maker()
        make.may_go.set()
        for number in [*range(150), *range(100, 150), *range(100, 150)]:  # all three parts
            await cache.get_or_make(key(number), make, LIFE)
        assert entries() == before + len(cache) > before + 50
        assert all(part.entries for part in cache._parts)

    gc.collect()
    gc.disable()
    try:
        before = entries()
        asyncio.run(use())
        assert entries() == before
    finally:
        gc.enable()


def test_a_value_that_is_larger_than_the_cache_is_refused() -> None:
    cache = make_cache(max_bytes=10_000)
    assert cache.put(b"a", b"small", LIFE)
    assert not cache.put(b"b", bytes(10_000), LIFE)
    assert cache.get(b"a") is not None


def test_a_new_value_takes_the_place_of_the_old_one() -> None:
    cache = make_cache()
    cache.put(b"key", bytes(100), LIFE)
    cache.put(b"key", b"new", LIFE)
    assert cache.get(b"key") == (b"new", True)
    assert len(cache) == 1
    assert cache.size_bytes == len(b"key") + len(b"new") + ENTRY_BYTES


def test_what_many_ask_for_survives_a_flood_of_what_is_asked_once() -> None:
    """An LRU of the same size would lose all of them."""
    cache = make_cache(1_000)
    popular = [key(number) for number in range(500)]
    for _ in range(5):
        for one in popular:
            if cache.get(one) is None:
                cache.put(one, b"popular", LIFE)
    for number in range(10_000, 20_000):
        if cache.get(key(number)) is None:
            cache.put(key(number), b"once", LIFE)
    assert sum(cache.get(one) is not None for one in popular) >= 490


def test_it_hits_more_often_than_an_lru_where_popularity_is_uneven() -> None:
    """Zipf with exponent 0.9 over 10,000 keys, a cache of 500: the setting of the paper's comparisons."""
    rng = np.random.default_rng(0)
    weight = 1 / np.arange(1, 10_001) ** 0.9
    asked = rng.choice(10_000, 60_000, p=weight / weight.sum()).tolist()
    cache, hits = make_cache(500), 0
    lru: dict[int, None] = {}
    lru_hits = 0
    for number in asked:
        if cache.get(key(number)) is None:
            cache.put(key(number), b"", LIFE)
        else:
            hits += 1
        if number in lru:
            lru_hits += 1
            del lru[number]
        lru[number] = None
        if len(lru) > 500:
            del lru[next(iter(lru))]
    assert hits > 1.1 * lru_hits


def test_what_was_popular_once_makes_room_for_what_is_now() -> None:
    cache = make_cache(100)
    for _ in range(20):
        for number in range(100):
            if cache.get(key(number)) is None:
                cache.put(key(number), b"", LIFE)
    for _ in range(200):
        for number in range(100, 200):
            if cache.get(key(number)) is None:
                cache.put(key(number), b"", LIFE)
    assert sum(cache.get(key(number)) is not None for number in range(100, 200)) > 80


def test_the_sketch_counts_up_to_fifteen_and_forgets_by_halves() -> None:
    sketch = Sketch(1_000)
    for _ in range(100):
        sketch.add(b"often")
    sketch.add(b"once")
    assert sketch.count(b"often") == 15
    assert sketch.count(b"once") == 1
    assert sketch.count(b"never") == 0
    for number in range(10 * 1_000 - 101):
        sketch.add(key(number % 50))
    assert sketch.count(b"often") == 7


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=900))
def test_the_sketch_never_counts_too_little(asked: list[int]) -> None:
    sketch = Sketch(100)
    for number in asked:
        sketch.add(key(number))
    assert all(sketch.count(key(number)) >= min(asked.count(number), 15) for number in set(asked))


@pytest.mark.parametrize("given", [{"max_entries": 0}, {"max_bytes": 100}])
def test_bounds_that_hold_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_cache(**given)
