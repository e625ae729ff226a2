"""The registry over a real MLflow database."""

import shutil
import socket
import sqlite3
from pathlib import Path

import pytest

from components.home import default_tracking_uri
from components.release.history import Promotion, next_line
from components.release.registry import Registry, RegistryRefused, RegistryUnreachable, is_own_place
from tests.chaos.listening import http_answers
from tests.programs import run_python


@pytest.mark.parametrize("name", ["", "A", "../x", "a" * 64])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RegistryRefused, match="expected lower-case letters"):
        Registry(default_tracking_uri(tmp_path), name)


NO_SCHEME = ("", "mlruns", "file:///etc", "postgresql://u:secret@h/db", "sqlite:///", "ftp://x")
NO_URL = ("http://user:secret@127.0.0.1:abc", "http://user:se@secret@127.0.0.1:abc", "http://a b")


@pytest.mark.parametrize(
    ("uri", "error", "says"),
    [
        *((uri, RegistryRefused, "expected sqlite:///PATH") for uri in NO_SCHEME),
        *((uri, RegistryUnreachable, "correct the tracking URI") for uri in NO_URL),
        ("http://user:secret@127.0.0.1:1", RegistryUnreachable, "nothing was changed"),
    ],
)
def test_an_address_without_a_registry_is_named_in_seconds_without_its_password(
    uri: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        Registry(uri, "recommender")
    assert "se@" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_that_wants_credentials_says_which() -> None:
    with (
        http_answers(lambda _: (401, b"")) as refusing,
        pytest.raises(RegistryRefused, match="MLFLOW_TRACKING_TOKEN"),
    ):
        Registry(refusing, "recommender")


@pytest.mark.slow
def test_a_proxy_that_wants_credentials_for_every_address_gets_those_that_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    with http_answers(lambda path: (401, b"") if path == "/health" else (200, b"{}")) as url:
        assert Registry(url, "recommender").versions() == []


@pytest.mark.slow
def test_the_first_request_to_a_server_loads_feasts_plugin_without_pytorch() -> None:
    program = (
        "import sys\n"
        "from components.release.registry import Registry\n"
        "assert Registry(sys.argv[1], 'recommender').versions() == []\n"
        "assert 'feast.infra.data_sources.mlflow.auth' in sys.modules, 'MLflow needs our help no longer'\n"
        "assert 'torch' not in sys.modules\n"
    )
    with http_answers(lambda path: (200, b"{}")) as url:
        run_python("-W", "ignore", "-c", program, url)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder with a file: the registry does not open it."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "a.txt").write_text("hello")
    return tmp_path / "bundle"


@pytest.mark.slow
def test_versions_aliases_and_history(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    assert registry.versions() == []
    assert registry.alias("champion") is None
    assert registry.history() == []
    tags = {"bundle_id": "b1", "cut": "2017-11-27T05:00:00Z", "size_bytes": "5", "metric.ndcg_at_10": "0.16"}
    tags |= {"metric.spoilt": "nan", "metric.lost": "x"}  # a version is found all the same
    params = {"lr": "0.1", "profiles.home & 50 %": "1"}  # MLflow takes no such name
    version = registry.add(bundle, tags, params, {"ndcg_at_10": 0.16, "blend/ndcg_at_10": 0.13})
    registry.point("challenger", version)
    [found] = registry.versions()
    assert set(registry._client.get_run(found.run_id).data.params) == {"lr", "profiles.home _ 50 _"}
    known = (found.version, found.bundle_id, found.aliases, found.size_bytes)
    assert known == ("1", "b1", ("challenger",), 5)
    assert found.metrics == {"ndcg_at_10": 0.16}
    assert registry.version("challenger") == registry.version("1") == found
    assert registry.version_of("b1") == "1"
    assert registry.version_of("b2") is None
    with pytest.raises(RegistryRefused, match="has no version '7'; versions: 1; aliases: challenger"):
        registry.version("7")
    fetched = registry.download(found, tmp_path / "copy")
    assert (fetched / "a.txt").read_text() == "hello"
    entry = Promotion(1, "promote", "1", "b1", "", "2026-01-01T00:00:00Z")
    registry.intend(entry)
    assert registry.history() == [], "its alias has not moved yet"
    registry.point("champion", "1")
    assert registry.history() == [entry]
    registry.complete()
    registry.unpoint("champion", str(registry.alias("champion")))
    assert registry.history() == [entry], "a line by now"
    registry.unpoint("challenger", "1")
    with pytest.raises(RegistryRefused, match="aliases: none; nothing waits for promotion: `reco refresh`"):
        registry.version("challenger")
    registry.intend(next_line([entry], "promote", "1", "b1", "", ""))
    registry.complete()
    registry.point("champion", "1")
    assert registry.history() == [entry], "its alias had not moved, so it was forgotten"


@pytest.mark.slow
def test_a_stop_between_run_and_version_leaves_no_second_run(registry: Registry, bundle: Path) -> None:
    first = registry._run(bundle, {"bundle_id": "b1"}, {}, {}, {})
    registry.add(bundle, {"bundle_id": "b1"}, {}, {})
    assert registry.version("1").run_id == first


@pytest.mark.slow
@pytest.mark.parametrize("length", [5_000, 5_001])
def test_a_card_that_is_longer_than_postgresql_takes_is_cut(
    registry: Registry, bundle: Path, length: int
) -> None:
    registry.add(bundle, {"bundle_id": "b1"}, {}, {}, card="x" * length)
    stored = registry._client.get_model_version("recommender", "1").description
    assert stored == ("x" * 5_000 if length == 5_000 else "x" * 4_997 + "...")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 100, 16_384], ids=["nothing", "the header", "the first pages"])
def test_a_damaged_database_is_named(registry: Registry, tmp_path: Path, kept: int) -> None:
    file = Path(registry.tracking_uri.removeprefix("sqlite:///"))
    content = file.read_bytes()
    damaged = tmp_path / "damaged" / "mlflow.db"
    damaged.parent.mkdir()
    damaged.write_bytes(content[:kept].ljust(len(content), b"x"))
    with pytest.raises(RegistryUnreachable, match=r"damaged/mlflow\.db .*restore a damaged file"):
        Registry(f"sqlite:///{damaged}", "recommender").versions()


def test_artifacts_lie_beside_the_database(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    registry.add(bundle, {"bundle_id": "b1"}, {}, {})
    database = Path(registry.tracking_uri.removeprefix("sqlite:///"))
    assert [file.name for file in (database.parent / "mlflow").rglob("a.txt")] == ["a.txt"]
    shutil.rmtree(database.parent / "mlflow")
    with pytest.raises(RegistryUnreachable, match="files of version 1 cannot be fetched"):
        registry.download(registry.version("1"), tmp_path / "copy")


@pytest.mark.slow
def test_a_home_that_was_copied_keeps_its_files_and_leaves_the_old_folder_alone(
    tmp_path: Path, migrated: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "a new?name %20 #1"
    old.mkdir()
    shutil.copyfile(migrated, old / "mlflow.db")
    for name in ("b1", "b2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    Registry(default_tracking_uri(old), "recommender").add(tmp_path / "b1", {"bundle_id": "b1"}, {}, {})
    shutil.copytree(old, new)
    before = {file: file.stat().st_mtime_ns for file in old.rglob("*")}
    registry = Registry(default_tracking_uri(new), "recommender")
    registry.add(tmp_path / "b2", {"bundle_id": "b2"}, {}, {})
    assert {file: file.stat().st_mtime_ns for file in old.rglob("*")} == before
    shutil.rmtree(old)
    for number, name in (("1", "b1"), ("2", "b2")):
        fetched = registry.download(registry.version(number), tmp_path / "fetched" / name)
        assert (fetched / "a.txt").read_text() == name
    assert sorted(file.name for file in tmp_path.iterdir()) == [new.name, "b1", "b2", "fetched"]


OURS = "file:///srv/home/mlflow"


def test_files_beside_the_database_and_of_a_server_s_own_store_are_fetched() -> None:
    assert is_own_place(f"{OURS}/7/0a1b2c/artifacts", OURS)
    for uri in ("mlflow-artifacts:/1/0a1b/artifacts", "s3://bucket-1/mlflow/0a1b/artifacts"):
        assert is_own_place(uri, None)
        assert not is_own_place(uri, OURS)


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "file:///etc",
            "/etc/passwd",
            "",
            "file:/etc",
            f"{OURS}/../../../etc",
            f"{OURS}/%2e%2e/x",
            f"{OURS}x/a",
        ),
        *("http://169.254.169.254/latest", "http:///#/../../../etc", "https://evil.example/a", "ftp://a/b"),
        *("s3://user:pass@bucket/a", "s3://bucket/a?b", "s3://bucket/a#b", "s3://bucket/../a", "s3:bucket/a"),
        *("mlflow-artifacts://evil/a", "mlflow-artifacts://169.254.169.254:80/a"),
        *("mlflow-artifacts:/../a", "dbfs:/a", "S3://bucket/a\n"),
        f"{OURS}/a//proc/self/root",
    ],
)
def test_files_of_other_places_are_refused(uri: str) -> None:
    assert not is_own_place(uri, OURS)
    assert not is_own_place(uri, None)


@pytest.mark.slow
def test_nothing_is_fetched_from_other_places(
    registry: Registry, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to the registry's database says where a run's files lie."""
    registry.add(bundle, {"bundle_id": "b1"}, {}, {})
    version = registry.version("1")

    def connect(*_: object) -> None:
        raise AssertionError("a socket is opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    for uri in ("file:///etc", "http://169.254.169.254/latest"):
        with sqlite3.connect(registry.tracking_uri.removeprefix("sqlite:///")) as database:
            database.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (uri, version.run_id))
        database.close()
        with pytest.raises(RegistryRefused, match="nothing was fetched"):
            registry.download(version, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
