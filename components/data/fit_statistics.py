"""Purchases before the cut -> the statistics directory (item table, bought-together, popularity)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import sparse

from feature_repo.aggregates import KINDS, hash_ids
from feature_repo.events import read_dataset
from feature_repo.item_days import DAY_S, SPAN, ItemDays, count_daily
from feature_repo.schema import FRESH, LEVELS, fresh_values
from feature_repo.statistics import NO_ITEM, Statistics, write_statistics

log = logging.getLogger(__name__)

NAMES = (*LEVELS, "manufacturer")  # of an item, by which rules choose; no model reads its manufacturer
MIN_BASKETS = 5  # fewer purchases than this and an item is too rare to recommend
NEIGHBOURS = 200
POPULAR = 500
STORE_POPULAR = 100
LIFT_ROWS = 512  # of the matrix of types at once
FRESH_ROWS = 100_000  # items that are counted at once: each has 92 days of four sums, or more
# More purchases of an item by one shopper in REPEAT_DAYS do not count: no account makes a best seller alone.
MOST_REPEATS, REPEAT_DAYS = 10, 28


class NoCatalogue(ValueError):
    """No item was bought often enough to be recommended."""


@dataclass(frozen=True)
class Views:
    """The impressions and clicks of a data set as columns, in the codes of its `Purchases`."""

    item: np.ndarray
    user: np.ndarray
    at: np.ndarray  # float64 seconds since the epoch
    kind: np.ndarray  # uint8, index of feature_repo.aggregates.KINDS
    basket: np.ndarray  # uint32 hashes: a view's basket need not have been bought


@dataclass(frozen=True)
class Purchases:
    """The purchases of a data set as integer columns, sorted by time; one row per basket and item.

    Codes are positions in the sorted distinct ids, so sorting codes sorts ids.
    """

    item_ids: np.ndarray
    user_ids: np.ndarray
    store_ids: np.ndarray
    basket_ids: np.ndarray
    item: np.ndarray
    user: np.ndarray
    store: np.ndarray
    basket: np.ndarray
    at: np.ndarray  # float64 seconds since the epoch
    paid: np.ndarray  # float64, for the line
    discount: np.ndarray  # float64, for the line
    quantity: np.ndarray  # units whose price is known: what `paid` and `discount` are for
    counts: np.ndarray  # bool, whether the line counts in statistics, see `_counted`
    views: Views  # of all times, whichever purchases are chosen

    def before(self, cut: pd.Timestamp) -> Purchases:
        """Return the purchases strictly before the cut; the id arrays stay whole."""
        return self.where(slice(int(np.searchsorted(self.at, cut.timestamp()))))

    def where(self, rows: np.ndarray | slice) -> Purchases:
        """Return some of the rows, by mask or slice; the id arrays stay whole."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})


_COLUMNS = ("item", "user", "store", "basket", "at", "paid", "discount", "quantity", "counts")


def read_purchases(dataset: Path) -> tuple[Purchases, pd.DataFrame]:
    """Return a data set's purchases and its item table (indexed by item id)."""
    data = read_dataset(dataset)
    return purchases_of(data.events), data.items.set_index("item_id")


def purchases_of(events: pd.DataFrame) -> Purchases:
    """Return the purchase events as integer columns, and the views beside them."""
    ordered = events.sort_values(["at", "basket_id", "item_id"], kind="stable")
    is_bought = (ordered["event_type"] == "purchase").to_numpy()
    bought, viewed = ordered[is_bought], ordered[~is_bought]
    ids, codes, seen = {}, {}, {}
    for name in ("item", "user"):  # of all events: users and items without a purchase may get one later
        ids[f"{name}_ids"], every = _coded(ordered[f"{name}_id"])
        codes[name], seen[name] = every[is_bought], every[~is_bought]
    for name in ("store", "basket"):
        ids[f"{name}_ids"], codes[name] = _coded(bought[f"{name}_id"])
    price = bought["price"].to_numpy(np.float64)
    quantity = np.where(np.isnan(price), 0.0, bought["quantity"].to_numpy(np.float64))
    purchases = Purchases(
        **ids,
        **codes,
        at=_seconds(bought["at"]),
        paid=np.nan_to_num(price) * quantity,
        discount=np.nan_to_num(bought["discount"].to_numpy(np.float64)) * quantity,
        quantity=quantity,
        counts=np.ones(len(quantity), bool),
        views=Views(
            **seen,
            at=_seconds(viewed["at"]),
            kind=viewed["event_type"].map(KINDS.index).to_numpy(np.uint8),
            basket=hash_ids(viewed["basket_id"]).astype(np.uint32),
        ),
    )
    merged = _merge_lines(purchases)
    return replace(merged, counts=_counted(merged))


def _coded(column: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct ids, sorted, and each line's place there: no line is as wide as the longest id."""
    codes, ids = pd.factorize(column, sort=True)
    return np.asarray(ids, str), codes.astype(np.int64)


def _counted(purchases: Purchases) -> np.ndarray:
    """Return which lines count, (n,): in any REPEAT_DAYS at most MOST_REPEATS of an item by one shopper."""
    order = np.lexsort((purchases.at, purchases.item, purchases.user))
    pair = purchases.user * len(purchases.item_ids) + purchases.item
    earlier, later = order[:-MOST_REPEATS], order[MOST_REPEATS:]
    is_near = purchases.at[later] - purchases.at[earlier] < REPEAT_DAYS * DAY_S
    frequent = np.unique(pair[later[is_near & (pair[later] == pair[earlier])]])
    counts = np.ones(len(order), bool)
    counted: dict[int, deque[float]] = {one: deque(maxlen=MOST_REPEATS) for one in frequent.tolist()}
    for line in order[np.isin(pair[order], frequent)].tolist():
        last, at = counted[pair[line]], purchases.at[line]
        counts[line] = len(last) < MOST_REPEATS or at - last[0] >= REPEAT_DAYS * DAY_S
        if counts[line]:
            last.append(at)
    return counts


def _merge_lines(purchases: Purchases) -> Purchases:
    """Add up lines of one basket that name the same item: they lie side by side."""
    basket, item = purchases.basket, purchases.item
    again = (basket[1:] == basket[:-1]) & (item[1:] == item[:-1])
    if not again.any():
        return purchases
    first = np.flatnonzero(np.concatenate([[True], ~again]))

    def total(of_line: np.ndarray) -> np.ndarray:
        # Each line as a user's row holds it, so that training adds up the numbers that serving does.
        return np.add.reduceat(of_line.astype(np.float32), first, dtype=np.float64)

    return replace(
        purchases.where(first),
        paid=total(purchases.paid),
        discount=total(purchases.discount),
        quantity=np.add.reduceat(purchases.quantity, first),
    )


def _seconds(at: pd.Series) -> np.ndarray:
    return at.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy("datetime64[us]").astype(np.int64) / 1e6


def fit_statistics(dataset: Path, statistics: Path, cut: str) -> dict[str, int]:
    """Write the statistics of all purchases before `cut` (ISO 8601).

    Returns:
        The number of items in the catalogue, of baskets and of bought-together pairs kept.

    Raises:
        NoCatalogue: no item was bought often enough before the cut.
    """
    purchases, items = read_purchases(dataset)
    seen = purchases.before(pd.Timestamp(cut))
    vocabulary = fit_vocabulary(seen, items)
    fitted = fit(seen, items, vocabulary, pd.Timestamp(cut))
    write_statistics(statistics, fitted, vocabulary)
    pairs = int((fitted.neighbours >= 0).sum())
    log.info("catalogue of %d items, %d bought-together pairs", len(fitted.item_ids), pairs)
    return {"items": len(fitted.item_ids), "baskets": int(fitted.total_baskets), "pairs": pairs}


def fit_vocabulary(seen: Purchases, items: pd.DataFrame) -> dict[str, list[str]]:
    """Return the names of types, categories, departments and manufacturers that were sold; 0 is unknown."""
    sold = items.reindex(seen.item_ids[np.unique(seen.item)])
    return {name: ["", *sorted(set(_level(sold, name)) - {""})] for name in NAMES}


def _level(items: pd.DataFrame, level: str) -> np.ndarray:
    """Return each item's name in a column, (n,); the empty text where it has none, or there is no column."""
    if level not in items:
        return np.full(len(items), "", dtype=object)
    return items[level].astype(object).fillna("").to_numpy()


def fit(
    seen: Purchases,
    items: pd.DataFrame,
    vocabulary: dict[str, list[str]],
    cut: pd.Timestamp,
    catalogue_ids: np.ndarray | None = None,
) -> Statistics:
    """Return the statistics of the purchases `seen`, all of which happened before `cut`.

    The catalogue is every item with MIN_BASKETS purchases, or `catalogue_ids` if given.
    """
    seen = seen.where(seen.counts)
    pairs = np.unique(seen.basket * len(seen.item_ids) + seen.item)
    baskets_of_item = np.bincount(pairs % len(seen.item_ids), minlength=len(seen.item_ids))
    catalogue = np.flatnonzero(baskets_of_item >= MIN_BASKETS)
    if catalogue_ids is not None:
        catalogue = np.searchsorted(seen.item_ids, catalogue_ids)
    if len(catalogue) == 0:
        raise NoCatalogue(
            f"no item has {MIN_BASKETS} purchases before {cut.isoformat()} "
            f"({len(seen.item)} purchases seen): move --train-until later or bring more events"
        )
    code_of = np.full(len(seen.item_ids), NO_ITEM)
    code_of[catalogue] = np.arange(len(catalogue))
    kept = code_of[seen.item] >= 0
    item = code_of[seen.item[kept]]
    user, store, basket = seen.user[kept], seen.store[kept], seen.basket[kept]
    at, paid, quantity = seen.at[kept], seen.paid[kept], seen.quantity[kept]
    n, end_s = len(catalogue), cut.timestamp()
    recent_4w, recent_13w = at >= end_s - 28 * 86_400, at >= end_s - 91 * 86_400

    table = items.reindex(seen.item_ids[catalogue])
    categorical = np.stack([_codes(table, level, vocabulary) for level in LEVELS], axis=1)
    buyers, repeats, intervals = _repeat_purchases(item, user, at, n)
    presence = _basket_matrix(basket, item, n)
    together = (presence.T @ presence).tocsr()
    basket_count = np.asarray(together.diagonal(), np.float32)
    neighbours, together_count = _neighbours(together, basket_count)
    units = np.bincount(item, quantity, n)
    first_at = np.full(n, end_s)
    np.minimum.at(first_at, item, at)
    purchases_4w = np.bincount(item[recent_4w], minlength=n)
    store_ids, store_popular = _store_popular(
        seen.store_ids, store[recent_13w], item[recent_13w], purchases_4w
    )

    return Statistics(
        item_ids=seen.item_ids[catalogue],
        categorical=categorical,
        is_private=(_level(table, "brand") == "private").astype(np.float32),
        price=(np.bincount(item, paid, n) / np.maximum(units, 1)).astype(np.float32),
        discount_ratio=(
            np.bincount(item, quantity * (seen.discount[kept] > 0), n) / np.maximum(units, 1)
        ).astype(np.float32),
        purchases_4w=purchases_4w.astype(np.float32),
        purchases_13w=np.bincount(item[recent_13w], minlength=n).astype(np.float32),
        basket_count=basket_count,
        buyer_count=buyers,
        repeat_ratio=(repeats / np.maximum(buyers, 1)).astype(np.float32),
        interval_days=intervals,
        age_days=((end_s - first_at) / 86_400).astype(np.float32),
        neighbours=neighbours,
        together_count=together_count,
        type_lift=_type_lift(presence, categorical[:, 0], len(vocabulary["type"])),
        popular=np.argsort(-purchases_4w, kind="stable")[:POPULAR].astype(np.int32),
        store_ids=store_ids,
        store_popular=store_popular,
        total_baskets=np.array(float(presence.shape[0])),
        fresh=fresh_by_day(seen, seen.item_ids[catalogue], categorical[:, 0], end_s, 1)[0],
        manufacturer=_codes(table, "manufacturer", vocabulary),
    )


def fresh_by_day(
    purchases: Purchases, item_ids: np.ndarray, types: np.ndarray, first: float, days: int
) -> np.ndarray:
    """Return the day-fresh features on each of some days in a row, (days, n, len(FRESH)) float32.

    Args:
        purchases: those before a day count for it, at most SPAN days back.
        item_ids: (n,) the catalogue.
        types: (n,) the type of each item, 0 unknown.
        first: seconds, when the first day begins; each ends when the next begins.
        days: how many days.
    """
    code_of = {item: code for code, item in enumerate(item_ids.tolist())}
    code = np.array([code_of.get(item, -1) for item in purchases.item_ids.tolist()], np.int64)
    begin = first - SPAN * DAY_S
    lines = np.flatnonzero((code[purchases.item] >= 0) & (purchases.at >= begin) & purchases.counts)
    units = purchases.quantity[lines]
    amounts = units, units * (purchases.discount[lines] > 0), purchases.paid[lines]
    order = np.argsort(types, kind="stable")  # items of a type lie together: features add them up
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    row, at = place[code[purchases.item[lines]]], purchases.at[lines]
    found = np.empty((days, len(item_ids), len(FRESH)), np.float32)
    for start, end in _blocks(types[order]):
        here = np.flatnonzero((row >= start) & (row < end))
        parts = tuple(amount[here] for amount in amounts)
        sales = count_daily(row[here] - start, at[here], parts, end - start, begin, SPAN + days - 1)
        items = order[start:end]
        for day in range(days):
            found[day, items] = fresh_values(ItemDays(sales, SPAN + day, types[items]))
    return found


def _blocks(types: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield begin and end of blocks of about FRESH_ROWS rows; no block ends inside a type but type 0.

    The types are sorted; 0 is unknown.
    """
    start = 0
    while start < len(types):
        end = min(start + FRESH_ROWS, len(types))
        if kind := types[end - 1]:
            end = int(np.searchsorted(types, kind, "right"))
        yield start, end
        start = end


def _codes(items: pd.DataFrame, column: str, vocabulary: dict[str, list[str]]) -> np.ndarray:
    """Return the code of each item's name in a column, (n,) int32."""
    code = {name: number for number, name in enumerate(vocabulary.get(column, []))}
    return np.array([code.get(name, 0) for name in _level(items, column)], np.int32)


def _basket_matrix(basket: np.ndarray, item: np.ndarray, n: int) -> sparse.csr_matrix:
    """Return baskets x items, 1 where the basket holds the item."""
    _, row = np.unique(basket, return_inverse=True)
    matrix = sparse.csr_matrix((np.ones(len(item), np.float32), (row, item)), shape=(row.max() + 1, n))
    matrix.data[:] = 1.0  # a basket that names an item twice holds it once
    return matrix


def _neighbours(together: sparse.csr_matrix, basket_count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each item's best partners by count / n_partner^0.3, and those counts.

    The arrays are as wide as the longest list, at most NEIGHBOURS: two million items with a few partners
    each must not fill the memory.

    The asymmetric exponents beat cosine and lift as a list of complements: dividing by less than
    the square root keeps staples in, dividing by something keeps milk from being everyone's partner.
    """
    n = together.shape[0]
    most = int(np.diff(together.indptr).max()) - 1  # an item is no partner of its own
    width = min(NEIGHBOURS, max(most, 1))
    neighbours = np.full((n, width), NO_ITEM, np.int32)
    counts = np.zeros((n, width), np.float32)
    discount = np.maximum(basket_count, 1) ** -0.3
    for i in range(n):
        row = slice(together.indptr[i], together.indptr[i + 1])
        partner, count = together.indices[row], together.data[row]
        other = partner != i
        partner, count = partner[other], count[other]
        best = np.argsort(-(count * discount[partner]), kind="stable")[:width]
        neighbours[i, : len(best)], counts[i, : len(best)] = partner[best], count[best]
    return neighbours, counts


def _repeat_purchases(
    item: np.ndarray, user: np.ndarray, at: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return per item: buyers, buyers with two purchases or more, mean days between their purchases."""
    order = np.lexsort((at, user, item))
    item, user, at = item[order], user[order], at[order]
    new_pair = np.ones(len(item), bool)
    new_pair[1:] = (item[1:] != item[:-1]) | (user[1:] != user[:-1])
    pair = np.cumsum(new_pair) - 1
    pair_item = item[new_pair]
    purchases = np.bincount(pair)
    buyers = np.bincount(pair_item, minlength=n).astype(np.float32)
    repeats = np.bincount(pair_item[purchases > 1], minlength=n)
    first, last = at[new_pair], at[np.append(np.flatnonzero(new_pair)[1:] - 1, len(at) - 1)]
    gaps = np.bincount(pair_item, purchases - 1, n)
    days = np.bincount(pair_item, (last - first) / 86_400, n)
    mean = days.sum() / max(gaps.sum(), 1)
    # Shrink towards the catalogue's mean with the weight of three gaps: rare items have few.
    return buyers, repeats, ((days + 3 * mean) / (gaps + 3)).astype(np.float32)


def _type_lift(presence: sparse.csr_matrix, item_type: np.ndarray, types: int) -> np.ndarray:
    """Return log((pairs + 5) / (expected + 5)), expected if types were independent, (types, types)."""
    fold = sparse.csr_matrix(
        (np.ones(len(item_type), np.float32), (np.arange(len(item_type)), item_type)),
        shape=(len(item_type), types),
    )
    by_type = (presence @ fold).tocsr()
    by_type.data[:] = 1.0
    observed = (by_type.T @ by_type).tocsr()
    count = observed.diagonal().astype(np.float64)
    lift = np.empty((types, types), np.float16)
    for start in range(0, types, LIFT_ROWS):  # a shop may have many thousand types
        rows = slice(start, start + LIFT_ROWS)
        expected = np.maximum(count[rows, None] * count[None, :] / presence.shape[0], 1e-3)
        lift[rows] = np.log((observed[rows].toarray() + 5.0) / (expected + 5.0))
    lift[0, :] = lift[:, 0] = 0.0
    return lift


def _store_popular(
    store_ids: np.ndarray, store: np.ndarray, item: np.ndarray, popularity: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stores seen and each one's best sellers; small stores lean on the chain's."""
    known = np.flatnonzero((np.bincount(store, minlength=len(store_ids)) > 0) & (store_ids != ""))
    width = min(STORE_POPULAR, len(popularity))
    chain = popularity / max(popularity.sum(), 1)
    rows = np.empty((len(known), width), np.int32)
    for row, code in enumerate(known):
        sold = np.bincount(item[store == code], minlength=len(popularity))
        rows[row] = np.argsort(-(sold + 500 * chain), kind="stable")[:width]
    return store_ids[known] if len(known) else np.empty(0, "U1"), rows
