"""What every test runs under: one thread, strict numerics, its own state folder, its lane.

It imports numpy only. torch, kfp, mlflow, feast, evidently and kserve cost seconds each: a test module
imports what it needs.
"""

import os
import sys

# Before numpy: its thread pool reads this once. Two test workers on two cores leave one thread to each, and
# single-threaded sums are the same on every machine.
for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(pool, "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STARTS_A_PROCESS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"}
THIS_MACHINE = ("127.", "::1", "localhost")
_fast = False  # whether the test of now is in the fast lane


def _keep_to_the_lane(event: str, arguments: tuple[Any, ...]) -> None:
    if not _fast:
        return
    if event in STARTS_A_PROCESS:
        raise RuntimeError(f"a fast test starts a process ({arguments[0]}): mark it slow")
    if event == "socket.connect" and not str(arguments[1][0]).startswith(THIS_MACHINE):
        raise RuntimeError(f"a test of the fast lane connects to {arguments[1]}: inject the transport")


sys.addaudithook(_keep_to_the_lane)


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fast test starts no process and reaches no other machine: so `make check` stays fast everywhere."""
    global _fast
    _fast = not any(request.node.get_closest_marker(name) for name in ("slow", "gpu", "cluster"))
    yield
    _fast = False


@pytest.fixture(autouse=True)
def strict_numerics() -> Iterator[None]:
    """A division by zero, an overflow or a NaN out of nothing is an error; exp(-1000) = 0 is meant."""
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test that forgets `--home` writes into its own folder, never into the developer's champion."""
    home = tmp_path / "reco-home"
    monkeypatch.setenv("RECO_HOME", str(home))
    return home
