"""The workflow that starts a release on a cluster: it ends when the Job ends, also if no pod ever runs."""

import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[2] / ".github" / "workflows" / "release.yml"
KUBECTL = """\
case "$3 $4" in
  logs*) [ -n "$LOG" ] || { echo "waiting to start: ImagePullBackOff" >&2; exit 1; }; echo "$LOG" ;;
  "get pods") ;;
  get*) if [ -e away ]; then rm away; exit 1; fi; echo "$CONDITION" ;;
esac
"""


def follow(folder: Path, started: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the step with a kubectl that shows this log and this condition of the Job."""
    [job] = yaml.safe_load(FILE.read_text())["jobs"].values()
    [step] = [one for one in job["steps"] if one.get("name") == "Follow"]
    kubectl = folder / "kubectl"
    kubectl.write_text(f"#!/bin/sh\n{KUBECTL}")
    kubectl.chmod(0o755)
    variables |= {"PATH": f"{folder}:/usr/bin:/bin", "JOB": "release-1"}
    command = ["bash", "-e", "-c", started + step["run"]]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("log", "condition", "exit_code"),
    [("step 5 %", "Complete", 0), ("step 5 %", "Failed", 1), ("", "Failed", 1)],
)
def test_it_follows_the_job_to_its_end(log: str, condition: str, exit_code: int, tmp_path: Path) -> None:
    done = follow(tmp_path, LOG=log, CONDITION=condition)
    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "release.log").read_text().strip() == log
    assert ("ImagePullBackOff" in done.stderr) == (not log)


def test_an_api_that_is_away_for_a_moment_does_not_fail_it(tmp_path: Path) -> None:
    (tmp_path / "away").touch()
    done = follow(tmp_path, LOG="step 5 %", CONDITION="Complete")
    assert done.returncode == 0, done.stderr


def test_its_runner_can_be_one_that_reaches_the_cluster() -> None:
    [job] = yaml.safe_load(FILE.read_text())["jobs"].values()
    assert "vars.RUNNER ||" in job["runs-on"]
    guide = FILE.parents[2] / "docs" / "how-to" / "cluster.md"
    assert "The repository variable `RUNNER`" in guide.read_text(encoding="utf-8")


def test_it_ends_when_no_pod_runs(tmp_path: Path) -> None:
    done = follow(tmp_path, LOG="", CONDITION="", started="SECONDS=901\n")
    assert done.returncode == 1
    assert "delete job release-1" in done.stdout
