"""What redis-py is told of each kind of address; that it works is proven where it is used."""

from typing import Any

import redis
from redis.retry import Retry

from serving.redis.address import parse_redis_url
from serving.redis.client import client_options, open_client


def test_a_client_waits_so_long_and_tries_once() -> None:
    client = open_client(parse_redis_url("redis://ann:pw@cache:7000/3"), 0.5)
    assert isinstance(client, redis.Redis)
    said = client.connection_pool.connection_kwargs
    assert {name: said[name] for name in ("host", "port", "db", "username", "password")} == {
        "host": "cache", "port": 7000, "db": 3, "username": "ann", "password": "pw",
    }  # fmt: skip
    assert (said["socket_timeout"], said["socket_connect_timeout"]) == (0.5, 0.5)
    assert isinstance(said["retry"], Retry)
    assert said["retry"].get_retries() == 0


def test_tls_and_its_files() -> None:
    options = client_options(
        parse_redis_url("rediss://cache?ssl_ca_certs=/ca.pem&ssl_check_hostname=false"), 1
    )
    assert options == {
        "socket_timeout": 1, "socket_connect_timeout": 1,
        "ssl": True, "ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False,
    }  # fmt: skip


def test_a_sentinel_has_a_password_of_its_own() -> None:
    address = parse_redis_url("redis+sentinel://:pw@a:1,b:2/shop/2?sentinel_password=guard")
    pool: Any = open_client(address, 1).connection_pool  # type: ignore[union-attr]
    assert pool.service_name == "shop"
    assert (pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == (2, "pw")
    sentinels = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    found = [(one["host"], one["port"], one["password"]) for one in sentinels]
    assert found == [("a", 1, "guard"), ("b", 2, "guard")]
