"""A request and its candidates -> one array per feature; the same functions train and serve.

Each public function below `Rows` is one feature. What it takes says what it is about:

    Statistics  an item           returns one float per item of the catalogue
    User        a user            returns one float
    Query       a user's items    returns one float per item bought (`of_history`), or per partner of the
                                  basket (`of_together`); called with `Rows` it gives the candidates'
    Rows        both, the basket  returns one float per candidate, or one that all share

What is known to a feature at time t comes from events strictly before t: `User` cuts them off there, and the
statistics are handed in as of then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feature_repo.aggregates import (
    CLICK,
    DAY_S,
    IMPRESSION,
    KINDS,
    PURCHASE,
    UserEvents,
    UserHistory,
    history_of,
    merge_lines,
)
from feature_repo.kernels import (
    best,
    fill_rows,
    last_distinct,
    levels_of,
    lift,
    link,
    link_to,
    rhythms,
    strongest_link,
    sums_by_level,
    totals_of,
)
from feature_repo.statistics import Statistics

MINUTE_S, HOUR_S = 60, 3_600
SESSION_GAP_S = 30 * MINUTE_S  # a session ends after so long without an event
LAST_ITEMS = 10
NEVER_DAYS = 730.0  # the recency of what never happened
LATELY = 64  # history items that count as bought lately
RECENT_ITEMS = 30  # those whose partners are looked up
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # every float16 there is
TYPE, CATEGORY, DEPARTMENT = range(3)  # rows of an item's levels
DECAYED_15D, DECAYED_60D, DECAYED_120D, ITEMS = range(4)  # rows of `Rows.history_sums`

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


def together_with(
    statistics: Statistics, items: np.ndarray, weights: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Return the first strength of each wanted code's links with `items`, added up, (n,) float64.

    Args:
        statistics: of the catalogue.
        items: (b,) int64 codes.
        weights: (b,) by which the links of each item are scaled.
        wanted: (n,) distinct codes.
    """
    factors = link_weights(statistics)
    scale = weights * factors[items, 0]
    tables = statistics.neighbours, statistics.together_count
    found: np.ndarray = statistics.marked(link_to, wanted, items, scale, *tables)
    return found * factors[wanted, 3]


def strongest_partner(statistics: Statistics, items: np.ndarray, code: int) -> int:
    """Return which of some items, (b,) int64 codes, is bought together with `code` most; NO_ITEM for none."""
    tables = statistics.neighbours, statistics.together_count, link_weights(statistics)
    return int(strongest_link(code, items, *tables))


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


class User:
    """What one user did strictly before `at`, an item once in each basket.

    `events.items` are codes of the catalogue, -1 what it lacks. In the offline store they are ids: what looks
    at single items belongs to `Rows`.
    """

    def __init__(self, events: UserEvents, at: float) -> None:
        """Take the user's row, which may hold later events, and the time that is asked for."""
        self.events = merge_lines(events.before(at))
        self.at = at
        self._kinds: dict[int, UserEvents] = {}
        self._windows: dict[tuple[float, int | None], Window] = {}

    @cached_property
    def history(self) -> UserHistory:
        """What was bought, items outside the catalogue included."""
        return history_of(self.of(PURCHASE), self.at)

    def of(self, kind: int | None) -> UserEvents:
        """Return the events of one kind; of all without one."""
        if kind is None:
            return self.events
        if kind not in self._kinds:
            count = self._counts[kind]
            if count in (0, len(self.events)):  # most users have one kind alone
                self._kinds[kind] = self.events if count else self.events.where(slice(0, 0))
            else:
                self._kinds[kind] = self.events.where(self.events.kind == kind)
        return self._kinds[kind]

    @cached_property
    def _counts(self) -> list[int]:
        """How many events there are of each kind."""
        return np.bincount(self.events.kind, minlength=len(KINDS)).tolist()

    @cached_property
    def acts(self) -> UserEvents:
        """What the user did: all but impressions, which are what the shop did."""
        if not self._counts[IMPRESSION]:
            return self.events
        return self.events.where(self.events.kind != IMPRESSION)

    @cached_property
    def session(self) -> UserEvents:
        """The acts since the last pause of SESSION_GAP_S; none if that pause lasts."""
        at = self.acts.at[-1_000:]
        if len(at) == 0 or self.at - at[-1] > SESSION_GAP_S:
            return self.acts.where(slice(len(self.acts), None))
        pauses = np.flatnonzero(at[1:] - at[:-1] > SESSION_GAP_S)
        start = 0 if len(pauses) == 0 else int(pauses[-1]) + 1
        return self.acts.where(slice(len(self.acts) - len(at) + start, None))

    @cached_property
    def last_items(self) -> np.ndarray:
        """The LAST_ITEMS items that the user bought or clicked last, the latest first."""
        return self.acts.items[last_distinct(self.acts.item, 200, LAST_ITEMS)]

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
    def lines(self) -> int:
        """Number of events."""
        return len(self._events) - self._first

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
        found: np.ndarray = rhythms(
            own.count, own.first_at, own.last_at, own.items, usual, self.at, float(DAY_S)
        )
        return found

    @cached_property
    def history_levels(self) -> np.ndarray:
        """Type, category and department of the history's items, (3, h)."""
        return _levels(self.statistics, self.history.items)

    @cached_property
    def basket_levels(self) -> np.ndarray:
        """Type, category and department of the basket's items, (3, m)."""
        return _levels(self.statistics, self.basket)


class Rows:
    """One row per candidate: the query, the candidate codes, and where each one stands in the tables."""

    def __init__(self, query: Query, candidates: np.ndarray) -> None:
        """Take the request and its candidates, (n,) int64 codes of the catalogue."""
        self.query = query
        self.statistics = statistics = query.statistics
        self.candidates = candidates
        self.places = {  # of each candidate in a table; -1 is its last row, of what is not in it
            "history": statistics.find(query.history.items, candidates),
            "together": statistics.find(query.together.codes, candidates),
        }
        self.in_history = self.places["history"] >= 0
        self.levels = _levels(statistics, candidates)  # (3, n)
        self.price = self.statistics.price[candidates]
        self._columns: dict[TableFeature, np.ndarray] = {}

    def fill(self, dense: np.ndarray, first: int, features: Sequence[TableFeature]) -> None:
        """Write features of one table into columns of `dense`, (n, columns) float32, from `first` on.

        Each is worked out once per entry of the table, and all are looked up together.
        """
        entries = [feature.of(self.query) for feature in features]
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

    @cached_property
    def history_sums(self) -> np.ndarray:
        """What the history holds of each candidate's type, category and department, (3, 4, n).

        The sums of the three decayed counts, and the number of items.
        """
        return self._sums(self.query.history_levels, self.query.history.decayed)

    @cached_property
    def basket_counts(self) -> np.ndarray:
        """How many basket items share each candidate's type, category and department, (3, n)."""
        return self.count_alike(self.query.basket_levels)

    def count_alike(self, levels: np.ndarray) -> np.ndarray:
        """Return how many of some items share each candidate's levels, (3, n); an unknown one is none.

        Args:
            levels: (3, k) of the items.
        """
        return self._sums(levels, np.empty((0, levels.shape[1])))[:, 0]

    def _sums(self, levels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        found: np.ndarray = sums_by_level(levels, weights, self.statistics.level_sizes, self.levels)
        return found

    def lines_of(self, events: UserEvents) -> np.ndarray:
        """Return for each candidate how many of the events are about it."""
        at = self.statistics.find(self.candidates, events.items[events.item])
        return np.bincount(at + 1, minlength=len(self.candidates) + 1)[1:]

    @cached_property
    def basket_type_lift(self) -> np.ndarray:
        """Mean and largest type lift of each candidate against the basket's items, (2, n) float32."""
        table = self.statistics.type_lift.view(np.uint16)
        found: np.ndarray = lift(table, _HALVES, self.query.basket_levels[0], self.levels[0])
        return found


class TableFeature:
    """A feature of what a table of the request holds; called with `Rows` it gives each candidate's, (n,)."""

    def __init__(self, of: Callable[[Query], np.ndarray], table: str, missing: float) -> None:
        """Take the function, its table, and the value of candidates that are not in it."""
        self.of, self.table, self.missing = of, table, missing
        self.__name__, self.__doc__ = of.__name__, of.__doc__

    def __call__(self, rows: Rows) -> np.ndarray:
        """Return the feature for each candidate."""
        return rows.column(self)


def of_history(missing: float = 0.0) -> Callable[[Callable[[Query], np.ndarray]], TableFeature]:
    """Mark a function that returns one float per item of `Query.history`; other candidates are `missing`."""
    return lambda of: TableFeature(of, "history", missing)


def of_together(of: Callable[[Query], np.ndarray]) -> TableFeature:
    """Mark a function that returns one float per partner in `Query.together`; other candidates have 0."""
    return TableFeature(of, "together", 0.0)


def _levels(statistics: Statistics, codes: np.ndarray) -> np.ndarray:
    """Return type, category and department of items, (3, n)."""
    found: np.ndarray = levels_of(statistics.categorical, codes)
    return found


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
    return query.history.count.astype(np.float64) / max(query.history.basket_count, 1)


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


def user_has_item(rows: Rows) -> np.ndarray:
    """1 if the user bought the item before."""
    return rows.in_history


# The user and this kind of item.


def user_type_decayed_120d(rows: Rows) -> np.ndarray:
    """The user's 120-day decayed count over all items of the type."""
    return rows.history_sums[TYPE, DECAYED_120D]


def user_type_decayed_15d(rows: Rows) -> np.ndarray:
    """The user's 15-day decayed count over all items of the type."""
    return rows.history_sums[TYPE, DECAYED_15D]


def user_type_items(rows: Rows) -> np.ndarray:
    """Distinct items of the type the user has bought."""
    return rows.history_sums[TYPE, ITEMS]


def user_type_share(rows: Rows) -> np.ndarray:
    """Share of the item in what the user buys of its type: 1 for a loyal buyer."""
    return user_item_decayed_120d(rows) / np.maximum(user_type_decayed_120d(rows), 1e-6)


def user_category_decayed_120d(rows: Rows) -> np.ndarray:
    """The user's 120-day decayed count over all items of the category."""
    return rows.history_sums[CATEGORY, DECAYED_120D]


def user_department_share(rows: Rows) -> np.ndarray:
    """Share of the department in the user's 120-day decayed purchases."""
    whole = float(rows.query.history.decayed[DECAYED_120D].sum())
    return rows.history_sums[DEPARTMENT, DECAYED_120D] / max(whole, 1e-6)


def user_private_ratio(rows: Rows) -> float:
    """Share of the shop's own brand in the user's 120-day decayed purchases."""
    weight = rows.query.history.decayed[2]
    return float(rows.statistics.is_private[rows.query.history.items] @ weight / max(weight.sum(), 1e-6))


# What the user looked at.


def user_item_clicks_1h(rows: Rows) -> np.ndarray | float:
    """Clicks of the user on the item in the last hour."""
    window = rows.query.user.window(HOUR_S, CLICK)
    return rows.lines_of(window.events) if window.lines else 0.0


def user_item_impressions_7d(rows: Rows) -> np.ndarray | float:
    """How often the item was recommended to the user in the last 7 days."""
    window = rows.query.user.window(7 * DAY_S, IMPRESSION)
    return rows.lines_of(window.events) if window.lines else 0.0


def user_item_last_rank(rows: Rows) -> np.ndarray:
    """Position of the item among the last ten that the user had to do with; 10 behind them."""
    last = rows.query.user.last_items
    known = np.flatnonzero(last >= 0)
    place = rows.statistics.find(last[known], rows.candidates)
    if len(known) == len(last):
        place[place < 0] = LAST_ITEMS
        return place
    return np.append(known, LAST_ITEMS)[place]


def session_same_type(rows: Rows) -> np.ndarray | float:
    """Events of the session about items of the candidate's type."""
    session = rows.query.user.session
    if len(session) == 0:
        return 0.0
    codes = session.items[session.item]
    return rows.count_alike(_levels(rows.statistics, codes[codes >= 0]))[TYPE]


# The user alone.


def user_basket_count(user: User) -> float:
    """Baskets the user has bought."""
    return float(user.history.basket_count)


def user_recency_days(user: User) -> float:
    """Days since the user's last basket."""
    history = user.history
    return (user.at - history.last_basket_at) / DAY_S if history.basket_count else NEVER_DAYS


def user_basket_interval_days(user: User) -> float:
    """Mean days between the user's baskets."""
    history = user.history
    span = (history.last_basket_at - history.first_basket_at) / DAY_S
    return span / (history.basket_count - 1) if history.basket_count > 1 else NEVER_DAYS


def user_basket_size(user: User) -> float:
    """Mean lines of the user's baskets."""
    return user.history.line_count / max(user.history.basket_count, 1)


def user_spend_per_line(user: User) -> float:
    """Mean paid per line by the user, in the shop's currency."""
    return user.history.spend / max(user.history.line_count, 1)


def user_discount_ratio(user: User) -> float:
    """Share of the undiscounted value that the user did not have to pay."""
    history = user.history
    return history.discount / max(history.spend + history.discount, 1e-6)


def user_baskets_7d(user: User) -> float:
    """Baskets of the last 7 days."""
    return float(user.window(7 * DAY_S).baskets)


def user_spend_7d(user: User) -> float:
    """Paid in the last 7 days, in the shop's currency."""
    return user.window(7 * DAY_S).spend


def user_basket_value_60d(user: User) -> float:
    """Mean paid per basket of the last 60 days, in the shop's currency."""
    window = user.window(60 * DAY_S)
    return window.spend / max(window.baskets, 1)


def user_items_60d(user: User) -> float:
    """Distinct items bought in the last 60 days."""
    return float(user.window(60 * DAY_S).items)


def user_spend_trend(user: User) -> float:
    """Spend of the last 7 days against the usual week of the last 60 days; 1 where there is none."""
    usual = user.window(60 * DAY_S).spend * 7 / 60
    return user_spend_7d(user) / usual if usual > 0 else 1.0


def user_lines_decayed_15d(user: User) -> float:
    """Lines bought, each weighted by exp(-age / 15 days)."""
    return float(user.history.decayed[0].sum())


def user_clicks_10m(user: User) -> float:
    """Clicks of the last 10 minutes."""
    return float(user.window(10 * MINUTE_S, CLICK).lines)


def user_baskets_1h(user: User) -> float:
    """Baskets of the last hour: the second trip for what was forgotten."""
    return float(user.window(HOUR_S).baskets)


def session_events(user: User) -> float:
    """Purchases and clicks since the last pause of half an hour."""
    return float(len(user.session))


def session_minutes(user: User) -> float:
    """Minutes since the session began; 0 without one."""
    return (user.at - float(user.session.at[0])) / MINUTE_S if len(user.session) else 0.0


# The basket and this item.


def basket_size(rows: Rows) -> float:
    """Lines of the basket."""
    return float(rows.query.basket_size)


def basket_value(rows: Rows) -> float:
    """Usual price of the basket, in the shop's currency."""
    return float(rows.statistics.price[rows.query.basket].sum())


def basket_known_ratio(rows: Rows) -> float:
    """Share of the basket that the user has bought before: a routine trip is near 1."""
    basket, bought = rows.query.basket, rows.query.history.items
    if len(basket) == 0 or len(bought) == 0:
        return 0.0
    at = np.minimum(bought.searchsorted(basket), len(bought) - 1)
    return float(np.count_nonzero(bought[at] == basket)) / len(basket)


def basket_same_type(rows: Rows) -> np.ndarray:
    """Basket items of the candidate's type."""
    return rows.basket_counts[TYPE]


def basket_same_category(rows: Rows) -> np.ndarray:
    """Basket items of the candidate's category."""
    return rows.basket_counts[CATEGORY]


def basket_same_department(rows: Rows) -> np.ndarray:
    """Share of the basket in the candidate's department."""
    return rows.basket_counts[DEPARTMENT] / max(len(rows.query.basket), 1)


def basket_type_lift_mean(rows: Rows) -> np.ndarray | float:
    """Mean type lift of the candidate against the basket."""
    if len(rows.query.basket) == 0:
        return 0.0
    return rows.basket_type_lift[0]


def basket_type_lift_max(rows: Rows) -> np.ndarray | float:
    """Largest type lift of the candidate against a basket item."""
    if len(rows.query.basket) == 0:
        return 0.0
    return rows.basket_type_lift[1]


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


def together_max_if_bought(rows: Rows) -> np.ndarray:
    """Largest bought-together score, for items the user has bought before."""
    return together_max(rows) * rows.in_history


def together_times_decayed(rows: Rows) -> np.ndarray:
    """Bought-together score times log(1 + 120-day decayed count): both signals at once."""
    return together_sum(rows) * np.log1p(user_item_decayed_120d(rows))


def history_together_sum(rows: Rows) -> np.ndarray:
    """Bought-together score with what the user bought lately."""
    query = rows.query
    top = query.lately[:RECENT_ITEMS]
    weights = np.log1p(query.history.decayed[1, top])
    return together_with(rows.statistics, query.history.items[top], weights, rows.candidates)


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


def price_to_user_ratio(rows: Rows) -> np.ndarray:
    """Price against what the user usually pays for a line."""
    return np.log((rows.price + 0.5) / (user_spend_per_line(rows.query.user) + 0.5))


def price_to_basket_ratio(rows: Rows) -> np.ndarray:
    """Price against the mean price in the basket."""
    basket = rows.statistics.price[rows.query.basket]
    mean = float(basket.sum() / len(basket)) if len(basket) else 0.0
    return np.log((rows.price + 0.5) / (mean + 0.5))
