"""The key of a cached list, its lifetime, and its single computation for all waiting requests."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.statistics import Statistics
from serving.cache.answer_cache import (
    HOUR_S,
    JITTER_RATIO,
    KNOWN_GONE_S,
    KNOWN_S,
    AnswerCache,
    AnswerKey,
    answer_key,
)
from serving.schemas import Request
from serving.stages.reranking import OBJECTS_BYTES, Ranked
from serving.stores.online_features import UserRow
from tests.serving.conftest import CUT, build_statistics, metric

AT = CUT.timestamp()
STATISTICS: Statistics = build_statistics()[0]
ROW, OTHER = UserRow(b"what one user did", AT), UserRow(b"what another did", AT)


def key_of(request: Request, row: UserRow | None = None) -> AnswerKey:
    key = answer_key(STATISTICS, request, row)
    assert key is not None
    return key


def ask(*basket: str, at: float = AT, store: str | None = "store-1", k: int = 10) -> Request:
    return Request(basket, at, None, store, k, "r")


def item(code: int) -> str:
    return str(1_000_000 + code)


@settings(deadline=None)
@given(st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True), st.randoms())
def test_the_order_of_a_basket_is_not_part_of_its_key(codes: list[int], chance) -> None:  # type: ignore[no-untyped-def]
    basket = [item(code) for code in codes] + ["unknown-1"]
    other = chance.sample(basket, len(basket))
    assert key_of(ask(*basket)) == key_of(ask(*other))


def test_the_last_forty_items_of_a_long_basket_are_distinguished() -> None:
    long = [item(code) for code in range(50)]
    assert key_of(ask(*long)) == key_of(ask(*long[:10][::-1], *long[10:][::-1]))
    assert key_of(ask(*long)) != key_of(ask(*long[::-1]))


def test_every_input_of_an_answer_is_part_of_its_key() -> None:
    keys: list[AnswerKey | None] = [
        key_of(ask(item(1), item(2))),
        key_of(ask(item(1))),
        key_of(ask(item(1), item(2), item(3))),
        key_of(ask(item(1), item(2), "unknown")),
        key_of(ask(item(1), item(2), "unknown", "nor this")),
        key_of(ask(item(1), item(2), store="store-2")),
        key_of(ask(item(1), item(2), store=None)),
        key_of(ask(item(1), item(2)), ROW),
        key_of(ask(item(1), item(2)), OTHER),
        key_of(ask(item(1), item(2), at=AT + HOUR_S), ROW),
        key_of(ask()),
        key_of(replace(ask(item(1), item(2)), profile="premium")),
        answer_key(STATISTICS, ask(item(1), item(2)), ROW, lines=1),
        answer_key(STATISTICS, ask(item(1), item(2)), None, b"some rules"),
        answer_key(STATISTICS, ask(item(1), item(2)), None, b"other ones"),
    ]
    assert len({key.digest for key in keys if key is not None}) == len(keys)
    assert key_of(ask(item(1))).shared
    assert not key_of(ask(item(1)), ROW).shared, "a known user's row is part of it"


def test_the_key_has_no_field_that_leaves_the_list_unchanged() -> None:
    key = key_of(ask(item(1), "unknown"))
    assert key == key_of(ask(item(1), "never heard of", at=AT + 1e7)), "an anonymous answer has no time"
    assert key == key_of(ask(item(1), "unknown", k=3))
    assert key == key_of(replace(ask(item(1), "unknown"), user_id="a stranger", request_id="r2"))
    assert key_of(ask(item(1), store="nowhere")) == key_of(ask(item(1), store=None))


def test_the_hour_of_each_user_ends_at_another_moment() -> None:
    changes = []
    for number in range(40):
        row = UserRow(b"user %d" % number, AT)
        keys = [key_of(ask(at=AT + minute * 60), row).digest for minute in range(60)]
        assert len(set(keys)) <= 2
        changes.append(next((m for m in range(1, 60) if keys[m] != keys[m - 1]), 0))
    assert len(set(changes)) > 15


def test_a_request_for_more_items_than_a_cached_list_covers_has_no_key() -> None:
    assert answer_key(STATISTICS, ask(k=15), None) is not None
    assert answer_key(STATISTICS, ask(k=16), None) is None


def list_of(code: int = 1, size: int = 1, score: float = 0.5) -> Ranked:
    return Ranked(
        np.full(size, code, np.int32), np.full(size, score, np.float32), np.full(size, 4, np.int8),
        np.zeros(size, np.uint16), np.zeros(size), np.full(size, score), size, True,
    )  # fmt: skip


KEY, KNOWN_KEY = key_of(ask(item(1))), key_of(ask(item(1)), ROW)


def keys(count: int) -> list[AnswerKey]:
    return [AnswerKey(number.to_bytes(16, "little"), True) for number in range(count)]


# ------------------------------------------------------------------------------------ single flight


@pytest.mark.parametrize(
    ("outcome", "stored"),
    [(list_of(), 1), (ValueError("no list"), 0), (list_of(score=1.1), 0)],
    ids=["a list", "a failure", "no probabilities"],
)
async def test_when_all_give_up_a_list_is_stored_and_a_failure_is_not(
    outcome: Ranked | Exception, stored: int
) -> None:
    """`test_cached_answers` has the requests that wait on."""
    cache, may_go = AnswerCache(), asyncio.Event()

    async def compute() -> Ranked:
        await may_go.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def wait() -> Ranked:
        return await asyncio.shield(cache.in_flight(KEY) or cache.start(KEY, compute))

    waiting = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    computed = cache.in_flight(KEY)
    assert computed is not None
    may_go.set()
    [result] = await asyncio.gather(computed, return_exceptions=True)
    assert result == outcome
    assert len(cache) == stored


# ------------------------------------------------------------------------------------------- times


def test_an_expired_list_is_a_miss_and_stays_as_a_stale_one() -> None:
    clock = SimpleNamespace(now=0.0)
    cache = AnswerCache(clock=lambda: clock.now)
    cache.put(KNOWN_KEY, list_of())
    clock.now = KNOWN_S * (1 - JITTER_RATIO) - 1
    assert cache.get(KNOWN_KEY) is not None
    clock.now = KNOWN_S * (1 + JITTER_RATIO)
    assert cache.get(KNOWN_KEY) is None
    assert cache.get_stale(KNOWN_KEY) is not None
    cache.put(KNOWN_KEY, list_of(2))
    assert (ranked := cache.get(KNOWN_KEY)) is not None
    assert ranked.codes[0] == 2
    assert len(cache) == 1


def test_a_known_user_s_list_is_gone_within_a_day_and_an_anonymous_one_never_expires() -> None:
    clock = SimpleNamespace(now=0.0)
    cache = AnswerCache(clock=lambda: clock.now)
    for key in (KEY, KNOWN_KEY):
        cache.put(key, list_of())
    clock.now = KNOWN_GONE_S - 1
    assert cache.get_stale(KNOWN_KEY) is not None
    clock.now = KNOWN_GONE_S
    assert cache.get_stale(KNOWN_KEY) is None
    clock.now = 1e9
    assert cache.get(KEY) is not None
    assert len(cache) == 1


def test_lists_stored_together_do_not_expire_together() -> None:
    """Of 10,000 keys in constant use: the busiest sixtieth of the span against the mean."""
    cache, known = AnswerCache(clock=lambda: 0.0), [key._replace(shared=False) for key in keys(10_000)]
    for key in known:
        cache.put(key, list_of())
    expire_at = [cache._lists[key.digest].expires_at for key in known]
    first_s, last_s = KNOWN_S * (1 - JITTER_RATIO), KNOWN_S * (1 + JITTER_RATIO)
    expired, _ = np.histogram(expire_at, bins=60, range=(first_s, last_s))
    assert expired.max() / ((last_s - first_s) / 60) <= 2 * 10_000 / KNOWN_S
    assert first_s <= min(expire_at) < max(expire_at) <= last_s


# ------------------------------------------------------------------------------------------- bounds


def test_the_least_recently_used_lists_make_room() -> None:
    cache = AnswerCache(max_bytes=3 * list_of().size_bytes)
    first, second, third, fourth = keys(4)
    for key in (first, second, third):
        cache.put(key, list_of())
    assert cache.get(first) is not None
    cache.put(fourth, list_of())
    assert [cache.get(key) is not None for key in (first, second, third, fourth)] == [True, False, True, True]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60)), max_size=200))
def test_the_cache_keeps_its_bound_and_returns_no_other_key_s_list(acts: list[tuple[bool, int, int]]) -> None:
    bound = 10 * OBJECTS_BYTES
    cache, stored = AnswerCache(max_bytes=bound), dict[int, int]()
    for stores, number, size in acts:
        key = keys(61)[number]
        if stores:
            cache.put(key, list_of(number, size))
            stored[number] = size
        elif (ranked := cache.get(key)) is not None:
            assert ranked.codes.tolist() == [number] * stored[number]
        assert cache._lists.currsize == sum(one.ranked.size_bytes for one in cache._lists.values()) <= bound


def test_the_metrics_show_the_cache_that_answers() -> None:
    def shown() -> tuple[float, float]:
        return metric("reco_cache_entries"), metric("reco_cache_bytes")

    old, new = AnswerCache(), AnswerCache()
    for key in keys(3):
        old.put(key, list_of())
    old.show()
    before = shown()
    assert before == (3, 3 * list_of().size_bytes)
    new.put(KEY, list_of())
    assert shown() == before, "it does not answer yet"
    new.show()
    assert shown() == (1, list_of().size_bytes)
