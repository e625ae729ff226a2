"""Users' query vectors -> behaviour clusters, and for each of them the requests its users make most often.

What an endpoint asks itself before it says that it is ready: `serving.answer.warming` reads the file. All of
it
lies before the bundle's cut.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import faiss
import numpy as np
import orjson
import pandas as pd

from components.data.build_examples import replay
from components.data.fit_statistics import Purchases
from components.evaluation.traffic import Ask, asks_of
from feature_repo.aggregates import UserEvents
from feature_repo.schema import tower_inputs
from serving.measurement import write_result
from serving.release.bundle import Bundle
from serving.stages.retrieval import build_query

CLUSTERS = 16
ITERATIONS = 20
WEEKS = pd.Timedelta(weeks=9)  # before the cut: whose questions are counted
MOST_USERS = 20_000  # that are looked at: a cluster's habits need no more
WARMED = 4_000  # requests in a bundle; an endpoint asks as many of them as its time allows


def warming_requests(bundle: Bundle, purchases: Purchases, count: int = WARMED) -> list[Ask]:
    """Return the requests to warm a bundle's cache with, the most promising first.

    Args:
        bundle: whose cut and query tower.
        purchases: of its data set; what comes after the cut is not looked at.
        count: how many at most.
    """
    cut = pd.Timestamp(bundle.manifest["cut"])
    return warming_asks(
        asks_of(purchases, (cut - WEEKS).timestamp(), cut.timestamp()),
        clusters_at(bundle, purchases, cut.timestamp()),
        count,
    )


def clusters_at(bundle: Bundle, purchases: Purchases, at: float) -> np.ndarray:
    """Return each user's cluster by what was known at a time, (users,) int64; -1: nothing was.

    Of more than MOST_USERS some are drawn; the others get -1, too.

    Args:
        bundle: whose query tower.
        purchases: of a data set.
        at: seconds since the epoch.
    """
    count = len(purchases.user_ids)
    some = np.random.default_rng(0).choice(count, min(count, MOST_USERS), replace=False)
    histories = dict(_histories_at(purchases, at, some))
    cluster = np.full(count, -1)
    cluster[list(histories)] = cluster_users(user_vectors(bundle, list(histories.values()), at))
    return cluster


def _histories_at(purchases: Purchases, at: float, users: np.ndarray) -> Iterator[tuple[int, UserEvents]]:
    """Yield each of these users who bought before a time with the row as of the last basket before it."""
    baskets = replay(purchases.where(purchases.at < at), users)
    for user, own in itertools.groupby(baskets, key=lambda basket: basket.user):
        *_, last = own
        yield user, last.history.named(purchases.item_ids)


def user_vectors(bundle: Bundle, histories: Sequence[UserEvents], at: float) -> np.ndarray:
    """Return the query tower's vector of each user with an empty basket, (n, d) float32.

    Args:
        bundle: whose tower.
        histories: the users' rows, with item ids.
        at: the time they are looked at, seconds since the epoch.
    """
    vectors = [
        bundle.query_tower.run(["vector"], tower_inputs(build_query(bundle.statistics, (), history, at)))[0]
        for history in histories
    ]
    width = bundle.query_tower.get_outputs()[0].shape[-1]
    return np.concatenate(vectors) if vectors else np.empty((0, width), np.float32)


def cluster_users(vectors: np.ndarray, clusters: int = CLUSTERS, seed: int = 0) -> np.ndarray:
    """Return each user's cluster by k-means, (n,) int64; never more clusters than users.

    The same vectors and seed give the same clusters on one machine.
    """
    n, d = vectors.shape
    if n == 0:
        return np.empty(0, np.int64)
    points = np.ascontiguousarray(vectors, np.float32)
    means = faiss.Kmeans(d, min(clusters, n), niter=ITERATIONS, seed=seed, min_points_per_centroid=1)
    means.train(points)
    return means.index.search(points, 1)[1][:, 0]


def warming_asks(asks: Sequence[Ask], cluster: np.ndarray, count: int) -> list[Ask]:
    """Return requests to ask before any shopper does, the most promising first.

    Each cluster brings as many as its share of the traffic, its most frequent first. Baskets count without
    their order.

    Args:
        asks: of some weeks before the cut.
        cluster: of each user in `asks`, (users,); -1 leaves a user out.
        count: how many at most.
    """
    counted: dict[int, Counter[tuple[str, frozenset[str]]]] = {}
    example: dict[tuple[str, frozenset[str]], Ask] = {}
    total = 0
    for ask in asks:
        if (own := int(cluster[ask.user])) >= 0:
            kind = (ask.store_id, frozenset(ask.items))
            counted.setdefault(own, Counter())[kind] += 1
            example.setdefault(kind, ask)
            total += 1
    chosen: dict[tuple[str, frozenset[str]], int] = {}
    for counts in counted.values():
        share = -(-count * counts.total() // total)
        for kind, times in counts.most_common(share):
            chosen[kind] = chosen.get(kind, 0) + times
    ranked = sorted(chosen, key=lambda kind: -chosen[kind])
    return [example[kind] for kind in ranked[:count]]


def write_warming(file: Path, asks: Sequence[Ask]) -> None:
    """Write requests without users, one JSON object a line, in the order in which they are to be asked."""
    lines = [
        orjson.dumps({"basket": ask.items, **({"store_id": ask.store_id} if ask.store_id else {})}) + b"\n"
        for ask in asks
    ]
    write_result(file, b"".join(lines))
