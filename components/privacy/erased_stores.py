"""A user's id -> the online store and the fact store without the user."""

from __future__ import annotations

import sqlite3
import time
import uuid
from pathlib import Path
from typing import Any

from components.data.feast_store import reachable
from feature_repo.aggregates import unpack
from feature_repo.facts import CLOCK_SKEW_S, Fact, subject_of
from feature_repo.ids import is_id
from feature_repo.snapshots import HISTORY, USER_VIEW
from serving.redis.address import is_redis_url
from serving.shop.fact_store import open_fact_store
from serving.shop.facts import POLL_S
from serving.stores.online_features import HISTORY_FIELD, PROJECT, bytes_value, entity_key

SQLITE_WAIT_S = 10.0


def erase_row(url: str, user_id: str, until: int, dry_run: bool = False) -> int:
    """Delete a user's row from an online store; return how many features it had.

    Args:
        url: as in `Settings.online_store_url`.
        user_id: whose.
        until: microseconds since the epoch; a row that holds only later events is a new one, and stays.
        dry_run: count only.

    Raises:
        ConnectionError: Redis cannot be reached, or refuses.
        sqlite3.Error: the file refuses.
    """
    if is_redis_url(url):
        return _erase_in_redis(url, user_id, until, dry_run)
    file = Path(url.removeprefix("sqlite:///"))
    if url == "memory:" or not file.is_file():
        return 0
    return _erase_in_sqlite(file, user_id, until, dry_run)


def _erase_in_redis(url: str, user_id: str, until: int, dry_run: bool) -> int:
    key = entity_key(user_id) + PROJECT.encode()
    with reachable(url) as client:
        hashes: Any = client  # redis-py's own types know neither bytes as keys nor that this client waits
        fields = hashes.hgetall(key)
        if not fields or not _is_old(fields.get(HISTORY_FIELD), until):
            return 0
        if not dry_run:
            client.unlink(key)
        return len(fields)


def _erase_in_sqlite(file: Path, user_id: str, until: int, dry_run: bool) -> int:
    key, table = entity_key(user_id), f"{PROJECT}_{USER_VIEW}"
    connection = sqlite3.connect(file, timeout=SQLITE_WAIT_S, isolation_level=None)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
            return 0
        found = dict(
            connection.execute(f'SELECT feature_name, value FROM "{table}" WHERE entity_key = ?', (key,))
        )
        count = len(found) if found and _is_old(found.get(HISTORY), until) else 0
        if dry_run:
            return count
        if count:
            connection.execute(f'DELETE FROM "{table}" WHERE entity_key = ?', (key,))
        # Free pages hold what stood in them, also what an earlier attempt deleted or a newer row replaced.
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return count
    finally:
        connection.close()


def _is_old(value: bytes | None, until: int) -> bool:
    """Say whether a row holds anything up to the time; one that cannot be read may."""
    try:
        row = unpack(bytes_value(value or b""))
    except ValueError:
        return True
    return not len(row) or round(float(row.at[0]) * 1e6) <= until


def erase_coupons(url: str, user_id: str, until: int, dry_run: bool = False) -> int:
    """Delete the coupons that are for one user from a fact store, damaged ones, too; return their number.

    Endpoints read changes only: the first change says that the coupons are no longer valid.

    Raises:
        FactsUnavailable: the store is broken or did not answer in time.
    """
    try:
        store = open_fact_store(url)
    except ValueError:  # this kind of store holds no facts
        return 0
    try:
        # A damaged one shows no time: it goes, too.
        gone = {
            key: fact
            for key, fact in store.of_user(user_id).items()
            if fact is None or round(fact.at * 1e6) <= until
        }
        if dry_run:
            return len(gone)
        if not gone:
            store.remove(())  # what an earlier attempt deleted may still be in free pages
            return 0
        found = [fact for fact in gone.values() if fact is not None]
        # A damaged one may come from a clock that was ahead: no fact is accepted from further ahead.
        ahead_s = CLOCK_SKEW_S if len(found) < len(gone) else 0.0
        # Later than each of them: of two offers with one time, their ids decide which is valid.
        latest = max([time.time() + ahead_s, *(fact.at + 1e-3 for fact in found)])
        # The key of a damaged one may still say where an endpoint shows it.
        places = {(fact.item_id, fact.store_id) for fact in found}
        for item_id, store_id, user in map(subject_of, gone):
            if user == user_id and is_id(item_id) and (store_id is None or is_id(store_id)):
                places.add((item_id, store_id))
        withdrawn = [
            Fact(uuid.uuid4().hex, "coupon", item_id, None, latest, store_id, user_id)
            for item_id, store_id in sorted(places, key=str)
        ]
        store.write(withdrawn)
        time.sleep(4 * POLL_S)
        store.remove([*gone, *(fact.key for fact in withdrawn)])
        return len(gone)
    finally:
        store.close()
