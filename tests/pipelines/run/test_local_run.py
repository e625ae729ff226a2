"""Runs of a trivial pipeline under the real kfp.local."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from components.home import Conflict, locked
from pipelines.run.arguments import ArgumentsInvalid, complete_arguments
from pipelines.run.graph import Spec
from pipelines.run.local_run import StepFailed, _Log, code_hash, resume_run, start_run
from pipelines.run.progress import Progress
from pipelines.run.runs import Run, find_run, new_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kfp.*")]


def start(home: Path, spec: Spec, **arguments: Any) -> tuple[Run, str]:
    said = io.StringIO()
    run = start_run(home, "sums", spec, complete_arguments(spec, arguments), False, said)
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
    assert run.peak_memory_mib > 10
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


def test_the_next_run_estimates_its_duration(tmp_path: Path, spec: Spec) -> None:
    start(tmp_path, spec)
    _, said = start(tmp_path, spec)
    assert ", about 0." in said.splitlines()[0]


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
    assert lines[3].endswith(f"reco run --resume {run.run_id} --only add-up")
    assert [step.status for step in run.steps] == ["done", "failed", "waiting"]
    assert run.status == "failed"
    assert "Traceback" in run.log("add-up").read_text()


def test_resume_continues_after_the_last_finished_step(tmp_path: Path, spec: Spec) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    with pytest.raises(StepFailed):
        start(tmp_path, spec, fail_while=str(flag))
    made = find_run(tmp_path, "last").artifacts("make-numbers").stat().st_mtime_ns
    flag.unlink()
    run, said = resume(tmp_path, spec)
    assert run.status == "done"
    assert "3 steps, 1 kept from before" in said
    assert "make-numbers" not in said
    assert run.artifacts("make-numbers").stat().st_mtime_ns == made
    assert run.outputs()["report"].parameters == {"Output": "6.0"}


def test_one_step_alone_makes_the_later_ones_stale(tmp_path: Path, spec: Spec) -> None:
    run, _ = start(tmp_path, spec)
    run, said = resume(tmp_path, spec, only="add_up")
    assert "add-up" in said
    assert "report" not in said
    assert [step.status for step in run.steps] == ["done", "done", "waiting"]
    run, said = resume(tmp_path, spec)
    assert run.status == "done"
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["report"]
    with pytest.raises(ArgumentsInvalid, match="has no step 'ad-up': did you mean 'add-up'"):
        resume(tmp_path, spec, only="ad_up")


def test_a_removed_artifact_is_made_again_and_all_after_it(tmp_path: Path, spec: Spec) -> None:
    run, _ = start(tmp_path, spec)
    (run.artifacts("make-numbers") / "numbers").rename(tmp_path / "gone")
    run, said = resume(tmp_path, spec)
    assert [line.split()[1] for line in said.splitlines()[1:]] == ["make-numbers", "add-up", "report"]
    assert run.status == "done"


def test_a_killed_step_is_reported_as_killed(tmp_path: Path, spec: Spec) -> None:
    with pytest.raises(StepFailed, match="it was killed, or memory ran out"):
        start(tmp_path, spec, die="9")


def test_a_refused_model_comes_without_advice_to_retry(tmp_path: Path, spec: Spec) -> None:
    """The same step on the same inputs fails the same gate: what helps is to look at the comparison."""
    run, _ = start(tmp_path, spec)
    told = str(StepFailed(run, "promote-bundle", "GateFailed: ndcg_at_10 is 0.1, needed 0.2", 1))
    assert "--resume" not in told
    assert "reco promote --dry-run" in told


def test_only_the_newest_runs_keep_their_artifacts(tmp_path: Path, spec: Spec) -> None:
    runs = [start(tmp_path, spec) for _ in range(4)]
    assert "artifacts of older runs removed" not in runs[2][1]
    assert f"artifacts of older runs removed ({runs[0][0].run_id})" in runs[3][1]
    assert runs[1][0].outputs()
    assert not (runs[0][0].folder / "artifacts").exists()


def test_a_failed_or_resumed_run_frees_space_too(tmp_path: Path, spec: Spec) -> None:
    flag = tmp_path / "flag"
    runs = [start(tmp_path, spec)[0] for _ in range(3)]
    flag.touch()
    with pytest.raises(StepFailed):
        start(tmp_path, spec, fail_while=str(flag))
    assert not (runs[0].folder / "artifacts").exists()
    failed = find_run(tmp_path, "last")
    oldest = new_run(tmp_path, "sums", failed.arguments, [])  # a fifth, which makes one more the fourth
    said = io.StringIO()
    flag.unlink()
    resume_run(tmp_path, failed, spec, "", said)
    assert f"artifacts of older runs removed ({runs[1].run_id})" in said.getvalue()
    assert oldest.run_id > failed.run_id


def test_a_resumed_run_keeps_its_artifacts_at_any_age(tmp_path: Path, spec: Spec) -> None:
    runs = [start(tmp_path, spec)[0] for _ in range(4)]
    resume_run(tmp_path, find_run(tmp_path, runs[0].run_id), spec, "", io.StringIO())
    assert find_run(tmp_path, runs[0].run_id).outputs().keys() == {"make-numbers", "add-up", "report"}


def test_a_failed_cleanup_does_not_hide_the_result(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise PermissionError("artifacts of another user")

    monkeypatch.setattr("pipelines.run.local_run.drop_artifacts", refuse)
    with pytest.raises(StepFailed, match="it was killed"):
        start(tmp_path, spec, die="9")
    assert "could not be removed: artifacts of another user" in start(tmp_path, spec)[1]


def test_changed_code_is_reported_on_resume(tmp_path: Path, spec: Spec) -> None:
    run, _ = start(tmp_path, spec)
    run.code = "older"
    run.step("report").status = "failed"
    run.save()
    _, said = resume(tmp_path, spec)
    assert "the code changed since this run began" in said
    assert len(code_hash()) == 16


def test_two_runs_in_one_home_are_a_conflict(tmp_path: Path, spec: Spec) -> None:
    with (
        locked(tmp_path / "run.lock", "running 20261121"),
        pytest.raises(Conflict, match="is running 20261121"),
    ):
        start(tmp_path, spec)


def test_the_cause_is_the_end_of_the_last_traceback(tmp_path: Path) -> None:
    """KFP's executor prints the whole traceback indented, the class with its module."""
    try:
        raise Conflict("process 7 promotes")
    except Conflict:
        text = traceback.format_exc()
    with _Log(tmp_path / "step.log", Progress(io.StringIO()).step("a", 1, ["a"])) as log:
        log.write(textwrap.indent(text, "    "))
    assert log.cause() == "components.home.Conflict: process 7 promotes"


RUN = """
import sys
from pathlib import Path
from tests_sums import sums
from pipelines.run.arguments import complete_arguments
from pipelines.run.graph import read_spec
from pipelines.run.local_run import start_run

spec = read_spec(sums)
start_run(Path(sys.argv[1]), "sums", spec, complete_arguments(spec, {"wait_s": 60.0}), False, sys.stderr)
"""


def test_sigterm_ends_the_step_too_and_the_run_can_be_resumed(tmp_path: Path, spec: Spec) -> None:
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    (tmp_path / "tests_sums.py").write_text(source)
    (tmp_path / "go.py").write_text(textwrap.dedent(RUN))
    home = tmp_path / "home"
    process = subprocess.Popen(
        [sys.executable, "go.py", str(home)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = [step.status for step in find_run(home, "last").steps] if (home / "runs").exists() else []
        if states[-1:] == ["running"]:
            break
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=20)[1]
    assert "stopped; go on with: reco run --resume" in said
    run = find_run(home, "last")
    assert run.status == "stopped"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(home).encode() in cmdline(pid)]
    run.arguments["wait_s"] = 0.0
    run.save()
    assert resume(home, spec)[0].status == "done"


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
