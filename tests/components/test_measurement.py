"""A result names the machine, software and commit it was measured with."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from components import measurement
from components.measurement import cores, measured_on


@pytest.mark.slow
def test_the_commit_is_that_of_our_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed into an environment, the code may lie in the folder of another repository."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    git += ["-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    module = tmp_path / "lib" / "measurement.py"
    module.parent.mkdir()
    module.touch()
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(measurement, "__file__", str(module))
    assert measurement.commit() == "unknown"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert measurement.commit() != "unknown"


@pytest.mark.slow
def test_a_measurement_names_its_machine_and_software() -> None:
    origin = measured_on()
    assert origin["machine"]["cores"] >= 1
    assert origin["machine"]["cpu"]
    assert origin["software"]["numpy"]
    json.dumps(origin)


def test_the_cores_are_those_of_the_tightest_control_group(tmp_path: Path) -> None:
    """A pod with two processors on a node with 64 starts no 64 processes."""
    assert cores(tmp_path) == len(os.sched_getaffinity(0)), "no control group"
    place = tmp_path / "sys/fs/cgroup/pods/one"
    place.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pods/one\n")
    (place / "cpu.max").write_text("max 100000\n")
    (place.parent / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 1
    (place.parent / "cpu.max").write_text("6400000 100000\n")
    assert cores(tmp_path) == len(os.sched_getaffinity(0))
