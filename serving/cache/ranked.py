"""Candidates and their scores -> `Ranked`, the best of them: the list that is cached.

It holds costly and lasting results, never facts of the moment: price, stock, promotion and coupon are looked
up for each answer, and so are the words of the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feature_repo.kernels.candidates import best, best_rows
from feature_repo.queries import Query
from serving.shop.rules import NO_PLAN, Plan
from serving.stages.reranking import NEW, NO_RARITY, NO_SLOTS, POOL, REPEAT, rare_pool
from serving.stages.retrieval import Candidates

KEPT = 60  # candidates; re-ranking to ten looks at 40, so 20 of them may be sold out by then
OBJECTS_BYTES = 1_040  # measured: of a cached list, beside the data of its columns


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best candidates of one request: the first `best` of them are worth most, best first.

    Behind them come candidates that only pins, reserved slots and novel slots may need.

    `times` and `last_at` say how often and when last the user bought a candidate. The reason of a candidate
    from the history is made of them at the time of the answer. Other reasons follow from basket and source.
    """

    codes: np.ndarray  # (m,) int32
    scores: np.ndarray  # (m,) float32 purchase probabilities
    source: np.ndarray  # (m,) int8, index of SOURCES
    times: np.ndarray  # (m,) uint16, 0 where the user never did
    last_at: np.ndarray  # (m,) float64 seconds since the epoch, 0 where the user never did
    worth: np.ndarray  # (m,) float64, the scores with all weights of bundle and rules
    best: int
    whole: bool  # these are all the candidates: none was left out

    def without(self, barred: np.ndarray) -> Ranked:
        """Return the list without codes that must not be shown: not whole, best sellers would fill it up."""
        stays = ~np.isin(self.codes, barred)
        if stays.all():
            return self
        return Ranked(
            self.codes[stays],
            self.scores[stays],
            self.source[stays],
            self.times[stays],
            self.last_at[stays],
            self.worth[stays],
            best=int(np.count_nonzero(stays[: self.best])),
            whole=False,
        )

    def suffices(self, k: int) -> bool:
        """Say whether the k items shown are those that all candidates would give, see `fill_slots`."""
        return self.whole or self.best >= POOL * k

    @property
    def size_bytes(self) -> int:
        """What the list takes in a cache, with its key and the cache's own objects."""
        columns = (self.codes, self.scores, self.source, self.times, self.last_at, self.worth)
        return sum(column.nbytes for column in columns) + OBJECTS_BYTES

    def holds_probabilities(self) -> bool:
        """Say whether each score is between 0 and 1; NaN is not."""
        return bool(((self.scores >= 0) & (self.scores <= 1)).all())


def best_of(
    query: Query,
    candidates: Candidates,
    scores: np.ndarray,
    most: int = KEPT,
    worth: np.ndarray | None = None,
    plan: Plan = NO_PLAN,
    rarity: np.ndarray = NO_RARITY,
    novel: np.ndarray = NO_SLOTS,
) -> Ranked:
    """Return the candidates of most worth, equal ones in the order they were retrieved.

    Args:
        query: the request; only its history is read.
        candidates: those retrieved for it.
        scores: one purchase probability per candidate, (n,) float32.
        most: how many to take at most, beside those that rules and novel slots may need.
        worth: of each candidate, (n,) 0 or more; None: its score.
        plan: the rules; pinned candidates are taken, and enough candidates for reserved slots.
        rarity: see `fill_slots`.
        novel: see `fill_slots`.
    """
    worth = weighed = scores.astype(np.float64) if worth is None else worth
    others = []
    if len(plan.pins):
        pinned = query.statistics.find(candidates.codes, plan.pinned)
        others.append(pinned[pinned >= 0])
        worth = worth.copy()
        worth[others[0]] = -1.0  # they take no place among the best
    places = best(worth, most)
    if plan.reserved.any():
        others += _of_kinds(query, candidates.codes, worth, places, plan)
    if len(rarity) and len(novel):
        others.append(best(worth * rarity, 2 * rare_pool(novel)))  # some of them may be sold out
    first = len(places)
    if others:
        more = np.zeros(len(worth), bool)
        more[np.concatenate(others)] = True
        more[places] = False
        places = np.concatenate([places, np.flatnonzero(more)])
    history = query.history
    columns = best_rows(
        places, scores, candidates.codes, candidates.source, history.items, history.count, history.last_at
    )
    return Ranked(*columns, weighed[places], best=first, whole=len(places) >= len(candidates.codes))


def _of_kinds(
    query: Query, codes: np.ndarray, worth: np.ndarray, places: np.ndarray, plan: Plan
) -> list[np.ndarray]:
    """Return the places of the best candidates beyond some, as many of each kind as slots reserved for it."""
    bought = query.statistics.find(query.history.items, codes) >= 0
    order = np.argsort(-worth, kind="stable")
    free = np.ones(len(worth), bool)
    free[places] = False
    rest = order[free[order]]
    slots = [int(np.count_nonzero(plan.reserved == kind)) for kind in (REPEAT, NEW)]
    return [rest[bought[rest]][: slots[0]], rest[~bought[rest]][: slots[1]]]
