"""Dataset -> each user's history and each item's statistics, in Feast's offline and online stores.

A snapshot stamped t holds what happened strictly before t. Feast joins a row to every request at t or
later, so stamping it later than its last event is what keeps a basket from seeing itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import redis

from components.fit_statistics import MIN_BASKETS, Purchases, read_purchases
from feature_repo.aggregates import UserHistory, empty_history, fold, pack
from serving.online_features import JOIN_KEY, PROJECT

if TYPE_CHECKING:
    from feast import FeatureStore

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


def materialize_features(
    dataset: Path, features: Path, cut: str, home: str, online_store: str = ""
) -> dict[str, int]:
    """Write the features as of `cut` to the offline store and the latest rows to the online store.

    What the stores under `home` held before is replaced, so that a run with an earlier cut leaves
    nothing of a later one behind.

    Args:
        dataset: the data set's directory.
        features: gets the offline Parquet files, one directory per view.
        cut: ISO 8601; only purchases strictly before it are seen.
        home: directory of the Feast state: `offline_store/`, `registry.db`, `online_store.db`.
        online_store: a redis:// URL; empty for SQLite under `home`.

    Returns:
        How many users and items the online store holds, and how many snapshot rows the offline store.

    Raises:
        ValueError: no purchase happened before the cut, or the URL is not one of Redis.
        ConnectionError: Redis cannot be reached.
    """
    if online_store:
        _connection_string(online_store)  # a URL that cannot work fails before the work
    cut_s = int(pd.Timestamp(cut).timestamp())
    purchases, _ = read_purchases(dataset)
    if len(purchases.at) == 0 or purchases.at[0] >= cut_s:
        raise ValueError(f"no purchase before {cut}: move --train-until later or bring older events")
    times = [at for at in (cut_s - weeks * WEEK_S for weeks in BASE_WEEKS) if at > purchases.at[0]]
    rows = write_snapshots(purchases, times, features)
    log.info("offline store: %d user and %d item snapshots", rows["user_history"], rows["item_statistics"])
    root = Path(home).absolute()
    _publish_offline(features, root / "offline_store")
    counts = _publish_online(root, cut_s, online_store)
    _write_atomically(
        root / "online_store.json",
        {
            "kind": "online_store",
            "store": "redis" if online_store else "sqlite",
            "cut": _iso(cut_s),
            "created_at": _iso(datetime.now(UTC).timestamp()),
            **counts,
        },
    )
    log.info("online store as of %s: %d users, %d items", _iso(cut_s), counts["users"], counts["items"])
    return {**counts, "user_snapshots": rows["user_history"], "item_snapshots": rows["item_statistics"]}


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


def _publish_offline(features: Path, offline_store: Path) -> None:
    """Copy the views into the home, each file in one step."""
    check_point_in_time(features / "user_history" / "snapshots.parquet")
    for view in VIEWS:
        target = offline_store / view / "snapshots.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        shutil.copyfile(features / view / "snapshots.parquet", temporary)
        os.replace(temporary, target)


def feature_store(home: Path, online_store: str = "", state: Path | None = None) -> FeatureStore:
    """Return Feast's own view of the stores under `home`, for joins, reads and materialisation.

    Args:
        home: the directory that `materialize_features` was given.
        online_store: a redis:// URL; empty for SQLite.
        state: directory of `registry.db` and `online_store.db` when it is not `home`.

    Raises:
        ValueError: the URL is not one of Redis, or holds what Feast cannot express.
    """
    from feast import FeatureStore, RepoConfig

    root = home.absolute()
    state = state or root
    online = {"type": "sqlite", "path": str(state / "online_store.db")}
    if online_store:
        online = {"type": "redis", "connection_string": _connection_string(online_store)}
    return FeatureStore(
        config=RepoConfig(
            project=PROJECT,
            provider="local",
            registry=str(state / "registry.db"),
            offline_store={"type": "duckdb"},
            online_store=online,
            entity_key_serialization_version=3,
            repo_path=root,
        )
    )


def _publish_online(root: Path, cut_s: int, redis_url: str) -> dict[str, int]:
    """Materialise the rows as of the cut with Feast, in place of whatever was there."""
    with tempfile.TemporaryDirectory(prefix=".feast-", dir=root) as workspace, quiet_feast():
        from feature_repo.feature_definitions import definitions

        # Feast never lets an older row replace a newer one, so an earlier cut needs an empty store.
        fresh = Path(workspace)
        store = feature_store(root, redis_url, fresh)
        if redis_url:
            _delete_rows(redis_url)
        cut = datetime.fromtimestamp(cut_s, UTC)
        store.apply([*definitions(root / "offline_store")])
        store.materialize(cut - timedelta(seconds=1), cut)
        os.replace(fresh / "registry.db", root / "registry.db")
        if not redis_url:
            os.replace(fresh / "online_store.db", root / "online_store.db")
    return {
        name: _rows_at(root / "offline_store" / view / "snapshots.parquet", cut)
        for name, view in (("users", VIEWS[0]), ("items", VIEWS[1]))
    }


@contextlib.contextmanager
def quiet_feast() -> Iterator[None]:
    """Keep Feast's prints out of the command's answer, and its look-ups and warnings out of the log."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import feast  # noqa: F401  (seconds, needed only here; it sets warning filters of its own)
        import ibis

        warnings.simplefilter("ignore")
        logger = logging.getLogger("feast")
        level, backend = logger.level, ibis.options.default_backend
        logger.setLevel(logging.WARNING)
        ibis.options.default_backend = connection = ibis.duckdb.connect()
        try:
            yield
        finally:
            # A DuckDB connection that lives to the end of the process complains of leaks on stderr.
            connection.disconnect()
            ibis.options.default_backend = backend
            logger.setLevel(level)


def _rows_at(path: Path, at: datetime) -> int:
    return pq.read_table(path, columns=["event_timestamp"], filters=[("event_timestamp", "=", at)]).num_rows


def _connection_string(url: str) -> str:
    """Return a redis:// URL in Feast's own notation, with time-outs that fail instead of hanging."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(f"an online store URL is redis://HOST:PORT/DB, not one of {parts.scheme!r}")
    options = {"db": parts.path.strip("/") or "0", "socket_timeout": "5", "socket_connect_timeout": "5"}
    if parts.scheme == "rediss":
        options["ssl"] = "true"
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    if any("," in value for value in options.values()):
        raise ValueError("Feast cannot take an online store user or password with a comma: choose another")
    named = [f"{name}={value}" for name, value in options.items()]
    return ",".join([f"{parts.hostname}:{parts.port or 6379}", *named, "retry=null"])


def _delete_rows(url: str) -> None:
    """Delete the project's rows of both views; keys of anything else in the same Redis stay."""
    client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=None)
    try:
        for join_key in (JOIN_KEY, "item_id"):
            # Feast's key: one entity, a string (2), the join key, a string, the id, then the project.
            prefix = struct.pack("<III", 1, 2, len(join_key)) + join_key.encode()
            scanned = client.scan_iter(prefix + b"*" + PROJECT.encode(), count=10_000)
            # "other_checkout" ends alike: only what stands behind the id is the project.
            found = [key for key in scanned if key[_id_end(key, len(prefix)) :] == PROJECT.encode()]
            for first in range(0, len(found), 10_000):
                client.unlink(*found[first : first + 10_000])
    except (redis.ConnectionError, redis.TimeoutError) as error:
        host, port = urlsplit(url).hostname, urlsplit(url).port or 6379
        reason = type(error).__name__
        raise ConnectionError(f"the online store at {host}:{port} cannot be reached: {reason}") from error
    finally:
        client.close()


def _id_end(key: bytes, prefix: int) -> int:
    """Return where the entity's id ends in Feast's key; its type and length stand behind the prefix."""
    return prefix + 8 + int.from_bytes(key[prefix + 4 : prefix + 8], "little")


def _write_atomically(path: Path, document: dict[str, object]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(temporary, path)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
