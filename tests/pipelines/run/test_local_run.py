"""Runs of a trivial pipeline under the real kfp.local."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.home import Conflict, locked
from pipelines.run.arguments import ArgumentsInvalid, complete_arguments
from pipelines.run.graph import Spec, WiringChanged
from pipelines.run.local_run import StepFailed, resume_run, start_run
from pipelines.run.runs import Run, find_run, list_runs
from pipelines.run.step_process import StepProcess, StepServer
from tests.chaos.procs import eventually

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kfp.*")]


@pytest.fixture(scope="module", autouse=True)
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs of this module share the process that forks steps: each server imports kfp.local."""
    with (
        StepServer(tmp_path_factory.mktemp("server") / "log") as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("pipelines.run.local_run.StepServer", lambda *_: contextlib.nullcontext(server))
        yield


def start(home: Path, spec: Spec, **arguments: Any) -> tuple[Run, str]:
    said = io.StringIO()
    run = start_run(home, "sums", spec, complete_arguments(spec, arguments), "full", said)
    return run, said.getvalue()


def resume(home: Path, spec: Spec, only: str = "") -> tuple[Run, str]:
    said = io.StringIO()
    run = resume_run(home, find_run(home, "last"), spec, only, said)
    return run, said.getvalue()


def test_a_run_returns_the_outputs_of_its_steps(tmp_path: Path, spec: Spec) -> None:
    run, said = start(tmp_path, spec, count=5, times={"times": 2})
    assert run.status == "done"
    assert run.outputs()["report"].parameters == {"Output": "20.0"}
    assert (run.artifacts("add-up") / "total" / "total.txt").read_text() == "20.0"
    assert run.step("add-up").parameters == {"Output": {"lines": 5.0, "cut": "2017-11-27", "mean": 0.25}}
    lines = said.splitlines()
    assert lines[0] == f"run {run.run_id}: 3 steps"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["[1/3]", "make-numbers"],
        ["[2/3]", "add-up"],
        ["[3/3]", "report"],
    ]
    assert lines[2].endswith("cut 2017-11-27, lines 5, mean 0.25")
    assert "5 numbers written" in run.log("make-numbers").read_text()
    assert not (run.folder / "working").exists()
    assert find_run(tmp_path, run.run_id[:8]).outputs() == run.outputs()


def test_a_failing_step_stops_the_run_with_its_own_error_first(tmp_path: Path, spec: Spec) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    with pytest.raises(StepFailed) as caught:
        start(tmp_path, spec, fail_while=str(flag))
    lines = str(caught.value).splitlines()
    run = find_run(tmp_path, "last")
    assert lines[0] == f"ValueError: {flag} exists"
    assert lines[1] == "expected it to be gone: remove it"
    assert str(run.log("add-up")) in lines[2]
    assert lines[3].endswith(f"reco --home {tmp_path} run --resume {run.run_id} --only add-up")
    assert [step.status for step in run.steps] == ["done", "failed", "waiting"]
    assert run.status == "failed"
    assert "Traceback" in run.log("add-up").read_text()
    assert (run.folder / "working").exists(), "an error may name a file in there"


def test_resume_continues_after_the_last_finished_step(tmp_path: Path, spec: Spec) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    with pytest.raises(StepFailed):
        start(tmp_path, spec, fail_while=str(flag))
    made = find_run(tmp_path, "last").artifacts("make-numbers").stat().st_mtime_ns
    flag.unlink()
    stale = find_run(tmp_path, "last")
    run, said = resume(tmp_path, spec)
    assert run.status == "done"
    assert "3 steps, 1 kept from before" in said
    assert "make-numbers" not in said
    assert run.artifacts("make-numbers").stat().st_mtime_ns == made
    assert run.outputs()["report"].parameters == {"Output": "6.0"}
    again = io.StringIO()
    assert resume_run(tmp_path, stale, spec, "", again).status == "done"
    assert "3 steps, 3 kept from before" in again.getvalue(), "it ended since its record was read"


def test_one_step_alone_makes_the_later_ones_stale(tmp_path: Path, spec: Spec) -> None:
    run, _ = start(tmp_path, spec)
    run, said = resume(tmp_path, spec, only="add_up")
    assert "3 steps, 1 kept from before" in said, "report came of an older output"
    assert "add-up" in said
    assert "report" not in said
    assert [step.status for step in run.steps] == ["done", "done", "waiting"]
    run, said = resume(tmp_path, spec)
    assert run.status == "done"
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["report"]
    (run.artifacts("add-up") / "total").rename(tmp_path / "gone")
    with pytest.raises(WiringChanged, match="--resume without --only makes it again"):
        resume(tmp_path, spec, only="report")
    assert find_run(tmp_path, "last").status == "done", "a step that cannot start changes no record"
    _, said = resume(tmp_path, spec)
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["add-up", "report"], "all after it, too"
    with pytest.raises(ArgumentsInvalid, match="has no step 'ad-up': did you mean 'add-up'"):
        resume(tmp_path, spec, only="ad_up")


def test_a_refused_model_comes_without_advice_to_retry(tmp_path: Path, spec: Spec) -> None:
    """The same step on the same inputs fails the same gate: what helps is to look at the comparison."""
    run, _ = start(tmp_path, spec)
    told = str(StepFailed(run, "promote-bundle", "GateFailed: ndcg_at_10 is 0.1, needed 0.2", 1))
    assert "--resume" not in told
    assert told.endswith(f"reco --home {tmp_path} promote --dry-run")
    run.arguments |= {"tracking_uri": "https://ann:hunter2@mlflow.example/a", "model_name": "shop"}
    told = str(StepFailed(run, "promote-bundle", "GateFailed: ndcg_at_10 is 0.1, needed 0.2", 1))
    assert told.endswith("promote --dry-run --tracking-uri https://mlflow.example/a --model-name shop"), (
        "the home's own registry holds another challenger"
    )
    run.arguments["gate_params"] = {"over_blend": 1.0, "over_champion": 1.05}
    told = str(StepFailed(run, "promote-bundle", "GateFailed: ndcg_at_10 is 0.1, needed 0.2", 1))
    assert "promote --dry-run --gate over_blend=1.0 --gate over_champion=1.05 --tracking-uri" in told


def test_only_the_newest_runs_keep_their_artifacts_and_a_resumed_one(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.run.local_run.KEPT_RUNS", 1)
    (older, first), (newer, second) = start(tmp_path, spec), start(tmp_path, spec)
    assert "artifacts of older runs removed" not in first
    assert f"artifacts of older runs removed ({older.run_id})" in second
    assert newer.outputs()
    assert not (older.folder / "artifacts").exists()
    resume_run(tmp_path, find_run(tmp_path, older.run_id), spec, "", io.StringIO())
    assert find_run(tmp_path, older.run_id).outputs().keys() == {"make-numbers", "add-up", "report"}


def test_two_runs_in_one_home_are_a_conflict(tmp_path: Path, spec: Spec) -> None:
    with (
        locked(tmp_path / "run.lock", "running 20261121"),
        pytest.raises(Conflict, match="is running 20261121"),
    ):
        start(tmp_path, spec)


def test_independent_steps_run_side_by_side(
    tmp_path: Path, pair_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a file of the other, so one after the other they would never end."""

    def measure(process: StepProcess) -> int:
        """A busy machine may give the run no look at a short step; `test_step_process` measures really."""
        process.peak_mib = 30
        return 30

    monkeypatch.setattr(StepProcess, "memory_mib", measure)
    monkeypatch.setattr("pipelines.run.local_run.MEASURE_S", -1.0)  # at each look
    arguments = complete_arguments(pair_spec, {"folder": str(tmp_path)})
    run = start_run(tmp_path, "pairs", pair_spec, arguments, "full", io.StringIO(), jobs=2)
    assert run.status == "done"
    assert [run.step(name).memory_mib for name in ("meet", "meet-2")] == [30, 30]
    assert run.peak_memory_mib == 60, "both together"


class Failing(io.StringIO):
    """Touches a file when the run says that it waits for others."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        if "waiting for" in text:
            self.file.touch()
        return super().write(text)


def test_steps_beside_a_failed_one_end_and_are_kept(tmp_path: Path, pair_spec: Spec) -> None:
    """The right one ends only when the run says that the left one has failed."""
    given = {"folder": str(tmp_path), "left_fails": True, "right_waits_for": "go"}
    arguments, said = complete_arguments(pair_spec, given), Failing(tmp_path / "go")
    with pytest.raises(StepFailed, match="ValueError: left fails"):
        start_run(tmp_path, "pairs", pair_spec, arguments, "full", said, jobs=2)
    run = find_run(tmp_path, "last")
    assert [step.status for step in run.steps] == ["failed", "done", "waiting"]
    assert "waiting for meet-2 to end" in said.getvalue()
    run.arguments["left_fails"] = False
    run.save()
    again = io.StringIO()
    assert resume_run(tmp_path, run, pair_spec, "", again, jobs=1).status == "done"
    assert "3 steps, 1 kept from before" in again.getvalue()


RUN = """
import sys
from pathlib import Path
from tests_sums import sums
from pipelines.run.arguments import complete_arguments
from pipelines.run.graph import read_spec
from pipelines.run.local_run import start_run

spec = read_spec(sums)
start_run(Path(sys.argv[1]), "sums", spec, complete_arguments(spec, {"wait_s": 300.0}), "full", sys.stderr)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda one: one.name)
def test_a_stopped_run_leaves_no_process_and_can_be_resumed(
    tmp_path: Path, spec: Spec, number: signal.Signals
) -> None:
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    (tmp_path / "tests_sums.py").write_text(source)
    (tmp_path / "go.py").write_text(textwrap.dedent(RUN))
    home = tmp_path / "home"
    process = subprocess.Popen(
        [sys.executable, "go.py", str(home)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    # The processes of a run: itself, that of the step, and KFP's executor in it.
    eventually(lambda: statuses(home)[-1:] == ["running"] and len(processes(home)) >= 3, 120)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    if number != signal.SIGKILL:
        again = f"reco --home {home} run --resume {find_run(home, 'last').run_id}"
        assert f"stopped; go on with: {again}" in said
    eventually(lambda: not processes(home), 120)
    run = find_run(home, "last")
    assert run.status == "stopped"
    assert statuses(home) == ["done", "done", "stopped"]
    run.arguments["wait_s"] = 0.0
    run.save()
    assert resume(home, spec)[0].status == "done"


def statuses(home: Path) -> list[str]:
    return [step.status for run in list_runs(home) for step in run.steps]


def processes(home: Path) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and str(home).encode() in cmdline(pid)]


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
