"""One step under kfp.local in a process of its own."""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kfp import dsl

from pipelines.run.graph import Outputs, Spec, read_spec, step_alone
from pipelines.run.step_process import StepProcess

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kfp.*")]


@partial(dsl.component, base_image="test-python:1", install_kfp_package=False)
def threads() -> str:
    """Return the threads of the numeric libraries."""
    import os

    return os.environ["OMP_NUM_THREADS"]


@dsl.pipeline(name="counts")
def counts() -> None:
    threads()


def ended(process: StepProcess) -> StepProcess:
    deadline = time.monotonic() + 120
    while not process.has_ended() and time.monotonic() < deadline:
        process.memory_mib()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("set_before", "got"), [("", "3"), ("7", "7")])
def test_a_step_gets_its_threads_unless_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_before: str, got: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_before:
        monkeypatch.setenv("OMP_NUM_THREADS", set_before)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    alone = step_alone(read_spec(counts), "threads", {}, {})
    process = ended(StepProcess(alone, tmp_path / "w", tmp_path / "log", 3))
    [own] = scratch.iterdir()
    assert list(own.iterdir()), "kfp writes the step's program there"
    assert process.close() == Outputs({"Output": got}, {})
    assert not list(scratch.iterdir())
    assert process.peak_mib > 10


@pytest.fixture
def waiting(tmp_path: Path, spec: Spec) -> Iterator[StepProcess]:
    (tmp_path / "total").mkdir()
    given = {"add-up": Outputs({}, {"total": tmp_path / "total"})}
    alone = step_alone(spec, "report", {"die": "", "wait_s": 300.0}, given)
    process = StepProcess(alone, tmp_path / "w", tmp_path / "log", 1)
    yield process
    process.end()


def test_a_step_that_is_ended_gives_nothing(waiting: StepProcess, tmp_path: Path) -> None:
    deadline = time.monotonic() + 120
    lines: list[str] = []
    while not lines and time.monotonic() < deadline:
        lines += waiting.lines()
        time.sleep(0.05)
    assert "'only-report'" in lines[0]
    assert (tmp_path / "w").stat().st_mode & 0o077 == 0, "an argument may be a password"
    waiting.end()
    assert waiting.has_ended()
    assert waiting.close() is None
