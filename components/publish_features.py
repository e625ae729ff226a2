"""Features of a bundle that was promoted -> the offline store, and the online store that is served from.

The last step of a training: until the gate let a bundle through, the endpoint meets the rows of the champion
that it has. A store that is being read is never empty: SQLite's file is written beside the old one and
renamed, in Redis each row is replaced at once and the rows of users that are gone are deleted last.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from components.home import write_json
from components.materialize_features import VIEWS
from serving.online_features import JOIN_KEY, PROJECT

if TYPE_CHECKING:
    from feast import FeatureStore

log = logging.getLogger(__name__)

KEYS = dict(zip(VIEWS, (JOIN_KEY, "item_id"), strict=True))


def publish_features(
    features: Path, cut: str, promoted: Mapping[str, Any], home: str, online_store: str = ""
) -> dict[str, int]:
    """Fill the stores with what `materialize_features` wrote, in place of whatever was there.

    Doing it again changes nothing; an earlier cut leaves nothing of a later one behind.

    Args:
        features: the directory that `materialize_features` filled.
        cut: ISO 8601; the online store gets the rows stamped with it.
        promoted: what `promote_bundle` returned.
        home: directory of the Feast state: `offline_store/`, `registry.db`, `online_store.db`.
        online_store: a redis:// URL; empty for SQLite under `home`.

    Returns:
        How many users and items the online store holds.

    Raises:
        ValueError: the features hold no user as of the cut, or the URL is not one of Redis.
        ConnectionError: Redis cannot be reached.
    """
    if online_store:
        connection_string(online_store)  # a URL that cannot work fails before the work
    at = datetime.fromtimestamp(int(pd.Timestamp(cut).timestamp()), UTC)
    ids = {view: _ids_at(features / view / "snapshots.parquet", KEYS[view], at) for view in VIEWS}
    if not ids["user_history"]:
        raise ValueError(f"{features} holds no user as of {cut}: the online store stays as it is")
    root = Path(home).absolute()
    if online_store:
        with _reachable(online_store) as client:
            _publish_offline(features, root / "offline_store")
            _materialize(root, at, online_store)
            for view, key in KEYS.items():
                _delete_others(client, key, ids[view])
    else:
        _publish_offline(features, root / "offline_store")
        _materialize(root, at)
    counts = dict(zip(("users", "items"), map(len, ids.values()), strict=True))
    stamp = _iso(at)
    note = {
        "kind": "online_store",
        "store": "redis" if online_store else "sqlite",
        "cut": stamp,
        "bundle_id": promoted["bundle_id"],
        "created_at": _iso(datetime.now(UTC)),
        **counts,
    }
    write_json(root / "online_store.json", note)
    log.info("online store as of %s: %d users, %d items", stamp, counts["users"], counts["items"])
    return counts


def _ids_at(path: Path, key: str, at: datetime) -> set[str]:
    table = pq.read_table(path, columns=[key], filters=[("event_timestamp", "=", pa.scalar(at))])
    return set(table[key].to_pylist())


def _publish_offline(features: Path, offline_store: Path) -> None:
    """Copy the views into the home, each file in one step."""
    for view in VIEWS:
        target = offline_store / view / "snapshots.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        shutil.copyfile(features / view / "snapshots.parquet", temporary)
        os.replace(temporary, target)


def _materialize(root: Path, cut: datetime, redis_url: str = "") -> None:
    """Let Feast write the rows as of the cut."""
    with tempfile.TemporaryDirectory(prefix=".feast-", dir=root) as workspace, quiet_feast():
        from feature_repo.feature_definitions import definitions

        # Feast never lets an older row of SQLite replace a newer one: an earlier cut needs an empty file.
        fresh = Path(workspace)
        store = feature_store(root, redis_url, fresh)
        store.apply([*definitions(root / "offline_store")])
        store.materialize(cut - timedelta(seconds=1), cut)
        os.replace(fresh / "registry.db", root / "registry.db")
        if not redis_url:
            os.replace(fresh / "online_store.db", root / "online_store.db")


def feature_store(home: Path, online_store: str = "", state: Path | None = None) -> FeatureStore:
    """Return Feast's own view of the stores under `home`, for joins, reads and materialisation.

    Args:
        home: the directory that `publish_features` was given.
        online_store: a redis:// URL; empty for SQLite.
        state: directory of `registry.db` and `online_store.db` when it is not `home`.

    Raises:
        ValueError: the URL is not one of Redis, or holds what Feast cannot express.
    """
    from feast import FeatureStore, RepoConfig

    root = home.absolute()
    state = state or root
    online: dict[str, Any] = {"type": "sqlite", "path": str(state / "online_store.db")}
    if online_store:
        # skip_dedup: a row of an earlier cut shall replace one of a later cut, without deleting that first.
        online = {
            "type": "redis",
            "connection_string": connection_string(online_store),
            "skip_dedup": True,
        }
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


def connection_string(url: str) -> str:
    """Return a redis:// URL in Feast's own notation, with time-outs that fail instead of hanging.

    Raises:
        ValueError: the URL is not one of Redis, or holds what Feast cannot express.
    """
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


@contextlib.contextmanager
def _reachable(url: str) -> Iterator[redis.Redis]:
    """Give a connection that answers; that it, or Feast's, is lost within is told in one way."""
    client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=None)
    try:
        client.ping()
        yield client
    except (redis.ConnectionError, redis.TimeoutError) as error:
        host, port = urlsplit(url).hostname, urlsplit(url).port or 6379
        reason = type(error).__name__
        raise ConnectionError(f"the online store at {host}:{port} cannot be reached: {reason}") from error
    finally:
        client.close()


def _delete_others(client: redis.Redis, join_key: str, ids: set[str]) -> None:
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
