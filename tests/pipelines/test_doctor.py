"""A home in each state that a person may leave it in -> what `reco doctor` says of it."""

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from components.home import Champion, write_champion
from pipelines.doctor import Finding, check_packages, examine, fits, sound
from pipelines.runs import new_run
from serving.bundle import REQUIRED, RankingSettings, seal_bundle
from serving.online_features import VIEW
from serving.retrieval import Quotas
from serving.settings import variable

CUT = "2024-06-10T00:00:00Z"


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two ports that nobody has: tests may run while an endpoint does."""
    free = {}
    for field in ("http_port", "grpc_port"):
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            free[field] = bound.getsockname()[1]
        monkeypatch.setenv(variable(field), str(free[field]))
    return free


@pytest.fixture
def home(tmp_path: Path, ports: dict[str, int]) -> Path:
    """A home as a finished run leaves it."""
    home = tmp_path / "home"
    bundle = tmp_path / "made"
    for file in REQUIRED:
        (bundle / file).parent.mkdir(parents=True, exist_ok=True)
        (bundle / file).write_text(file)
    made = seal_bundle(bundle, cut=CUT, settings=RankingSettings(Quotas(), 0.95), made_from={})
    shutil.copytree(bundle, home / "bundles" / made)
    write_champion(home, Champion(made, "3", "reco", f"bundles/{made}", CUT, CUT))
    with closing(sqlite3.connect(home / "online_store.db")) as database:
        database.execute(
            f'CREATE TABLE "checkout_{VIEW}" (entity_key BLOB, feature_name TEXT, value BLOB, event_ts TEXT)'
        )
    (home / "online_store.json").write_text(json.dumps({"cut": CUT}))
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        database.execute("CREATE TABLE registered_model_aliases (alias TEXT, version INTEGER, name TEXT)")
        database.execute("INSERT INTO registered_model_aliases VALUES ('champion', 3, 'reco')")
    run = new_run(home, "training", {}, ["ingest-events"])
    run.step("ingest-events").status = "done"
    run.save()
    return home


def look(home: Path, tracking_uri: str = "") -> dict[str, Finding]:
    return {found.name: found for found in examine(home, tracking_uri or f"sqlite:///{home / 'mlflow.db'}")}


def test_a_finished_run_leaves_nothing_to_mend(home: Path) -> None:
    found = look(home)
    for name in ("home", "champion", "online store", "registry", "last run", "http_port", "grpc_port"):
        assert (found[name].status, found[name].mend) == ("ok", ""), found[name]


def test_an_empty_home_lacks_things_and_none_is_broken(tmp_path: Path, ports: dict[str, int]) -> None:
    found = look(tmp_path / "new")
    for name in ("champion", "online store", "registry", "last run"):
        assert found[name].status == "missing"
        assert "reco run" in found[name].mend
    assert not (tmp_path / "new").exists()


def test_a_flipped_byte_in_the_champion(home: Path) -> None:
    ranker = next((home / "bundles").glob("*/ranker.onnx"))
    ranker.write_bytes(b"X" + ranker.read_bytes()[1:])
    found = look(home)["champion"]
    assert (found.status, found.mend) == ("broken", "reco promote 3")
    assert "ranker.onnx" in found.found
    assert not sound([found])


def test_a_pointer_that_is_none(home: Path) -> None:
    (home / "champion.json").write_text("{}")
    found = look(home)["champion"]
    assert found.status == "broken"
    assert "reco promote" in found.mend


def test_a_pointer_beside_the_alias(home: Path) -> None:
    pointer = json.loads((home / "champion.json").read_text())
    write_champion(home, replace(Champion(**pointer), version="2"))
    found = look(home)["registry"]
    assert (found.status, found.mend) == ("broken", "reco promote champion")
    assert "version 3" in found.found


def test_an_online_store_of_another_cut(home: Path) -> None:
    (home / "online_store.json").write_text(json.dumps({"cut": "2024-05-01T00:00:00Z"}))
    found = look(home)["online store"]
    assert found.status == "missing"
    assert "2024-05-01" in found.found


def test_an_online_store_that_is_no_database(home: Path) -> None:
    (home / "online_store.db").write_text("hello" * 100)
    assert look(home)["online store"].status == "broken"


def test_a_registry_that_is_no_database(home: Path) -> None:
    (home / "mlflow.db").write_text("hello" * 100)
    assert look(home)["registry"].status == "broken"


@pytest.mark.parametrize("uri", ["http://user:secret@127.0.0.1:1", "postgresql://user:secret@db/mlflow"])
def test_a_registry_that_cannot_be_reached(home: Path, uri: str) -> None:
    found = look(home, uri)["registry"]
    assert found.status == "broken"
    assert "secret" not in found.found + found.mend


def test_a_failed_run_says_how_to_go_on(home: Path) -> None:
    run = new_run(home, "training", {}, ["ingest-events", "fit-statistics"])
    run.step("ingest-events").status = "done"
    run.step("fit-statistics").status, run.step("fit-statistics").error = (
        "failed",
        "ValueError: no rows\nmore",
    )
    run.save()
    found = look(home)["last run"]
    assert found.found.endswith("failed at fit-statistics: ValueError: no rows")
    assert found.mend == f"reco run --resume {run.run_id}"


def test_a_taken_port(home: Path, ports: dict[str, int]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports["http_port"]))
        taken.listen()
        found = look(home)["http_port"]
    assert found.status == "missing"
    assert variable("http_port") in found.mend


def test_a_misspelt_setting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECO_DEADLINE", "50")
    assert "RECO_DEADLINE" in look(home)["environment"].found
    monkeypatch.delenv("RECO_DEADLINE")
    monkeypatch.setenv("RECO_DEADLINE_MS", "soon")
    assert "RECO_DEADLINE_MS" in look(home)["environment"].found


def test_a_home_that_is_a_file(tmp_path: Path, ports: dict[str, int]) -> None:
    (tmp_path / "file").write_text("")
    found = look(tmp_path / "file")["home"]
    assert (found.status, "--home" in found.mend) == ("broken", True)


# --------------------------------------------------------------------------------------------- packages

ASKED = [
    "click>=8.1",
    "numpy<3,>=2",
    'onnxruntime<2,>=1.31; extra == "cpu"',
    'onnxruntime-gpu<2,>=1.31; extra == "gpu"',
    'feast[duckdb,redis]<0.68,>=0.67; extra == "train"',
    'checkout-recommender[train]; extra == "dev"',
]
INSTALLED = {"click": "8.3.1", "numpy": "2.4.6", "onnxruntime": "1.31.1", "feast": "0.67.0"}


def test_all_packages_there() -> None:
    assert [found.status for found in check_packages(ASKED, INSTALLED)] == ["ok", "ok"]


def test_the_endpoint_alone_is_a_sound_installation() -> None:
    served = {name: version for name, version in INSTALLED.items() if name != "feast"}
    findings = list(check_packages(ASKED, served))
    assert [found.status for found in findings] == ["ok", "missing"]
    assert findings[1].found == "feast is not installed"
    assert sound(findings)


def test_a_package_that_is_too_old() -> None:
    endpoint, _ = check_packages(ASKED, {**INSTALLED, "numpy": "1.26.4"})
    assert (endpoint.status, endpoint.found) == ("broken", "numpy is 1.26.4, asked for <3,>=2")


def test_both_runtimes() -> None:
    found = list(check_packages(ASKED, {**INSTALLED, "onnxruntime-gpu": "1.31.1"}))[-1]
    assert (found.name, found.status) == ("onnxruntime", "broken")


def test_the_repository_not_installed() -> None:
    (found,) = check_packages([], INSTALLED)
    assert found.status == "broken"
    assert "-e ." in found.mend


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.16.1", "<2.17,>=2.16.1", True),
        ("2.17", "<2.17,>=2.16.1", False),
        ("2.17.0", "==2.17", True),
        ("2.13.0+cpu", ">=2.13,<3", True),
        ("9.1.2.post2", ">=9.1", True),
        ("10", ">=9.1", True),
        ("1", "", True),
    ],
)
def test_bounds(version: str, bounds: str, expected: bool) -> None:
    assert fits(version, bounds) is expected


@pytest.mark.slow
def test_the_answer_comes_within_five_seconds(home: Path) -> None:
    code = "import sys; from pathlib import Path; from pipelines.doctor import examine; "
    code += "examine(Path(sys.argv[1]), 'sqlite:////none'); heavy = {'torch', 'kfp', 'mlflow', 'feast', "
    code += "'evidently', 'kserve'} & sys.modules.keys(); assert not heavy, heavy"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(home)], check=True)
    assert time.monotonic() - began < 5
