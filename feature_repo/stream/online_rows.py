"""Users' rows in the online store, read and written through the feature repository's own view.

The online store of the Feast configuration holds the rows; the endpoint and Feast's own tools read them. Rows
of recently seen users stay in memory: only one process writes the rows of a user, so they cannot be stale.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pandas as pd
from google.protobuf.message import DecodeError

from feature_repo.aggregates import UserEvents, check_owner, no_events, unpack
from feature_repo.schema import USER
from feature_repo.snapshots import (
    HEARTBEAT,
    HISTORY,
    PARTITIONS,
    USER_COLUMNS,
    USER_VIEW,
    pack_times,
    unpack_times,
    user_table,
)

if TYPE_CHECKING:
    from feast import FeatureStore

ROWS_KEPT = 20_000
GONE_S = 86_400.0  # a partition without a beat for so long has no consumer any more
_DAMAGED = b"\0"  # no row, and no times of partitions


class RowsDamaged(ValueError):
    """Some rows in the store are damaged, of another user or of another format; `users` names their users."""

    def __init__(self, users: list[str]) -> None:
        super().__init__(f"{len(users)} rows of the online store cannot be read")
        self.users = users


class OnlineRows:
    """The view of users in the online store, with a cache of recently used rows."""

    def __init__(self, open_store: Callable[[], FeatureStore]) -> None:
        """Keep the function that opens the Feast store: `reopen` calls it again."""
        self._open = open_store
        self.reopen()

    def reopen(self) -> None:
        """Open the store again and clear the cache, after another process replaced the store's rows."""
        self._kept: OrderedDict[str, UserEvents] = OrderedDict()
        self._store = self._open()

    def get(self, users: Iterable[str]) -> dict[str, UserEvents]:
        """Return the rows of users; an unknown user has an empty row.

        Raises:
            RowsDamaged: some rows are damaged; all others are in memory by then.
        """
        users = list(users)
        missing = [user for user in users if user not in self._kept]
        damaged = []
        for user, packed in zip(missing, self._read(missing), strict=True):
            try:
                if packed:
                    check_owner(packed, user)
                self._kept[user] = unpack(packed) if packed else no_events()
            except ValueError:
                damaged.append(user)
        if damaged:
            raise RowsDamaged(damaged)
        return {user: self._kept[user] for user in users}

    def put(self, rows: dict[str, UserEvents]) -> None:
        """Write rows, each stamped just after its last event; an empty row is kept in memory only."""
        self._write(user_table((user, row) for user, row in rows.items() if len(row)).to_pandas())
        for user, row in rows.items():
            self._kept[user] = row
            self._kept.move_to_end(user)
        while len(self._kept) > ROWS_KEPT:
            self._kept.popitem(last=False)

    def users(self) -> list[str]:
        """Return the users whose rows are in memory."""
        return list(self._kept)

    def drop(self, users: Iterable[str]) -> None:
        """Remove the rows of users from memory; the store does not change."""
        for user in users:
            self._kept.pop(user, None)

    def beat(
        self, now: float, name: bytes, partitions: Iterable[int] = (), existing: Collection[int] = ()
    ) -> None:
        """Write the heartbeat.

        Args:
            now: its time, seconds since the epoch.
            name: names the content of the store; a process that writes all users' rows sets a new name.
            partitions: those whose events are in the rows until now. Those of other consumers keep the time
                they have, for GONE_S.
            existing: all partitions of the topic, which may have been made again with fewer; empty: unknown.
        """
        kept = unpack_times(self._read([PARTITIONS])[0] or b"") or {}
        kept = {one: at for one, at in kept.items() if at > now - GONE_S and one in (existing or kept)}
        until = kept | dict.fromkeys(partitions, now)
        row: dict[str, object] = dict.fromkeys((feature.__name__ for feature in USER), 0.0)
        row |= {
            "user_id": [HEARTBEAT, PARTITIONS],
            # Never newer than the newest partition: a consumer may have none, or lag.
            "event_timestamp": datetime.fromtimestamp(max(until.values(), default=now), UTC),
            HISTORY: [name, pack_times(until)],
        }
        self._write(pd.DataFrame(row)[USER_COLUMNS.names])

    def name(self) -> bytes | None:
        """Return the name in the heartbeat; None without one: the store is new, or lost its rows."""
        return self._read([HEARTBEAT])[0]

    def _read(self, users: list[str]) -> list[bytes | None]:
        if not users:
            return []
        asked = [{"user_id": user} for user in users]
        try:
            found = self._store.get_online_features([f"{USER_VIEW}:{HISTORY}"], asked)
        except DecodeError:  # of one value; Feast does not say of which
            return [_DAMAGED] if len(users) == 1 else [self._read([user])[0] for user in users]
        return found.to_dict()[HISTORY]

    def _write(self, frame: pd.DataFrame) -> None:
        if len(frame):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Feast's warnings about its own use of pandas
                self._store.write_to_online_store(USER_VIEW, df=frame)
