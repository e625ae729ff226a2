"""The settings of the broker: valid and invalid values; topics on a real broker."""

from pathlib import Path
from typing import Any

import pytest

from feature_repo.stream.kafka import (
    PARTITIONS,
    KafkaSettingInvalid,
    KafkaSettings,
    client_config,
    create_topics,
)


def test_nothing_set_gives_the_defaults() -> None:
    assert KafkaSettings.from_env({}) == KafkaSettings()
    assert client_config(KafkaSettings()) == {
        "bootstrap.servers": "127.0.0.1:19092",
        "security.protocol": "PLAINTEXT",
        "client.id": "checkout-recommender",
        "reconnect.backoff.max.ms": "2000",
    }


def test_a_broker_elsewhere_with_sasl_and_tls(tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    settings = KafkaSettings.from_env(
        {
            "RECO_KAFKA_BOOTSTRAP": "a.example:9093, b.example:9093",
            "RECO_KAFKA_SECURITY": "sasl_tls",
            "RECO_KAFKA_CA": f"{tmp_path}/ca.pem",
            "RECO_KAFKA_CERT": f"{tmp_path}/cert.pem",
            "RECO_KAFKA_KEY": f"{tmp_path}/key.pem",
            "RECO_KAFKA_SASL_MECHANISM": "plain",
            "RECO_KAFKA_USERNAME": "reco",
            "RECO_KAFKA_PASSWORD": " secret",
        }
    )
    assert client_config(settings) == {
        "bootstrap.servers": "a.example:9093,b.example:9093",
        "security.protocol": "SASL_SSL",
        "client.id": "checkout-recommender",
        "reconnect.backoff.max.ms": "2000",
        "ssl.ca.location": f"{tmp_path}/ca.pem",
        "ssl.certificate.location": f"{tmp_path}/cert.pem",
        "ssl.key.location": f"{tmp_path}/key.pem",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "reco",
        "sasl.password": " secret",
    }
    assert "secret" not in repr(settings)
    assert "key.pem" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RECO_KAFKA_BOOTSTRAP": "kafka"}, "RECO_KAFKA_BOOTSTRAP is 'kafka'; expected HOST:PORT"),
        ({"RECO_KAFKA_BOOTSTRAP": "tcp://kafka:9092"}, "expected HOST:PORT"),
        ({"RECO_KAFKA_BOOTSTRAP": "kafka:9092,"}, "expected HOST:PORT"),
        ({"RECO_KAFKA_BOOTSTRAP": "kafka:70000"}, "expected HOST:PORT"),
        ({"RECO_KAFKA_SECURITY": "ssl"}, "expected one of plaintext, tls, sasl_plaintext, sasl_tls"),
        ({"RECO_KAFKA_SECURITY": "tls", "RECO_KAFKA_CA": "/nowhere"}, "'/nowhere'; expected a PEM file"),
        (
            {"RECO_KAFKA_SECURITY": "tls", "RECO_KAFKA_CERT": __file__},
            "only one of RECO_KAFKA_CERT and RECO_KAFKA_KEY",
        ),
        ({"RECO_KAFKA_CA": "/nowhere"}, "RECO_KAFKA_CA is set, but RECO_KAFKA_SECURITY is 'plaintext'"),
        ({"RECO_KAFKA_SECURITY": "sasl_tls"}, "RECO_KAFKA_USERNAME and RECO_KAFKA_PASSWORD"),
        ({"RECO_KAFKA_PASSWORD": "x"}, "RECO_KAFKA_PASSWORD is set, but"),
        ({"RECO_EVENTS_TOPIC": "two words"}, "RECO_EVENTS_TOPIC is 'two words'"),
        ({"RECO_EVENTS_TOPIC": ".."}, "RECO_EVENTS_TOPIC is '..'"),
        ({"RECO_EVENTS_TOPIC": "checkout.facts"}, "three different topics"),
    ],
)
def test_an_invalid_setting_is_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(KafkaSettingInvalid, match=message):
        KafkaSettings.from_env(given)


def test_the_client_takes_every_configuration() -> None:
    from confluent_kafka import Producer

    Producer(client_config(KafkaSettings()))
    Producer(client_config(KafkaSettings(security="tls")))
    Producer(client_config(KafkaSettings(security="sasl_tls", username="reco", password="secret")))


def test_an_unreachable_broker_is_reported() -> None:
    with pytest.raises(ConnectionError, match=r"127.0.0.1:1 cannot be used .*RECO_KAFKA_BOOTSTRAP"):
        create_topics(KafkaSettings(bootstrap="127.0.0.1:1"), timeout_s=0.5)


@pytest.mark.slow
def test_topics_are_created_once(broker: Any) -> None:
    from confluent_kafka.admin import AdminClient

    settings = KafkaSettings(
        bootstrap=broker.bootstrap, events_topic="e", facts_topic="f", dead_letter_topic="d"
    )
    create_topics(settings)
    create_topics(settings)
    topics = AdminClient(client_config(settings)).list_topics(timeout=10).topics
    assert {name: len(topics[name].partitions) for name in "def"} == dict.fromkeys("def", PARTITIONS)


def test_the_toml_file_has_a_table_of_kafka_s_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reco.toml").write_text(
        'http_port = 1\n[kafka]\nbootstrap = "t:1"\nsasl_mechanism = "plain"\n'
    )
    settings = KafkaSettings.from_env({"RECO_GROUP": "g"}, bootstrap="running:1", group="x", facts_topic="f")
    assert settings == KafkaSettings(bootstrap="t:1", sasl_mechanism="PLAIN", group="g", facts_topic="f")
    assert KafkaSettings.from_env({**settings.to_env(), "RECO_CONFIG": "off"}) == settings
