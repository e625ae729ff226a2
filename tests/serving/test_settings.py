import re
from pathlib import Path

import pytest

from serving.settings import SettingInvalid, Settings, configured_home, configured_keys, unknown_variables


def test_each_field_is_read_from_its_variable_and_written_back() -> None:
    given = Settings(
        home=Path("/srv/reco"), host="0.0.0.0", http_port=0, grpc_port=9_000, store_url="redis://cache:6379/0",
        deadline_ms=20.0, body_limit_bytes=16_384, body_timeout_ms=250.0, drain_s=5.0, grace_s=1.0, log=False,
        log_dir=Path("/var/log/reco"), log_segment_s=2.0,
        rules_file=Path("/srv/rules.yaml"),
        store_password="p@ss", ranker_address="ranker:8001/ranker-{bundle_id}", request_log=False,
        request_log_key="k3y", trace_url="http://collector:4318/v1/traces",
        batch_max_wait_ms=2.5, batch_max_rows=4_000,
    )  # fmt: skip
    assert Settings.from_env(given.to_env()) == given
    assert Settings.from_env(Settings().to_env()) == Settings()


def test_a_child_does_not_inherit_the_metrics_folder(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("RECO_RANKER_ADDRESS", "https://::1:8001/ranker"),
        ("RECO_METRICS_ADDRESS", "::1:9090"),
        ("RECO_METRICS_ADDRESS", "[::1:9090"),
        ("RECO_METRICS_ADDRESS", "::1]:9090"),
        ("RECO_METRICS_ADDRESS", "[]:9090"),
        ("RECO_METRICS_ADDRESS", "[::1]:70000"),
        ("RECO_TRACE_URL", "collector:4318"),
    ],
)
def test_a_wrong_value_is_reported_with_name_found_and_expected(name: str, text: str) -> None:
    with pytest.raises(SettingInvalid, match=rf"{name} is '{re.escape(text)}'; expected "):
        Settings.from_env({name: text})


@pytest.mark.parametrize(
    ("field", "accepted"),
    [
        ("metrics_address", ["localhost:9090", "127.0.0.1:9090", "[::1]:9090"]),
        ("ranker_address", ["ranker:8001", "[::1]:8001", "https://[fd00::1]:8001/ranker-{bundle_id}"]),
    ],
)
def test_an_ipv6_address_needs_brackets(field: str, accepted: list[str]) -> None:
    for text in accepted:
        assert getattr(Settings.from_env({f"RECO_{field.upper()}": text}), field) == text
    with pytest.raises(SettingInvalid, match=r"an IPv6 address in brackets: \[::1\]:9090"):
        Settings.from_env({f"RECO_{field.upper()}": "::1:9090"})


@pytest.mark.parametrize(
    "url", ["redis://cache:abc", "sqlite:///", "sqlite://x", "memory", "mysql://app:hunter2@db/reco"]
)
def test_an_unusable_store_url_is_reported_at_once_without_its_password(url: str) -> None:
    with pytest.raises(
        SettingInvalid, match="expected sqlite:///PATH, redis://HOST:PORT or memory:"
    ) as found:
        Settings.from_env({"RECO_STORE_URL": url})
    assert "hunter2" not in str(found.value)


def test_a_separate_password_is_in_the_url_and_in_no_text() -> None:
    environ = {"RECO_STORE_URL": "redis://shop@cache:6380/1", "RECO_STORE_PASSWORD": "hunter@2"}
    settings = Settings.from_env(environ)
    assert settings.online_store_url == "redis://shop:hunter%402@cache:6380/1"
    assert settings.store_url == "redis://shop@cache:6380/1"
    assert Settings(store_password="hunter2").online_store_url.startswith("sqlite:///")
    with pytest.raises(SettingInvalid) as found:
        Settings.from_env({"RECO_STORE_URL": "redis://:hunter2/@cache"})
    assert "hunter2" not in f"{found.value} {found.value.__cause__}"


def test_default_places_are_under_the_home() -> None:
    settings = Settings(home=Path("/srv/reco"))
    assert settings.online_store_url == "sqlite:////srv/reco/online_store.db"
    assert settings.fact_store_url == "sqlite:////srv/reco/facts.db"
    assert settings.prediction_log_dir == Path("/srv/reco/prediction_log")
    assert settings.rules_path == Path("/srv/reco/rules.yaml")


@pytest.mark.parametrize(
    ("online", "facts"),
    [
        ("sqlite:////data/users.db", "sqlite:////data/facts.db"),
        ("sqlite:///users.db", "sqlite:///facts.db"),
        ("redis://:secret@cache:6379/1", "redis://:secret@cache:6379/1"),
        ("memory:", "sqlite:////srv/reco/facts.db"),
    ],
)
def test_facts_are_kept_beside_the_users_or_under_the_home(online: str, facts: str) -> None:
    assert Settings(home=Path("/srv/reco"), store_url=online).fact_store_url == facts


def test_a_misspelt_variable_is_found() -> None:
    environ = {"RECO_HTP_PORT": "1", "RECO_HTTP_PORT": "1", "RECO_CONFIG": "off", "PATH": ""}
    assert unknown_variables(environ) == ["RECO_HTP_PORT"]


def test_a_broker_setting_is_not_reported_as_unknown() -> None:
    assert not unknown_variables({"RECO_KAFKA_BOOTSTRAP": "kafka:9092", "RECO_EVENTS_TOPIC": "events"})
    assert unknown_variables({"RECO_KAFKA_BOOTSTRAPS": "kafka:9092"}) == ["RECO_KAFKA_BOOTSTRAPS"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where the settings files are read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_overrides_dotenv_and_dotenv_the_toml_file(folder: Path) -> None:
    (folder / "reco.toml").write_text(
        'home = "t"\nhost = "t"\nhttp_port = 1\nlog = false\n[kafka]\ngroup = "t"\n'
    )
    (folder / ".env").write_text(
        "OTHER=e\nRECO_HOST=${OTHER}\nRECO_HTTP_PORT=2\nRECO_GRPC_PORT=\n# x\nhome=no\n"
    )
    settings = Settings.from_env({"RECO_HTTP_PORT": "3", "RECO_HOST": " "})
    assert settings == Settings(home=Path("t"), host="e", http_port=3, log=False)
    assert Settings.from_env({"RECO_CONFIG": "off"}) == Settings()
    assert Settings.from_env(settings.to_env()) == settings
    assert Settings.from_env(Settings().to_env()) == Settings(), "a child reads no file"


def test_another_toml_file_can_be_named(folder: Path) -> None:
    (folder / "reco.toml").write_text("http_port = 1\n")
    (folder / "other.toml").write_text("grpc_port = 2\n")
    assert Settings.from_env({"RECO_CONFIG": "other.toml"}) == Settings(grpc_port=2)
    with pytest.raises(SettingInvalid, match=r"RECO_CONFIG is 'none\.toml'; expected a TOML file"):
        Settings.from_env({"RECO_CONFIG": "none.toml"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("htp_port = 1", "reco.toml has an unknown setting 'htp_port': did you mean 'http_port'?"),
        ("[kafkas]", "reco.toml has an unknown setting 'kafkas': did you mean 'kafka'?"),
        ("http_port = 70000", "http_port in reco.toml is 70000; expected a whole number from 0 to 65535"),
        ('deadline_ms = "fast"', "deadline_ms in reco.toml is 'fast'; expected a number from 1 to 60000"),
        ("http_port = true", "http_port in reco.toml is True; expected a whole number from 0 to 65535"),
        ("deadline_ms = true", "deadline_ms in reco.toml is True; expected a number from 1 to 60000"),
        ("host = 5", "host in reco.toml is 5; expected an address to listen on"),
        ("http_port", "reco.toml cannot be read as TOML"),
        ('store_url = "CANARY"', "store_url in reco.toml is invalid (not shown); expected sqlite:///PATH"),
        ('store_url = "redis://:CANARY/@a"', "store_url in reco.toml is a 'redis' URL; expected sqlite"),
        ("request_log_key = 5", "request_log_key in reco.toml is invalid (not shown); expected text"),
        ('store_password = "CANARY" x', "reco.toml cannot be read as TOML"),
        ("a." * 10_000 + "b = 1", "reco.toml has more than 16384 bytes"),
    ],
)
def test_a_wrong_toml_file_is_refused_with_its_place_and_without_secrets(
    folder: Path, text: str, message: str
) -> None:
    (folder / "reco.toml").write_text(text)
    with pytest.raises(SettingInvalid, match=f"^{re.escape(message)}") as caught:
        Settings.from_env({})
    assert "CANARY" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "line",
    [
        'RECO_CALLER_TOKENS="0123456789',
        "RECO_CALLER_TOKENS",
        "reco_caller_tokens",
        '"RECO_CALLER_TOKENS"=0123456789',
        "OTHER='x\nRECO_CALLER_TOKENS=0123456789\n# the shops'",
        'RECO_HOST="127.0.0.1\nOTHER="',
        "=x",
    ],
)
def test_a_dotenv_line_that_cannot_be_read_is_refused(folder: Path, line: str) -> None:
    """The library passes it over: the endpoint would ask no caller for a token."""
    (folder / ".env").write_text(f"RECO_HOST=e\nKEY='-----\n-----'\n\n\n{line}\nRECO_HTTP_PORT=2\n")
    with pytest.raises(SettingInvalid, match=r"\.env, line 6: expected VARIABLE=VALUE"):
        Settings.from_env({})


def test_a_dotenv_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / ".env").write_bytes(b"RECO_HTTP_PORT=\xff\n")
    with pytest.raises(SettingInvalid, match=r"^\.env cannot be read \(UnicodeDecodeError\); expected lines"):
        Settings.from_env({})
    assert unknown_variables({}) == []


def test_a_misspelt_variable_in_dotenv_is_found(folder: Path) -> None:
    (folder / ".env").write_text("RECO_HTP_PORT=1\nreco_http_port=1\nRECO_CONFIG=x.toml\nOTHER=x\n")
    assert unknown_variables({"RECO_CONFIG": "x.toml"}) == ["RECO_CONFIG", "RECO_HTP_PORT"]
    assert unknown_variables({"RECO_CONFIG": "off"}) == []


def test_an_empty_text_in_the_toml_file_is_the_default_as_in_a_variable(folder: Path) -> None:
    names = ("home", "rules_file", "metrics_address", "store_url", "answer_cache", "trace_url")
    (folder / "reco.toml").write_text("".join(f'{name} = " "\n' for name in names))
    assert Settings.from_env({}) == Settings()


def test_no_secret_is_in_the_text_of_the_settings() -> None:
    secrets = {"store_url": "CANARY-1", "store_password": "CANARY-2", "request_log_key": "CANARY-3"}
    assert "CANARY" not in f"{Settings(**secrets)} {Settings(**secrets)!r}"  # type: ignore[arg-type]


def test_the_home_is_read_even_with_other_invalid_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECO_HOME")
    assert configured_home() == Path(".reco")
    (folder / "reco.toml").write_text('home = "t"\nhttp_port = 70000\n')
    assert configured_home() == Path("t")
    monkeypatch.setenv("RECO_HOME", "/srv/e")
    assert configured_home() == Path("/srv/e")


def test_the_gate_and_the_endpoint_read_the_trusted_keys_from_the_same_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configured_keys() is None
    (folder / "reco.toml").write_text('trusted_keys = "toml"\nhttp_port = 70000\n')
    assert configured_keys() == Path("toml")
    (folder / ".env").write_text("RECO_TRUSTED_KEYS=dotenv\n")
    assert configured_keys() == Path("dotenv")
    monkeypatch.setenv("RECO_TRUSTED_KEYS", "variable")
    assert configured_keys() == Path("variable")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("shop", False),
    ],
)
def test_loopback_addresses_are_local(host: str, is_local: bool) -> None:
    assert Settings(host=host).is_local is is_local
