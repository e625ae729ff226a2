"""A Redis URL (server, cluster or sentinel) -> `RedisAddress`; the only parser of such URLs.

`host_port` writes any address, also of HTTP and gRPC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit, urlunsplit

EXPECTED = (
    "redis://[USER:PASSWORD@]HOST:PORT/DB, redis+cluster://HOST:PORT[,HOST:PORT] or "
    "redis+sentinel://HOST:PORT[,HOST:PORT]/SERVICE[/DB]; rediss for TLS"
)

Kind = Literal["server", "cluster", "sentinel"]
_KINDS: dict[str, Kind] = {"": "server", "+cluster": "cluster", "+sentinel": "sentinel"}
_SCHEMES = {f"{scheme}{form}": kind for scheme in ("redis", "rediss") for form, kind in _KINDS.items()}
_NODE = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<name>[^:\[\]@\s]+))(?::(?P<port>\d{1,5}))?")
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The nodes of a Redis and the credentials for it; `str` and `repr` show no password."""

    kind: Kind
    nodes: tuple[tuple[str, int], ...]  # the server, some nodes of the cluster, or the sentinels
    db: int = 0
    service: str = ""  # the name under which the sentinels watch the master
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    # PEM files. Empty: the system's authorities, and no client certificate.
    ssl_ca_certs: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_check_hostname: bool = True

    def __str__(self) -> str:
        """Return the address without credentials, for messages."""
        hosts = ",".join(host_port(*node) for node in self.nodes)
        return {"server": hosts, "cluster": f"cluster {hosts}"}.get(
            self.kind, f"{self.service!r} by sentinel {hosts}"
        )


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_redis_url(url: str) -> bool:
    """Return whether the URL's scheme is one of Redis; the rest of the URL is not checked."""
    scheme, found, _ = url.partition("://")
    return bool(found) and scheme in _SCHEMES


def parse_redis_url(url: str) -> RedisAddress:
    """Return the address in a URL.

    Raises:
        ValueError: the URL is invalid; the message names the fault and the expected form, but never the
            user or the password.
    """
    if not is_redis_url(url):
        scheme = url.partition(":")[0]
        raise ValueError(f"{scheme!r} is no scheme of an online store in Redis: expected {EXPECTED}")
    parts = _split(url)
    kind = _SCHEMES[parts.scheme]
    entry, _, hosts = parts.netloc.rpartition("@")
    username, _, own = entry.partition(":")
    nodes = tuple(_node(text, 26_379 if kind == "sentinel" else 6_379) for text in hosts.split(","))
    if kind == "server" and len(nodes) > 1:
        raise ValueError(f"an online store at several hosts: expected {EXPECTED}")
    service, db = _path(kind, [unquote(part) for part in parts.path.strip("/").split("/") if part])
    tls = parts.scheme.startswith("rediss")
    return RedisAddress(
        kind=kind,
        nodes=nodes,
        db=db,
        service=service,
        username=unquote(username),
        password=unquote(own),
        tls=tls,
        **_options(parts.query, tls, kind),  # type: ignore[arg-type]
    )


def with_password(url: str, password: str) -> str:
    """Return the URL with the password added; unchanged if it holds one or is no Redis URL."""
    if not password or not is_redis_url(url) or parse_redis_url(url).password:
        return url
    parts = _split(url)
    entry, _, hosts = parts.netloc.rpartition("@")
    username = entry.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{username}:{quote(password, safe='')}@{hosts}"))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its message repeats user and password
        raise ValueError(f"an online store URL that cannot be read: expected {EXPECTED}") from None


def _node(text: str, default_port: int) -> tuple[str, int]:
    found = _NODE.fullmatch(text)
    port = int(found["port"] or default_port) if found else 0
    if not found or not 0 < port < 65_536:
        # A password with a raw "/" or "@" lands here, so the message must not show the text.
        raise ValueError(
            f"an online store URL whose hosts cannot be read: expected {EXPECTED}, "
            "and a password's special characters percent-encoded"
        )
    return found["v6"] or found["name"], port


def _path(kind: Kind, parts: list[str]) -> tuple[str, int]:
    """Return the service and the number of the database."""
    service = parts.pop(0) if kind == "sentinel" and parts else ""
    if kind == "sentinel" and not service:
        raise ValueError("a redis+sentinel URL names no service: expected redis+sentinel://HOST:PORT/SERVICE")
    if kind == "cluster" and parts not in ([], ["0"]):
        raise ValueError("a redis+cluster URL names a database: a cluster has only database 0")
    if len(parts) > 1 or (parts and not re.fullmatch(r"\d{1,5}", parts[0])):
        raise ValueError(f"an online store URL whose database is no number: expected {EXPECTED}")
    return service, int(parts[0]) if parts else 0


def _options(query: str, tls: bool, kind: Kind) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _TLS_FILES and tls and value:
            options[name] = value
        elif name == "ssl_check_hostname" and tls and value.lower() in _SWITCH:
            options[name] = _SWITCH[value.lower()]
        elif name == "sentinel_password" and kind == "sentinel":
            options[name] = value
        else:
            known = ", ".join((*_TLS_FILES, "ssl_check_hostname=true|false"))
            raise ValueError(
                f"an online store URL with the parameter {name!r}, unknown or with no use here: "
                f"expected {known} for rediss, sentinel_password for redis+sentinel"
            )
    return options
