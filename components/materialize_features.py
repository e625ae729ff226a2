"""Dataset -> each user's history and each item's statistics, as the files of Feast's offline store.

A snapshot stamped t holds what happened strictly before t. Feast joins a row to every request at t or
later, so stamping it later than its last event is what keeps a basket from seeing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.fit_statistics import MIN_BASKETS, Purchases, read_purchases
from feature_repo.aggregates import UserHistory, empty_history, fold, pack

log = logging.getLogger(__name__)

BASE_WEEKS = (20, 16, 12, 8, 4, 0)  # snapshots before the cut: the rolling origins, and the cut
WEEK_S = 7 * 86_400
VIEWS = ("user_history", "item_statistics")
STAMP = pa.timestamp("us", tz="UTC")
USER_COLUMNS = pa.schema(
    [
        ("user_id", pa.string()),
        ("event_timestamp", STAMP),
        ("history", pa.binary()),
        ("basket_count", pa.int64()),
        ("item_count", pa.int64()),
        ("last_basket_at", STAMP),
        ("basket_size", pa.float32()),
        ("basket_spend", pa.float32()),
        ("discount_ratio", pa.float32()),
    ]
)
ITEM_COLUMNS = pa.schema(
    [
        ("item_id", pa.string()),
        ("event_timestamp", STAMP),
        ("purchases_4w", pa.int64()),
        ("purchases_13w", pa.int64()),
        ("price", pa.float32()),
        ("discount_ratio", pa.float32()),
        ("buyer_count", pa.int64()),
        ("repeat_ratio", pa.float32()),
    ]
)


def materialize_features(dataset: Path, features: Path, cut: str) -> dict[str, int]:
    """Write the features as of `cut`, and as of some weeks before it, to one directory per view.

    Nobody is served from these files: `publish_features` brings them to the stores once their bundle is
    champion.

    Args:
        dataset: the data set's directory.
        features: gets the Parquet files.
        cut: ISO 8601; only purchases strictly before it are seen.

    Returns:
        How many snapshot rows of users and of items were written.

    Raises:
        ValueError: no purchase happened before the cut.
    """
    cut_s = int(pd.Timestamp(cut).timestamp())
    purchases, _ = read_purchases(dataset)
    if len(purchases.at) == 0 or purchases.at[0] >= cut_s:
        raise ValueError(f"no purchase before {cut}: move --train-until later or bring older events")
    times = [at for at in (cut_s - weeks * WEEK_S for weeks in BASE_WEEKS) if at > purchases.at[0]]
    rows = write_snapshots(purchases, times, features)
    check_point_in_time(features / "user_history" / "snapshots.parquet")
    log.info("offline store: %d user and %d item snapshots", rows["user_history"], rows["item_statistics"])
    return {"user_snapshots": rows["user_history"], "item_snapshots": rows["item_statistics"]}


def write_snapshots(purchases: Purchases, times: list[int], features: Path) -> dict[str, int]:
    """Write each view's rows as of each time to `features`/VIEW/snapshots.parquet; return row counts."""
    rows = dict.fromkeys(VIEWS, 0)
    for view, columns, tables in (
        ("user_history", USER_COLUMNS, user_tables(purchases, times)),
        ("item_statistics", ITEM_COLUMNS, (item_table(purchases, at) for at in sorted(times))),
    ):
        path = features / view / "snapshots.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, columns, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
                rows[view] += table.num_rows
    return rows


def user_tables(purchases: Purchases, times: list[int]) -> Iterator[pa.Table]:
    """Yield one table per time, earliest first: the history of each user who bought before it."""
    histories: dict[int, UserHistory] = {}
    nothing = empty_history(np.int64)
    baskets = _baskets(purchases)
    basket = next(baskets, None)
    for at in sorted(times):
        while basket is not None and basket[1] < at:
            user, basket_at, items, spend, discount = basket
            histories[user] = fold(histories.get(user, nothing), basket_at, items, spend, discount)
            basket = next(baskets, None)
        rows = [_user_row(purchases, user, histories[user], at) for user in sorted(histories)]
        yield pa.Table.from_pylist(rows, schema=USER_COLUMNS)


def _baskets(purchases: Purchases) -> Iterator[tuple[int, int, np.ndarray, float, float]]:
    """Yield user, time, sorted items, spend and discount of each basket, in order of time."""
    p = purchases
    # Codes stand in the order of their ids, so items sorted by code are sorted by id as `fold` needs.
    order = np.lexsort((p.item, p.user, p.basket, p.at))
    user, basket, at, item = p.user[order], p.basket[order], p.at[order], p.item[order]
    start = np.ones(len(order), bool)
    start[1:] = (user[1:] != user[:-1]) | (basket[1:] != basket[:-1]) | (at[1:] != at[:-1])
    begin = np.flatnonzero(start)
    if len(begin) == 0:
        return
    spend = np.add.reduceat(p.paid[order], begin)
    discount = np.add.reduceat(p.discount[order], begin)
    end = np.append(begin[1:], len(order))
    for i, (first, last) in enumerate(zip(begin, end, strict=True)):
        yield int(user[first]), int(at[first]), item[first:last], float(spend[i]), float(discount[i])


def _user_row(purchases: Purchases, user: int, history: UserHistory, at: int) -> dict[str, object]:
    named = replace(history, items=purchases.item_ids[history.items])
    full_price = history.spend + history.discount
    return {
        "user_id": str(purchases.user_ids[user]),
        "event_timestamp": at * 1_000_000,
        "history": pack(named),
        "basket_count": history.basket_count,
        "item_count": len(history.items),
        "last_basket_at": history.last_basket_at * 1_000_000,
        "basket_size": history.line_count / history.basket_count,
        "basket_spend": history.spend / history.basket_count,
        "discount_ratio": history.discount / full_price if full_price > 0 else 0.0,
    }


def item_table(purchases: Purchases, at: int) -> pa.Table:
    """Return the statistics, as of `at`, of each item bought at least `MIN_BASKETS` times before it."""
    end = int(np.searchsorted(purchases.at, at))
    bought_at = purchases.at[:end]
    rows = pd.DataFrame(
        {
            "item": purchases.item[:end],
            "user": purchases.user[:end],
            "units": purchases.quantity[:end],
            "paid": purchases.paid[:end],
            "discounted": purchases.quantity[:end] * (purchases.discount[:end] > 0),
            "purchases_4w": bought_at >= at - 4 * WEEK_S,
            "purchases_13w": bought_at >= at - 13 * WEEK_S,
            "purchases": 1,
        }
    )
    items = rows.drop(columns="user").groupby("item").sum()
    items = items[items["purchases"] >= MIN_BASKETS]
    occasions = rows.groupby(["item", "user"])["purchases"].sum()
    buyers = occasions.groupby(level="item").size().reindex(items.index)
    repeats = (occasions > 1).groupby(level="item").sum().reindex(items.index)
    units = items["units"].clip(lower=1)
    columns = {
        "item_id": purchases.item_ids[items.index.to_numpy(np.int64)],
        "event_timestamp": np.full(len(items), at * 1_000_000, np.int64),
        "purchases_4w": items["purchases_4w"].to_numpy(np.int64),
        "purchases_13w": items["purchases_13w"].to_numpy(np.int64),
        "price": (items["paid"] / units).to_numpy(np.float32),
        "discount_ratio": (items["discounted"] / units).to_numpy(np.float32),
        "buyer_count": buyers.to_numpy(np.int64),
        "repeat_ratio": (repeats / buyers).to_numpy(np.float32),
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in ITEM_COLUMNS]
    return pa.Table.from_arrays(arrays, schema=ITEM_COLUMNS)


def check_point_in_time(snapshots: Path) -> None:
    """Refuse user snapshots that know the moment they are stamped with, or a later one.

    Raises:
        ValueError: naming how many rows leak.
    """
    table = pq.read_table(snapshots, columns=["event_timestamp", "last_basket_at"])
    leaks = int(pc.sum(pc.greater_equal(table["last_basket_at"], table["event_timestamp"])).as_py() or 0)
    if leaks:
        raise ValueError(f"{leaks} of {table.num_rows} rows of {snapshots} know a basket of their future")
