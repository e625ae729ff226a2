"""Environment -> `Settings`: what changes the endpoint's speed or place, not its answers.

What changes an answer stands in the bundle's manifest; the exception is the cache of answers, with which
features that age with the clock may be up to an hour old. This is the only module that reads the environment;
it does so once, when a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from feature_repo.errors import USAGE, RecoError
from feature_repo.stream.kafka import VARIABLES as KAFKA_VARIABLES
from serving.redis.address import is_redis_url, parse_redis_url, with_password

PREFIX = "RECO_"
FEASTS_OWN = ("PROMETHEUS_MULTIPROC_DIR", "PROMETHEUS_MULTIPROCESS_DIR")


class SettingInvalid(RecoError, ValueError):
    """A variable of the environment has a value that its setting cannot take."""

    exit_code = USAGE


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is read from the variable RECO_<FIELD>, for example RECO_HTTP_PORT."""

    home: Path = Path(".reco")  # where champion, online store and log live
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 in a container
    http_port: int = 8080  # REST; 0 lets the system choose, and the start line has the port
    grpc_port: int = 8081  # gRPC; 0 lets the system choose
    processes: int = 1  # processes that answer behind the two ports
    metrics_address: str = (
        ""  # HOST:PORT where metrics are shown, and nowhere else; empty: at HTTP's /metrics
    )
    store_url: str = field(default="", repr=False)  # online store; empty means the SQLite file under home
    store_password: str = field(default="", repr=False)  # of the store's Redis, if its URL holds none
    availability_file: Path | None = (
        None  # items out of stock or banned; empty means availability.json under home
    )
    rules_file: Path | None = None  # pins, boosts, bans, minimums; empty means rules.yaml under home
    stale_after_s: float = 60.0  # the stream's silence after which answers say that features are stale
    deadline_ms: float = 50.0  # an answer that takes longer steps down the ladder
    ranker_address: str = ""  # of a ranker elsewhere, HOST:PORT or HOST:PORT/MODEL; empty: in this process
    answer_cache: str = ""  # memory: caches ranked lists in each process; empty: none
    user_limit_per_s: float = 20.0  # answers that a process computes for one shopper; 0: no limit
    batch_max_wait_ms: float = 5.0  # longest wait for a call of a remote ranker that requests share; 0: none
    batch_max_rows: int = 800  # most candidates of such a call; a bundle's rows have some 300 bytes
    body_limit_bytes: int = 262_144  # a longer request is refused with 413
    body_timeout_ms: float = 1_000.0  # a head, or a body, that takes longer to arrive is refused with 408
    max_connections: int = (
        4_096  # of HTTP, and of gRPC, to one process; the one that idles longest makes room
    )
    drain_s: float = 0.5  # time between readiness off and the door shut, for load balancers to notice
    grace_s: float = 20.0  # time that requests in flight get to finish after that
    log: bool = True  # keep the prediction log
    log_dir: Path | None = None  # empty means prediction_log under home
    log_segment_s: float = 60.0  # a log segment becomes readable after this time
    request_log: bool = True  # one line of JSON per request on stderr
    request_log_key: str = field(default="", repr=False)  # of the users' hashes in it; empty: a new one
    trace_url: str = ""  # of an OpenTelemetry collector, OTLP over HTTP; empty: no spans

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read each field from its variable; unset and empty ones keep their default.

        Raises:
            SettingInvalid: naming the variable, what was found and what was expected.
        """
        environ = os.environ if environ is None else environ
        given = {}
        for name, (expected, parse) in _PARSERS.items():
            if text := environ.get(variable(name), "").strip():
                try:
                    given[name] = parse(text)
                except ValueError as error:
                    if name in ("store_url", "answer_cache"):  # it may hold a password
                        found, why = f"a {text.partition(':')[0]!r} URL", f" ({error})" if error.args else ""
                    else:
                        found, why = repr(text), ""
                    raise SettingInvalid(f"{variable(name)} is {found}; expected {expected}{why}") from error
        return cls(**given)

    def to_env(self) -> dict[str, str]:
        """Return the whole environment for a child process that shall have these settings."""
        own = {variable(f.name): _text(getattr(self, f.name)) for f in fields(self)}
        # Feast sets this where it is imported: with it, all children would count into one set of files.
        others = {name: value for name, value in os.environ.items() if name not in FEASTS_OWN}
        return {**others, **own}

    @property
    def online_store_url(self) -> str:
        """Where the online store is, and its password if it has one: not to be shown."""
        if not self.store_url:
            return f"sqlite:///{(self.home / 'online_store.db').absolute()}"
        return with_password(self.store_url, self.store_password)

    @property
    def fact_store_url(self) -> str:
        """Where the facts are: in the same Redis, or in a file beside SQLite's."""
        store = self.online_store_url
        if not store.startswith("sqlite:///"):
            return store
        return f"sqlite:///{Path(store.removeprefix('sqlite:///')).with_name('facts.db')}"

    @property
    def availability_path(self) -> Path:
        """Where the list of items that must not be offered is; the file need not exist."""
        return self.availability_file or self.home / "availability.json"

    @property
    def rules_path(self) -> Path:
        """Where the rules are; the file need not exist."""
        return self.rules_file or self.home / "rules.yaml"

    @property
    def prediction_log_dir(self) -> Path:
        """Where the prediction log is."""
        return self.log_dir or self.home / "prediction_log"


def variable(field: str) -> str:
    """Return the name of the environment variable of a field."""
    return PREFIX + field.upper()


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the RECO_ variables that name no setting: most likely misspelt, and without effect."""
    environ = os.environ if environ is None else environ
    known = {variable(name) for name in _PARSERS} | set(KAFKA_VARIABLES.values())
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(low: int, high: int) -> tuple[str, Callable[[str], int]]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return f"a whole number from {low} to {high}", parse


def _number(low: float, high: float) -> tuple[str, Callable[[str], float]]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # also refuses nan
            raise ValueError(text)
        return value

    return f"a number from {low:g} to {high:g}", parse


def _switch(text: str) -> bool:
    found = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}.get(text.lower())
    if found is None:
        raise ValueError(text)
    return found


def _url(text: str) -> str:
    if is_redis_url(text):
        parse_redis_url(text)
    elif not (text == "memory:" or (text.startswith("sqlite:///") and urlsplit(text).path.strip("/"))):
        raise ValueError
    return text


def _cache_url(text: str) -> str:
    if text != "memory:":
        raise ValueError
    return text


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError
    return text


def _ranker_address(text: str) -> str:
    _address(text.partition("/")[0])
    return text


def _collector(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise ValueError
    return text


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "home": ("a directory", Path),
    "host": ("an address to listen on", str),
    "http_port": _whole(0, 65_535),
    "grpc_port": _whole(0, 65_535),
    "processes": _whole(1, 256),
    "metrics_address": ("HOST:PORT", _address),
    "store_url": ("sqlite:///PATH, redis://HOST:PORT or memory:", _url),
    "store_password": ("text", str),
    "availability_file": ("a file", Path),
    "rules_file": ("a file", Path),
    "stale_after_s": _number(1, 1e9),
    "deadline_ms": _number(1, 60_000),
    "answer_cache": ("memory:", _cache_url),
    "ranker_address": ("HOST:PORT or HOST:PORT/MODEL", _ranker_address),
    "user_limit_per_s": _number(0, 1e6),
    "batch_max_wait_ms": _number(0, 10),
    "batch_max_rows": _whole(1, 1 << 20),
    "body_limit_bytes": _whole(1_024, 64 << 20),
    "body_timeout_ms": _number(10, 600_000),
    "max_connections": _whole(1, 1 << 20),
    "drain_s": _number(0, 600),
    "grace_s": _number(0, 600),
    "log": ("on or off", _switch),
    "log_dir": ("a directory", Path),
    "log_segment_s": _number(0.1, 86_400),
    "request_log": ("on or off", _switch),
    "request_log_key": ("text", str),
    "trace_url": ("http://HOST:PORT/v1/traces", _collector),
}
