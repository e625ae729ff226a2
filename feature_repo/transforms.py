"""A request and its candidates -> one array per feature; the same functions train and serve.

Each public function is one feature. Its argument says which kind:

    Statistics  an item           returns one float per item of the catalogue
    ItemDays    an item lately    the same.
    User        a user            returns one float
    Query       a user's items    returns one float per item bought (`of_history`), or per partner of the
                                  basket (`of_together`); called with `Rows` it gives the candidates'
    Rows        both, the basket  returns one float per candidate, or one that all share

`kernels.pairs` computes the features of both that every request needs in a compiled loop (`PairFeature`), and
`kernels.history` the sums of a user (`Totals`): a numpy call for each feature costs more than its arithmetic.
A new function needs no loop: it takes any field of `User`, `Query` or `Rows`.

A feature as of time t sees events strictly before t: `User` drops later ones, and the caller passes the
statistics as of then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from feature_repo.aggregates import DAY_S
from feature_repo.item_days import SPAN, ItemDays
from feature_repo.queries import MINUTE_S, OWN_PRIOR, Query, Rows, User, of_history, of_together
from feature_repo.statistics import Statistics

NEVER_DAYS = 730.0  # the recency of an event that never happened
_OWN_COUNT = 0.02  # added to a weighted count: the logarithm of 0 is no number

ItemFeature = Callable[[Statistics], np.ndarray]
FreshFeature = Callable[[ItemDays], np.ndarray]
UserFeature = Callable[[User], float]
Feature = Callable[[Rows], "np.ndarray | float"]


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
    """Mean days between the user's purchases of the item; after a single purchase, the item's own mean."""
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


# The user's own earlier baskets that are like this one: "I buy it with that".


@of_history()
def own_basket_likeness(query: Query) -> np.ndarray:
    """Cosine of this basket and each earlier one with the item, times exp(-age / 120 days), added up."""
    return query.own_baskets.likeness


@of_history()
def own_basket_likeness_max(query: Query) -> np.ndarray:
    """Cosine of this basket and the most similar earlier one with the item."""
    return query.own_baskets.largest_likeness


@of_history()
def own_basket_count(query: Query) -> np.ndarray:
    """Earlier baskets with the item that share an item with this one, weighted by exp(-age / 120 days)."""
    return query.own_baskets.weight


@of_history()
def own_basket_confidence(query: Query) -> np.ndarray:
    """Share of the item in the user's earlier baskets that share an item with this one."""
    return query.own_baskets.weight / (query.own_baskets.shared_weight + OWN_PRIOR)


@of_history()
def own_basket_lift(query: Query) -> np.ndarray:
    """Log of that share against the item's share in all baskets of the user."""
    own = query.own_baskets
    usual = (query.history.decayed[2] + _OWN_COUNT) / (own.total_weight + OWN_PRIOR)
    return np.log((own.weight + _OWN_COUNT) / (own.shared_weight + OWN_PRIOR)) - np.log(usual)


@of_history()
def own_type_likeness(query: Query) -> np.ndarray:
    """Cosine of the types of this basket and of each earlier one with the item, weighted, added up."""
    return query.own_baskets.type_likeness


@of_history()
def own_type_likeness_mean(query: Query) -> np.ndarray:
    """The same, averaged over the earlier baskets with the item."""
    return query.own_baskets.type_likeness / (query.history.decayed[2] + 0.1)


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
    return user.spend_per_line


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
    """Spend of the last 7 days against the usual week of the last 60 days; 1 without such a week."""
    usual = user.totals.spend_60d * 7 / 60
    return user.totals.spend_7d / usual if usual > 0 else 1.0


def user_lines_decayed_15d(user: User) -> float:
    """Lines bought, each weighted by exp(-age / 15 days)."""
    return float(user.history.decayed[0].sum())


def user_clicks_10m(user: User) -> float:
    """Clicks of the last 10 minutes."""
    return user.totals.clicks_10m


def user_baskets_1h(user: User) -> float:
    """Baskets of the last hour: a second trip for forgotten items."""
    return user.totals.baskets_1h


def session_events(user: User) -> float:
    """Purchases and clicks since the last pause of half an hour."""
    return user.totals.session_lines


def session_minutes(user: User) -> float:
    """Minutes since the session began; 0 without one."""
    totals = user.totals
    return (user.at - totals.session_at) / MINUTE_S if totals.session_lines else 0.0


# Items that are bought together with the basket.


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


# The item alone: most are arrays of the item table.


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


# The item lately: its sales and its price of now.


def item_baskets_1d(days: ItemDays) -> np.ndarray:
    """Baskets with the item on the day before."""
    return days.baskets(1)


def item_baskets_3d(days: ItemDays) -> np.ndarray:
    """Baskets with the item in the last 3 days."""
    return days.baskets(3)


def item_baskets_7d(days: ItemDays) -> np.ndarray:
    """Baskets with the item in the last 7 days."""
    return days.baskets(7)


def item_baskets_14d(days: ItemDays) -> np.ndarray:
    """Baskets with the item in the last 14 days."""
    return days.baskets(14)


def item_baskets_28d(days: ItemDays) -> np.ndarray:
    """Baskets with the item in the last 28 days."""
    return days.baskets(28)


def item_baskets_91d(days: ItemDays) -> np.ndarray:
    """Baskets with the item in the last 91 days."""
    return days.baskets(SPAN)


def item_week_trend(days: ItemDays) -> np.ndarray:
    """Log of the sales a day of the last 7 days against those of 28."""
    return np.log((days.baskets(7) / 7 + 0.1) / (days.baskets(28) / 28 + 0.1))


def item_month_trend(days: ItemDays) -> np.ndarray:
    """Log of the sales a day of the last 28 days against those of 91."""
    return np.log((days.baskets(28) / 28 + 0.1) / (days.baskets(SPAN) / SPAN + 0.1))


def item_baskets_weekday(days: ItemDays) -> np.ndarray:
    """Baskets with the item on this day of the week in the last 4 weeks."""
    return days.on_weekday(4)


def type_baskets_7d(days: ItemDays) -> np.ndarray:
    """Baskets with each item of the type in the last 7 days, added up."""
    return days.of_type(days.baskets(7))


def type_baskets_28d(days: ItemDays) -> np.ndarray:
    """The same in the last 28 days."""
    return days.of_type(days.baskets(28))


def item_share_of_type_28d(days: ItemDays) -> np.ndarray:
    """Share of the item in what its type sold in the last 28 days."""
    sold = days.baskets(28)
    whole = days.of_type(sold)  # 0 for an unknown type, whatever the item sold
    return np.divide(sold, whole, out=np.zeros(len(sold)), where=whole > 0)


def item_discount_3d(days: ItemDays) -> np.ndarray:
    """Share of the item's units sold at a discount in the last 3 days."""
    return days.discount_share(3)


def item_discount_7d(days: ItemDays) -> np.ndarray:
    """The same in the last 7 days."""
    return days.discount_share(7)


def item_discount_28d(days: ItemDays) -> np.ndarray:
    """The same in the last 28 days."""
    return days.discount_share(28)


def item_discount_91d(days: ItemDays) -> np.ndarray:
    """The same in the last 91 days."""
    return days.discount_share(SPAN)


def item_price_drop_3d(days: ItemDays) -> np.ndarray:
    """Log of the price paid in the last 3 days against that of 28 days: below 0 it is cheap now."""
    return np.log((days.price(3) + 0.05) / (days.price(28) + 0.05))


def item_price_drop_7d(days: ItemDays) -> np.ndarray:
    """Log of the price paid in the last 7 days against that of 91 days."""
    return np.log((days.price(7) + 0.05) / (days.price(SPAN) + 0.05))
