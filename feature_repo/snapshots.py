"""Rows of users and items as of a moment -> the tables behind the Feast views, one column per feature.

A row stamped t holds the events strictly before t: Feast joins it to requests at t or later, so that no
basket sees itself. The columns follow `USER`, `ITEM` and `FRESH` of `schema`; no feature is listed twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from feature_repo.aggregates import UserEvents, pack
from feature_repo.atomic_files import read_json
from feature_repo.queries import User
from feature_repo.schema import FRESH, ITEM, USER, item_values, user_values
from feature_repo.statistics import Statistics

USER_VIEW, ITEM_VIEW = "user_history", "item_statistics"
# The packed row, which the endpoint reads; the other columns are for people and for Feast.
HISTORY = "history"
# A row is expired so long after its own time, which is its last event or the publication: Feast skips it in
# joins, the endpoint when it reads.
USER_TTL_DAYS = 730
HEARTBEAT = "\x00stream"  # its row shows that the stream is alive; no user can have this id
# The heartbeat's time is that of the consumer that wrote last. Feast's SQLite writer spoils it where clocks
# change in summer. This row has one time for each partition.
PARTITIONS = f"{HEARTBEAT}-partitions"
_STAMP = ("event_timestamp", pa.timestamp("us", tz="UTC"))
USER_COLUMNS = pa.schema(
    [
        ("user_id", pa.string()),
        _STAMP,
        (HISTORY, pa.binary()),
        *((feature.__name__, pa.float32()) for feature in USER),
    ]
)
ITEM_COLUMNS = pa.schema(
    [("item_id", pa.string()), _STAMP, *((feature.__name__, pa.float32()) for feature in (*ITEM, *FRESH))]
)


def pack_times(until: dict[int, float]) -> bytes:
    """Return the row PARTITIONS: for each partition, until when the rows hold its events."""
    return json.dumps(until).encode()


def unpack_times(packed: bytes) -> dict[int, float] | None:
    """Return the times in the row PARTITIONS, seconds since the epoch; None if it is damaged."""
    try:
        times = {int(partition): float(at) for partition, at in read_json(packed).items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None  # the next beat replaces it
    return times if all(map(math.isfinite, times.values())) else None


def user_table(rows: Iterable[tuple[str, UserEvents]], at: float | None = None) -> pa.Table:
    """Return the users' rows as of `at`, seconds since the epoch, as a table of USER_COLUMNS.

    Args:
        rows: user ids and rows; later events are left out, and so are users without earlier events.
        at: None stamps each row just after its own last event, as the stream does.
    """
    ids, stamps, packed, values = [], [], [], []
    for user_id, events in rows:
        stamp = at if at is not None else float(events.at[-1]) + 1e-6
        known = events.before(stamp)
        if len(known) == 0:
            continue
        ids.append(user_id)
        stamps.append(round(stamp * 1e6))
        packed.append(pack(known, user_id))
        values.append(user_values(User(known, stamp)))
    columns = np.array(values, np.float32).reshape(len(ids), len(USER)).T
    arrays = [ids, pa.array(stamps, pa.int64()).cast(_STAMP[1]), packed, *columns]
    return pa.table(dict(zip(USER_COLUMNS.names, arrays, strict=True)), USER_COLUMNS)


def item_table(statistics: Statistics, at: float) -> pa.Table:
    """Return the catalogue's features as of `at`, seconds since the epoch, as a table of ITEM_COLUMNS."""
    stamps = pa.array(np.full(len(statistics.item_ids), round(at * 1e6), np.int64)).cast(_STAMP[1])
    values = item_values(statistics).T, statistics.fresh.T
    arrays = [statistics.item_ids.tolist(), stamps, *values[0], *values[1]]
    return pa.table(dict(zip(ITEM_COLUMNS.names, arrays, strict=True)), ITEM_COLUMNS)
