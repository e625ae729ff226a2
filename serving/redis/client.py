"""The address of a Redis -> redis-py's client of it, for whatever is not on the request path.

That one has a connection of its own, see `redis_connection`: what is done here may take seconds.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from serving.redis.address import RedisAddress


def open_client(address: RedisAddress, timeout_s: float) -> redis.Redis | RedisCluster:
    """Return a client whose waits are bounded each, and that tries nothing twice.

    Raises:
        redis.RedisClusterException: no node of the cluster answers; others connect when they are first used.
    """
    options = client_options(address, timeout_s)
    # The library's default retries with a second's back-off whatever the time-outs say.
    once: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
    if address.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        return RedisCluster(startup_nodes=nodes, **once, **options)
    options |= {"db": address.db} | once
    if address.kind == "sentinel":
        entry = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl"))}
        entry |= {"password": address.sentinel_password or None} | once
        return Sentinel(address.nodes, sentinel_kwargs=entry, **options).master_for(address.service)
    host, port = address.nodes[0]
    return redis.Redis(host, port, **options)


def client_options(address: RedisAddress, timeout_s: float) -> dict[str, Any]:
    """Return what redis-py is to know of every server, by its own names."""
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if address.tls:
        options |= {"ssl": True, "ssl_check_hostname": address.ssl_check_hostname}
        files = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
        options |= {name: getattr(address, name) for name in files if getattr(address, name)}
    credentials = {"username": address.username, "password": address.password}
    return options | {name: value for name, value in credentials.items() if value}
