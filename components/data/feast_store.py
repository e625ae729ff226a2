"""Settings -> Feast's own view of the stores under a home, and a connection to its Redis that answers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from filelock import FileLock

from serving.redis.address import RedisAddress, parse_redis_url, with_password
from serving.redis.client import client_options, open_client
from serving.settings import Settings
from serving.stores.online_features import PROJECT

if TYPE_CHECKING:
    from feast import FeatureStore

TIMEOUT_S = 5.0
LOCK_S = 60.0  # opening takes less than a second; after so long a stopped process holds the lock


def feature_store(home: Path, online_store: str = "", state: Path | None = None) -> FeatureStore:
    """Return Feast's own view of the stores under `home`, for joins, reads and materialisation.

    Args:
        home: the directory that `publish_features` was given.
        online_store: a URL of Redis; empty for SQLite.
        state: directory of `registry.db` and `online_store.db` when it is not `home`.

    Raises:
        ValueError: the URL is not one of Redis, or holds what Feast cannot express.
    """
    import feature_repo.feature_definitions  # noqa: F401  (before Feast: that makes Feast's import quicker)

    # isort: split
    from feast import FeatureStore, RepoConfig
    from feast.repo_config import RegistryConfig

    root = home.absolute()
    state = state or root
    online: dict[str, Any] = {"type": "sqlite", "path": str(state / "online_store.db")}
    if online_store:
        # skip_dedup: a row of an earlier cut shall replace one of a later cut, without deleting that first.
        online = {
            "type": "redis",
            **redis_settings(online_store),
            "skip_dedup": True,
        }
    return FeatureStore(
        config=RepoConfig(
            project=PROJECT,
            provider="local",
            registry=RegistryConfig(
                path=str(state / "registry.db"),
                registry_store_type="components.data.registry_store.WholeFileRegistryStore",
            ),
            offline_store={"type": "duckdb"},
            online_store=online,
            entity_key_serialization_version=3,
            repo_path=root,
        )
    )


def open_feature_store(home: Path, online_store: str = "") -> FeatureStore:
    """Return Feast's view of the stores under `home`; missing stores are created.

    Args:
        home: folder of all state.
        online_store: a URL of Redis, or empty for the file under home.

    Raises:
        ValueError: it names another file.
    """
    from feature_repo.feature_definitions import definitions

    check_file(home, online_store)
    home.mkdir(parents=True, exist_ok=True)
    # Applying again changes nothing, and makes the tables of a file that is new. One at a time: the second to
    # open a new home would write its empty registry over the first one's.
    with FileLock(home / "registry.db.lock", timeout=LOCK_S):
        store = feature_store(home, "" if online_store.startswith("sqlite:") else online_store)
        store.apply([*definitions(home / "offline_store")])
    return store


def check_file(home: Path, url: str) -> None:
    """Refuse a file that an endpoint would read and nothing fills: runs and streams write the one under home.

    Raises:
        ValueError: the URL names another file.
    """
    own = home.resolve() / "online_store.db"
    if url.startswith("sqlite:") and Path(url.removeprefix("sqlite:///")).resolve() != own:
        raise ValueError(
            f"RECO_STORE_URL is {url}, and runs and the stream fill no other file than {own}: "
            "leave it empty, or name a Redis"
        )


@contextlib.contextmanager
def quiet_feast() -> Iterator[None]:
    """Keep Feast's prints out of the command's answer, and its look-ups and warnings out of the log."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        # Feast takes seconds, is needed only here, and sets warning filters of its own.
        import ibis

        import feature_repo.feature_definitions  # noqa: F401

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


def redis_settings(url: str) -> dict[str, str]:
    """Return a URL of Redis as Feast's settings of its online store, with time-outs instead of hanging.

    Raises:
        ValueError: the URL is not one of Redis, or holds what Feast cannot express.
    """
    address = _address(url)
    options = client_options(address, TIMEOUT_S)
    if address.kind != "cluster":
        options |= {"db": address.db, "retry": None}
    if address.sentinel_password:
        options["sentinel_kwargs"] = {"password": address.sentinel_password}
    if address.kind == "sentinel" and address.tls:
        raise ValueError(
            "Feast cannot reach the sentinels of an online store through TLS: use redis+sentinel"
        )
    if any(":" in host for host, _ in address.nodes):
        raise ValueError("Feast cannot take an online store's IPv6 address: give a host name")
    # Feast splits at commas, then reads each value as JSON, where a comma can be written without one.
    values = [json.dumps(value).replace(",", r"\u002c") for value in options.values()]
    named = [f"{name}={value}" for name, value in zip(options, values, strict=True)]
    nodes = [f"{host}:{port}" for host, port in address.nodes]
    settings = {"connection_string": ",".join([*nodes, *named])}
    if address.kind != "server":
        settings["redis_type"] = f"redis_{address.kind}"
    if address.kind == "sentinel":
        settings["sentinel_master"] = address.service
    return settings


def _address(url: str) -> RedisAddress:
    return parse_redis_url(with_password(url, Settings.from_env().store_password))


@contextlib.contextmanager
def reachable(url: str) -> Iterator[redis.Redis | redis.RedisCluster]:
    """Yield a connection that answers; any fault of it, or of Feast's own, raises one kind of error."""
    address = _address(url)
    client: redis.Redis | redis.RedisCluster | None = None
    try:
        client = open_client(address, TIMEOUT_S)
        client.ping()
        yield client
    except (redis.RedisError, redis.RedisClusterException) as error:
        reason = type(error).__name__
        raise ConnectionError(f"the online store at {address} cannot be reached: {reason}") from error
    finally:
        if client is not None:
            client.close()
