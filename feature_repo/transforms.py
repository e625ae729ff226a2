"""A request and its candidates -> one array per feature; the same functions train and serve.

Each public name below `Rows` is one feature. What it takes says what it is about:

    Statistics  an item           returns one float per item of the catalogue
    User        a user            returns one float
    Query       a user's items    returns one float per item bought (`of_history`), or per partner of the
                                  basket, by that alone (`of_together`); called with `Rows` it gives the
                                  candidates'
    Rows        both, the basket  returns one float per candidate, or one that all share

Those of `Rows` that are here are worked out in one loop, `kernels.compare` (`PairFeature`), as are the sums
of a user, `kernels.summarise` (`Totals`): a call of numpy for each costs more than its numbers. A function of
your own needs no loop: it takes what `User`, `Query` or `Rows` hold.

What is known to a feature at time t comes from events strictly before t: `User` cuts them off there, and the
statistics are handed in as of then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feature_repo.aggregates import (
    CLICK,
    DAY_S,
    IMPRESSION,
    PURCHASE,
    Totals,
    UserEvents,
    UserHistory,
    merge_lines,
    summary_of,
)
from feature_repo.kernels import compiled as kernels
from feature_repo.kernels.compiled import (
    best,
    compare,
    fill_rows,
    last_distinct,
    link,
    rhythms,
    strongest_links,
    totals_of,
)
from feature_repo.statistics import Statistics

MINUTE_S, HOUR_S = 60, 3_600
LAST_ITEMS = 10
NEVER_DAYS = 730.0  # the recency of what never happened
LATELY = 64  # history items that count as bought lately
RECENT_ITEMS = 30  # those whose partners are looked up
_NO_CODES = np.empty(0, np.int64)

ItemFeature = Callable[[Statistics], np.ndarray]
UserFeature = Callable[["User"], float]
Feature = Callable[["Rows"], "np.ndarray | float"]


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
    tables = statistics.neighbours, statistics.together_count, link_weights(statistics)
    return Together(*statistics.marked(link, items, *tables))


def strongest_partners(statistics: Statistics, items: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return which of some items is bought together with each distinct code most, (n,); NO_ITEM for none."""
    tables = statistics.neighbours, statistics.together_count, link_weights(statistics)
    found: np.ndarray = statistics.marked(strongest_links, codes, items, *tables)
    return found


def link_weights(statistics: Statistics) -> np.ndarray:
    """Return what a link's count is multiplied by, (n, 6) float32, computed once per statistics.

    The first three columns are of the item it comes from, one per strength; the others of its partner.
    """
    cached: np.ndarray | None = statistics.__dict__.get("_link_weights")
    if cached is None:
        count = np.maximum(statistics.basket_count, 1).astype(np.float32)
        total = np.float32(statistics.total_baskets)
        rows = [count**-0.7, count**-0.5, 1 / count, count**-0.3, count**-0.5, total / count]
        cached = statistics.__dict__["_link_weights"] = np.stack(rows, axis=1).astype(np.float32)
    return cached


def log_price(statistics: Statistics) -> np.ndarray:
    """Return the logarithm of each item's price and a half, (n,) float64, computed once per statistics."""
    cached: np.ndarray | None = statistics.__dict__.get("_log_price")
    if cached is None:
        with np.errstate(invalid="ignore", divide="ignore"):  # a price that is none stays in its own row
            cached = statistics.__dict__["_log_price"] = np.log(statistics.price + np.float64(0.5))
    return cached


class User:
    """What one user did strictly before `at`, an item once in each basket.

    `events.items` are codes of the catalogue, -1 what it lacks. In the offline store they are ids: what looks
    at single items belongs to `Rows`.
    """

    def __init__(self, events: UserEvents, at: float) -> None:
        """Take the user's row, which may hold later events, and the time that is asked for."""
        self._read = events.before(at)
        self.at = at
        self._kinds: dict[int, UserEvents] = {}
        self._windows: dict[tuple[float, int | None], Window] = {}

    @cached_property
    def events(self) -> UserEvents:
        """All of them, what was scanned twice added up."""
        return merge_lines(self._read)

    @cached_property
    def _summary(self) -> tuple[UserHistory, Totals]:
        return summary_of(self._read, self.at)

    @property
    def history(self) -> UserHistory:
        """What was bought, items outside the catalogue included."""
        return self._summary[0]

    @property
    def totals(self) -> Totals:
        """What was done, in sums."""
        return self._summary[1]

    def of(self, kind: int | None) -> UserEvents:
        """Return the events of one kind; of all without one."""
        if kind is None:
            return self.events
        if kind not in self._kinds:
            self._kinds[kind] = self.events.where(self.events.kind == kind)
        return self._kinds[kind]

    @cached_property
    def acts(self) -> UserEvents:
        """What the user did: all but impressions, which are what the shop did."""
        if not self.totals.impressions:
            return self.events
        return self.events.where(self.events.kind != IMPRESSION)

    @cached_property
    def session(self) -> UserEvents:
        """The acts since the last pause of SESSION_GAP_S; none if that pause lasts."""
        return self.acts.where(slice(len(self.acts) - int(self.totals.session_lines), None))

    @cached_property
    def last_items(self) -> np.ndarray:
        """The LAST_ITEMS items that the user bought or clicked last, the latest first."""
        acts = self.acts if self.totals.impressions else self._read
        return acts.items[last_distinct(acts.item, 200, LAST_ITEMS)]

    def window(self, seconds: float, kind: int | None = PURCHASE) -> Window:
        """Return the events of one kind (None: of all) in the last `seconds`."""
        window = self._windows.get((seconds, kind))
        if window is None:
            events = self.of(kind)
            window = Window(events, int(events.at.searchsorted(self.at - seconds)))
            self._windows[seconds, kind] = window
        return window


class Window:
    """What happened since a moment: counts, sums, means and distinct values of it."""

    def __init__(self, events: UserEvents, first: int = 0) -> None:
        """Take events, and the number of the first one that counts."""
        self._events, self._first = events, first

    @cached_property
    def events(self) -> UserEvents:
        """The events of the span."""
        return self._events.where(slice(self._first, None))

    @property
    def baskets(self) -> int:
        """Number of baskets."""
        return self._totals[0]

    @property
    def items(self) -> int:
        """Number of distinct items."""
        return self._totals[1]

    @property
    def spend(self) -> float:
        """What was paid, in the shop's currency."""
        return self._totals[2]

    @cached_property
    def _totals(self) -> tuple[int, int, float]:
        events, rows = self._events, slice(self._first, None)
        found: tuple[int, int, float] = totals_of(
            events.at[rows], events.basket[rows], events.item[rows], events.paid[rows], len(events.items)
        )
        return found


@dataclass
class Query:
    """What is known of one request before any candidate is: user, basket and time."""

    statistics: Statistics
    at: float
    basket: np.ndarray  # (m,) int64 codes of the basket items the catalogue knows
    basket_size: int  # lines of the basket, known or not
    user: User

    @cached_property
    def history(self) -> UserHistory:
        """What the user bought of the catalogue; `items` are sorted codes."""
        history = self.user.history
        known = np.flatnonzero(history.items >= 0)
        if len(known) == len(history.items):
            return history
        return replace(
            history,
            items=history.items.take(known),
            count=history.count.take(known),
            decayed=history.decayed.take(known, axis=1),
            first_at=history.first_at.take(known),
            last_at=history.last_at.take(known),
        )

    @property
    def says_something(self) -> bool:
        """Whether anything of basket or history is known to the catalogue."""
        return len(self.basket) > 0 or len(self.history.items) > 0

    @cached_property
    def together(self) -> Together:
        """Partners of the basket."""
        return bought_together(self.statistics, self.basket)

    def with_partners(self, places: np.ndarray) -> Query:
        """Return what is known of the same request, with some of the entries of `together` alone."""
        every, known = self.together, copy(self)
        known.together = Together(
            every.codes.take(places),
            every.sums.take(places, axis=1),
            every.largest.take(places, axis=1),
            every.links.take(places),
        )
        return known

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
        own, usual = self.history, self.statistics.interval_days
        found: np.ndarray = rhythms(own.count, own.first_at, own.last_at, own.items, usual, self.at)
        return found


class Rows:
    """One row per candidate: the query, the candidate codes, and what the two have to do with each other."""

    def __init__(self, query: Query, candidates: np.ndarray) -> None:
        """Take the request and its candidates, (n,) distinct int64 codes of the catalogue."""
        self.query = query
        self.statistics = statistics = query.statistics
        self.candidates = candidates
        user, history, together = query.user, query.history, query.together
        history_places, together_places, self.levels, self.pairs = statistics.marked(
            compare,
            candidates,
            query.basket,
            query.basket_size,
            history.items,
            history.decayed,
            query.lately[:RECENT_ITEMS],
            together.codes,
            together.sums,
            together.largest,
            user.last_items,
            user.session.codes() if user.totals.session_lines else _NO_CODES,
            user.window(HOUR_S, CLICK).events.codes() if user.totals.clicks else _NO_CODES,
            user.window(7 * DAY_S, IMPRESSION).events.codes() if user.totals.impressions else _NO_CODES,
            user_spend_per_line(user),
            statistics.categorical,
            statistics.level_sizes,
            statistics.price,
            log_price(statistics),
            statistics.is_private,
            statistics.type_lift.view(np.uint16),
            statistics.neighbours,
            statistics.together_count,
            link_weights(statistics),
        )
        self._of = {"history": query, "together": query}
        if len(together.codes) > len(candidates):  # a large basket: few of its partners are asked about
            there = np.flatnonzero(together_places >= 0)
            self._of["together"] = query.with_partners(together_places[there])
            together_places[there] = np.arange(len(there))
        # Of each candidate in a table; -1 is its last row, of what is not in it.
        self.places: dict[str, np.ndarray] = {"history": history_places, "together": together_places}
        self._columns: dict[TableFeature, np.ndarray] = {}

    def fill(self, dense: np.ndarray, first: int, features: Sequence[TableFeature]) -> None:
        """Write features of one table into columns of `dense`, (n, columns) float32, from `first` on.

        Each is worked out once per entry of the table, and all are looked up together.
        """
        query = self._of[features[0].table]
        entries = [feature.of(query) for feature in features]
        table = np.empty((len(features), len(entries[0]) + 1), np.float32)
        for row, values in enumerate(entries):
            table[row, :-1] = values
        table[:, -1] = [feature.missing for feature in features]
        fill_rows(dense, first, table, self.places[features[0].table])
        for column, feature in enumerate(features, first):
            self._columns[feature] = dense[:, column]

    def column(self, feature: TableFeature) -> np.ndarray:
        """Return one feature of a table for each candidate, (n,) float32."""
        if feature not in self._columns:
            self.fill(np.empty((len(self.candidates), 1), np.float32), 0, [feature])
        return self._columns[feature]


class TableFeature:
    """A feature of what a table of the request holds; called with `Rows` it gives each candidate's, (n,)."""

    def __init__(self, of: Callable[[Query], np.ndarray], table: str, missing: float) -> None:
        """Take the function, its table, and the value of candidates that are not in it."""
        self.of, self.table, self.missing = of, table, missing
        self.__name__, self.__doc__ = of.__name__, of.__doc__

    def __call__(self, rows: Rows) -> np.ndarray:
        """Return the feature for each candidate."""
        return rows.column(self)


class PairFeature:
    """A feature of the query and a candidate together; called with `Rows` it gives each candidate's, (n,)."""

    def __init__(self, name: str, row: int, what: str) -> None:
        """Take its name, its row in `Rows.pairs`, where `kernels.compare` puts it, and what it says."""
        self.row = row
        self.__name__, self.__doc__ = name, what

    def __call__(self, rows: Rows) -> np.ndarray:
        """Return the feature for each candidate."""
        found: np.ndarray = rows.pairs[self.row]
        return found


def of_history(missing: float = 0.0) -> Callable[[Callable[[Query], np.ndarray]], TableFeature]:
    """Mark a function that returns one float per item of `Query.history`; other candidates are `missing`."""
    return lambda of: TableFeature(of, "history", missing)


def of_together(of: Callable[[Query], np.ndarray]) -> TableFeature:
    """Mark a function that returns one float per partner in `Query.together`; other candidates have 0.

    Each float comes from its own partner's entry: which others there are depends on how many are asked about.
    """
    return TableFeature(of, "together", 0.0)


# The user and this very item.


@of_history()
def user_item_count(query: Query) -> np.ndarray:
    """Baskets of the user with the item."""
    return query.history.count


@of_history()
def user_item_decayed_15d(query: Query) -> np.ndarray:
    """The same, each basket weighted by exp(-age / 15 days)."""
    return query.history.decayed[0]


@of_history()
def user_item_decayed_60d(query: Query) -> np.ndarray:
    """The same, weighted by exp(-age / 60 days)."""
    return query.history.decayed[1]


@of_history()
def user_item_decayed_120d(query: Query) -> np.ndarray:
    """The same, weighted by exp(-age / 120 days)."""
    return query.history.decayed[2]


@of_history(missing=NEVER_DAYS)
def user_item_recency_days(query: Query) -> np.ndarray:
    """Days since the user last bought the item."""
    return query.rhythms[0]


@of_history(missing=NEVER_DAYS)
def user_item_interval_days(query: Query) -> np.ndarray:
    """Mean days between the user's purchases of the item; the item's own mean where there is one."""
    return query.rhythms[1]


@of_history()
def user_item_due_ratio(query: Query) -> np.ndarray:
    """Recency over interval: 1 when the next purchase is due, 0 right after one."""
    return query.rhythms[2]


@of_history()
def user_item_rate(query: Query) -> np.ndarray:
    """Share of the user's baskets with the item."""
    return query.history.count.astype(np.float64) / max(query.user.totals.baskets, 1)


@of_history()
def user_item_rate_since_first(query: Query) -> np.ndarray:
    """Purchases of the item per 30 days since the user's first one."""
    return query.rhythms[3]


@of_history(missing=1_024.0)
def user_item_rank(query: Query) -> np.ndarray:
    """Rank of the item in the user's history by 120-day decayed count."""
    rank = np.empty(len(query.favourites))
    rank[query.favourites] = np.arange(len(rank))
    return rank


user_has_item = PairFeature("user_has_item", kernels.HAS_ITEM, "1 if the user bought the item before.")


# The user and this kind of item.


user_type_decayed_120d = PairFeature(
    "user_type_decayed_120d",
    kernels.TYPE_120D,
    "The user's 120-day decayed count over all items of the type.",
)


user_type_decayed_15d = PairFeature(
    "user_type_decayed_15d", kernels.TYPE_15D, "The user's 15-day decayed count over all items of the type."
)
user_type_items = PairFeature(
    "user_type_items", kernels.TYPE_ITEMS, "Distinct items of the type the user has bought."
)
user_type_share = PairFeature(
    "user_type_share",
    kernels.TYPE_SHARE,
    "Share of the item in what the user buys of its type: 1 for a loyal buyer.",
)


user_category_decayed_120d = PairFeature(
    "user_category_decayed_120d",
    kernels.CATEGORY_120D,
    "The user's 120-day decayed count over all items of the category.",
)
user_department_share = PairFeature(
    "user_department_share",
    kernels.DEPARTMENT_SHARE,
    "Share of the department in the user's 120-day decayed purchases.",
)
user_private_ratio = PairFeature(
    "user_private_ratio",
    kernels.PRIVATE_RATIO,
    "Share of the shop's own brand in the user's 120-day decayed purchases.",
)


# What the user looked at.


user_item_clicks_1h = PairFeature(
    "user_item_clicks_1h", kernels.CLICKS, "Clicks of the user on the item in the last hour."
)


user_item_impressions_7d = PairFeature(
    "user_item_impressions_7d",
    kernels.IMPRESSIONS,
    "How often the item was recommended to the user in the last 7 days.",
)
user_item_last_rank = PairFeature(
    "user_item_last_rank",
    kernels.LAST_RANK,
    "Position of the item among the last ten that the user had to do with; 10 behind them.",
)
session_same_type = PairFeature(
    "session_same_type", kernels.SESSION_TYPE, "Events of the session about items of the candidate's type."
)


# The user alone.


def user_basket_count(user: User) -> float:
    """Baskets the user has bought."""
    return user.totals.baskets


def user_recency_days(user: User) -> float:
    """Days since the user's last basket."""
    return (user.at - user.totals.last_basket_at) / DAY_S if user.totals.baskets else NEVER_DAYS


def user_basket_interval_days(user: User) -> float:
    """Mean days between the user's baskets."""
    totals = user.totals
    span = (totals.last_basket_at - totals.first_basket_at) / DAY_S
    return span / (totals.baskets - 1) if totals.baskets > 1 else NEVER_DAYS


def user_basket_size(user: User) -> float:
    """Mean lines of the user's baskets."""
    return user.totals.lines / max(user.totals.baskets, 1)


def user_spend_per_line(user: User) -> float:
    """Mean paid per line by the user, in the shop's currency."""
    return user.totals.spend / max(user.totals.lines, 1)


def user_discount_ratio(user: User) -> float:
    """Share of the undiscounted value that the user did not have to pay."""
    totals = user.totals
    return totals.discount / max(totals.spend + totals.discount, 1e-6)


def user_baskets_7d(user: User) -> float:
    """Baskets of the last 7 days."""
    return user.totals.baskets_7d


def user_spend_7d(user: User) -> float:
    """Paid in the last 7 days, in the shop's currency."""
    return user.totals.spend_7d


def user_basket_value_60d(user: User) -> float:
    """Mean paid per basket of the last 60 days, in the shop's currency."""
    return user.totals.spend_60d / max(user.totals.baskets_60d, 1)


def user_items_60d(user: User) -> float:
    """Distinct items bought in the last 60 days."""
    return user.totals.items_60d


def user_spend_trend(user: User) -> float:
    """Spend of the last 7 days against the usual week of the last 60 days; 1 where there is none."""
    usual = user.totals.spend_60d * 7 / 60
    return user.totals.spend_7d / usual if usual > 0 else 1.0


def user_lines_decayed_15d(user: User) -> float:
    """Lines bought, each weighted by exp(-age / 15 days)."""
    return float(user.history.decayed[0].sum())


def user_clicks_10m(user: User) -> float:
    """Clicks of the last 10 minutes."""
    return user.totals.clicks_10m


def user_baskets_1h(user: User) -> float:
    """Baskets of the last hour: the second trip for what was forgotten."""
    return user.totals.baskets_1h


def session_events(user: User) -> float:
    """Purchases and clicks since the last pause of half an hour."""
    return user.totals.session_lines


def session_minutes(user: User) -> float:
    """Minutes since the session began; 0 without one."""
    totals = user.totals
    return (user.at - totals.session_at) / MINUTE_S if totals.session_lines else 0.0


# The basket and this item.


basket_size = PairFeature("basket_size", kernels.BASKET_SIZE, "Lines of the basket.")
basket_value = PairFeature(
    "basket_value", kernels.BASKET_VALUE, "Usual price of the basket, in the shop's currency."
)
basket_known_ratio = PairFeature(
    "basket_known_ratio",
    kernels.BASKET_KNOWN,
    "Share of the basket that the user has bought before: a routine trip is near 1.",
)
basket_same_type = PairFeature("basket_same_type", kernels.SAME_TYPE, "Basket items of the candidate's type.")
basket_same_category = PairFeature(
    "basket_same_category", kernels.SAME_CATEGORY, "Basket items of the candidate's category."
)
basket_same_department = PairFeature(
    "basket_same_department", kernels.SAME_DEPARTMENT, "Share of the basket in the candidate's department."
)
basket_type_lift_mean = PairFeature(
    "basket_type_lift_mean", kernels.LIFT_MEAN, "Mean type lift of the candidate against the basket."
)
basket_type_lift_max = PairFeature(
    "basket_type_lift_max", kernels.LIFT_MAX, "Largest type lift of the candidate against a basket item."
)


@of_together
def together_sum(query: Query) -> np.ndarray:
    """Bought-together score, summed over the basket."""
    return query.together.sums[0]


@of_together
def together_mean(query: Query) -> np.ndarray:
    """Bought-together score, averaged over the basket."""
    return query.together.sums[0].astype(np.float64) / max(len(query.basket), 1)


@of_together
def together_max(query: Query) -> np.ndarray:
    """Largest bought-together score with a basket item."""
    return query.together.largest[0]


@of_together
def together_cosine_sum(query: Query) -> np.ndarray:
    """Cosine of the two items' baskets, summed over the basket."""
    return query.together.sums[1]


@of_together
def together_cosine_max(query: Query) -> np.ndarray:
    """Largest cosine with a basket item."""
    return query.together.largest[1]


@of_together
def together_lift_max(query: Query) -> np.ndarray:
    """Largest lift with a basket item."""
    return query.together.largest[2]


@of_together
def together_links(query: Query) -> np.ndarray:
    """Share of the basket that has the candidate as a partner."""
    return query.together.links / max(len(query.basket), 1)


together_max_if_bought = PairFeature(
    "together_max_if_bought",
    kernels.TOGETHER_IF_BOUGHT,
    "Largest bought-together score, for items the user has bought before.",
)
together_times_decayed = PairFeature(
    "together_times_decayed",
    kernels.TOGETHER_TIMES_DECAYED,
    "Bought-together score times log(1 + 120-day decayed count): both signals at once.",
)
history_together_sum = PairFeature(
    "history_together_sum",
    kernels.HISTORY_TOGETHER,
    "Bought-together score with what the user bought lately.",
)


# The item alone: the item table holds them, so the function says which array it is.


def item_purchases_4w(statistics: Statistics) -> np.ndarray:
    """Baskets with the item in the last 4 weeks before the cut."""
    return statistics.purchases_4w


def item_purchases_13w(statistics: Statistics) -> np.ndarray:
    """Baskets with the item in the last 13 weeks before the cut."""
    return statistics.purchases_13w


def item_trend(statistics: Statistics) -> np.ndarray:
    """Log of recent against usual weekly sales."""
    return np.log((statistics.purchases_4w / 4 + 0.5) / (statistics.purchases_13w / 13 + 0.5))


def item_buyer_count(statistics: Statistics) -> np.ndarray:
    """Distinct users who bought the item."""
    return statistics.buyer_count


def item_repeat_ratio(statistics: Statistics) -> np.ndarray:
    """Share of the item's buyers who came back for it."""
    return statistics.repeat_ratio


def item_interval_days(statistics: Statistics) -> np.ndarray:
    """Mean days between two purchases of the item by one user."""
    return statistics.interval_days


def item_price(statistics: Statistics) -> np.ndarray:
    """Mean price paid, in the shop's currency."""
    return statistics.price


def item_discount_ratio(statistics: Statistics) -> np.ndarray:
    """Share of the item's units sold at a discount."""
    return statistics.discount_ratio


def item_is_private(statistics: Statistics) -> np.ndarray:
    """1 for the shop's own brand."""
    return statistics.is_private


def item_age_days(statistics: Statistics) -> np.ndarray:
    """Days between the item's first sale and the cut."""
    return statistics.age_days


# The item's price.


price_to_user_ratio = PairFeature(
    "price_to_user_ratio", kernels.PRICE_TO_USER, "Price against what the user usually pays for a line."
)
price_to_basket_ratio = PairFeature(
    "price_to_basket_ratio", kernels.PRICE_TO_BASKET, "Price against the mean price in the basket."
)
