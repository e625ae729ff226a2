"""A champion and a data set -> what caching answers brings: hits, inference saved, cold starts, regret.

The data set's own test weeks are replayed in the order of time, see `components.evaluation.traffic`. Hits are
counted in the very cache that serves, its clock set to the time of each question; processor time is measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pandas as pd

from components.data.build_examples import replay
from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.cluster_users import WEEKS, clusters_at, warming_asks
from components.evaluation.evaluate_bundle import window_s
from components.evaluation.traffic import AGAIN_RATIO, ANONYMOUS_RATIO, Ask, anonymous_users, asks_of
from feature_repo.aggregates import UserEvents, no_events, pack, unpack
from feature_repo.events import Dataset, read_dataset
from feature_repo.schema import item_values
from feature_repo.statistics import Statistics
from feature_repo.transforms import Query, User, bought_together
from pipelines.bench.cache_report import cache_table, draw_hits
from serving.answer.recommender import Recommender
from serving.cache.answer_cache import HOUR_S, KNOWN, SHARED, AnswerCache, AnswerKey, answer_key
from serving.cache.entries import JITTER_RATIO, Cache
from serving.cache.ranked import KEPT, Ranked
from serving.measurement import measured_on, write_result
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import DEFAULT_K, Request
from serving.stages.reranking import rerank
from serving.stores.online_features import MemoryStore, UserRow

log = logging.getLogger(__name__)
T = TypeVar("T")

SHARES = (0.0, 0.3, 0.7, 1.0)  # of shoppers who are anonymous
AGAIN = (0.0, AGAIN_RATIO)  # of questions that are asked again a minute later
TYPICAL = (ANONYMOUS_RATIO, AGAIN_RATIO)  # of the two, where one table has no room for all
SIZES = (1_000, 10_000, 100_000)
REPLICAS = 4
RATES = (10, 100)  # questions per second after a deploy
WARMED = (1_000, 10_000)
BUDGET_S = 5.0
JITTERS = (0.0, 0.1, 0.2, JITTER_RATIO)
KEYS = 10_000
OTHER_ITEMS_BOUND = 0.01  # of kept answers that may show other items than one that is computed now
WHOLE, VECTORS, TOGETHER, ROWS, ITEMS = (
    "whole answers",
    "user vectors and their neighbours",
    "bought-together lists of the basket",
    "users' rows, unpacked",
    "item rows",
)
_VALUE = bytes(8 + 9 * KEPT)  # as long as an anonymous shopper's list


@dataclass(frozen=True)
class Replayed:
    """The test weeks as questions, by the share that is asked again, and the weeks before the cut."""

    bundle: Bundle
    purchases: Purchases
    asks: dict[float, list[Ask]]
    before: list[Ask]

    def keys(self, asks: Sequence[Ask], share: float) -> list[AnswerKey]:
        """Return the key of each question, `share` of the shoppers being anonymous.

        A known user's row is a new one with each basket: it does not change while the basket grows.
        """
        anonymous = anonymous_users(len(self.purchases.user_ids), share).tolist()
        keys = []
        for ask in asks:
            row = None if anonymous[ask.user] else UserRow(b"basket %d" % ask.basket, ask.at)
            key = answer_key(self.bundle.bundle_id, self.bundle.statistics, ask.request(), row)
            assert key is not None
            keys.append(key)
        return keys


def bench_cache(bundle: Path, dataset: Path, out_dir: Path, answers: int = 2_000) -> dict[str, Any]:
    """Measure and write `cache.json`, `cache.md` and `cache.png`; return what the JSON holds.

    Args:
        bundle: the champion's.
        dataset: a data set with weeks after the bundle's cut.
        out_dir: where the results go.
        answers: how many questions are really answered, with the cache and without.

    Raises:
        ValueError: no basket was bought after the cut.
    """
    replayed = read_replayed(load_bundle(bundle), read_dataset(dataset))
    result: dict[str, Any] = {
        "bundle_id": replayed.bundle.bundle_id,
        **measured_on(),
        "questions": {f"{again:g}": len(asks) for again, asks in replayed.asks.items()},
        "baskets": len({ask.basket for ask in replayed.asks[0.0]}),
        "shoppers": len({ask.user for ask in replayed.asks[0.0]}),
        "items": len(replayed.bundle.statistics.item_ids),
        "stores": len(replayed.bundle.statistics.store_ids),
        "budget_s": BUDGET_S,
        "typical": {"anonymous": TYPICAL[0], "again": TYPICAL[1]},
    }
    parts: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("hits", lambda: hits(replayed)),
        ("by_size_of_basket", lambda: by_size_of_basket(replayed)),
        ("levels", lambda: levels(replayed)),
        ("candidates", lambda: candidates(replayed, min(answers, 400))),
        ("answers", lambda: asyncio.run(answered(replayed, answers))),
        ("hour_old", lambda: hour_old(replayed, min(answers, 400))),
        ("without_store", lambda: without_store(replayed, min(answers, 400))),
        ("deploy", lambda: deploy(replayed, result["answers"]["ms"]["without"])),
        ("expiry", expiry),
    )
    for number, (name, part) in enumerate(parts, 1):
        log.info("%d of %d: %s", number, len(parts), name.replace("_", " "))
        result[name] = part()
    write_result(out_dir / "cache.json", orjson.dumps(result, option=orjson.OPT_INDENT_2))
    write_result(out_dir / "cache.md", cache_table(result).encode())
    draw_hits(result, out_dir / "cache.png")
    return result


def read_replayed(bundle: Bundle, data: Dataset) -> Replayed:
    """Return the questions of a data set's weeks after and before a bundle's cut.

    Raises:
        ValueError: no basket was bought after the cut.
    """
    purchases = purchases_of(data.events)
    cut = pd.Timestamp(bundle.manifest["cut"])
    start, end = window_s(cut)
    asks = {again: asks_of(purchases, start, end, again) for again in AGAIN}
    if not asks[0.0]:
        raise ValueError(f"no basket after {cut}: choose a data set with weeks after the bundle's cut")
    return Replayed(bundle, purchases, asks, asks_of(purchases, (cut - WEEKS).timestamp(), start))


def hits(replayed: Replayed) -> list[dict[str, Any]]:
    """Count hits of one process for each share of anonymous shoppers, of repetitions, and each size."""
    rows = []
    for again, asks in replayed.asks.items():
        for share in SHARES:
            keys = replayed.keys(asks, share)
            rates = {str(size): round(float(hits_of(keys, asks, Clocked(size)).mean()), 4) for size in SIZES}
            rows.append({"anonymous": share, "again": again, "distinct": len(set(keys)), "hit_ratio": rates})
    return rows


class Clocked:
    """The cache that serves, on a clock that is set."""

    def __init__(self, entries: int) -> None:
        """Take its number of entries; bytes do not bound it."""
        self.now = 0.0
        self.cache = Cache(
            max_entries=entries,
            max_bytes=1 << 40,
            clock=lambda: self.now,
            chance=random.Random(0),
        )

    def ask(self, key: AnswerKey, at: float) -> bool:
        """Ask for a key, put it if it is not there; return whether it was."""
        self.now = at
        if self.cache.get(key.digest) is not None:
            return True
        self.cache.put(key.digest, _VALUE, SHARED if key.shared else KNOWN)
        return False


def hits_of(keys: Sequence[AnswerKey], asks: Sequence[Ask], clocked: Clocked) -> np.ndarray:
    """Return which questions a cache answers, (n,) bool."""
    return np.array([clocked.ask(key, ask.at) for key, ask in zip(keys, asks, strict=True)], bool)


def by_size_of_basket(replayed: Replayed) -> list[dict[str, Any]]:
    """Count hits by the number of items in the basket, every shopper anonymous and nothing asked again."""
    asks = replayed.asks[0.0]
    found = hits_of(replayed.keys(asks, 1.0), asks, Clocked(SIZES[-1]))
    size = np.minimum([len(ask.items) for ask in asks], 6)
    return [
        {"items": str(n) if n < 6 else "6 or more", "questions": int((size == n).sum()),
         "hit_ratio": round(float(found[size == n].mean()), 4)}
        for n in range(1, 7) if (size == n).any()
    ]  # fmt: skip


def levels(replayed: Replayed) -> dict[str, Any]:
    """Count hits of several processes with a cache each, and one in Redis behind them all."""
    asks = replayed.asks[TYPICAL[1]]
    keys = replayed.keys(asks, TYPICAL[0])
    processes = [Clocked(SIZES[-1]) for _ in range(REPLICAS)]
    redis = Clocked(SIZES[-1])
    chosen = np.random.default_rng(0).integers(REPLICAS, size=len(asks)).tolist()
    first = second = 0
    for key, ask, number in zip(keys, asks, chosen, strict=True):
        if processes[number].ask(key, ask.at):
            first += 1
        elif key.shared and redis.ask(key, ask.at):
            second += 1
    n = len(asks)
    return {
        "replicas": REPLICAS,
        "process_hit_ratio": round(first / n, 4),
        "redis_hit_ratio_of_the_rest": round(second / max(n - first, 1), 4),
        "inference_avoided_ratio": round((first + second) / n, 4),
    }


# --------------------------------------------------------------------------- what is worth caching


def candidates(replayed: Replayed, count: int) -> list[dict[str, Any]]:
    """Return for all that could be cached: hits, what a hit saves, what a look costs, and so what is saved.

    Hits are those of a cache without bounds, for the typical shares.
    """
    share, again = TYPICAL
    asks = replayed.asks[again]
    anonymous = anonymous_users(len(replayed.purchases.user_ids), share).tolist()
    nobody = np.array([anonymous[ask.user] for ask in asks])
    keys: dict[str, list[Any]] = {
        WHOLE: [key.digest for key in replayed.keys(asks, share)],
        VECTORS: [key.digest for key in replayed.keys([replace(ask, store_id="") for ask in asks], share)],
        TOGETHER: [frozenset(ask.items) for ask in asks],
        ROWS: [None if anonymous[ask.user] else ask.basket for ask in asks],
        ITEMS: [0] * len(asks),
    }
    costs = _costs(replayed, count)
    rows = []
    for name, own in keys.items():
        found = _seen_before(own)
        saved = hit = 0.0
        for kind, of_kind in (("anonymous", nobody), ("known", ~nobody)):
            if not of_kind.any():
                continue
            cost = costs[kind][name]
            saved += of_kind.mean() * (found[of_kind].mean() * cost["make"] - cost["look"])
            hit += of_kind.mean() * found[of_kind].mean()
        rows.append(
            {
                "what": name,
                "hit_ratio": round(float(hit), 4),
                **{
                    f"{act}_ms_{kind}": round(costs[kind][name][act], 4)
                    for kind in costs
                    for act in ("make", "look")
                },
                "saved_ms_per_question": round(float(saved), 4),
                "saved_ratio": round(float(saved) / _mean_cost(costs, nobody), 4),
            }
        )
    return rows


def _mean_cost(costs: dict[str, dict[str, dict[str, float]]], nobody: np.ndarray) -> float:
    share = float(nobody.mean())
    whole = {kind: costs[kind][WHOLE]["make"] for kind in costs}
    return share * whole["anonymous"] + (1 - share) * whole["known"]


def _seen_before(keys: Sequence[Any]) -> np.ndarray:
    seen: set[Any] = set()
    found = []
    for key in keys:
        found.append(key is not None and key in seen)
        seen.add(key)
    return np.array(found, bool)


class Watch:
    """Processor times by name and act, milliseconds."""

    def __init__(self) -> None:
        """Begin with none."""
        self._took: dict[str, dict[str, list[float]]] = {}

    def time(self, name: str, act: str, call: Callable[[], T]) -> T:
        """Call, and add the processor time that it took."""
        began = time.thread_time()
        value = call()
        took_ms = (time.thread_time() - began) * 1e3
        self._took.setdefault(name, {}).setdefault(act, []).append(took_ms)
        return value

    def medians(self) -> dict[str, dict[str, float]]:
        """Return the median of each."""
        return {
            name: {act: float(np.median(values)) for act, values in acts.items()}
            for name, acts in self._took.items()
        }


def _costs(replayed: Replayed, count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the processor time that each part takes, and a look for it: medians in milliseconds."""
    recommender, asks, rows = _prepared(replayed, count)
    found = {}
    for kind in ("anonymous", "known"):
        watch, cache = Watch(), Clocked(SIZES[-1]).cache
        for ask in asks:
            if kind == "known":
                _time_parts(watch, cache, recommender, ask.request(_user_id(replayed, ask)), rows[ask.basket])
            else:
                _time_parts(watch, cache, recommender, ask.request(), None)
        found[kind] = watch.medians()
    return found


def _time_parts(
    watch: Watch, cache: Cache, recommender: Recommender, request: Request, row: UserRow | None
) -> None:
    bundle, statistics = recommender.bundle, recommender.bundle.statistics
    profile = bundle.profiles[request.profile]
    history = b"" if row is None else row.history

    def key() -> AnswerKey:
        found = answer_key(bundle.bundle_id, statistics, request, row)
        assert found is not None
        return found

    def look() -> Ranked:
        found = cache.get(key().digest)
        assert found is not None
        return Ranked.from_bytes(found[0], len(statistics.item_ids))

    ranked = watch.time(WHOLE, "make", lambda: _rank(recommender, request))
    cache.put(key().digest, ranked.to_bytes(), SHARED)
    watch.time(WHOLE, "look", look)
    events = watch.time(ROWS, "make", lambda: _unpacked(history, statistics))
    watch.time(ROWS, "look", lambda: hashlib.blake2b(history).digest())
    basket = statistics.codes(request.basket)
    query = Query(statistics, request.at, basket, len(request.basket), User(events, request.at))
    assert query.history is not None  # computed now: it is no part of what follows
    watch.time(VECTORS, "make", lambda: profile.tower.search([query], profile.quotas.tower))
    watch.time(VECTORS, "look", key)
    watch.time(TOGETHER, "make", lambda: bought_together(statistics, query.basket))
    watch.time(TOGETHER, "look", lambda: hashlib.blake2b(np.sort(query.basket).tobytes()).digest())
    for act in ("make", "look"):  # the same: it is a table already
        watch.time(ITEMS, act, lambda: item_values(statistics)[ranked.codes])


def _unpacked(history: bytes, statistics: Statistics) -> UserEvents:
    return unpack(history, statistics.codes_in) if history else no_events(np.int64)


# ------------------------------------------------------------------------------- answers, really given


def _prepared(
    replayed: Replayed, count: int, again: float = 0.0
) -> tuple[Recommender, list[Ask], dict[int, UserRow]]:
    """Return a recommender, the first questions, and the row of the shopper of each of their baskets."""
    asks = replayed.asks[again][:count]
    wanted = {ask.basket for ask in asks}
    rows = dict(_rows(replayed.purchases, sorted({ask.user for ask in asks}), wanted))
    store = MemoryStore()
    for ask in asks:
        store.write(_user_id(replayed, ask), rows[ask.basket])
    return Recommender(replayed.bundle, store), asks, rows


def _rows(purchases: Purchases, users: list[int], baskets: set[int]) -> Iterator[tuple[int, UserRow]]:
    for basket in replay(purchases, np.array(users)):
        if basket.basket in baskets:
            yield basket.basket, UserRow(pack(basket.history.named(purchases.item_ids)), basket.at)


def _user_id(replayed: Replayed, ask: Ask) -> str:
    """Return a name of the shopper while this basket grows: each has a row of its own."""
    return f"{replayed.purchases.user_ids[ask.user]} {ask.basket}"


def _rank(recommender: Recommender, request: Request) -> Ranked:
    prepared = recommender.prepare(request)
    scores = recommender.rank(prepared.dense, prepared.categorical)
    return recommender.best(prepared, scores)


def _shown(bundle: Bundle, ranked: Ranked) -> list[int]:
    types = bundle.statistics.categorical[ranked.codes, 0]
    worth = bundle.worth(ranked.codes, ranked.scores)
    rare = bundle.rarity_of(ranked.codes), bundle.novel
    return ranked.codes[rerank(worth, types, DEFAULT_K, bundle.settings.type_penalty, *rare)].tolist()


async def answered(replayed: Replayed, count: int) -> dict[str, Any]:
    """Answer the first questions with the cache and without, in turn; compare processor time and lists."""
    share, again = TYPICAL
    bundle = replayed.bundle
    recommender, asks, rows = _prepared(replayed, count, again)
    anonymous = anonymous_users(len(replayed.purchases.user_ids), share)
    cache = AnswerCache(bundle.bundle_id, len(bundle.statistics.item_ids))
    took: dict[str, list[float]] = {"without": [], "hit": [], "miss": [], "with": []}
    lists: dict[str, list[tuple[list[int], list[int]]]] = {"anonymous": [], "known": []}
    made = 0
    for ask in asks[:50]:
        _rank(recommender, ask.request())

    for number, ask in enumerate(asks):
        known = not anonymous[ask.user]
        request = ask.request(_user_id(replayed, ask) if known else None)
        row = rows[ask.basket] if known else None
        before = made

        async def make(request: Request = request) -> Ranked:
            nonlocal made
            made += 1
            return _rank(recommender, request)

        async def through_cache(
            request: Request = request, row: UserRow | None = row, make: Any = make
        ) -> list[int]:
            key = answer_key(bundle.bundle_id, bundle.statistics, request, row)
            assert key is not None
            return _shown(bundle, await cache.get_or_make(key, make))

        shown: dict[str, list[int]] = {}
        for way in ("without", "with") if number % 2 else ("with", "without"):
            began = time.thread_time()
            if way == "with":
                shown[way] = await through_cache()
            else:
                shown[way] = _shown(bundle, _rank(recommender, request))
            took[way].append((time.thread_time() - began) * 1e3)
        was_hit = made == before
        took["hit" if was_hit else "miss"].append(took["with"][-1])
        if was_hit:
            lists["known" if known else "anonymous"].append((shown["with"], shown["without"]))
    regret = {kind: _regret(pairs) for kind, pairs in lists.items()}
    return {
        "questions": len(asks),
        "hit_ratio": round(1 - made / len(asks), 4),
        "ms": {name: _percentiles(values) for name, values in took.items()},
        "regret": regret,
        "kept": kept_verdict(regret),
    }


def kept_verdict(regret: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many of all hits showed other items than a computed answer, and whether that is few enough.

    Each kind of shopper weighs as much as its hits; without a hit there is no share and no verdict.
    """
    hits = sum(found["answers"] for found in regret.values())
    other = sum(round(found["answers"] * found.get("other_items_ratio", 0.0)) for found in regret.values())
    share = other / hits if hits else None
    return {
        "answers": hits,
        "other_items": other,
        "other_items_ratio": None if share is None else round(share, 4),
        "bound": OTHER_ITEMS_BOUND,
        "reached": None if share is None else share <= OTHER_ITEMS_BOUND,
    }


def _regret(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Compare lists that were kept with lists made now.

    `ndcg` weighs each place by 1 / log2(place + 1): the share of the weight where the same items stand.
    """
    if not pairs:
        return {"answers": 0}
    weight = 1 / np.log2(np.arange(2, DEFAULT_K + 2))
    overlap = [len(set(kept) & set(now)) / max(len(now), 1) for kept, now in pairs]
    ndcg = [
        sum(w for w, item in zip(weight, kept, strict=False) if item in now) / weight[: len(now)].sum()
        for kept, now in pairs
    ]
    return {
        "answers": len(pairs),
        "other_items_ratio": round(float(np.mean([set(kept) != set(now) for kept, now in pairs])), 4),
        "other_order_ratio": round(float(np.mean([kept != now for kept, now in pairs])), 4),
        "overlap_at_10": round(float(np.mean(overlap)), 5),
        "ndcg": round(float(np.mean(ndcg)), 5),
    }


def hour_old(replayed: Replayed, count: int) -> dict[str, Any]:
    """Compare known users' answers with those of the same question asked later: how old may they get?"""
    recommender, asks, _ = _prepared(replayed, count)
    result = {}
    for minutes in (15, 59):
        pairs = []
        for ask in asks:
            request = ask.request(_user_id(replayed, ask))
            later = replace(request, at=request.at + minutes * 60)
            pairs.append(
                (
                    _shown(replayed.bundle, _rank(recommender, request)),
                    _shown(replayed.bundle, _rank(recommender, later)),
                )
            )
        result[str(minutes)] = _regret(pairs)
    return result


def without_store(replayed: Replayed, count: int) -> dict[str, Any]:
    """Say what a key without the store would bring, and what it would cost."""
    recommender, asks, _ = _prepared(replayed, count)
    pairs = [
        (
            _shown(replayed.bundle, _rank(recommender, replace(ask.request(), store_id=None))),
            _shown(replayed.bundle, _rank(recommender, ask.request())),
        )
        for ask in asks
    ]
    all_asks = [replace(ask, store_id="") for ask in replayed.asks[0.0]]
    rates = {}
    for name, own in (("with_store", replayed.asks[0.0]), ("without_store", all_asks)):
        rates[name] = round(float(hits_of(replayed.keys(own, 1.0), own, Clocked(SIZES[-1])).mean()), 4)
    return {"hit_ratio": rates, "regret": _regret(pairs)}


# ------------------------------------------------------------------------------ deploys and expiry


def deploy(replayed: Replayed, ms: dict[str, float]) -> list[dict[str, Any]]:
    """Count the misses of the first minute after a deploy: nothing warmed, or the most promising requests.

    `clusters` warms by behaviour (k-means over the users' vectors at the cut), `popular` the most frequent
    requests of all. `budget` says how many can be computed in BUDGET_S.
    """
    share, again = TYPICAL
    asks = replayed.asks[again]
    cut = window_s(pd.Timestamp(replayed.bundle.manifest["cut"]))[0]
    cluster = clusters_at(replayed.bundle, replayed.purchases, cut)
    one = np.where(cluster >= 0, 0, -1)
    in_budget = max(int(BUDGET_S * 1e3 / ms["mean"]), 1)
    result = []
    for anonymous in (share, 1.0):
        keys = replayed.keys(asks, anonymous)
        for rate in RATES:
            first = slice(0, rate * 60)
            arms = {"nothing": (0, cluster)}
            for count in dict.fromkeys((in_budget, *WARMED)):
                arms[f"{count} by clusters"] = (count, cluster)
                arms[f"{count} by popularity"] = (count, one)
            misses: dict[str, int] = {}
            for name, (count, groups) in arms.items():
                clocked = Clocked(SIZES[-1])
                warmed = warming_asks(replayed.before, groups, count) if count else []
                for key in replayed.keys(warmed, 1.0):
                    clocked.ask(key, asks[0].at)
                # A minute of a busier shop: the questions come in their order, all within it.
                near = [replace(ask, at=asks[0].at) for ask in asks[first]]
                misses[name] = int((~hits_of(keys[first], near, clocked)).sum())
            result.append(
                {
                    "anonymous": anonymous,
                    "per_second": rate,
                    "questions": len(asks[first]),
                    "in_budget": in_budget,
                    "misses": misses,
                }
            )
    return result


def expiry() -> dict[str, Any]:
    """Write keys at once, ask for all of them all the time: the busiest sixtieth of a life against the mean.

    A key is made anew as soon as it is stale. Over three lives; the first is the worst.
    """
    result = {}
    for jitter in JITTERS:
        rng = np.random.default_rng(0)
        at = np.cumsum(HOUR_S * rng.uniform(1 - jitter, 1 + jitter, (KEYS, 6)), axis=1)
        made, _ = np.histogram(at, bins=180, range=(0, 3 * HOUR_S))
        result[f"{jitter:g}"] = round(float(made.max() / (KEYS / 60)), 2)
    return {"keys": KEYS, "busiest_against_mean": result, "chosen": JITTER_RATIO}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"p50": round(p50, 4), "p99": round(p99, 4), "mean": round(float(np.mean(values)), 4)}
