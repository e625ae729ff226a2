"""Environment, `.env` and `reco.toml` -> `Settings`: values that affect the endpoint's speed or location.

Values that affect an answer are in the bundle's manifest; `docs/reference/settings.md` lists the exceptions.
A process reads its settings once, when it starts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from feature_repo.errors import USAGE, RecoError
from feature_repo.stream.configuration import (
    CONFIG,
    NO_FILE,
    as_text,
    dotenv_names,
    has_files,
    read_values,
    setting,
)
from feature_repo.stream.kafka import VARIABLES as KAFKA_VARIABLES
from serving.redis.address import is_redis_url, parse_redis_url, with_password

PREFIX = "RECO_"
OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FEASTS_OWN = ("PROMETHEUS_MULTIPROC_DIR", "PROMETHEUS_MULTIPROCESS_DIR")


class SettingInvalid(RecoError, ValueError):
    """A setting has an invalid value."""

    exit_code = USAGE


def _check_store(text: str) -> None:
    if is_redis_url(text):
        parse_redis_url(text)
    elif not (text == "memory:" or (text.startswith("sqlite:///") and urlsplit(text).path.strip("/"))):
        raise ValueError


def _check_address(text: str) -> None:
    # Of an IPv6 address URLs need the brackets.
    address = re.fullmatch(r"(?:\[[^\[\]]+\]|[^:\[\]]+):([0-9]+)", text)
    if not address or not 0 < int(address[1]) < 65_536:
        raise ValueError


def _check_ranker(text: str) -> None:
    _check_address(text.removeprefix("https://").partition("/")[0])


def _check_collector(text: str) -> None:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise ValueError


def _check_tokens(text: str) -> None:
    if any(not re.fullmatch(r"[\x21-\x7e]{16,}", token.strip()) for token in text.split(",")):
        raise ValueError


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is read from the variable RECO_<FIELD>, or from the key <field> of the TOML file."""

    home: Path = setting(Path(".reco"), "State folder: champion, online store, log", expected="a directory")
    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 in a container", expected="an address to listen on"
    )
    http_port: int = setting(
        8080, "REST; 0 lets the system choose, and the start line has the port", ge=0, le=65_535
    )
    grpc_port: int = setting(8081, "gRPC; 0 lets the system choose", ge=0, le=65_535)
    processes: int = setting(1, "Processes that answer behind the two ports", ge=1, le=256)
    metrics_address: str = setting(
        "",
        "HOST:PORT of a port for metrics alone; empty: `/metrics` on the port of REST",
        expected="HOST:PORT, an IPv6 address in brackets: [::1]:9090",
        check=_check_address,
    )
    caller_tokens: str = setting(
        "",
        "Bearer tokens of the callers, separated by commas; empty: every caller may ask",
        expected="tokens of at least 16 characters, separated by commas",
        check=_check_tokens,
        secret=True,
    )
    reasons: Literal["counts", "plain"] = setting(
        "counts",
        "`counts`: a reason says how often and when an item was bought before; `plain`: it does not",
        expected="counts or plain",
    )
    trusted_keys: Path | None = setting(
        None,
        "Folder of public keys, one of which must have signed a bundle; empty: unsigned ones answer, too",
        expected="a directory",
    )
    store_url: str = setting(
        "",
        "Online store; empty: the SQLite file under home, the only one that is filled. Facts of `memory:` "
        "lie under home, too",
        expected="sqlite:///PATH, redis://HOST:PORT or memory:",
        check=_check_store,
        secret=True,
    )
    store_password: str = setting("", "Password of the store's Redis, if its URL holds none", secret=True)
    rules_file: Path | None = setting(
        None, "The merchandiser's rules; empty: `rules.yaml` under home", expected="a file"
    )
    stale_after_s: float = setting(
        60.0, "Silence of the stream after which answers say `stale_features`", ge=1, le=1e9
    )
    deadline_ms: float = setting(50.0, "An answer that takes longer steps down the ladder", ge=1, le=60_000)
    ranker_address: str = setting(
        "",
        "A remote ranker, HOST:PORT or HOST:PORT/MODEL, `https://` before it: TLS; empty: in this process",
        expected="[https://]HOST:PORT[/MODEL], an IPv6 address in brackets: [::1]:9090",
        check=_check_ranker,
    )
    ranker_ca: Path | None = setting(
        None,
        "PEM file of the authorities that may sign the ranker's certificate; empty: those of the system",
        expected="a file",
    )
    ranker_certificate: Path | None = setting(
        None, "PEM file of our own certificate for the ranker; empty: none", expected="a file"
    )
    ranker_key: Path | None = setting(None, "PEM file of the key of that certificate", expected="a file")
    explore_share: float = setting(
        0.0,
        "Share of the answers in which one place is drawn by chance, for off-policy estimates",
        ge=0,
        le=1,
    )
    answer_cache: Literal["", "memory:"] = setting(
        "",
        "`memory:` caches ranked lists in each process; empty: no cache",
        expected="memory:",
        secret=True,  # an older configuration may have a Redis URL here
    )
    user_limit_per_s: float = setting(
        20.0, "Answers a second that a process computes for one shopper; 0: no limit", ge=0, le=1e6
    )
    batch_max_wait_ms: float = setting(
        5.0, "Longest wait for a call of a remote ranker that requests share; 0: none", ge=0, le=10
    )
    batch_max_rows: int = setting(
        800,
        "Most candidates of such a call; our own ranker takes up to 4,096",
        ge=1,
        le=1 << 20,
    )
    body_limit_bytes: int = setting(
        262_144,
        "A longer request is refused with 413; over gRPC about 1.6 MiB always fit, in every method",
        ge=16_384,  # the golden requests of a start must fit, over V2 and with the longest ids
        le=64 << 20,
    )
    body_timeout_ms: float = setting(
        1_000.0, "Headers or a body that take longer to arrive are refused with 408", ge=10, le=600_000
    )
    max_connections: int = setting(
        4_096,
        "Connections to one process, of HTTP and of gRPC each; the longest idle one of HTTP makes room",
        ge=1,
        le=1 << 20,
    )
    drain_s: float = setting(
        0.5, "Time between not ready and the closed port, for load balancers to notice", ge=0, le=600
    )
    grace_s: float = setting(20.0, "Time that requests in flight get to finish after that", ge=0, le=600)
    log: bool = setting(True, "Keep the prediction log", expected="on or off")
    log_dir: Path | None = setting(
        None, "Folder of the prediction log; empty: `prediction_log` under home", expected="a directory"
    )
    log_segment_s: float = setting(
        60.0, "A segment of the log becomes readable after this time", ge=0.1, le=86_400
    )
    request_log: bool = setting(True, "One line of JSON per request on stderr", expected="on or off")
    request_log_key: str = setting(
        "", "Key of the shoppers' hashes in these lines; empty: a new one at each start", secret=True
    )
    trace_url: str = setting(
        "",
        "OpenTelemetry collector, OTLP over HTTP; empty: that of `OTEL_EXPORTER_OTLP_ENDPOINT`, or no spans",
        expected="http://HOST:PORT/v1/traces",
        check=_check_collector,
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read each field from the environment, `.env` or the TOML file; others keep their default.

        Raises:
            SettingInvalid: the message names the place, the value (unless secret) and the expected value.
        """
        return cls(**read_values(cls, _variables(), "", environ, SettingInvalid))

    def to_env(self) -> dict[str, str]:
        """Return the whole environment for a child process with these settings; it reads no file."""
        values = {variable(f.name): as_text(getattr(self, f.name)) for f in fields(self)}
        # Importing Feast sets these: with them, all children would count into one set of metric files.
        others = {name: value for name, value in os.environ.items() if name not in FEASTS_OWN}
        return {**others, CONFIG: NO_FILE, **values}

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the ports."""
        with contextlib.suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def online_store_url(self) -> str:
        """URL of the online store, with its password if it has one: never show it."""
        if not self.store_url:
            return f"sqlite:///{(self.home / 'online_store.db').absolute()}"
        return with_password(self.store_url, self.store_password)

    @property
    def fact_store_url(self) -> str:
        """URL of the fact store: the same Redis, or a file beside SQLite's.

        Beside `memory:` it is the file under home: `reco facts` and the endpoint are two processes.
        """
        if self.store_url == "memory:":
            return f"sqlite:///{(self.home / 'facts.db').absolute()}"
        store = self.online_store_url
        if not store.startswith("sqlite:///"):
            return store
        return f"sqlite:///{Path(store.removeprefix('sqlite:///')).with_name('facts.db')}"

    @property
    def rules_path(self) -> Path:
        """Path of the rules file, which need not exist."""
        return self.rules_file or self.home / "rules.yaml"

    @property
    def prediction_log_dir(self) -> Path:
        """Folder of the prediction log."""
        return self.log_dir or self.home / "prediction_log"


def variable(field: str) -> str:
    """Return the name of the environment variable of a field."""
    return PREFIX + field.upper()


def names_collector() -> bool:
    """Return whether OpenTelemetry's own variables name a collector of spans."""
    return any(os.environ.get(name) for name in OTLP_VARIABLES)


def configured_home() -> Path:
    """Return the configured home, without reading the other settings.

    Raises:
        SettingInvalid: the TOML file cannot be read or has an unknown name.
    """
    if not has_files(os.environ):  # without pydantic, which takes a quarter of a second to import
        return Path(os.environ.get(variable("home"), "").strip() or Settings().home)
    given = read_values(Settings, _variables(), "", None, SettingInvalid, only=("home",))
    return Path(given.get("home", Settings().home))


def configured_keys() -> Path | None:
    """Return the configured folder of trusted keys, without reading the other settings.

    Raises:
        SettingInvalid: `.env` or the TOML file cannot be read or has an unknown name.
    """
    given = read_values(Settings, _variables(), "", None, SettingInvalid, only=("trusted_keys",))
    return given.get("trusted_keys")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the RECO_ variables that match no setting: probably misspelt, and without effect."""
    environ = os.environ if environ is None else environ
    known = {*_variables().values(), *KAFKA_VARIABLES.values()}
    names = {*environ} - {CONFIG} | {*dotenv_names(environ)}
    return sorted(name for name in names if name.startswith(PREFIX) and name not in known)


def without_effect(names: Sequence[str]) -> str:
    """Return the sentence about variables that match no setting."""
    return f"no setting is named {' or '.join(names)}, so it has no effect"


def _variables() -> dict[str, str]:
    return {f.name: variable(f.name) for f in fields(Settings)}
