import pytest

from serving.redis.address import RedisAddress, host_port, is_redis_url, parse_redis_url, with_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", RedisAddress("server", (("cache", 6379),))),
        ("redis://cache:6380/3", RedisAddress("server", (("cache", 6380),), 3)),
        ("redis://[::1]:6380", RedisAddress("server", (("::1", 6380),))),
        (
            "rediss://shop:p%40s%2Cs@cache/0?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            RedisAddress(
                "server", (("cache", 6379),), username="shop", password="p@s,s", tls=True,
                ssl_ca_certs="/ca.pem", ssl_check_hostname=False,
            ),
        ),
        (
            "redis+cluster://:pw@a:7000,b:7001/0",
            RedisAddress("cluster", (("a", 7000), ("b", 7001)), password="pw"),
        ),
        (
            "redis+sentinel://u:pw@a,b:5/shop/2?sentinel_password=guard",
            RedisAddress(
                "sentinel", (("a", 26379), ("b", 5)), 2, "shop", "u", "pw", sentinel_password="guard"
            ),
        ),
        ("rediss+sentinel://a/shop", RedisAddress("sentinel", (("a", 26379),), service="shop", tls=True)),
    ],
)  # fmt: skip
def test_each_form_is_read(url: str, expected: RedisAddress) -> None:
    assert is_redis_url(url)
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(("host", "address"), [("shop", "shop:80"), ("::1", "[::1]:80")])
def test_an_address_has_an_ipv6_host_in_brackets(host: str, address: str) -> None:
    assert host_port(host, 80) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://:hunter2@cache", "no scheme of an online store in Redis"),
        ("redis", "no scheme of an online store in Redis"),
        ("redis://", "hosts cannot be read"),
        ("redis://:hunter2@", "hosts cannot be read"),
        ("redis://:hunter2@cache:0", "hosts cannot be read"),
        ("redis://:hunter2@cache:70000", "hosts cannot be read"),
        ("redis://:hunter2@cache:port", "hosts cannot be read"),
        ("redis://:hunter2/x@cache", "hosts cannot be read"),
        ("redis://:hunter2\u2100@cache", "cannot be read"),
        ("redis://:hunter2@[::1", "cannot be read"),
        ("redis://:hunter2@a,b", "several hosts"),
        ("redis://:hunter2@cache/zero", "database is no number"),
        ("redis://:hunter2@cache/0/1", "database is no number"),
        ("redis+cluster://:hunter2@cache/1", "only database 0"),
        ("redis+sentinel://:hunter2@cache", "names no service"),
        ("redis://:hunter2@cache?password=hunter2", "the parameter 'password'"),
        ("redis://:hunter2@cache?ssl_ca_certs=hunter2", "the parameter 'ssl_ca_certs'"),
        ("rediss://:hunter2@cache?ssl_check_hostname=hunter2", "the parameter 'ssl_check_hostname'"),
    ],
)
def test_a_wrong_url_is_reported_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_redis_url(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None, "a cause is logged too"


def test_an_address_shows_no_password() -> None:
    address = parse_redis_url("redis+sentinel://:hunter2@a:1,b:2/shop?sentinel_password=hunter3")
    assert str(address) == "'shop' by sentinel a:1,b:2"
    assert str(parse_redis_url("redis://:hunter2@[::1]:6379")) == "[::1]:6379"
    assert str(parse_redis_url("redis+cluster://:hunter2@a,b")) == "cluster a:6379,b:6379"
    assert "hunter" not in repr(address)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache:6380/1", "redis://:s%40me%2F@cache:6380/1"),
        ("redis://shop@cache", "redis://shop:s%40me%2F@cache"),
        ("redis+sentinel://a,b/shop", "redis+sentinel://:s%40me%2F@a,b/shop"),
        ("redis://:own@cache", "redis://:own@cache"),
        ("sqlite:///x.db", "sqlite:///x.db"),
    ],
)
def test_a_password_is_added_to_a_url_without_one(url: str, expected: str) -> None:
    assert with_password(url, "s@me/") == expected
    assert with_password(url, "") == url
