"""A request -> its ranked list, from this process, from Redis, or computed once for all who ask.

What is cached is a function of its key: bundle, store, basket, the rules that arrange lists, and for a known
user the row that was read and the hour. Bans, price, stock, promotion and coupon are applied to it
afterwards, for each answer. So a cached answer says nothing that is not true now; only the features that age
with the clock may be up to an hour old.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np

from feature_repo.schema import BASKET_LENGTH
from feature_repo.statistics import Statistics
from serving.cache.entries import Cache, Life
from serving.cache.ranked import KEPT, Ranked
from serving.cache.redis_answers import RedisAnswers
from serving.metrics import CACHE_LOOKUPS
from serving.schemas import Request
from serving.stages.reranking import POOL
from serving.stores.feast_layout import UserRow

VERSION = 2  # to be raised when this code ranks the same bundle differently: Redis outlives a deploy
HOUR_S = 3_600
# What is nobody's is made of its key and the bundle alone: made anew it would be the same. It goes after a
# week for its room in Redis. A known user's is worth no more after its hour, and gone within a day.
SHARED = Life(fresh_s=7 * 24 * HOUR_S, dead_s=7 * 24 * HOUR_S)
KNOWN = Life(fresh_s=HOUR_S, dead_s=2 * HOUR_S, kept_s=12 * HOUR_S)
MAX_ENTRIES = 100_000
MAX_BYTES = 64 << 20  # some 60,000 lists
_PARTS = struct.Struct("<HiII")  # version, store, unknown lines, known lines

_log = logging.getLogger(__name__)
_refused = CACHE_LOOKUPS.labels("process", "refused")


class AnswerKey(NamedTuple):
    """What an answer is a function of, as a digest; `shared` if nothing in it comes from a known user."""

    digest: bytes
    shared: bool


def answer_key(
    bundle_id: str, statistics: Statistics, request: Request, row: UserRow | None, rules: bytes = b""
) -> AnswerKey | None:
    """Return the key of a request's ranked list; None if a list that is kept would be too short for its k.

    Baskets that differ in order alone have one key: the order changes no feature, and the query tower
    averages over the last BASKET_LENGTH items. Items that the catalogue does not know count by their number.
    Who has no row is answered like nobody, so all of them share their keys.

    Args:
        bundle_id: the bundle that answers.
        statistics: its tables.
        request: what is asked; `at` counts by the hour and for a known user only. The hour begins at another
            minute for each row, so that not all keys change at once.
        row: the user's row as far as it is used; None for nobody, no row, or one that is too old or broken.
        rules: digest of those that have a say in which list it is, see `serving.shop.rules.Plan`.
    """
    if POOL * request.k > KEPT:
        _refused.inc()
        return None
    codes = statistics.codes(request.basket)
    last = codes[-BASKET_LENGTH:]
    shop = -1 if request.store_id is None else statistics.store_row.get(request.store_id, -1)
    key = hashlib.blake2b(f"{bundle_id}\n{request.profile}\n".encode() + rules, digest_size=16)
    key.update(_PARTS.pack(VERSION, shop, len(request.basket) - len(codes), len(codes)))
    key.update(np.sort(codes).tobytes())
    if len(last) < len(codes):
        key.update(np.sort(last).tobytes())
    if row is None:
        return AnswerKey(key.digest(), shared=True)
    row_hash = hashlib.blake2b(row.history, digest_size=16).digest()
    begin_s = int.from_bytes(row_hash[:4], "little") % HOUR_S
    key.update(row_hash + struct.pack("<q", int((request.at + begin_s) // HOUR_S)))
    return AnswerKey(key.digest(), shared=False)


class AnswerCache:
    """Ranked lists of one bundle: in this process, and beyond it those that no known user had a part in.

    Lists of known users stay in this process. So whoever asks to be forgotten has nothing in Redis; what is
    here can no longer be found once the row is gone and names nobody; after three hours it is an answer only
    where there is no better one, after twelve it is none and goes with the next questions.
    """

    def __init__(self, bundle_id: str, items: int, redis: RedisAnswers | None = None) -> None:
        """Take the bundle's id, the size of its catalogue, and Redis if there is one."""
        self._place = f"{bundle_id}:".encode()
        self._items = items
        self._redis = redis
        self._cache = Cache(max_entries=MAX_ENTRIES, max_bytes=MAX_BYTES)

    def __len__(self) -> int:
        """Return the number of lists in this process."""
        return len(self._cache)

    def show(self) -> None:
        """Say in the metrics what is kept in this process, when this cache begins to answer."""
        self._cache.show()

    def is_kept(self, key: AnswerKey) -> bool:
        """Say whether this process has the list of a key, so that nobody would wait for it."""
        return self._cache.is_alive(key.digest)

    def last_kept(self, key: AnswerKey) -> Ranked | None:
        """Return the list of a key from this process even if its life is over; None if there is none."""
        found = self._cache.last_kept(key.digest)
        return None if found is None else Ranked.from_bytes(found)

    def is_being_made(self, key: AnswerKey) -> bool:
        """Say whether somebody computes the list of a key just now."""
        return self._cache.is_being_made(key.digest)

    async def get_or_make(
        self, key: AnswerKey, make: Callable[[], Awaitable[Ranked]], deadline: float = math.inf
    ) -> Ranked:
        """Return the ranked list of a key; `make` computes it if no level has it, once for all who ask now.

        Args:
            key: of `answer_key`.
            make: computes the list. It must not leave out what is sold out now: the list outlives that.
            deadline: perf_counter after which Redis is not waited for.

        Raises:
            Exception: what `make` raised.
        """

        async def make_bytes() -> bytes:
            return await self._through_redis(key, make, deadline)

        found = await self._cache.get_or_make(key.digest, make_bytes, SHARED if key.shared else KNOWN)
        return Ranked.from_bytes(found)

    def warm(self, key: AnswerKey | None, make: Callable[[], Ranked]) -> None:
        """Keep a key's list, from Redis or computed, before anybody else uses this cache."""
        if key is None or key.digest in self._cache:
            return
        found = self._in_redis(key)
        value = make().to_bytes() if found is None else found
        if found is None:
            self._to_redis(key, value)
        self._cache.put(key.digest, value, SHARED if key.shared else KNOWN)

    async def _through_redis(
        self, key: AnswerKey, make: Callable[[], Awaitable[Ranked]], deadline: float
    ) -> bytes:
        if (found := self._in_redis(key, deadline)) is not None:
            return found
        made = (await make()).to_bytes()
        Ranked.from_bytes(made, self._items)  # a ranker elsewhere may have given what is no probability
        self._to_redis(key, made)
        return made

    def _in_redis(self, key: AnswerKey, deadline: float = math.inf) -> bytes | None:
        if self._redis is None or not key.shared:
            return None
        found = self._redis.get(self._place + key.digest, deadline)
        if found is not None:
            try:
                Ranked.from_bytes(found, self._items)
            except ValueError as error:
                _log.warning("a cached answer in Redis is not used: %s", error)
                return None
        return found

    def _to_redis(self, key: AnswerKey, value: bytes) -> None:
        if self._redis is not None and key.shared:
            self._redis.put(self._place + key.digest, value)
