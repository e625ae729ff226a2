"""A request -> its ranked list: cached in this process, or computed once for all requests that wait for it.

A list is a function of its key: profile, store, basket, the rules that arrange lists, and for a known user
the row that was read, how much of it lies before the request, and the hour. Bans, price, stock, promotion
and coupon are applied afterwards, for each answer. So a cached answer is true at its own time. Only features
that age with the clock may be up to an hour old.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import struct
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
from cachetools import TLRUCache

from feature_repo.schema import BASKET_LENGTH
from feature_repo.statistics import Statistics
from serving.metrics import CACHE_BYTES, CACHE_COMPUTED, CACHE_ENTRIES, CACHE_LOOKUPS
from serving.schemas import Request
from serving.stages.reranking import KEPT, POOL, Ranked
from serving.stores.online_features import UserRow

HOUR_S = 3_600
KNOWN_S = HOUR_S  # a list without a user row never expires: computed again, it would be the same
KNOWN_GONE_S = 12 * HOUR_S  # a known user's list, after its time, serves the rung `cached` until then
# Share by which each list's time is longer or shorter: lists that were computed together, as after a deploy,
# must not expire together.
JITTER_RATIO = 0.35
MAX_BYTES = 64 << 20  # some 25,000 lists of KEPT candidates
_PARTS = struct.Struct("<iII")  # store, unknown lines, known lines

_hits, _misses = (CACHE_LOOKUPS.labels("process", name) for name in ("hit", "miss"))


class AnswerKey(NamedTuple):
    """All that a ranked list depends on, as a digest; `shared` if no known user's row is part of it."""

    digest: bytes
    shared: bool


class CachedList(NamedTuple):
    """A ranked list and its times, in seconds of the cache's clock."""

    ranked: Ranked
    expires_at: float  # after that it serves the rung `cached` alone
    gone_at: float


def answer_key(
    statistics: Statistics, request: Request, row: UserRow | None, rules: bytes = b"", lines: int = 0
) -> AnswerKey | None:
    """Return the key of a request's ranked list; None if a cached list would be too short for its k.

    Baskets that differ only in order share a key: the order changes no feature, and the query tower averages
    over the last BASKET_LENGTH items. Items outside the catalogue count by their number. A user without a row
    gets the answer of an anonymous shopper, and so shares its key.

    Args:
        statistics: tables of the bundle that answers.
        request: its `at` counts by the hour, and for a known user only. The hour begins at another
            minute for each row, so that not all keys change at once.
        row: the user's row if it is used; None for an anonymous shopper, or for a missing, old or broken row.
        rules: digest of the rules that change the list, see `serving.shop.rules.Plan`.
        lines: of the row, how many lie before the request.
    """
    if POOL * request.k > KEPT:
        return None
    codes = statistics.codes(request.basket)
    last = codes[-BASKET_LENGTH:]
    store = -1 if request.store_id is None else statistics.store_row.get(request.store_id, -1)
    key = hashlib.blake2b(f"{request.profile}\n".encode() + rules, digest_size=16)
    key.update(_PARTS.pack(store, len(request.basket) - len(codes), len(codes)))
    key.update(np.sort(codes).tobytes())
    if len(last) < len(codes):
        key.update(np.sort(last).tobytes())
    if row is None:
        return AnswerKey(key.digest(), shared=True)
    row_hash = hashlib.blake2b(row.history, digest_size=16).digest()
    begin_s = int.from_bytes(row_hash[:4], "little") % HOUR_S
    key.update(row_hash + struct.pack("<qI", int((request.at + begin_s) // HOUR_S), lines))
    return AnswerKey(key.digest(), shared=False)


class AnswerCache:
    """The ranked lists of one bundle in this process: an LRU bounded in bytes, for one event loop.

    After a user is forgotten, the user's lists are out of reach because the row is part of their key. They
    contain no user id and are deleted within KNOWN_GONE_S and the next list that is stored.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lists: TLRUCache[bytes, CachedList] = TLRUCache(
            max_bytes, lambda _, cached, now: cached.gone_at, clock, lambda cached: cached.ranked.size_bytes
        )
        self._in_flight: dict[bytes, asyncio.Task[Ranked]] = {}

    def __len__(self) -> int:
        """Return the number of lists, also of those that have expired and are not yet gone."""
        return len(self._lists)

    def show(self) -> None:
        """Set the gauges; called for the cache that answers, not for one that is warmed beside it."""
        CACHE_ENTRIES.set(len(self._lists))
        CACHE_BYTES.set(self._lists.currsize)

    def get(self, key: AnswerKey) -> Ranked | None:
        """Return the list of a key; None if it is not cached or has expired."""
        cached = self._lists.get(key.digest)
        if cached is None or self._clock() >= cached.expires_at:
            _misses.inc()
            return None
        _hits.inc()
        return cached.ranked

    def get_stale(self, key: AnswerKey) -> Ranked | None:
        """Return the list of a key even if it has expired; None if it is not cached."""
        cached = self._lists.get(key.digest)
        return None if cached is None else cached.ranked

    def put(self, key: AnswerKey, ranked: Ranked) -> None:
        """Store the list of a key; the least recently used ones make room."""
        now = self._clock()
        expires_at, gone_at = math.inf, math.inf
        if not key.shared:
            lasts_s = KNOWN_S * random.uniform(1 - JITTER_RATIO, 1 + JITTER_RATIO)
            expires_at, gone_at = now + lasts_s, now + KNOWN_GONE_S
        self._lists[key.digest] = CachedList(ranked, expires_at, gone_at)

    def in_flight(self, key: AnswerKey) -> asyncio.Task[Ranked] | None:
        """Return the task that computes the list of a key now, if there is one."""
        return self._in_flight.get(key.digest)

    def start(self, key: AnswerKey, compute: Callable[[], Awaitable[Ranked]]) -> asyncio.Task[Ranked]:
        """Compute the list of a key in a task for all requests that wait, and store it.

        A failure is not stored. Wait for the task with `asyncio.shield`: a request that gives up must not
        cancel it for the others.
        """
        CACHE_COMPUTED.inc()
        task = asyncio.get_running_loop().create_task(self._compute(key, compute))
        self._in_flight[key.digest] = task
        task.add_done_callback(_retrieve_error)
        return task

    async def _compute(self, key: AnswerKey, compute: Callable[[], Awaitable[Ranked]]) -> Ranked:
        try:
            ranked = await compute()
            if ranked.holds_probabilities():  # a remote ranker may return other scores
                self.put(key, ranked)
                self.show()
            return ranked
        finally:
            del self._in_flight[key.digest]


def _retrieve_error(task: asyncio.Task[Ranked]) -> None:
    """Retrieve a task's error: asyncio logs it otherwise if all requests that waited have given up."""
    if not task.cancelled():
        task.exception()
