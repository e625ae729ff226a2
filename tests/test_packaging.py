"""Locks and wheels: the packages that a clone, an endpoint's image and a checkout client install."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.distributions import declared

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
    kept = f'shift $(($# - 1)); cat "$1" > "{tmp_path}/uv.lock"'
    (programs / "python").write_text(
        f'{note}case "$*" in *"config list") echo "{config}";; *--require-hashes*/dev/fd/*) {kept};; esac\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "set-up", programs.parent], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1].split()[:2] == ["ready:", f"{programs}/reco,"]
    lines = calls.read_text().splitlines()
    whole = [line for line in lines if line.endswith("-r requirements/dev.lock")]
    assert ["uv" if line.startswith("uv ") else "pip" for line in whole] == installers
    assert all("--require-hashes --no-deps" in line for line in whole)
    assert any(line.endswith("-r requirements/torch.txt") for line in lines)
    if "uv" in installers:  # pip installs uv itself, checked and alone
        assert re.fullmatch(
            r"uv==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", (tmp_path / "uv.lock").read_text()
        )


@pytest.mark.slow
def test_an_environment_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    """Python is in it and pip is not. The interpreter's path has a space."""
    half, given = tmp_path / "venv" / "bin" / "python", tmp_path / "my python" / "python3"
    programs = {half: 'case "$*" in "-m pip "*) exit 1;; esac', given: f'echo "$@" >> "{tmp_path}/calls"'}
    for program, does in programs.items():
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    command = [ROOT / ".ci" / "set-up", half.parents[1]]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": str(given)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f"[1/3] new virtual environment {tmp_path}/venv with"), done.stderr
    assert (tmp_path / "calls").read_text().splitlines()[-1] == f"-m venv {tmp_path}/venv"


def test_the_endpoints_lock_is_the_part_without_training_and_tests() -> None:
    endpoint, everything = pins("endpoint.lock"), pins("dev.lock")
    assert endpoint.items() <= everything.items()
    assert not TRAINING & endpoint.keys()


@pytest.mark.slow
@pytest.mark.parametrize("image", ["endpoint", "pipeline"])
def test_the_bill_of_materials_names_each_package_of_the_image_with_its_hashes(
    image: str, tmp_path: Path
) -> None:
    for name in ("Makefile", "infra", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = f"BIN={Path(sys.executable).parent}"
    command = ["make", "--old-file=.venv/.ready", "sbom", f"IMAGE={image}", programs]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    sbom = json.loads((tmp_path / "build" / f"sbom-{image}.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    named = {one["name"].lower().replace("_", "-"): one for one in sbom["components"]}
    # torch alone has no hash: requirements/torch.txt
    assert ("torch" in named) == (image == "pipeline")
    named.pop("torch", None)
    assert {name: one["version"] for name, one in named.items()} == pins(f"{image}.lock")
    assert all(one["externalReferences"][0]["hashes"] for one in named.values())


def test_every_pinned_file_is_audited() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text(encoding="utf-8"))
    audited = workflow["jobs"]["audit"]["strategy"]["matrix"]["file"]
    assert sorted(audited) == sorted(file.name for file in (ROOT / "requirements").iterdir())


def test_ci_gives_the_tests_more_time_than_they_take() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    [longest] = re.findall(
        r"make test .*: \d+ to (\d+) minutes", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert workflow["jobs"]["test"]["timeout-minutes"] > int(longest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "available_kb", "workers"),
    [
        ("max", 24_000_000, 7),
        (None, 12_000_000, 5),
        ("9000000000", 24_000_000, 4),
        ("24000000000", 9_000_000, 4),
        (None, None, 4),
    ],
)
def test_the_number_of_test_workers_follows_free_memory(
    tmp_path: Path, limit: str | None, available_kb: int | None, workers: int
) -> None:
    """The smaller one counts: the limit of a container, or the free memory of the machine."""
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    if available_kb:
        (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available_kb} kB\n")
    files = f"MEMORY={tmp_path}/memory.max {tmp_path}/meminfo"
    rule = ["make", "-s", "--eval", "workers: ; @echo $(WORKERS)", files, "workers"]
    plain = {"PATH": os.environ["PATH"]}
    said = subprocess.run(rule, cwd=ROOT, env=plain, stdout=subprocess.PIPE, check=True).stdout
    assert int(said) == workers


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
