"""Python programs as child processes, on the project or on a changed copy of its packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_packages(place: Path, *packages: str) -> None:
    """Copy packages, with their compiled loops, to a place where a test may change them."""
    for package in packages:
        shutil.copytree(ROOT / package, place / package)


def run_python(*arguments: str | Path, root: Path = ROOT, timeout_s: float = 900) -> str:
    """Run Python on the packages under `root`, which must end well, and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{arguments[-3:]}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    return done.stdout
