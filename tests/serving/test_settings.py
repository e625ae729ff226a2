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
    )  # fmt: skip
    assert Settings.from_env(given.to_env()) == given
    assert Settings.from_env(Settings().to_env()) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RECO_HTTP_PORT", "eighty"),
        ("RECO_HTTP_PORT", "70000"),
        ("RECO_GRPC_PORT", "-1"),
        ("RECO_DEADLINE_MS", "nan"),
        ("RECO_DEADLINE_MS", "0"),
        ("RECO_LOG", "maybe"),
        ("RECO_BODY_LIMIT_BYTES", "1e9"),
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
    ["redis://cache:abc", "redis://", "redis://:pw@:1", "sqlite:///", "sqlite://x", "memory", "nonsense"],
)
def test_a_store_url_that_opens_nothing_is_told_at_once(url: str) -> None:
    with pytest.raises(SettingInvalid, match="expected sqlite:///PATH, redis://HOST:PORT or memory:"):
        Settings.from_env({"RECO_STORE_URL": url})


@pytest.mark.parametrize("url", ["redis://cache", "rediss://u:p@cache:6380/1", "sqlite:///a.db", "memory:"])
def test_a_store_url_that_opens_something_is_taken(url: str) -> None:
    assert Settings.from_env({"RECO_STORE_URL": url}).store_url == url


def test_places_under_home() -> None:
    settings = Settings(home=Path("/srv/reco"))
    assert settings.online_store_url == "sqlite:////srv/reco/online_store.db"
    assert settings.prediction_log_dir == Path("/srv/reco/prediction_log")
    assert settings.availability_path == Path("/srv/reco/availability.json")


def test_a_misspelt_variable_is_found() -> None:
    assert unknown_variables({"RECO_HTP_PORT": "1", "RECO_HTTP_PORT": "1", "PATH": ""}) == ["RECO_HTP_PORT"]
