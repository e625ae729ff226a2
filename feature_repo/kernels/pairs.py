"""A query and its candidates -> the features of both together, compiled by numba.

A feature's name, order and text are its line in `PairFeature`; one of the loops below writes its row. To add
a feature: add the line, write the row, and name the feature in `schema.py`. A request has a few hundred
candidates: a call for each feature would cost more than its arithmetic.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from feature_repo.kernels.compiled import compiled

FLOAT16_SCALE = np.float32(
    2.0**112
)  # bits of a float16 moved to a float32's places, times this, are its value
LAST_ITEMS = 10  # items that have a rank

# Arrays that belong together; numba unpacks plain tuples faster than named tuples.
History = tuple[np.ndarray, np.ndarray, np.ndarray]
Partners = tuple[np.ndarray, np.ndarray, np.ndarray]
Views = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Catalogue = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray
]


class PairFeature(IntEnum):
    """A feature of the query and a candidate; called with `Rows` it returns each candidate's value, (n,).

    The number is the feature's row in `Rows.pairs`.
    """

    __doc__: str

    def __new__(cls, text: str) -> PairFeature:
        """Number the features in the order of their lines."""
        feature = int.__new__(cls, len(cls.__members__))
        feature._value_ = len(cls.__members__)
        feature.__doc__ = text
        return feature

    # The user, and the item and its kind.
    user_has_item = "1 if the user bought the item before."
    user_type_decayed_120d = "The user's 120-day decayed count over all items of the type."
    user_type_decayed_15d = "The user's 15-day decayed count over all items of the type."
    user_type_items = "Distinct items of the type the user has bought."
    user_type_share = "Share of the item in the purchases of its type by this user: 1 for a loyal buyer."
    user_category_decayed_120d = "The user's 120-day decayed count over all items of the category."
    user_department_share = "Share of the department in the user's 120-day decayed purchases."
    user_private_ratio = "Share of the shop's own brand in the user's 120-day decayed purchases."

    # Clicks, impressions and the session.
    user_item_clicks_1h = "Clicks of the user on the item in the last hour."
    user_item_impressions_7d = "How often the item was recommended to the user in the last 7 days."
    user_item_last_rank = "Position of the item among the user's last ten items; 10 if it is not among them."
    session_same_type = "Events of the session about items of the candidate's type."

    # The basket.
    basket_size = "Lines of the basket."
    basket_value = "Usual price of the basket, in the shop's currency."
    basket_known_ratio = "Share of the basket that the user has bought before: a routine trip is near 1."
    basket_same_type = "Basket items of the candidate's type."
    basket_same_category = "Basket items of the candidate's category."
    basket_same_department = "Share of the basket in the candidate's department."
    basket_type_lift_mean = "Mean type lift of the candidate against the basket."
    basket_type_lift_max = "Largest type lift of the candidate against a basket item."
    own_basket_type_confidence = (
        "Share of the type in the user's own earlier baskets that share an item with this one."
    )

    # Items that are bought together.
    together_max_if_bought = "Largest bought-together score, for items the user has bought before."
    together_times_decayed = (
        "Bought-together score times log(1 + 120-day decayed count): both signals at once."
    )
    history_together_sum = "Bought-together score with the recent purchases of this user."

    # The item's price.
    price_to_user_ratio = "Price against the usual price of a line of this user."
    price_to_basket_ratio = "Price against the mean price in the basket."

    @property
    def __name__(self) -> str:
        """The name, as a function has it."""
        return self.name

    def __call__(self, rows: Any) -> np.ndarray:
        """Return the feature for each candidate."""
        row: np.ndarray = rows.pairs[self]
        return row


FEATURES = len(PairFeature)


@compiled
def compare(
    candidates: np.ndarray,
    basket: np.ndarray,
    basket_size: int,
    spend_per_line: float,
    type_confidence: np.ndarray,
    history: History,
    partners: Partners,
    views: Views,
    catalogue: Catalogue,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the pair features of a query and its candidates, and the look-ups behind them.

    Args:
        candidates: (n,) distinct codes.
        basket: (m,) codes.
        basket_size: lines of the basket, those outside the catalogue included.
        spend_per_line: the user's mean price of a line.
        type_confidence: (T,) `own_basket_type_confidence` of each type.
        history: (h,) distinct codes of the user's history; (3, h) their counts, decayed over 15, 60 and 120
            days; (r,) places in the history whose partners are looked up.
        partners: (t,) distinct codes of the basket's partners; (3, t) float32 sums and (3, t) float32 largest
            strengths, see `partners.link`.
        views: codes, -1 outside the catalogue: (l,) the user's last items, the latest first; (s,) one for
            each event of the session; one for each click that counts; one for each impression that counts.
        catalogue: see `Statistics.catalogue`.
        marks: see `partners.link`.

    Returns:
        Places of the candidates in the history, (n,), and among the partners, (n,), -1 where they are not;
        their levels, (3, n); and one row for each PairFeature, float32.
    """
    rows = np.empty((FEATURES, len(candidates)), np.float32)
    places = find(history[0], candidates, marks)
    links = find(partners[0], candidates, marks)
    levels = levels_of(catalogue[0], candidates)
    compare_history(rows, places, levels, history, catalogue)
    compare_views(rows, candidates, levels, views, catalogue, marks)
    value = compare_basket(rows, basket, basket_size, history[0], levels, catalogue, marks)
    compare_links(rows, candidates, places, links, history, partners, catalogue, marks)
    mean_price = value / len(basket) if len(basket) else 0.0
    compare_prices(rows, candidates, spend_per_line, mean_price, catalogue[3])
    for at in range(len(candidates)):
        rows[PairFeature.own_basket_type_confidence, at] = type_confidence[levels[0, at]]
    return places, links, levels, rows


@compiled
def compare_history(
    rows: np.ndarray, places: np.ndarray, levels: np.ndarray, history: History, catalogue: Catalogue
) -> None:
    """Write the features of the user, the item and its kind; the arguments are those of `compare`."""
    bought, decayed, _ = history
    categorical, sizes, _, _, is_private, _, _, _, _ = catalogue
    sums = sums_by_level(levels_of(categorical, bought), decayed, sizes, levels)
    total, private = 0.0, 0.0
    for item in range(len(bought)):
        total += decayed[2, item]
        private += is_private[bought[item]] * decayed[2, item]
    total = max(total, 1e-6)
    for at in range(len(places)):
        place = places[at]
        count = decayed[2, place] if place >= 0 else 0.0
        rows[PairFeature.user_has_item, at] = place >= 0
        rows[PairFeature.user_type_decayed_120d, at] = sums[0, 2, at]
        rows[PairFeature.user_type_decayed_15d, at] = sums[0, 0, at]
        rows[PairFeature.user_type_items, at] = sums[0, 3, at]
        whole = sums[0, 2, at]  # 0 for an unknown type, whatever the count is
        rows[PairFeature.user_type_share, at] = count / max(whole, 1e-6) if whole > 0 else 0.0
        rows[PairFeature.user_category_decayed_120d, at] = sums[1, 2, at]
        rows[PairFeature.user_department_share, at] = sums[2, 2, at] / total
        rows[PairFeature.user_private_ratio, at] = private / total


@compiled
def compare_views(
    rows: np.ndarray,
    candidates: np.ndarray,
    levels: np.ndarray,
    views: Views,
    catalogue: Catalogue,
    marks: np.ndarray,
) -> None:
    """Write the features of clicks, impressions and the session; the arguments are those of `compare`."""
    last, session, clicked, shown = views
    categorical, sizes = catalogue[0], catalogue[1]
    in_catalogue = session[session >= 0]
    by_session = sums_by_level(levels_of(categorical, in_catalogue), np.empty((0, 0)), sizes, levels)
    clicks, impressions = count_lines(candidates, clicked, marks), count_lines(candidates, shown, marks)
    for at in range(len(last)):
        if last[at] >= 0:
            marks[last[at]] = at + 1
    for at in range(len(candidates)):
        rank = marks[candidates[at]] - 1
        rows[PairFeature.user_item_clicks_1h, at] = clicks[at]
        rows[PairFeature.user_item_impressions_7d, at] = impressions[at]
        rows[PairFeature.user_item_last_rank, at] = rank if rank >= 0 else LAST_ITEMS
        rows[PairFeature.session_same_type, at] = by_session[0, 0, at]
    for code in last:
        if code >= 0:
            marks[code] = 0


@compiled
def compare_basket(
    rows: np.ndarray,
    basket: np.ndarray,
    basket_size: int,
    bought: np.ndarray,
    levels: np.ndarray,
    catalogue: Catalogue,
    marks: np.ndarray,
) -> float:
    """Write the features of the basket and return its usual price; the arguments are those of `compare`."""
    categorical, sizes, price, _, _, type_lift, _, _, _ = catalogue
    basket_levels = levels_of(categorical, basket)
    counts = sums_by_level(basket_levels, np.empty((0, 0)), sizes, levels)
    value, size = 0.0, max(len(basket), 1)
    for code in basket:
        value += price[code]
    known_ratio = count_lines(bought, basket, marks).sum() / size
    lifts = np.zeros((2, levels.shape[1]), np.float32)
    if len(basket):
        lifts = lift(type_lift, basket_levels[0], levels[0])
    for at in range(levels.shape[1]):
        rows[PairFeature.basket_size, at] = basket_size
        rows[PairFeature.basket_value, at] = value
        rows[PairFeature.basket_known_ratio, at] = known_ratio
        rows[PairFeature.basket_same_type, at] = counts[0, 0, at]
        rows[PairFeature.basket_same_category, at] = counts[1, 0, at]
        rows[PairFeature.basket_same_department, at] = counts[2, 0, at] / size
        rows[PairFeature.basket_type_lift_mean, at] = lifts[0, at]
        rows[PairFeature.basket_type_lift_max, at] = lifts[1, at]
    return value


@compiled
def compare_links(
    rows: np.ndarray,
    candidates: np.ndarray,
    places: np.ndarray,
    links: np.ndarray,
    history: History,
    partners: Partners,
    catalogue: Catalogue,
    marks: np.ndarray,
) -> None:
    """Write the features of items that are bought together; the arguments are those of `compare`."""
    bought, decayed, lately = history
    _, sums, largest = partners
    neighbours, together, weights = catalogue[6], catalogue[7], catalogue[8]
    recent, scale = np.empty(len(lately), np.int64), np.empty(len(lately))
    for at in range(len(lately)):
        recent[at] = bought[lately[at]]
        scale[at] = np.log1p(decayed[1, lately[at]]) * weights[recent[at], 0]
    linked = link_to(candidates, recent, scale, neighbours, together, marks)
    for at in range(len(candidates)):
        place, partner = places[at], links[at]
        both = partner >= 0 and place >= 0
        rows[PairFeature.together_max_if_bought, at] = largest[0, partner] if both else 0.0
        rows[PairFeature.together_times_decayed, at] = (
            sums[0, partner] * np.log1p(decayed[2, place]) if both else 0.0
        )
        rows[PairFeature.history_together_sum, at] = linked[at] * weights[candidates[at], 3]


@compiled
def compare_prices(
    rows: np.ndarray,
    candidates: np.ndarray,
    spend_per_line: float,
    mean_price: float,
    log_price: np.ndarray,
) -> None:
    """Write the features of the item's price, against the user's usual price and the basket's mean price."""
    log_spend, log_basket = np.log(spend_per_line + 0.5), np.log(mean_price + 0.5)
    for at in range(len(candidates)):
        rows[PairFeature.price_to_user_ratio, at] = log_price[candidates[at]] - log_spend
        rows[PairFeature.price_to_basket_ratio, at] = log_price[candidates[at]] - log_basket


@compiled
def count_lines(candidates: np.ndarray, codes: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return how often each candidate is among some codes, (n,) int64; codes below 0 count for no candidate.

    Args:
        candidates: (n,) distinct codes.
        codes: one for each line.
        marks: see `partners.link`.
    """
    counts = np.zeros(len(candidates), np.int64)
    if len(codes):
        for place in find(candidates, codes, marks):
            if place >= 0:
                counts[place] += 1
    return counts


@compiled
def find(codes: np.ndarray, wanted: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return the place of each wanted code among distinct codes, int64; -1 if it is missing or below 0.

    Args:
        codes: (m,) codes of the catalogue.
        wanted: (n,) codes of the catalogue, or numbers below 0.
        marks: as in `link`.
    """
    places = np.empty(len(wanted), np.int64)
    for at in range(len(codes)):
        marks[codes[at]] = at + 1
    for at in range(len(wanted)):
        places[at] = marks[wanted[at]] - 1 if wanted[at] >= 0 else -1
    for code in codes:
        marks[code] = 0
    return places


@compiled
def levels_of(categorical: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the columns of a table for some rows, each column contiguous, (columns, n) int64.

    Args:
        categorical: (m, columns) integers.
        codes: (n,) rows.
    """
    levels = np.empty((categorical.shape[1], len(codes)), np.int64)
    for at in range(len(codes)):
        for column in range(categorical.shape[1]):
            levels[column, at] = categorical[codes[at], column]
    return levels


@compiled
def sums_by_level(
    codes: np.ndarray, weights: np.ndarray, sizes: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Return for each wanted code the sums of its lines' weights, and their number, one level at a time.

    Code 0 is unknown: its sums are 0.

    Args:
        codes: (levels, k) of each line.
        weights: (w, k) of each line.
        sizes: (levels,) how many codes each level has.
        wanted: (levels, n) codes.

    Returns:
        (levels, w + 1, n) float64, the number of lines behind the sums.
    """
    kinds = len(weights) + 1
    found = np.empty((len(codes), kinds, wanted.shape[1]))
    for level in range(len(codes)):
        totals = np.zeros((sizes[level], kinds))
        for line in range(codes.shape[1]):
            own = totals[codes[level, line]]
            for kind in range(kinds - 1):
                own[kind] += weights[kind, line]
            own[kinds - 1] += 1
        totals[0] = 0
        for at in range(wanted.shape[1]):
            for kind in range(kinds):
                found[level, kind, at] = totals[wanted[level, at], kind]
    return found


@compiled
def lift(table: np.ndarray, basket: np.ndarray, types: np.ndarray) -> np.ndarray:
    """Return the mean and the largest lift of each type against those of a basket, (2, n) float32.

    Args:
        table: (T, T) uint16, the bits of finite float16.
        basket: (m,) types of its items, at least one.
        types: (n,) types; each distinct type is looked up once.
    """
    place = np.zeros(len(table), np.int32)
    asked, count = np.empty(len(types), np.int64), 0
    for kind in types:
        if place[kind] == 0:
            asked[count] = kind
            count += 1
            place[kind] = count
    bits = np.empty(count, np.uint32)
    floats = bits.view(np.float32)
    sums, largest = np.zeros(count, np.float32), np.full(count, np.float32(-np.inf))
    for own in basket:
        row = table[own]
        for at in range(count):
            half = np.uint32(row[asked[at]])
            sign, rest = half & np.uint32(0x8000), half & np.uint32(0x7FFF)
            bits[at] = sign << np.uint32(16) | rest << np.uint32(13)
        for at in range(count):
            value = floats[at] * FLOAT16_SCALE
            sums[at] += value
            largest[at] = max(largest[at], value)
    found = np.empty((2, len(types)), np.float32)
    for at in range(len(types)):
        own = place[types[at]] - 1
        found[0, at], found[1, at] = sums[own] / np.float32(len(basket)), largest[own]
    return found


@compiled
def link_to(
    wanted: np.ndarray,
    items: np.ndarray,
    scale: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    marks: np.ndarray,
) -> np.ndarray:
    """Return for each wanted code the sum of its links' counts with a set of items, (n,).

    Args:
        wanted: (n,) distinct codes.
        items: (b,) codes.
        scale: (b,) by which the counts of each item are multiplied.
        neighbours: as in `link`.
        together: as in `link`.
        marks: as in `link`.
    """
    sums = np.zeros(len(wanted) + 1)  # the first adds up unwanted codes: adding is faster than a branch
    for at in range(len(wanted)):
        marks[wanted[at]] = at + 1
    for number in range(len(items)):
        source = items[number]
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            sums[marks[partner]] += together[source, place] * scale[number]
    for code in wanted:
        marks[code] = 0
    return sums[1:]
