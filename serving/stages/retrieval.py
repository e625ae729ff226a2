"""A query -> candidate items from several sources, each candidate naming the source that found it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feature_repo.aggregates import UserEvents
from feature_repo.kernels.candidates import choose
from feature_repo.queries import Query, User
from feature_repo.statistics import Statistics

MOST = 100_000  # candidates of one source, or in all
_NOTHING = np.empty(0, np.int64)
_EVERYTHING = np.empty(0, bool)
# In the order of the numbers that `kernels.candidates.choose` writes, and `add_pinned`.
SOURCES = ("history", "together", "tower", "store", "popular", "pinned", "week")


@dataclass(frozen=True)
class Quotas:
    """How many candidates each source may bring, and how many are ranked in all."""

    history: int = 300
    together: int = 180
    week: int = 60
    tower: int = 60
    store: int = 40
    total: int = 500

    def __post_init__(self) -> None:
        """Refuse an invalid number of candidates."""
        for name, quota in vars(self).items():
            if not isinstance(quota, int) or isinstance(quota, bool) or not 0 <= quota <= MOST:
                raise ValueError(
                    f"quota {name} is {str(quota)[:40]!r}: expected a whole number from 0 to {MOST}"
                )

    def of(self, total: int) -> Quotas:
        """Return the same shares of `total` candidates, rounded up.

        The sources are asked in turn: if the total alone shrank, the first would leave no place for others.
        """
        whole = replace(self, total=total)
        shares = {name: -(-quota * total // self.total) for name, quota in vars(self).items()}
        return replace(whole, **shares)


@dataclass(frozen=True)
class Candidates:
    """Distinct items to rank, none of them in the basket."""

    codes: np.ndarray  # (n,) int64
    source: np.ndarray  # (n,) int8, index into SOURCES of the first source that brought the item


def build_query(statistics: Statistics, basket: tuple[str, ...], events: UserEvents, at: float) -> Query:
    """Return the query for a basket of item ids and a user's row with item ids.

    Items outside the catalogue are left out of the basket, which keeps its full size. In the row they count
    but have no code.
    """
    codes = statistics.each_code(events.items.tolist())
    user = User(replace(events, items=codes), at)
    return Query(statistics, at, statistics.codes(basket), len(basket), user)


def retrieve(
    query: Query,
    store: np.ndarray | None,
    quotas: Quotas,
    near: np.ndarray = _NOTHING,
    barred: np.ndarray = _NOTHING,
    offers: np.ndarray = _EVERYTHING,
) -> Candidates:
    """Return up to `quotas.total` candidates, each source after the one before.

    The user's own items, partners of the basket, best sellers of the last week, neighbours of the query
    vector, best sellers of the store; then more partners and best sellers of the chain to fill up.

    Args:
        query: the request.
        store: best sellers of the request's store, codes best first, or None.
        quotas: how many of each source.
        near: codes from the two-tower search, nearest first.
        barred: codes that must not be offered (out of stock, banned).
        offers: which items the profile offers, (n,) bool; empty: all. A filter leaves out most of a
            catalogue: a list of codes would cost a request more, the more items the shop has.
    """
    together = query.together
    codes, sources = query.statistics.marked(
        choose,
        query.basket,
        barred,
        offers,
        query.history.items,
        query.favourites[: quotas.history],
        together.codes,
        together.sums[0],
        quotas.together,
        query.statistics.best_of_week[: quotas.week],
        near[: quotas.tower],
        _NOTHING if store is None else store[: quotas.store].astype(np.int64, copy=False),
        query.statistics.popular,
        quotas.total,
    )
    return Candidates(codes, sources)


def thin(candidates: Candidates, most: int) -> Candidates:
    """Return `most` of the candidates in their order: the same share of each source, its first ones."""
    sources = candidates.source
    sizes = np.bincount(sources, minlength=len(SOURCES))
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.empty(len(sources), np.int64)  # of each candidate within its source
    place[np.argsort(sources, kind="stable")] = np.arange(len(sources)) - first
    chosen = np.sort(np.argsort((place + 0.5) / sizes[sources], kind="stable")[:most])
    return Candidates(candidates.codes[chosen], sources[chosen])


def add_pinned(candidates: Candidates, pinned: np.ndarray, taken: np.ndarray) -> Candidates:
    """Return candidates with the pinned items that no source brought, but for those that are taken."""
    more = pinned[~np.isin(pinned, np.concatenate([candidates.codes, taken]))]
    source = np.full(len(more), SOURCES.index("pinned"), np.int8)
    return Candidates(np.concatenate([candidates.codes, more]), np.concatenate([candidates.source, source]))
