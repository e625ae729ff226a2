"""A request and its candidates -> one array per feature; the same functions train and serve.

Each public function below `Rows` is one feature. What it takes says what it is about:

    Statistics  an item           returns one float per item of the catalogue
    User        a user            returns one float
    Rows        both, the basket  returns one float per candidate, or one that all share

What is known to a feature at time t comes from events strictly before t: `User` cuts them off there, and the
statistics are handed in as of then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feature_repo.aggregates import (
    CLICK,
    DAY_S,
    IMPRESSION,
    PURCHASE,
    UserEvents,
    UserHistory,
    history_of,
    merge_lines,
)
from feature_repo.statistics import Statistics

MINUTE_S, HOUR_S = 60, 3_600
SESSION_GAP_S = 30 * MINUTE_S  # a session ends after so long without an event
LAST_ITEMS = 10
NEVER_DAYS = 730.0  # the recency of what never happened
RECENT_ITEMS = 30  # history items whose partners are looked up
LEVELS = {"type": 0, "category": 1, "department": 2}

ItemFeature = Callable[[Statistics], np.ndarray]
UserFeature = Callable[["User"], float]
Feature = Callable[["Rows"], "np.ndarray | float"]


@dataclass(frozen=True)
class Together:
    """Items bought together with a set of items: one entry per partner, sorted by code."""

    codes: np.ndarray
    sum: np.ndarray  # of count / (n_v^0.7 n_i^0.3) over the set
    max: np.ndarray
    cosine_sum: np.ndarray
    cosine_max: np.ndarray
    lift_max: np.ndarray
    links: np.ndarray  # how many of the set have this partner


def bought_together(statistics: Statistics, codes: np.ndarray, weights: np.ndarray | None = None) -> Together:
    """Return the partners of `codes`, (b,) int64, each link scaled by `weights`, (b,)."""
    count = statistics.together_count[codes]  # (b, K)
    if weights is not None:
        count = count * weights.astype(np.float32)[:, None]
    flat = statistics.neighbours[codes].ravel()
    order = np.argsort(flat)  # groups the links by partner; NO_ITEM comes first
    order = order[np.searchsorted(flat, 0, sorter=order) :]
    partner = flat[order].astype(np.int64)
    if len(partner) == 0:
        empty = np.empty(0, np.float32)
        return Together(np.empty(0, np.int64), empty, empty, empty, empty, empty, empty)
    powers = _powers(statistics)
    by_source = [
        (count * power[codes][:, None]).ravel()[order] for power in (powers[0], powers[2], powers[3])
    ]
    directed = by_source[0] * powers[1][partner]
    cosine = by_source[1] * powers[2][partner]
    lift = by_source[2] * powers[3][partner] * np.float32(statistics.total_baskets)
    start = np.flatnonzero(np.concatenate([[True], partner[1:] != partner[:-1]]))
    return Together(
        codes=partner[start],
        sum=np.add.reduceat(directed, start),
        max=np.maximum.reduceat(directed, start),
        cosine_sum=np.add.reduceat(cosine, start),
        cosine_max=np.maximum.reduceat(cosine, start),
        lift_max=np.maximum.reduceat(lift, start),
        links=np.diff(start, append=len(partner)).astype(np.float32),
    )


def _powers(statistics: Statistics) -> tuple[np.ndarray, ...]:
    """Return n^-0.7, n^-0.3, n^-0.5 and 1/n for each item, computed once per statistics."""
    cached = statistics.__dict__.get("_powers")
    if cached is None:
        count = np.maximum(statistics.basket_count, 1).astype(np.float32)
        cached = statistics.__dict__["_powers"] = (count**-0.7, count**-0.3, count**-0.5, 1 / count)
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
        self._windows: dict[tuple[float, int | None], Window] = {}

    @cached_property
    def history(self) -> UserHistory:
        """What was bought, items outside the catalogue included."""
        return history_of(self.events, self.at)

    @cached_property
    def acts(self) -> UserEvents:
        """What the user did: all but impressions, which are what the shop did."""
        shown = self.events.kind == IMPRESSION
        return self.events.where(~shown) if shown.any() else self.events

    @cached_property
    def session(self) -> UserEvents:
        """The acts since the last pause of SESSION_GAP_S; none if that pause lasts."""
        at = self.acts.at[-1_000:]
        pauses = np.flatnonzero(np.diff(at, append=self.at) > SESSION_GAP_S)
        start = 0 if len(pauses) == 0 else int(pauses[-1]) + 1
        return self.acts.where(slice(len(self.acts) - len(at) + start, None))

    @cached_property
    def last_items(self) -> np.ndarray:
        """The LAST_ITEMS items that the user bought or clicked last, the latest first."""
        lately = self.acts.item[::-1][:200]
        _, first = np.unique(lately, return_index=True)
        return self.acts.items[lately[np.sort(first)[:LAST_ITEMS]]]

    def window(self, seconds: float, kind: int | None = PURCHASE) -> Window:
        """Return the events of one kind (None: of all) in the last `seconds`."""
        if (seconds, kind) not in self._windows:
            events = self.events.where(slice(int(np.searchsorted(self.events.at, self.at - seconds)), None))
            if kind is not None and not (events.kind == kind).all():
                events = events.where(events.kind == kind)
            self._windows[seconds, kind] = Window(events)
        return self._windows[seconds, kind]


class Window:
    """What happened in a span of time: counts, sums, means and distinct values of it."""

    def __init__(self, events: UserEvents) -> None:
        """Take the events of the span."""
        self.events = events

    @property
    def lines(self) -> int:
        """Number of events."""
        return len(self.events)

    @cached_property
    def baskets(self) -> int:
        """Number of baskets."""
        return int(self.events.begins().sum())

    @cached_property
    def items(self) -> int:
        """Number of distinct items."""
        return len(np.unique(self.events.item))

    @cached_property
    def spend(self) -> float:
        """What was paid, in the shop's currency."""
        return float(self.events.paid.sum(dtype=np.float64))


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
        known = history.items >= 0
        if known.all():
            return history
        return replace(
            history,
            items=history.items[known],
            count=history.count[known],
            decayed=history.decayed[known],
            first_at=history.first_at[known],
            last_at=history.last_at[known],
        )

    @cached_property
    def together(self) -> Together:
        """Partners of the basket."""
        return bought_together(self.statistics, self.basket)

    @cached_property
    def history_together(self) -> Together:
        """Partners of what the user bought lately, weighted by the 60-day decayed count."""
        weight = self.history.decayed[:, 1]
        top = np.argsort(-weight, kind="stable")[:RECENT_ITEMS]
        return bought_together(self.statistics, self.history.items[top], np.log1p(weight[top]))

    @cached_property
    def history_rank(self) -> np.ndarray:
        """Position of each history item when sorted by 120-day decayed count, (h,)."""
        rank = np.empty(len(self.history.items))
        rank[np.argsort(-self.history.decayed[:, 2], kind="stable")] = np.arange(len(rank))
        return rank


class Rows:
    """One row per candidate: the query, the candidate codes, and where each one stands in the tables."""

    def __init__(self, query: Query, candidates: np.ndarray) -> None:
        """Take the request and its candidates, (n,) int64 codes of the catalogue."""
        self.query = query
        self.statistics = query.statistics
        self.candidates = candidates
        self.in_history, self.history_at = _find(query.history.items, candidates)
        self.in_together, self.together_at = _find(query.together.codes, candidates)
        self.levels = self.statistics.categorical[candidates]  # (n, 3)
        self.price = self.statistics.price[candidates]

    def from_history(self, values: np.ndarray, missing: float) -> np.ndarray:
        """Return the history's `values`, (h,), for each candidate; `missing` if never bought."""
        return _take(values, self.in_history, self.history_at, missing)

    def from_together(self, values: np.ndarray) -> np.ndarray:
        """Return the basket partners' `values` for each candidate; 0 if it is no partner."""
        return _take(values, self.in_together, self.together_at, 0.0)

    def by_level(self, items: np.ndarray, level: str, weights: np.ndarray | None = None) -> np.ndarray:
        """Return for each candidate how many of `items`, (k,) codes, share its level; an unknown one is none.

        With `weights`, (k,), the sum of those instead.
        """
        column = LEVELS[level]
        codes = self.statistics.categorical[items, column]
        size = int(max(codes.max(initial=0), self.levels[:, column].max(initial=0))) + 1
        totals = np.bincount(codes, weights, size)
        totals[0] = 0
        return totals[self.levels[:, column]]

    def history_by(self, level: str, weights: np.ndarray) -> np.ndarray:
        """Return for each candidate the sum of `weights`, (h,), over history items of its level."""
        return self.by_level(self.query.history.items, level, weights)

    def lines_of(self, events: UserEvents) -> np.ndarray:
        """Return for each candidate how many of the events are about it."""
        codes = events.items[events.item]
        found, count = np.unique(codes[codes >= 0], return_counts=True)
        known, at = _find(found, self.candidates)
        return _take(count.astype(float), known, at, 0.0)

    def basket_by(self, level: str) -> np.ndarray:
        """Return for each candidate how many basket items share its level."""
        return self.by_level(self.query.basket, level)

    @cached_property
    def basket_type_lift(self) -> np.ndarray:
        """Type lift of each candidate against each basket item, (m, n)."""
        types = self.statistics.categorical[self.query.basket, 0]
        return self.statistics.type_lift[types[:, None], self.levels[None, :, 0]].astype(np.float32)


def _find(sorted_codes: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(sorted_codes) == 0:
        return np.zeros(len(wanted), bool), np.zeros(len(wanted), np.int64)
    at = np.minimum(np.searchsorted(sorted_codes, wanted), len(sorted_codes) - 1)
    return sorted_codes[at] == wanted, at


def _take(values: np.ndarray, known: np.ndarray, at: np.ndarray, missing: float) -> np.ndarray:
    if len(values) == 0:
        return np.full(len(known), missing)
    return np.where(known, values[at], missing)


# The user and this very item.


def user_item_count(rows: Rows) -> np.ndarray:
    """Baskets of the user with the item."""
    return rows.from_history(rows.query.history.count, 0.0)


def user_item_decayed_15d(rows: Rows) -> np.ndarray:
    """The same, each basket weighted by exp(-age / 15 days)."""
    return rows.from_history(rows.query.history.decayed[:, 0], 0.0)


def user_item_decayed_60d(rows: Rows) -> np.ndarray:
    """The same, weighted by exp(-age / 60 days)."""
    return rows.from_history(rows.query.history.decayed[:, 1], 0.0)


def user_item_decayed_120d(rows: Rows) -> np.ndarray:
    """The same, weighted by exp(-age / 120 days)."""
    return rows.from_history(rows.query.history.decayed[:, 2], 0.0)


def user_item_recency_days(rows: Rows) -> np.ndarray:
    """Days since the user last bought the item."""
    return rows.from_history(_age_days(rows, rows.query.history.last_at), NEVER_DAYS)


def user_item_interval_days(rows: Rows) -> np.ndarray:
    """Mean days between the user's purchases of the item; the item's own mean where there is one."""
    history = rows.query.history
    span = (history.last_at - history.first_at) / DAY_S
    own = span / np.maximum(history.count - 1, 1)
    usual = rows.statistics.interval_days[history.items]
    return rows.from_history(np.where(history.count > 1, own, usual), NEVER_DAYS)


def user_item_due_ratio(rows: Rows) -> np.ndarray:
    """Recency over interval: 1 when the next purchase is due, 0 right after one."""
    return np.where(
        rows.in_history, user_item_recency_days(rows) / np.maximum(user_item_interval_days(rows), 1), 0
    )


def user_item_rate(rows: Rows) -> np.ndarray:
    """Share of the user's baskets with the item."""
    return user_item_count(rows) / max(rows.query.history.basket_count, 1)


def user_item_rate_since_first(rows: Rows) -> np.ndarray:
    """Purchases of the item per 30 days since the user's first one."""
    history = rows.query.history
    return rows.from_history(30 * history.count / np.maximum(_age_days(rows, history.first_at), 7), 0.0)


def user_item_rank(rows: Rows) -> np.ndarray:
    """Rank of the item in the user's history by 120-day decayed count."""
    return rows.from_history(rows.query.history_rank, 1_024.0)


def user_has_item(rows: Rows) -> np.ndarray:
    """1 if the user bought the item before."""
    return rows.in_history.astype(np.float32)


# The user and this kind of item.


def user_type_decayed_120d(rows: Rows) -> np.ndarray:
    """The user's 120-day decayed count over all items of the type."""
    return rows.history_by("type", rows.query.history.decayed[:, 2])


def user_type_decayed_15d(rows: Rows) -> np.ndarray:
    """The user's 15-day decayed count over all items of the type."""
    return rows.history_by("type", rows.query.history.decayed[:, 0])


def user_type_items(rows: Rows) -> np.ndarray:
    """Distinct items of the type the user has bought."""
    return rows.history_by("type", np.ones(len(rows.query.history.items)))


def user_type_share(rows: Rows) -> np.ndarray:
    """Share of the item in what the user buys of its type: 1 for a loyal buyer."""
    return user_item_decayed_120d(rows) / np.maximum(user_type_decayed_120d(rows), 1e-6)


def user_category_decayed_120d(rows: Rows) -> np.ndarray:
    """The user's 120-day decayed count over all items of the category."""
    return rows.history_by("category", rows.query.history.decayed[:, 2])


def user_department_share(rows: Rows) -> np.ndarray:
    """Share of the department in the user's 120-day decayed purchases."""
    return rows.history_by("department", rows.query.history.decayed[:, 2]) / max(
        rows.query.history.decayed[:, 2].sum(), 1e-6
    )


def user_private_ratio(rows: Rows) -> float:
    """Share of the shop's own brand in the user's 120-day decayed purchases."""
    weight = rows.query.history.decayed[:, 2]
    return float(rows.statistics.is_private[rows.query.history.items] @ weight / max(weight.sum(), 1e-6))


# What the user looked at.


def user_item_clicks_1h(rows: Rows) -> np.ndarray:
    """Clicks of the user on the item in the last hour."""
    return rows.lines_of(rows.query.user.window(HOUR_S, CLICK).events)


def user_item_impressions_7d(rows: Rows) -> np.ndarray:
    """How often the item was recommended to the user in the last 7 days."""
    return rows.lines_of(rows.query.user.window(7 * DAY_S, IMPRESSION).events)


def user_item_last_rank(rows: Rows) -> np.ndarray:
    """Position of the item among the last ten that the user had to do with; 10 behind them."""
    last = rows.query.user.last_items
    order = np.argsort(last)
    known, at = _find(last[order], rows.candidates)
    return _take(order.astype(float), known, at, float(LAST_ITEMS))


def session_same_type(rows: Rows) -> np.ndarray:
    """Events of the session about items of the candidate's type."""
    session = rows.query.user.session
    codes = session.items[session.item]
    return rows.by_level(codes[codes >= 0], "type")


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
    return float(user.history.decayed[:, 0].sum())


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
    if len(rows.query.basket) == 0:
        return 0.0
    return float(_find(rows.query.history.items, rows.query.basket)[0].mean())


def basket_same_type(rows: Rows) -> np.ndarray:
    """Basket items of the candidate's type."""
    return rows.basket_by("type")


def basket_same_category(rows: Rows) -> np.ndarray:
    """Basket items of the candidate's category."""
    return rows.basket_by("category")


def basket_same_department(rows: Rows) -> np.ndarray:
    """Share of the basket in the candidate's department."""
    return rows.basket_by("department") / max(len(rows.query.basket), 1)


def basket_type_lift_mean(rows: Rows) -> np.ndarray | float:
    """Mean type lift of the candidate against the basket."""
    return rows.basket_type_lift.mean(0) if len(rows.query.basket) else 0.0


def basket_type_lift_max(rows: Rows) -> np.ndarray | float:
    """Largest type lift of the candidate against a basket item."""
    return rows.basket_type_lift.max(0) if len(rows.query.basket) else 0.0


def together_sum(rows: Rows) -> np.ndarray:
    """Bought-together score, summed over the basket."""
    return rows.from_together(rows.query.together.sum)


def together_mean(rows: Rows) -> np.ndarray:
    """Bought-together score, averaged over the basket."""
    return together_sum(rows) / max(len(rows.query.basket), 1)


def together_max(rows: Rows) -> np.ndarray:
    """Largest bought-together score with a basket item."""
    return rows.from_together(rows.query.together.max)


def together_cosine_sum(rows: Rows) -> np.ndarray:
    """Cosine of the two items' baskets, summed over the basket."""
    return rows.from_together(rows.query.together.cosine_sum)


def together_cosine_max(rows: Rows) -> np.ndarray:
    """Largest cosine with a basket item."""
    return rows.from_together(rows.query.together.cosine_max)


def together_lift_max(rows: Rows) -> np.ndarray:
    """Largest lift with a basket item."""
    return rows.from_together(rows.query.together.lift_max)


def together_links(rows: Rows) -> np.ndarray:
    """Share of the basket that has the candidate as a partner."""
    return rows.from_together(rows.query.together.links) / max(len(rows.query.basket), 1)


def together_max_if_bought(rows: Rows) -> np.ndarray:
    """Largest bought-together score, for items the user has bought before."""
    return together_max(rows) * rows.in_history


def together_times_decayed(rows: Rows) -> np.ndarray:
    """Bought-together score times log(1 + 120-day decayed count): both signals at once."""
    return together_sum(rows) * np.log1p(user_item_decayed_120d(rows))


def history_together_sum(rows: Rows) -> np.ndarray:
    """Bought-together score with what the user bought lately."""
    partners = rows.query.history_together
    return _take(partners.sum, *_find(partners.codes, rows.candidates), 0.0)


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
    return np.log((rows.price + 0.5) / ((float(basket.mean()) if len(basket) else 0.0) + 0.5))


def _age_days(rows: Rows, at: np.ndarray) -> np.ndarray:
    return np.maximum(rows.query.at - at, 0) / DAY_S
