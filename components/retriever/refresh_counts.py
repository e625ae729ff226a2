"""A bundle and the purchases since -> the bundle with last night's counts and the items that have joined.

This is the nightly job between two trainings. The models stay as they are. The day-fresh features of each
item are counted again, to the end of the last whole day. An item that was bought MIN_BASKETS times by now
joins the catalogue, see `extend_index`, unless it waits for a name, see `are_named`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from components.data.fit_statistics import MIN_BASKETS, NAMES, Purchases, purchases_of
from components.retriever.extend_index import codes_of, extend_index
from feature_repo.events import ITEM_COLUMNS, Dataset, read_dataset
from feature_repo.item_days import DAY_S, SPAN
from feature_repo.schema import LEVELS
from feature_repo.statistics import Statistics
from feature_repo.stream.erasure import Forgotten
from serving.release.bundle import load_bundle

DAY = pd.Timedelta(days=1)
WEEKS = np.arange(1, 5)
CLOSED = 7 * DAY  # the counts may begin in days on which nothing was sold


def refresh_counts(
    bundle: Path,
    retriever: Path,
    dataset: Path,
    refreshed: Path,
    until: pd.Timestamp,
    forgotten: Forgotten | None = None,
) -> dict[str, str | int]:
    """Write a bundle with fresh counts.

    Args:
        bundle: the bundle to start from; it may be a refreshed one.
        retriever: the checkpoint that it was made from.
        dataset: the purchases, at least those of the last SPAN days; of a younger shop all.
        refreshed: the directory to write.
        until: the moment of the count. Days begin at the hour of the cut. The counts end with the last day
            that is over then, and at the latest as `days_over` says.
        forgotten: see `extend_index`.

    Returns:
        The id of the bundle, the end of the counts, how many items have joined, and how many wait for a name.

    Raises:
        ValueError: no whole day lies between the bundle's cut and that moment or the last purchase, or the
            purchases begin too late.
    """
    loaded, data = load_bundle(bundle), read_dataset(dataset)
    cut = pd.Timestamp(loaded.manifest["cut"])
    purchases = purchases_of(data.events)
    if len(purchases.at) == 0:
        raise ValueError(f"{dataset} holds no purchase: bring those since the bundle's cut {cut}")
    first, last = (pd.Timestamp(at, unit="s", tz="UTC") for at in purchases.at[[0, -1]])
    days = days_over(purchases.at, cut, until)
    if days < 1:
        ends = min(until, last).floor("min")
        raise ValueError(f"the purchases end at {ends}, expected a day or more after the bundle's cut {cut}")
    end = cut + days * DAY
    since = counted_since(loaded.statistics, cut, end)
    if first > since + CLOSED:
        raise ValueError(
            f"the purchases begin at {first.floor('min')}, expected those since {since.floor('min')}: "
            "pass a data set that reaches back so far"
        )
    known = purchases.before(end)
    sold = joining_items(known, data, loaded.statistics)
    new = sold[are_named(sold, loaded.statistics, loaded.vocabulary)]
    bundle_id = extend_index(
        bundle, retriever, refreshed, new, [], counted=known, until=end, forgotten=forgotten
    )
    waiting = len(sold) - len(new)
    return {"bundle_id": bundle_id, "until": end.isoformat(), "joined": len(new), "waiting": waiting}


def days_over(at: np.ndarray, cut: pd.Timestamp, until: pd.Timestamp) -> int:
    """Return how many days after the cut are over at `until` and in the data, with sales at `at`.

    Data may end long ago, or a delivery may be missing: the day of the last sale is the last one, whole for a
    shop that closes at night. Days of the week without any sale in the four weeks before follow it: the shop
    is closed then, and the next morning has to see that nothing was sold.
    """
    whole, sold = (until - cut) // DAY, np.unique((at - cut.timestamp()) // DAY_S)
    days = min(whole, int(sold[-1]) + 1)
    while days < whole and not np.isin(days - 7 * WEEKS, sold).any():
        days += 1
    return days


def counted_since(statistics: Statistics, cut: pd.Timestamp, end: pd.Timestamp) -> pd.Timestamp:
    """Return where counts that end at `end` begin: SPAN days before, or with a younger shop's first sale."""
    return max(end - SPAN * DAY, cut - pd.Timedelta(days=float(statistics.age_days.max())))


def joining_items(purchases: Purchases, data: Dataset, statistics: Statistics) -> pd.DataFrame:
    """Return a row, as `extend_index` takes it, for each item unknown so far with MIN_BASKETS baskets."""
    baskets = np.bincount(purchases.item, minlength=len(purchases.item_ids))
    ids = purchases.item_ids[baskets >= MIN_BASKETS]
    ids = ids[~np.isin(ids, statistics.item_ids)]
    code = np.searchsorted(purchases.item_ids, ids)
    units = np.bincount(purchases.item, purchases.quantity, len(purchases.item_ids))[code]
    paid = np.bincount(purchases.item, purchases.paid, len(purchases.item_ids))[code]
    table = data.items.set_index("item_id").reindex(index=ids, columns=list(ITEM_COLUMNS[1:]))
    table = table.astype(object).fillna("")
    columns = {name: table[name].to_numpy(str) for name in NAMES}
    columns["is_private"] = (table["brand"] == "private").to_numpy(np.float32)
    return pd.DataFrame({"item_id": ids, **columns, "price": paid / np.maximum(units, 1)})


def are_named(new: pd.DataFrame, statistics: Statistics, vocabulary: dict[str, list[str]]) -> np.ndarray:
    """Return which new items have a known name at each level at which the catalogue has names, (m,) bool.

    No ban of a type, category or department holds for an item whose name is missing there.
    """
    used = [level for level, codes in zip(LEVELS, statistics.categorical.T, strict=True) if codes.any()]
    known = np.ones(len(new), bool)
    for level in used:
        known &= np.array(codes_of(new[level], vocabulary[level]), bool)
    return known
