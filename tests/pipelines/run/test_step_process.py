"""One step under kfp.local in a process of its own."""

import os
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from kfp import dsl

from components.measurement import cores
from pipelines.run.graph import Outputs, Spec, read_spec, step_alone
from pipelines.run.step_process import HEAVY, ServerEnded, StepProcess, StepServer
from tests.chaos.procs import eventually

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kfp.*")]


@partial(dsl.component, base_image="test-python:1", install_kfp_package=False)
def threads() -> str:
    """Return whether garbage is collected, and the threads: of libraries to come, and of those there."""
    import gc
    import os
    import warnings

    warnings.warn("a warning of the step", stacklevel=1)
    import numpy  # noqa: F401 - it loads its BLAS
    from threadpoolctl import threadpool_info

    there = max(pool["num_threads"] for pool in threadpool_info())
    return f"{gc.isenabled()} {os.environ['OMP_NUM_THREADS']} {there}"


@dsl.pipeline(name="counts")
def counts() -> None:
    threads()


def ended(process: StepProcess) -> StepProcess:
    deadline = time.monotonic() + 120
    while not process.has_ended() and time.monotonic() < deadline:
        process.memory_mib()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("modules", [(), ("numpy",)], ids=["imported by the step", "imported before"])
@pytest.mark.parametrize(("set_before", "got"), [("", "True 1 1"), ("2", f"True 2 {min(2, cores())}")])
def test_a_step_collects_garbage_and_has_its_threads_unless_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_before: str, got: str, modules: tuple[str, ...]
) -> None:
    for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(pool, raising=False)
    if set_before:
        monkeypatch.setenv("OMP_NUM_THREADS", set_before)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    alone = step_alone(read_spec(counts), "threads", {}, {})
    with StepServer(tmp_path / "server", modules) as server:
        process = ended(StepProcess(server, alone, tmp_path / "w", tmp_path / "log", 1))
    [own] = scratch.iterdir()
    assert list(own.iterdir()), "the step's program was written there"
    assert process.close() == Outputs({"Output": got}, {})
    assert "UserWarning: a warning of the step" in (tmp_path / "log").read_text()
    assert not list(scratch.iterdir())
    assert process.peak_mib > 10


@pytest.mark.parametrize("module", HEAVY)
def test_the_server_imports_modules_that_exist(module: str) -> None:
    """It only logs a failed import: a renamed module would cost each step seconds, unseen."""
    import_module(module)


def report_alone(spec: Spec, folder: Path) -> Spec:
    (folder / "total").mkdir()
    given = {"add-up": Outputs({}, {"total": folder / "total"})}
    return step_alone(spec, "report", {"wait_s": 300.0}, given)


def said(process: StepProcess) -> str:
    return eventually(process.lines, 120)[0]


def test_a_step_that_is_ended_gives_nothing(tmp_path: Path, spec: Spec) -> None:
    alone = report_alone(spec, tmp_path)
    with StepServer(tmp_path / "server") as server:
        process = StepProcess(server, alone, tmp_path / "w", tmp_path / "log", 1)
        assert "'only-report'" in said(process)
        assert (tmp_path / "w").stat().st_mode & 0o077 == 0, "an argument may be a password"
        assert (tmp_path / "log").stat().st_mode & 0o077 == 0, "a line may name a shopper"
        process.end()
        assert process.has_ended()
        assert process.close() is None


def test_a_step_that_cannot_open_its_log_has_a_number_and_leaves_its_error(tmp_path: Path) -> None:
    step = {"folder": str(tmp_path), "log": str(tmp_path / "gone" / "log"), "threads": 1, "environment": {}}
    with StepServer(tmp_path / "server") as server:
        late = threading.Timer(120, server._process.kill)  # else a missing number would be waited for
        late.start()
        assert server.fork(step) > 0
        late.cancel()
        eventually((tmp_path / "failure.json").exists, 120)
    assert "FileNotFoundError" in (tmp_path / "failure.json").read_text()


def test_steps_end_with_their_server_and_none_starts_without(tmp_path: Path, spec: Spec) -> None:
    alone = report_alone(spec, tmp_path)
    with StepServer(tmp_path / "server") as server:
        process = StepProcess(server, alone, tmp_path / "w", tmp_path / "log", 1)
        said(process)
        [own] = [
            one
            for one in psutil.process_iter(["ppid", "cmdline"])
            if one.info["ppid"] == os.getpid() and str(tmp_path / "server") in (one.info["cmdline"] or ())
        ]
        own.kill()
        assert ended(process).has_ended()
        assert process.close() is None
        assert "it was killed, memory ran out or the disk is full" in process.failure()[0]
        with pytest.raises(ServerEnded, match="ended with -9: was it killed"):
            StepProcess(server, alone, tmp_path / "w2", tmp_path / "log2", 1)
