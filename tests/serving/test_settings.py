from pathlib import Path

import pytest

from serving.settings import SettingInvalid, Settings, unknown_variables


def test_nothing_set_gives_the_defaults() -> None:
    assert Settings.from_env({}) == Settings()


def test_each_field_is_read_from_its_variable_and_written_back() -> None:
    given = Settings(
        home=Path("/srv/reco"), host="0.0.0.0", http_port=0, grpc_port=9_000, store_url="redis://cache:6379/0",
        deadline_ms=20.0, body_limit_bytes=4_096, body_timeout_ms=250.0, drain_s=5.0, grace_s=1.0, log=False,
        log_dir=Path("/var/log/reco"), log_segment_s=2.0, availability_file=Path("/srv/out.json"),
        rules_file=Path("/srv/rules.yaml"),
        store_password="p@ss", ranker_address="ranker:8001/ranker-{bundle_id}", request_log=False,
        request_log_key="k3y", trace_url="http://collector:4318/v1/traces",
        batch_max_wait_ms=2.5, batch_max_rows=4_000,
    )  # fmt: skip
    assert Settings.from_env(given.to_env()) == given
    assert Settings.from_env(Settings().to_env()) == Settings()


def test_a_child_keeps_its_metrics_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/of/feast")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    given = Settings().to_env()
    assert "PROMETHEUS_MULTIPROC_DIR" not in given
    assert given["SOMETHING_ELSE"] == "stays"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RECO_HTTP_PORT", "eighty"),
        ("RECO_HTTP_PORT", "70000"),
        ("RECO_GRPC_PORT", "-1"),
        ("RECO_DEADLINE_MS", "nan"),
        ("RECO_DEADLINE_MS", "0"),
        ("RECO_BATCH_MAX_WAIT_MS", "10.5"),
        ("RECO_BATCH_MAX_ROWS", "0"),
        ("RECO_LOG", "maybe"),
        ("RECO_BODY_LIMIT_BYTES", "1e9"),
        ("RECO_RANKER_ADDRESS", "ranker"),
        ("RECO_RANKER_ADDRESS", ":8001"),
        ("RECO_RANKER_ADDRESS", "ranker:http"),
        ("RECO_TRACE_URL", "collector:4318"),
    ],
)
def test_a_wrong_value_is_told_with_name_found_and_expected(name: str, text: str) -> None:
    with pytest.raises(SettingInvalid, match=rf"{name} is '{text}'; expected "):
        Settings.from_env({name: text})


def test_a_wrong_store_url_is_told_without_its_password() -> None:
    with pytest.raises(SettingInvalid, match=r"'mysql' URL; expected sqlite:///PATH") as found:
        Settings.from_env({"RECO_STORE_URL": "mysql://app:hunter2@db/reco"})
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache:abc",
        "redis://",
        "redis+sentinel://cache",
        "redis+cluster://cache/1",
        "redis://:pw@:1",
        "sqlite:///",
        "sqlite://x",
        "memory",
        "nonsense",
    ],
)
def test_a_store_url_that_opens_nothing_is_told_at_once(url: str) -> None:
    with pytest.raises(SettingInvalid, match="expected sqlite:///PATH, redis://HOST:PORT or memory:"):
        Settings.from_env({"RECO_STORE_URL": url})


@pytest.mark.parametrize(
    "url",
    [
        *("redis://cache", "rediss://u:p@cache:6380/1", "sqlite:///a.db", "memory:"),
        *("redis+cluster://a:1,b:2", "redis+sentinel://a,b/shop/1", "rediss://a?ssl_ca_certs=/ca.pem"),
    ],
)
def test_a_store_url_that_opens_something_is_taken(url: str) -> None:
    assert Settings.from_env({"RECO_STORE_URL": url}).store_url == url


def test_a_password_of_its_own_goes_into_the_url_and_into_no_text() -> None:
    environ = {"RECO_STORE_URL": "redis://shop@cache:6380/1", "RECO_STORE_PASSWORD": "hunter@2"}
    settings = Settings.from_env(environ)
    assert settings.online_store_url == "redis://shop:hunter%402@cache:6380/1"
    assert settings.store_url == "redis://shop@cache:6380/1"
    assert "hunter" not in repr(settings)
    assert Settings(store_password="hunter2").online_store_url.startswith("sqlite:///")
    with pytest.raises(SettingInvalid) as found:
        Settings.from_env({"RECO_STORE_URL": "redis://:hunter2/@cache"})
    assert "hunter2" not in f"{found.value} {found.value.__cause__}"


def test_places_under_home() -> None:
    settings = Settings(home=Path("/srv/reco"))
    assert settings.online_store_url == "sqlite:////srv/reco/online_store.db"
    assert settings.fact_store_url == "sqlite:////srv/reco/facts.db"
    assert settings.prediction_log_dir == Path("/srv/reco/prediction_log")
    assert settings.availability_path == Path("/srv/reco/availability.json")
    assert settings.rules_path == Path("/srv/reco/rules.yaml")


@pytest.mark.parametrize(
    ("online", "facts"),
    [
        ("sqlite:////data/users.db", "sqlite:////data/facts.db"),
        ("sqlite:///users.db", "sqlite:///facts.db"),
        ("redis://:secret@cache:6379/1", "redis://:secret@cache:6379/1"),
        ("memory:", "memory:"),
    ],
)
def test_facts_are_kept_beside_the_users(online: str, facts: str) -> None:
    assert Settings(store_url=online).fact_store_url == facts


def test_a_misspelt_variable_is_found() -> None:
    assert unknown_variables({"RECO_HTP_PORT": "1", "RECO_HTTP_PORT": "1", "PATH": ""}) == ["RECO_HTP_PORT"]


def test_a_setting_of_the_broker_is_no_mistake() -> None:
    assert not unknown_variables({"RECO_KAFKA_BOOTSTRAP": "kafka:9092", "RECO_EVENTS_TOPIC": "events"})
    assert unknown_variables({"RECO_KAFKA_BOOTSTRAPS": "kafka:9092"}) == ["RECO_KAFKA_BOOTSTRAPS"]
