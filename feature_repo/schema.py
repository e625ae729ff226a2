"""CONTRACT model inputs in order: the feature of each column, and the hash of all of them.

To add a feature: write its function in `transforms.py` and its line here. Training, the endpoint, the stream
and the Feast views take it from here.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from feature_repo import transforms as t
from feature_repo.item_days import ItemDays
from feature_repo.kernels.candidates import tower_rows
from feature_repo.kernels.pairs import FEATURES, PairFeature
from feature_repo.kernels.rows import begin_rows, categories, put_columns
from feature_repo.queries import LATELY, Query, Rows, TableFeature, User
from feature_repo.statistics import Statistics
from feature_repo.transforms import Feature, FreshFeature, ItemFeature, UserFeature

# One line per feature. Those of a user and of an item are also fields of the Feast views.
USER: tuple[UserFeature, ...] = (
    t.user_basket_count,
    t.user_recency_days,
    t.user_basket_interval_days,
    t.user_basket_size,
    t.user_spend_per_line,
    t.user_discount_ratio,
    t.user_baskets_7d,
    t.user_spend_7d,
    t.user_basket_value_60d,
    t.user_items_60d,
    t.user_spend_trend,
    t.user_lines_decayed_15d,
    t.user_clicks_10m,
    t.user_baskets_1h,
    t.session_events,
    t.session_minutes,
)
ITEM: tuple[ItemFeature, ...] = (
    t.item_purchases_4w,
    t.item_purchases_13w,
    t.item_trend,
    t.item_buyer_count,
    t.item_repeat_ratio,
    t.item_interval_days,
    t.item_price,
    t.item_discount_ratio,
    t.item_is_private,
    t.item_age_days,
)
FRESH: tuple[FreshFeature, ...] = (
    t.item_baskets_1d,
    t.item_baskets_3d,
    t.item_baskets_7d,
    t.item_baskets_14d,
    t.item_baskets_28d,
    t.item_baskets_91d,
    t.item_week_trend,
    t.item_month_trend,
    t.item_baskets_weekday,
    t.type_baskets_7d,
    t.type_baskets_28d,
    t.item_share_of_type_28d,
    t.item_discount_3d,
    t.item_discount_7d,
    t.item_discount_28d,
    t.item_discount_91d,
    t.item_price_drop_3d,
    t.item_price_drop_7d,
)
REQUEST: tuple[Feature, ...] = (
    t.user_item_count,
    t.user_item_decayed_15d,
    t.user_item_decayed_60d,
    t.user_item_decayed_120d,
    t.user_item_recency_days,
    t.user_item_interval_days,
    t.user_item_due_ratio,
    t.user_item_rate,
    t.user_item_rate_since_first,
    t.user_item_rank,
    t.own_basket_likeness,
    t.own_basket_likeness_max,
    t.own_basket_count,
    t.own_basket_confidence,
    t.own_basket_lift,
    t.own_type_likeness,
    t.own_type_likeness_mean,
    PairFeature.user_has_item,
    PairFeature.user_type_decayed_120d,
    PairFeature.user_type_decayed_15d,
    PairFeature.user_type_items,
    PairFeature.user_type_share,
    PairFeature.user_category_decayed_120d,
    PairFeature.user_department_share,
    PairFeature.user_private_ratio,
    PairFeature.user_item_clicks_1h,
    PairFeature.user_item_impressions_7d,
    PairFeature.user_item_last_rank,
    PairFeature.session_same_type,
    PairFeature.basket_size,
    PairFeature.basket_value,
    PairFeature.basket_known_ratio,
    PairFeature.basket_same_type,
    PairFeature.basket_same_category,
    PairFeature.basket_same_department,
    PairFeature.basket_type_lift_mean,
    PairFeature.basket_type_lift_max,
    PairFeature.own_basket_type_confidence,
    t.together_sum,
    t.together_mean,
    t.together_max,
    t.together_cosine_sum,
    t.together_cosine_max,
    t.together_lift_max,
    t.together_links,
    PairFeature.together_max_if_bought,
    PairFeature.together_times_decayed,
    PairFeature.history_together_sum,
    PairFeature.price_to_user_ratio,
    PairFeature.price_to_basket_ratio,
)
DENSE_NAMES: tuple[str, ...] = tuple(feature.__name__ for feature in (*USER, *ITEM, *FRESH, *REQUEST))
LIMIT = 1e9  # no feature of a real shop is larger
LEVELS: tuple[str, ...] = ("type", "category", "department")  # of an item, the narrowest first
CATEGORICAL: tuple[str, ...] = ("item", *LEVELS)


def schema_hash() -> str:
    """Return a hash over the inputs and their order; a bundle with another hash is refused."""
    return hashlib.sha256("\n".join([*DENSE_NAMES, "|", *CATEGORICAL]).encode()).hexdigest()[:16]


def user_values(user: User) -> np.ndarray:
    """Return the features of a user, (len(USER),) float64."""
    return np.array([feature(user) for feature in USER])


def item_values(statistics: Statistics) -> np.ndarray:
    """Return the features of every item of the catalogue, (n, len(ITEM)) float32, computed once."""
    return statistics.once(_item_values)


def fresh_values(days: ItemDays) -> np.ndarray:
    """Return the day-fresh features of every item, (n, len(FRESH)) float32."""
    return np.column_stack([feature(days).astype(np.float32) for feature in FRESH])


def _item_values(statistics: Statistics) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.column_stack([feature(statistics).astype(np.float32) for feature in ITEM])


def model_inputs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranker's inputs, dense (n, features) float32 and categorical (n, 4) int64, 0 unknown.

    NaN becomes 0, and a number beyond ±LIMIT becomes ±LIMIT: one broken number stays in its own row and
    never reaches another user's score.
    """
    dense = np.empty((len(rows.candidates), len(DENSE_NAMES)), np.float32)
    with np.errstate(over="ignore"):  # 1e308 becomes infinite, which is clipped below
        tables = item_values(rows.statistics), rows.statistics.fresh
        begin_rows(dense, user_values(rows.query.user), *tables, rows.candidates)
        for first, features in _TABLES:
            rows.fill(dense, first, features)
        put_columns(dense, _PAIRS, rows.pairs)
        for column, feature in _OTHERS:
            dense[:, column] = feature(rows)
    if not is_within_limit(dense):
        np.nan_to_num(np.clip(dense, -LIMIT, LIMIT, out=dense), copy=False)
    return dense, categories(rows.candidates, rows.statistics.known_items, rows.levels)


def is_within_limit(dense: np.ndarray) -> bool:
    """Say whether all inputs, (n, columns), are from -LIMIT to LIMIT; NaN is not."""
    return bool(np.abs(dense).max(initial=0) <= LIMIT)


def _tables() -> Iterator[tuple[int, tuple[TableFeature, ...]]]:
    """Yield the first column and the features of each run of neighbouring columns that read one table."""
    for _, group in itertools.groupby(enumerate(REQUEST, _OWN), lambda place: getattr(place[1], "table", "")):
        features = [(column, feature) for column, feature in group if isinstance(feature, TableFeature)]
        if features:
            yield features[0][0], tuple(feature for _, feature in features)


_OWN = len(USER) + len(ITEM) + len(FRESH)
_TABLES = tuple(_tables())
_PAIRS = np.full(FEATURES, -1)  # the column of each row of `Rows.pairs`
for _column, _feature in enumerate(REQUEST, _OWN):
    if isinstance(_feature, PairFeature):
        _PAIRS[_feature] = _column
_OTHERS = tuple(
    (column, feature)
    for column, feature in enumerate(REQUEST, _OWN)
    if not isinstance(feature, TableFeature | PairFeature)
)
HISTORY_LENGTH = LATELY  # history items the query tower sees, most bought lately first
BASKET_LENGTH = 40  # basket items it sees, the last ones


def tower_inputs(query: Query) -> dict[str, np.ndarray]:
    """Return the query tower's inputs for one request; item codes are shifted by one, 0 is padding.

    `history` (1, HISTORY_LENGTH) int64, the items most bought lately, by their last purchase, the latest
    first; `history_weight` (1, HISTORY_LENGTH) float32 (log of one plus the 60-day decayed count); `basket`
    (1, BASKET_LENGTH) int64.
    """
    history, statistics = query.history, query.statistics
    bought = np.zeros((1, HISTORY_LENGTH), np.int64)
    weights = np.zeros((1, HISTORY_LENGTH), np.float32)
    basket = np.zeros((1, BASKET_LENGTH), np.int64)
    tower_rows(
        history.items,
        history.decayed[1],
        history.last_at,
        query.lately,
        bought,
        statistics.known_items,
        query.basket,
        weights,
        basket,
    )
    return {"history": bought, "history_weight": weights, "basket": basket}
