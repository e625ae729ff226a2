"""A user's row, a basket, a moment and candidates -> `User`, `Query` and `Rows`: arguments of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from feature_repo.aggregates import (
    CLICK,
    DAY_S,
    DECAY_DAYS,
    IMPRESSION,
    PURCHASE,
    Totals,
    UserEvents,
    UserHistory,
    merge_lines,
    summary_of,
)
from feature_repo.kernels.candidates import best
from feature_repo.kernels.history import last_distinct, rhythms
from feature_repo.kernels.own_baskets import like_this_one
from feature_repo.kernels.pairs import LAST_ITEMS, compare
from feature_repo.kernels.partners import link, strongest_links
from feature_repo.kernels.rows import fill_rows
from feature_repo.statistics import Statistics

MINUTE_S, HOUR_S = 60, 3_600
LATELY = 64  # history items that count as bought lately
RECENT_ITEMS = 30  # those of them whose partners are looked up
OWN_PRIOR = 0.3  # weight of a basket that no user has: it keeps shares of a few baskets small
_NO_CODES = np.empty(0, np.int64)


class User:
    """One user's events strictly before `at`, an item once in each basket.

    `events.items` are codes of the catalogue, -1 outside it. In the offline store they are ids: a feature
    that compares single items takes `Rows`.
    """

    def __init__(self, events: UserEvents, at: float) -> None:
        self.lines = events.before(at)  # as scanned; `events` adds repeated scans up
        self.at = at

    @cached_property
    def events(self) -> UserEvents:
        """All events; lines of one item in one basket are added up."""
        return merge_lines(self.lines)

    @cached_property
    def _summary(self) -> tuple[UserHistory, Totals]:
        return summary_of(self.lines, self.at)

    @property
    def history(self) -> UserHistory:
        """The items that the user bought, those outside the catalogue included."""
        return self._summary[0]

    @property
    def totals(self) -> Totals:
        """Sums over the events."""
        return self._summary[1]

    @property
    def spend_per_line(self) -> float:
        """Mean paid per line, in the shop's currency."""
        return self.totals.spend / max(self.totals.lines, 1)

    @cached_property
    def acts(self) -> UserEvents:
        """All events except impressions, which are acts of the shop."""
        if not self.totals.impressions:
            return self.events
        return self.events.where(self.events.kind != IMPRESSION)

    @cached_property
    def session(self) -> UserEvents:
        """The acts since the last pause of SESSION_GAP_S; empty during a pause."""
        return self.acts.where(slice(len(self.acts) - int(self.totals.session_lines), None))

    @cached_property
    def last_items(self) -> np.ndarray:
        """The LAST_ITEMS items that the user bought or clicked last, the latest first."""
        acts = self.acts if self.totals.impressions else self.lines
        return acts.items[last_distinct(acts.item, LAST_ITEMS)]

    def window(self, seconds: float, kind: int = PURCHASE) -> UserEvents:
        """Return the events of one kind in the last `seconds`."""
        recent = self.events.where(slice(int(self.events.at.searchsorted(self.at - seconds)), None))
        return recent.where(recent.kind == kind)


@dataclass(frozen=True)
class Together:
    """Items bought together with a set of items: one entry per partner, in the order in which they come.

    A link from an item v of the set to a partner i has three strengths, all of the baskets with both:
    count / (n_v^0.7 n_i^0.3), count / sqrt(n_v n_i) and count N / (n_v n_i).
    """

    codes: np.ndarray  # (t,) int64
    sums: np.ndarray  # (3, t) float32, the strengths added up over the set
    largest: np.ndarray  # (3, t) float32, the largest ones
    links: np.ndarray  # (t,) how many of the set have this partner


def bought_together(statistics: Statistics, items: np.ndarray) -> Together:
    """Return the partners of items, (b,) int64 codes."""
    tables = statistics.neighbours, statistics.together_count, statistics.link_weights
    return Together(*statistics.marked(link, items, *tables))


def strongest_partners(statistics: Statistics, items: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return for each distinct code the item most bought together with it, (n,); NO_ITEM without one."""
    tables = statistics.neighbours, statistics.together_count, statistics.link_weights
    strongest: np.ndarray = statistics.marked(strongest_links, codes, items, *tables)
    return strongest


class OwnBaskets(NamedTuple):
    """The user's earlier baskets beside the basket of the request; see `kernels.own_baskets`.

    A basket weighs exp(-age / 120 days). The first four have an entry for each item of `Query.history`.
    """

    likeness: np.ndarray  # (h,) weighted likenesses of the baskets with the item, added up
    largest_likeness: np.ndarray  # (h,)
    weight: np.ndarray  # (h,) of the baskets with the item that share an item with this one
    type_likeness: np.ndarray  # (h,) as `likeness`, of the baskets' types
    type_weight: np.ndarray  # (types,) of the baskets with the type that share an item with this one
    shared_weight: float  # of the baskets that share an item with this one
    total_weight: float


@dataclass
class Query:
    """One request before it has candidates: user, basket and time."""

    statistics: Statistics
    at: float
    basket: np.ndarray  # (m,) int64 codes of the basket items the catalogue knows
    basket_size: int  # lines of the basket, known or not
    user: User

    @cached_property
    def history(self) -> UserHistory:
        """The items of the catalogue that the user bought; `items` are distinct codes in order of the ids."""
        history = self.user.history
        places = np.flatnonzero(history.items >= 0)
        if len(places) == len(history.items):
            return history
        return replace(
            history,
            items=history.items.take(places),
            count=history.count.take(places),
            decayed=history.decayed.take(places, axis=1),
            first_at=history.first_at.take(places),
            last_at=history.last_at.take(places),
        )

    @property
    def says_something(self) -> bool:
        """Whether the catalogue holds any item of basket or history."""
        return len(self.basket) > 0 or len(self.history.items) > 0

    @cached_property
    def together(self) -> Together:
        """Partners of the basket."""
        return bought_together(self.statistics, self.basket)

    @cached_property
    def own_baskets(self) -> OwnBaskets:
        """The user's earlier baskets, compared with this one."""
        events, statistics = self.user.lines, self.statistics
        found, by_type, shared, total = statistics.marked(
            like_this_one,
            events.at,
            events.basket,
            events.item,
            events.kind,
            events.items,
            self.history.items,
            self.basket,
            statistics.categorical[:, 0],
            int(statistics.level_sizes[0]),
            self.at,
            DECAY_DAYS[2] * DAY_S,
        )
        likeness, largest, weight, type_likeness = found
        return OwnBaskets(likeness, largest, weight, type_likeness, by_type, shared, total)

    @cached_property
    def lately(self) -> np.ndarray:
        """Places of LATELY items of the history, by 60-day decayed count, the largest first."""
        return best(self.history.decayed[1], LATELY)

    @cached_property
    def favourites(self) -> np.ndarray:
        """Places in the history, by 120-day decayed count, the largest first, (h,)."""
        return np.argsort(-self.history.decayed[2], kind="stable")

    @cached_property
    def rhythms(self) -> np.ndarray:
        """Recency and interval in days, their ratio, and purchases per 30 days, of the history, (4, h)."""
        bought, usual = self.history, self.statistics.interval_days
        values: np.ndarray = rhythms(
            bought.count, bought.first_at, bought.last_at, bought.items, usual, self.at
        )
        return values


class Rows:
    """One row per candidate: the query, the candidate codes, and the features of both together."""

    def __init__(self, query: Query, candidates: np.ndarray) -> None:
        """Compare the request with its candidates, (n,) distinct int64 codes of the catalogue."""
        self.query = query
        self.statistics = statistics = query.statistics
        self.candidates = candidates
        user, history, together = query.user, query.history, query.together
        history_places, together_places, self.levels, self.pairs = statistics.marked(
            compare,
            candidates,
            query.basket,
            query.basket_size,
            user.spend_per_line,
            query.own_baskets.type_weight / (query.own_baskets.shared_weight + OWN_PRIOR),
            (history.items, history.decayed, query.lately[:RECENT_ITEMS]),
            (together.codes, together.sums, together.largest),
            (
                user.last_items,
                user.session.codes() if user.totals.session_lines else _NO_CODES,
                user.window(HOUR_S, CLICK).codes() if user.totals.clicks else _NO_CODES,
                user.window(7 * DAY_S, IMPRESSION).codes() if user.totals.impressions else _NO_CODES,
            ),
            statistics.catalogue,
        )
        # The place of each candidate in a table; -1 is the table's last row, of candidates that it lacks.
        self.places: dict[str, np.ndarray] = {"history": history_places, "together": together_places}

    def fill(self, dense: np.ndarray, first: int, features: Sequence[TableFeature]) -> None:
        """Write features of one table into columns of `dense`, (n, columns) float32, from `first` on.

        Each is computed once per entry of the table; one look-up fills all columns.
        """
        entries = [feature.of(self.query) for feature in features]
        table = np.empty((len(features), len(entries[0]) + 1), np.float32)
        for row, values in enumerate(entries):
            table[row, :-1] = values
        table[:, -1] = [feature.missing for feature in features]
        fill_rows(dense, first, table, self.places[features[0].table])


class TableFeature:
    """A feature of a request's table; called with `Rows` it returns the value of each candidate, (n,)."""

    def __init__(self, of: Callable[[Query], np.ndarray], table: str, missing: float) -> None:
        """Name the feature after its function; candidates outside the table have the value `missing`."""
        self.of, self.table, self.missing = of, table, missing
        self.__name__, self.__doc__ = of.__name__, of.__doc__

    def __call__(self, rows: Rows) -> np.ndarray:
        """Return the feature for each candidate."""
        column = np.empty((len(rows.candidates), 1), np.float32)
        rows.fill(column, 0, [self])
        return column[:, 0]


def of_history(missing: float = 0.0) -> Callable[[Callable[[Query], np.ndarray]], TableFeature]:
    """Mark a function that returns one float per item of `Query.history`; other candidates get `missing`."""
    return lambda of: TableFeature(of, "history", missing)


def of_together(of: Callable[[Query], np.ndarray]) -> TableFeature:
    """Mark a function that returns one float per partner in `Query.together`; other candidates get 0."""
    return TableFeature(of, "together", 0.0)
