"""What an answer is a function of, and what of it may leave the process."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from feature_repo.statistics import Statistics
from serving.cache.answer_cache import HOUR_S, SHARED, AnswerCache, AnswerKey, answer_key
from serving.cache.ranked import Ranked
from serving.schemas import Request
from serving.stores.online_features import UserRow
from tests.serving.conftest import CUT, build_statistics

AT = CUT.timestamp()
STATISTICS: Statistics = build_statistics()[0]
ITEMS = len(STATISTICS.item_ids)
ROW, OTHER = UserRow(b"what one user did", AT), UserRow(b"what another did", AT)


def key_of(request: Request, row: UserRow | None = None, bundle_id: str = "b1") -> AnswerKey:
    key = answer_key(bundle_id, STATISTICS, request, row)
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


def test_of_a_long_basket_the_last_forty_are_told_apart() -> None:
    long = [item(code) for code in range(50)]
    assert key_of(ask(*long)) == key_of(ask(*long[:10][::-1], *long[10:][::-1]))
    assert key_of(ask(*long)) != key_of(ask(*long[::-1]))


def test_all_that_an_answer_depends_on_is_part_of_its_key() -> None:
    keys: list[AnswerKey | None] = [
        key_of(ask(item(1), item(2))),
        key_of(ask(item(1), item(2)), bundle_id="b2"),
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
        answer_key("b1", STATISTICS, ask(item(1), item(2)), None, b"some rules"),
        answer_key("b1", STATISTICS, ask(item(1), item(2)), None, b"other ones"),
    ]
    assert len({key.digest for key in keys if key is not None}) == len(keys)


def test_what_an_answer_does_not_depend_on_is_not() -> None:
    key = key_of(ask(item(1), "unknown"))
    assert key == key_of(ask(item(1), "never heard of", at=AT + 1e7)), "nobody's answer knows no time"
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


def test_only_what_no_known_user_had_a_part_in_may_leave_the_process() -> None:
    assert key_of(ask(item(1))).shared
    assert not key_of(ask(item(1)), ROW).shared


def test_a_list_too_long_for_what_is_kept_has_no_key() -> None:
    assert answer_key("b1", STATISTICS, ask(k=15), None) is not None
    assert answer_key("b1", STATISTICS, ask(k=16), None) is None


class Redis:
    """The level beyond the process, in a dict: what RedisAnswers does, without Redis."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, key: bytes, deadline: float = math.inf) -> bytes | None:
        return self.values.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value


def a_list(code: int = 1) -> Ranked:
    return Ranked(
        np.array([code], np.int32), np.array([0.5], np.float32), np.array([4], np.int8),
        np.zeros(1, np.uint16), np.zeros(1), 1, True,
    )  # fmt: skip


def maker(made: list[int], code: int = 1) -> Callable:
    async def make() -> Ranked:
        made.append(code)
        return a_list(code)

    return make


def cache_of(redis: Redis | None, bundle_id: str = "b1") -> AnswerCache:
    return AnswerCache(bundle_id, ITEMS, redis)  # type: ignore[arg-type]


def test_an_answer_is_computed_once() -> None:
    async def act() -> None:
        cache, made = cache_of(None), list[int]()
        key = key_of(ask(item(1)))
        for _ in range(3):
            assert (await cache.get_or_make(key, maker(made))).codes.tolist() == [1]
        assert made == [1]

    asyncio.run(act())


def test_what_is_warm_is_not_computed_again() -> None:
    redis, key = Redis(), key_of(ask(item(1)))
    cache, other, computed = cache_of(redis), cache_of(redis), list[int]()

    def compute() -> Ranked:
        computed.append(1)
        return a_list(3)

    for warmed in (cache, cache, other):
        warmed.warm(key, compute)
    cache.warm(None, compute)
    assert computed == [1], "the second time it is there, and another replica finds it in Redis"
    for warmed in (cache, other):
        found = asyncio.run(warmed.get_or_make(key, maker(computed, 8)))
        assert found.codes.tolist() == [3]
    cache.warm(key_of(ask(item(2)), ROW), compute)
    assert len(redis.values) == 1, "nor does warming bring a known user's list there"


def test_the_metrics_tell_what_the_cache_that_answers_keeps() -> None:
    def told() -> tuple[float | None, ...]:
        return tuple(REGISTRY.get_sample_value(f"reco_cache_{name}") for name in ("entries", "bytes"))

    old, new = cache_of(None), cache_of(None, "b2")
    for code in range(3):
        old.warm(key_of(ask(item(code))), lambda: a_list(3))
    old.show()
    before = told()
    assert before == (3, old._cache.size_bytes)
    new.warm(key_of(ask(item(1)), bundle_id="b2"), lambda: a_list(3))
    assert told() == before, "it does not answer yet"
    new.show()
    assert told() == (1, new._cache.size_bytes)
    assert len(new) == 1


def test_nobody_s_list_is_not_made_anew_while_it_lives() -> None:
    assert SHARED.fresh_s == SHARED.dead_s


def test_another_replica_finds_in_redis_what_one_has_made() -> None:
    async def act() -> None:
        redis, made = Redis(), list[int]()
        await cache_of(redis).get_or_make(key_of(ask(item(1))), maker(made, 7))
        found = await cache_of(redis).get_or_make(key_of(ask(item(1))), maker(made, 8))
        assert found.codes.tolist() == [7]
        assert made == [7]
        await cache_of(redis, "b2").get_or_make(key_of(ask(item(1)), bundle_id="b2"), maker(made, 9))
        assert made == [7, 9], "another bundle's answers are not taken"

    asyncio.run(act())


def test_nothing_of_a_known_user_reaches_redis() -> None:
    async def act() -> None:
        redis, made = Redis(), list[int]()
        key = key_of(ask(item(1)), ROW)
        await cache_of(redis).get_or_make(key, maker(made))
        assert redis.values == {}
        redis.values[b"b1:" + key.digest] = a_list(9).to_bytes()
        found = await cache_of(redis).get_or_make(key, maker(made))
        assert found.codes.tolist() == [1], "nor is it taken from there"

    asyncio.run(act())


def test_a_known_users_list_is_gone_within_a_day_and_nobodys_is_not() -> None:
    cache, now = cache_of(None), [0.0]
    cache._cache._clock = lambda: now[0]
    known, nobodys = key_of(ask(item(1)), ROW), key_of(ask(item(1)))
    for key in (known, nobodys):
        cache.warm(key, a_list)
    now[0] = 24.0 * HOUR_S
    assert cache.last_kept(nobodys) is not None
    assert cache.last_kept(known) is None
    assert len(cache) == 1


@pytest.mark.parametrize("value", [b"", b"rubbish", a_list(ITEMS + 1).to_bytes()])
def test_what_cannot_be_read_in_redis_is_computed_and_replaced(value: bytes) -> None:
    async def act() -> None:
        redis, made = Redis(), list[int]()
        key = key_of(ask(item(1)))
        redis.values[b"b1:" + key.digest] = value
        assert (await cache_of(redis).get_or_make(key, maker(made))).codes.tolist() == [1]
        assert redis.values[b"b1:" + key.digest] == a_list(1).to_bytes()

    asyncio.run(act())
