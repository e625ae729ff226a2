"""The images: their Dockerfiles as text, the loops that they carry, and hadolint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from serving.settings import Settings, variable
from tests.programs import environment

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "infra" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
ENDPOINT = (IMAGES / "endpoint.Dockerfile").read_text(encoding="utf-8")
MADE = {"build/kernel-bundle"}  # by `make image`


def copied(text: str) -> set[str]:
    """What an image takes from the repository."""
    return {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    }


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_dockerfile_copies_files_that_its_context_has(file: Path) -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    ]
    for source in copied(file.read_text(encoding="utf-8")):
        assert (ROOT / source).exists() or source in MADE, source
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_runs_as_a_numbered_user_without_rights(file: Path) -> None:
    """Kubernetes can refuse root only if the user is a number."""
    assert re.findall(r"^USER (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)[-1] == "10001:10001"


def test_the_endpoint_s_image_has_the_runtime_s_lock_and_no_training() -> None:
    assert not copied(ENDPOINT) & {"components", "monitoring", "pipelines", "requirements"}
    assert "--require-hashes" in ENDPOINT
    assert "requirements/endpoint.lock" in copied(ENDPOINT)


def test_its_settings_exist_and_its_ports_are_the_manifests() -> None:
    names = set(re.findall(r"\bRECO_[A-Z_]+", ENDPOINT)) - {"RECO_CONFIG"}
    assert names <= {variable(name) for name in Settings.__dataclass_fields__}
    [ports] = re.findall(r"^EXPOSE (.+)$", ENDPOINT, re.MULTILINE)
    slot = yaml.safe_load((ROOT / "infra/kserve/slot/inferenceservice.yaml").read_text(encoding="utf-8"))
    [container] = slot["spec"]["predictor"]["containers"]
    assert [int(port) for port in ports.split()] == [port["containerPort"] for port in container["ports"]]
    assert container["args"] == yaml.safe_load(re.findall(r"^CMD (.+)$", ENDPOINT, re.MULTILINE)[0])


def test_the_workflow_gives_each_argument_of_the_images() -> None:
    """Without them the bases are tags that move, and pip takes the CUDA build of torch."""
    workflow = (ROOT / ".github/workflows/images.yml").read_text(encoding="utf-8")
    [steps] = [job["steps"] for job in yaml.safe_load(workflow)["jobs"].values()]
    [given] = [step["with"]["build-args"] for step in steps if "build-args" in step.get("with", {})]
    arguments = {
        name
        for file in DOCKERFILES
        for name in re.findall(r"^ARG (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {line.split("=")[0] for line in given.splitlines()} == arguments - {"CPU"}
    assert [step for step in steps if "sha256" in step.get("run", "")], "refuses a base without a digest"


@pytest.mark.slow
def test_make_image_gives_the_build_the_index_of_set_up() -> None:
    """Without it the pipeline's image holds the CUDA build of torch, several GB more."""
    index = "https://wheels.example/cpu"
    done = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/.ready", "image", "IMAGE=pipeline"],
        cwd=ROOT,
        env={**os.environ, "PIP_EXTRA_INDEX_URL": index},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"docker build --build-arg 'PIP_ARGS=--extra-index-url {index}' -f" in done.stdout


@pytest.mark.slow
def test_a_container_starts_with_the_compiled_loops_of_its_image(tmp_path: Path) -> None:
    """The image is read-only and numba wants to write: the start copies the loops, numba must accept them."""
    asks = """
import numpy as np
from feature_repo.kernels import pairs
marks, codes = np.zeros(9, np.int32), np.array([1, 2])
pairs.count_lines(codes, codes, marks)
print(sum(pairs.count_lines.stats.cache_hits.values()))
"""
    image, pod, programs = tmp_path / "kernels", tmp_path / "pod", tmp_path / "bin"
    programs.mkdir()
    fake = programs / "python"  # what start.sh runs in the end
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'asks.py'}\n")
    fake.chmod(0o755)
    (tmp_path / "asks.py").write_text(asks)
    processor = dict(re.findall(r"(NUMBA_CPU_NAME)=(\S+)", ENDPOINT))
    [features] = re.findall(r"^ARG CPU=(.+)$", ENDPOINT, re.MULTILINE)
    shared = {**environment(), **processor, "NUMBA_CPU_FEATURES": features}
    subprocess.run([sys.executable, "-c", asks], env={**shared, "NUMBA_CACHE_DIR": str(image)}, check=True)
    start = (IMAGES / "start.sh").read_text(encoding="utf-8").replace("/opt/reco/kernels", str(image))
    for left in ("nothing", "a copy that was killed"):  # by an earlier container of the pod
        hits = subprocess.run(
            ["sh", "-c", start],
            env={**shared, "NUMBA_CACHE_DIR": str(pod), "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert hits.stdout.strip() == "1", left
        for loop in pod.rglob("*.nb?"):
            loop.unlink()


@pytest.mark.slow
def test_hadolint_has_no_finding() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")  # a package of the lock
    done = subprocess.run([hadolint, *DOCKERFILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
