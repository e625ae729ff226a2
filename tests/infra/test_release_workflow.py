"""The workflow that starts a release on a cluster: it ends when the Job ends, also if no pod ever runs."""

import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[2] / ".github" / "workflows" / "release.yml"
KUBECTL = """\
case "$3" in
  logs) [ -n "$LOG" ] || { echo "waiting to start: ImagePullBackOff" >&2; exit 1; }; echo "$LOG" ;;
  get) [ "$4" = pods ] || echo "$CONDITION" ;;
esac
"""


@pytest.mark.parametrize(
    ("log", "condition", "exit_code"),
    [("step 5 %", "Complete", 0), ("step 5 %", "Failed", 1), ("", "Failed", 1)],
)
def test_it_follows_the_job_to_its_end(log: str, condition: str, exit_code: int, tmp_path: Path) -> None:
    [job] = yaml.safe_load(FILE.read_text())["jobs"].values()
    [step] = [one for one in job["steps"] if one.get("name") == "Follow"]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\n{KUBECTL}")
    kubectl.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB": "release-1", "LOG": log, "CONDITION": condition}
    command = ["bash", "-e", "-c", step["run"]]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "release.log").read_text().strip() == log
    assert ("ImagePullBackOff" in done.stderr) == (not log)
