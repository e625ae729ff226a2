"""Environment -> `KafkaSettings` -> the client's configuration: the one place that knows where the broker is.

A broker without encryption on this machine is the default; any other address, TLS and SASL are settings.
confluent_kafka is loaded where a topic is created, not before: the endpoint reads the names below without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from feature_repo.errors import USAGE, RecoError
from feature_repo.stream.configuration import as_text, read_values, setting

SECURITY = {
    "plaintext": "PLAINTEXT",
    "tls": "SSL",
    "sasl_plaintext": "SASL_PLAINTEXT",
    "sasl_tls": "SASL_SSL",
}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
REACH_S = 5.0  # how long a broker may take to answer before it counts as away
PARTITIONS = 4  # of a topic that is created here


class KafkaSettingInvalid(RecoError, ValueError):
    """A RECO_KAFKA_ variable, or a topic's or group's name, has a value that cannot work."""

    exit_code = USAGE


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The address of the broker and the names of the topics; `VARIABLES` names each field's variable."""

    bootstrap: str = setting("127.0.0.1:19092", "HOST:PORT, several separated by commas")
    security: str = setting("plaintext", "`plaintext`, `tls`, `sasl_plaintext` or `sasl_tls`")
    ca: Path | None = setting(None, "PEM file of authorities to trust; empty means the system's")
    cert: Path | None = setting(None, "PEM file of the client's certificate, together with its key")
    key: Path | None = setting(None, "PEM file of the certificate's key", secret=True)
    sasl_mechanism: str = setting("SCRAM-SHA-512", "SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN")
    username: str = setting("", "SASL user")
    # Spaces around other values are a typing error, but a password may begin with a space.
    password: str = setting("", "SASL password", secret=True, verbatim=True)
    events_topic: str = setting("checkout.events", "Purchases, impressions and clicks")
    facts_topic: str = setting("checkout.facts", "Prices, stock, bans, promotions and coupons")
    dead_letter_topic: str = setting("checkout.dead-letter", "Invalid messages, each with the reason")
    group: str = setting(
        "checkout-features", "Consumer group of `reco stream`; facts have the group GROUP-facts"
    )

    def __post_init__(self) -> None:
        for address in self.bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or "/" in address or not (port.isdecimal() and 0 < int(port) < 65_536):
                raise _invalid("bootstrap", self.bootstrap, "HOST:PORT, several separated by commas")
        for name, known in (("security", tuple(SECURITY)), ("sasl_mechanism", MECHANISMS)):
            if getattr(self, name) not in known:
                raise _invalid(name, getattr(self, name), f"one of {', '.join(known)}")
        self._check_security()
        for name in _NAMES:
            if not re.fullmatch(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}", getattr(self, name)):
                raise _invalid(name, getattr(self, name), "1 to 249 letters, digits, dots, _ or -")
        if len({self.events_topic, self.facts_topic, self.dead_letter_topic}) < 3:
            raise KafkaSettingInvalid(
                f"{', '.join(VARIABLES[name] for name in _NAMES[:3])} name one topic twice; "
                "expected three different topics"
            )

    def _check_security(self) -> None:
        for name in ("ca", "cert", "key"):
            file = getattr(self, name)
            if file and "tls" not in self.security:
                raise _useless(name, self.security, "tls or sasl_tls")
            if file and not file.is_file():
                raise _invalid(name, str(file), "a PEM file that can be read")
        if bool(self.cert) != bool(self.key):
            raise KafkaSettingInvalid(
                f"only one of {VARIABLES['cert']} and {VARIABLES['key']} is set; expected both or neither"
            )
        if "sasl" in self.security:
            if not (self.username and self.password):
                raise KafkaSettingInvalid(
                    f"{VARIABLES['security']} is {self.security!r}; expected "
                    f"{VARIABLES['username']} and {VARIABLES['password']} to be set too"
                )
        elif self.username or self.password:
            raise _useless("username" if self.username else "password", self.security, "sasl_tls")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **otherwise: Any) -> KafkaSettings:
        """Read each field from its variable, `.env` or the table [kafka] of the TOML file.

        Args:
            environ: None means the environment of the process.
            **otherwise: values that replace the defaults.

        Raises:
            KafkaSettingInvalid: naming the place, the value (unless secret) and the expected value.
        """
        given = {**otherwise, **read_values(cls, VARIABLES, "kafka", environ, KafkaSettingInvalid)}
        if "sasl_mechanism" in given:
            given["sasl_mechanism"] = given["sasl_mechanism"].upper()
        return cls(**given)

    def to_env(self) -> dict[str, str]:
        """Return the variables for a child process with these settings."""
        return {variable: as_text(getattr(self, name)) for name, variable in VARIABLES.items()}


_NAMES = ("events_topic", "facts_topic", "dead_letter_topic", "group")
# field -> its environment variable: RECO_KAFKA_<FIELD>, and RECO_<FIELD> for the names of topics and group
VARIABLES = {
    f.name: ("RECO_" if f.name in _NAMES else "RECO_KAFKA_") + f.name.upper() for f in fields(KafkaSettings)
}


def client_config(settings: KafkaSettings) -> dict[str, Any]:
    """Return the common options of producer, consumer and admin client, under the names of librdkafka."""
    config: dict[str, Any] = {
        "bootstrap.servers": ",".join(address.strip() for address in settings.bootstrap.split(",")),
        "security.protocol": SECURITY[settings.security],
        "client.id": "checkout-recommender",
        # A broker that comes back is noticed within two seconds; librdkafka's own pause grows to ten.
        "reconnect.backoff.max.ms": "2000",
    }
    files = {
        "ssl.ca.location": settings.ca,
        "ssl.certificate.location": settings.cert,
        "ssl.key.location": settings.key,
    }
    config |= {name: str(file) for name, file in files.items() if file}
    if "sasl" in settings.security:
        config |= {
            "sasl.mechanism": settings.sasl_mechanism,
            "sasl.username": settings.username,
            "sasl.password": settings.password,
        }
    return config


def consumer_config(settings: KafkaSettings, group: str) -> dict[str, Any]:
    """Return the options of a consumer that commits explicitly, after its messages are written."""
    return {
        **client_config(settings),
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 6_000,
        "heartbeat.interval.ms": 1_000,
        "fetch.wait.max.ms": 50,  # some brokers answer no sooner, although messages are there
    }


def create_topics(settings: KafkaSettings, timeout_s: float = REACH_S) -> None:
    """Create those of the three topics that are missing.

    Raises:
        ConnectionError: the broker cannot be reached, or refuses.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    # The reason is in the exception; librdkafka would also write it to stderr, again and again.
    admin = AdminClient({**client_config(settings), "log_level": "0"})
    names = (settings.events_topic, settings.facts_topic, settings.dead_letter_topic)
    try:
        known = admin.list_topics(timeout=timeout_s).topics
        wanted = [NewTopic(name, PARTITIONS, -1) for name in names if name not in known]
        futures = admin.create_topics(wanted, operation_timeout=timeout_s) if wanted else {}
        for future in futures.values():
            try:
                future.result(timeout_s)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
    except (KafkaException, TimeoutError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else f"no answer in {timeout_s:g} s"
        raise ConnectionError(
            f"the broker at {settings.bootstrap} cannot be used ({reason}): "
            f"start one with `reco up`, or set {VARIABLES['bootstrap']}"
        ) from error


def _invalid(name: str, found: str, expected: str) -> KafkaSettingInvalid:
    return KafkaSettingInvalid(f"{VARIABLES[name]} is {found!r}; expected {expected}")


def _useless(name: str, security: str, expected: str) -> KafkaSettingInvalid:
    return KafkaSettingInvalid(
        f"{VARIABLES[name]} is set, but {VARIABLES['security']} is {security!r}, which makes no use of it; "
        f"expected {expected}"
    )
