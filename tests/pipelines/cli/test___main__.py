"""The command as a module: so child processes start it, and so it is installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipelines.cli.__main__ import start


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"reco": f"{start.__module__}:{start.__name__}"}


@pytest.mark.slow
def test_the_module_runs_as_the_command_and_starts_fast() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: reco [OPTIONS] COMMAND")


@pytest.mark.slow
def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    code = """
import sys
from pipelines.cli.__main__ import start
class Interrupted:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
start()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
