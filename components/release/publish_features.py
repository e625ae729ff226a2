"""Features of a bundle that was promoted -> the offline store, and the online store that is served from.

The last step of a training: until the gate let a bundle through, the endpoint meets the rows of the champion
that it has. A store that is being read is never empty: SQLite's file is written beside the old one and
renamed, in Redis each row is replaced at once and the rows of users that are gone are deleted last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import redis

from components.data.feast_store import feature_store, quiet_feast, reachable, redis_settings
from components.data.materialize_features import write_view
from components.home import Conflict, write_json
from components.privacy.erased_files import erase_rows
from components.privacy.erased_stores import erase_row
from feature_repo.atomic_files import replaced
from feature_repo.snapshots import ITEM_VIEW, USER_VIEW, user_table
from feature_repo.stream.archive import BASE, EVENTS, read_archive, rows_of, write_segment
from feature_repo.stream.erasure import Forgotten, stamp
from feature_repo.stream.publication import FILE, read_publication
from serving.errors import NoChampion
from serving.release.champion import read_champion
from serving.stores.online_features import JOIN_KEY, PROJECT

log = logging.getLogger(__name__)

KEYS = {USER_VIEW: JOIN_KEY, ITEM_VIEW: "item_id"}


def publish_features(
    features: Path, cut: str, promoted: Mapping[str, Any], home: str, online_store: str = ""
) -> dict[str, int]:
    """Fill the stores with what `materialize_features` wrote, in place of whatever was there.

    What a stream brought to this home stays: users' rows are made from the new base and all segments.
    Doing it again changes nothing; an earlier cut leaves nothing of a later one behind.

    Args:
        features: the directory that `materialize_features` filled, or the home's own `offline_store/`.
        cut: ISO 8601; the items' rows are stamped with it, the users' with the end of the events.
        promoted: what `promote_bundle` or `deploy_endpoint` returned.
        home: directory of the Feast state: `offline_store/`, `registry.db`, `online_store.db`.
        online_store: a URL of Redis, RECO_STORE_PASSWORD its password if it holds none; empty for SQLite
            under `home`.

    Returns:
        How many users and items the online store holds.

    Raises:
        ValueError: the features hold no user as of the cut, or the URL is not one of Redis.
        ConnectionError: Redis cannot be reached.
        Conflict: another bundle is champion, and the stores hold its features, of a later cut.
        PublicationDamaged: another bundle is champion, and the content of the stores is unknown.
    """
    if online_store:
        redis_settings(online_store)  # a URL that cannot work fails before the work
    _refuse_if_superseded(Path(home), cut, str(promoted["bundle_id"]))
    begin = datetime.fromtimestamp(pd.Timestamp(cut).timestamp(), UTC)
    tables = {view: pq.read_table(features / view / "snapshots.parquet") for view in KEYS}
    # An offline store also holds the rows as of its end, which are made again.
    tables[USER_VIEW] = tables[USER_VIEW].filter(pc.field("event_timestamp") == pa.scalar(begin))
    if not len(tables[USER_VIEW]):
        raise ValueError(f"{features} holds no user as of {cut}: the online store stays as it is")
    root = Path(home).absolute()
    with reachable(online_store) if online_store else contextlib.nullcontext() as client:
        # The run may have read its data before an erasure was requested.
        seen, forgotten = stamp(root), Forgotten.load(root)
        end, ids = _publish_offline(features, tables, root / "offline_store", begin, forgotten)
        _materialize(root, begin, end, online_store)
        if client is not None:
            for view, key in KEYS.items():
                _delete_others(client, key, ids[view])
        written = ids[USER_VIEW] | set(tables[USER_VIEW]["user_id"].to_pylist())
        ids[USER_VIEW] -= _erase_added(root, written, seen, forgotten, online_store)
    counts = {"users": len(ids[USER_VIEW]), "items": len(ids[ITEM_VIEW])}
    note = {
        "kind": "online_store",
        "store": "redis" if online_store else "sqlite",
        "cut": _iso(begin),
        "until": _iso(end),
        "bundle_id": promoted["bundle_id"],
        "created_at": _iso(datetime.now(UTC)),
        **counts,
    }
    write_json(root / FILE, note)
    log.info("online store: %(users)d users as of %(until)s, %(items)d items as of %(cut)s", note)
    return counts


def _publish_offline(
    features: Path, tables: Mapping[str, pa.Table], offline_store: Path, cut: datetime, forgotten: Forgotten
) -> tuple[datetime, dict[str, set[str]]]:
    """Bring the base and the views into the home, each file in one step.

    Returns:
        The moment just after the last event, but never before the cut, and the ids of each view.
    """
    archive = offline_store / EVENTS
    write_segment(archive, forgotten.without(pq.read_table(features / EVENTS / BASE)), BASE)
    for name in ("items.parquet", "dataset.json"):
        with replaced(offline_store / name) as part:
            shutil.copyfile(features / name, part)
    events = forgotten.without(read_archive(archive))
    last = pc.max(events["at"]).as_py()
    end = max(last.replace(microsecond=0) + timedelta(seconds=1), cut)
    users = user_table(rows_of(events), end.timestamp())
    past = () if end == cut else (forgotten.without(tables[USER_VIEW], "event_timestamp"),)
    write_view(offline_store, USER_VIEW, *past, users)
    write_view(offline_store, ITEM_VIEW, tables[ITEM_VIEW])
    items = tables[ITEM_VIEW]["item_id"].to_pylist()
    return end, {USER_VIEW: set(users["user_id"].to_pylist()), ITEM_VIEW: set(items)}


def _erase_added(
    root: Path, written: set[str], seen: tuple[int, int] | None, forgotten: Forgotten, redis_url: str
) -> set[str]:
    """Remove and return the users whose erasure ran since the stamp `seen`, before these files existed."""
    offline_store, erased = root / "offline_store", set[str]()
    while (now := stamp(root)) != seen:
        seen, added = now, Forgotten.load(root)
        for user in written:
            if (end := added.until(user)) is not None and end != forgotten.until(user):
                for file in (offline_store / EVENTS / BASE, offline_store / USER_VIEW / "snapshots.parquet"):
                    erase_rows(file, user, end)
                erase_row(redis_url or f"sqlite:///{root / 'online_store.db'}", user, end)
                erased.add(user)
        forgotten = added
    return erased


def _refuse_if_superseded(home: Path, cut: str, bundle_id: str) -> None:
    """Let no late repetition of a run replace the features that another champion's run published since."""
    try:
        champion = read_champion(home).bundle_id
    except NoChampion:
        return
    if champion == bundle_id or (held := read_publication(home)) is None:
        return
    if pd.Timestamp(held.cut) > pd.Timestamp(cut):
        raise Conflict(
            f"the stores hold features until {held.cut}, and bundle {champion} is champion: those of bundle "
            f"{bundle_id}, until {cut}, replace nothing"
        )


def _materialize(root: Path, begin: datetime, end: datetime, redis_url: str) -> None:
    """Let Feast write the latest row of each user and item between two stamps, both included."""
    with tempfile.TemporaryDirectory(prefix=".feast-", dir=root) as workspace, quiet_feast():
        from feature_repo.feature_definitions import definitions

        # Feast never lets an older row of SQLite replace a newer one: an earlier cut needs an empty file.
        fresh = Path(workspace)
        store = feature_store(root, redis_url, fresh)
        store.apply([*definitions(root / "offline_store")])
        store.materialize(begin - timedelta(seconds=1), end)
        os.replace(fresh / "registry.db", root / "registry.db")
        if not redis_url:
            os.replace(fresh / "online_store.db", root / "online_store.db")


def _delete_others(client: redis.Redis | redis.RedisCluster, join_key: str, ids: set[str]) -> None:
    """Delete the project's rows of all but these ids; keys of anything else in the same Redis stay."""
    # Feast's key: one entity, a string (2), the join key, a string, the id, then the project.
    prefix = struct.pack("<III", 1, 2, len(join_key)) + join_key.encode()
    kept, project = {name.encode() for name in ids}, PROJECT.encode()
    gone = []
    for key in client.scan_iter(prefix + b"*" + project, count=10_000):
        begin = len(prefix) + 8  # behind the id's type and length
        end = begin + int.from_bytes(key[begin - 4 : begin], "little")
        # "other_checkout" ends alike: only what stands behind the id is the project.
        if key[end:] == project and key[begin:end] not in kept:
            gone.append(key)
    for first in range(0, len(gone), 10_000):
        client.unlink(*gone[first : first + 10_000])


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
