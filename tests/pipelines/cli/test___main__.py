"""The command as a module: so child processes start it."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_module_runs_as_the_command_and_starts_fast() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: reco [OPTIONS] COMMAND")
