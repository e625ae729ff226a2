"""Locks and wheels: the packages that a clone, an endpoint's image and a checkout client install."""

import json
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from tests.test_architecture import declared

ROOT = Path(__file__).parents[1]
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")
TRAINING = {"torch", "kfp", "mlflow", "feast", "evidently", "lightgbm", "onnx", "pytest", "mypy", "ruff"}
FOR_CLONES = ("pipelines/bench", "pipelines/drills", "serving/client", "tests")


def pins(lock: str) -> dict[str, str]:
    """Name -> version; checks that each pin has a hash."""
    entries = re.split(r"\n(?=[a-z])", (ROOT / "requirements" / lock).read_text(encoding="utf-8"))
    rows = {}
    for entry in entries[1:]:
        pin = re.match(r"([a-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\]+)", entry)
        assert pin, entry[:60]
        assert "--hash=sha256:" in entry, f"{pin[0]} has no hash: run `make lock`"
        rows[pin[1]] = pin[2]
    return rows


def test_the_locks_pin_each_dependency() -> None:
    everything = declared("cpu", "train", "stream", "trace", "dev")
    assert everything - {"torch", "checkout-recommender"} <= pins("dev.lock").keys()
    assert declared("cpu", "trace") <= pins("endpoint.lock").keys()
    assert "rfc3987-syntax" not in pins("dev.lock")  # see `make lock`
    torch = (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8")
    assert re.search(r"(?m)^torch==\d", torch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "uv_exit", "installers"),
    [
        ("global.extra-index-url='https://wheels.example'", 0, ["uv"]),
        ("global.extra-index-url='https://wheels.example'", 2, ["uv", "pip"]),
        ("global.index-url='https://mirror.example/simple'", 0, ["pip"]),
    ],
)
def test_set_up_installs_the_lock_with_uv_where_pip_has_no_index_of_its_own(
    tmp_path: Path, config: str, uv_exit: int, installers: list[str]
) -> None:
    calls, programs = tmp_path / "calls", tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    note = f'#!/bin/sh\necho "${{0##*/}} $@" >> "{calls}"\n'
    (programs / "uv").write_text(f"{note}exit {uv_exit}\n")
    (programs / "python").write_text(f'{note}case "$*" in *"config list") echo "{config}";; esac\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    subprocess.run([ROOT / ".ci" / "set-up", programs.parent], check=True, capture_output=True)
    lines = calls.read_text().splitlines()
    whole = [line for line in lines if line.endswith("-r requirements/dev.lock")]
    assert ["uv" if line.startswith("uv ") else "pip" for line in whole] == installers
    assert all("--require-hashes --no-deps" in line for line in whole)
    assert any(line.endswith("-r requirements/torch.txt") for line in lines)


def test_the_endpoints_lock_is_the_part_without_training_and_tests() -> None:
    endpoint, everything = pins("endpoint.lock"), pins("dev.lock")
    assert endpoint.items() <= everything.items()
    assert not TRAINING & endpoint.keys()


def test_the_bill_of_materials_names_each_pin_with_its_hashes(tmp_path: Path) -> None:
    run = pytest.importorskip("cyclonedx_py._internal.cli").run
    file = tmp_path / "sbom.json"
    lock, checked = str(ROOT / "requirements" / "endpoint.lock"), "--validate"  # against the schema
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tool warns of itself, and that a lock has no graph
        assert run(argv=["requirements", lock, checked, "--output-reproducible", "-o", str(file)]) == 0
    sbom = json.loads(file.read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    named = {one["name"].lower().replace("_", "-"): one["version"] for one in sbom["components"]}
    assert named == pins("endpoint.lock")
    assert all(one["externalReferences"][0]["hashes"] for one in sbom["components"])


@pytest.mark.slow
def test_the_wheel_holds_no_bench_no_drill_and_no_client(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert not [name for name in files if name.startswith(FOR_CLONES)]
    modules = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    missing = {name for name in modules if not name.startswith(FOR_CLONES)} - set(files)
    assert not missing
