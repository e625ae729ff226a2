import os
from pathlib import Path

import psutil
import pytest

from pipelines.run.graph import Outputs
from pipelines.run.runs import (
    Run,
    RunUnknown,
    champions_run,
    drop_artifacts,
    find_run,
    list_runs,
    new_run,
    read_run,
    usual_steps,
)
from tests.pipelines.conftest import promote_run


def finish(run: Run, seconds: float = 1.0) -> Run:
    for step in run.steps:
        step.status, step.seconds = "done", seconds
    run.save()
    return run


def test_a_record_round_trips(tmp_path: Path) -> None:
    run = new_run(tmp_path, "training", {"data": "toy"}, ["a", "b"])
    run.step("a").parameters = {"Output": "x"}
    run.step("a").artifacts = ["dataset"]
    run.step("a").status = "done"
    run.save()
    assert read_run(run.folder) == run
    assert run.outputs() == {}, "the artifact is not there"
    (run.artifacts("a") / "dataset").mkdir(parents=True)
    assert run.outputs() == {"a": Outputs({"Output": "x"}, {"dataset": run.artifacts("a") / "dataset"})}


def test_a_run_in_a_copied_home_works_there_and_not_in_the_old_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    arguments = {"home": str(old), "tracking_uri": f"sqlite:///{old}/mlflow.db", "data": f"{old}er/data"}
    run = new_run(old, "training", {**arguments, "online_store": "redis://h/0", "seed": 1}, ["a"])
    old.rename(new)
    assert read_run(new / "runs" / run.run_id).arguments == {
        "home": str(new),
        "tracking_uri": f"sqlite:///{new}/mlflow.db",
        "data": f"{old}er/data",
        "online_store": "redis://h/0",
        "seed": 1,
    }


def test_runs_are_listed_newest_first_and_found_by_an_id_prefix(tmp_path: Path) -> None:
    first = new_run(tmp_path, "training", {}, ["a"])
    second = new_run(tmp_path, "training", {}, ["a"])
    assert first.run_id != second.run_id
    assert [run.run_id for run in list_runs(tmp_path)] == sorted([first.run_id, second.run_id], reverse=True)
    assert find_run(tmp_path, "last").run_id == max(first.run_id, second.run_id)
    assert find_run(tmp_path, first.run_id) == first
    with pytest.raises(RunUnknown, match="several runs begin with '2'"):
        find_run(tmp_path, "2")
    with pytest.raises(RunUnknown, match=f"no run 'x' under .*newest: {max(first.run_id, second.run_id)}"):
        find_run(tmp_path, "x")


@pytest.mark.parametrize("text", ["", "{", '{"kind": "run"}', "[]"])
def test_an_unreadable_record_is_not_listed(tmp_path: Path, text: str) -> None:
    run = new_run(tmp_path, "training", {}, ["a"])
    (run.folder / "state.json").write_text(text)
    assert list(list_runs(tmp_path)) == []
    with pytest.raises(RunUnknown, match="is not the record of a run"):
        read_run(run.folder)


def test_the_status_follows_the_process_and_the_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path, "training", {}, ["a", "b"])
    assert run.status == "waiting"
    run.steps[0].status = "running"
    assert run.status == "stopped"
    run.pid = os.getpid()
    assert run.status == "running"
    run.pid = 0
    run.steps[0].status = "failed"
    assert run.status == "failed"
    assert finish(run).status == "done"
    assert run.seconds == 2.0


def test_the_usual_time_is_that_of_a_similar_run(tmp_path: Path) -> None:
    finish(new_run(tmp_path, "training", {"data": "toy"}, ["a"]), 3.0)
    finish(new_run(tmp_path, "training", {"data": "complete-journey"}, ["a"]), 300.0)
    new_run(tmp_path, "training", {"data": "toy"}, ["a"])
    now = new_run(tmp_path, "training", {"data": "toy"}, ["a"])
    assert usual_steps(tmp_path, now)["a"].seconds == 3.0
    assert usual_steps(tmp_path, new_run(tmp_path, "training", {"data": "shop"}, ["a"])) == {}
    assert usual_steps(tmp_path, new_run(tmp_path, "training", {"data": "toy"}, ["a"], "fast")) == {}


def test_a_process_that_got_the_number_of_a_killed_one_is_another(tmp_path: Path) -> None:
    """In a container each process that runs `reco` has the number 1."""
    run = new_run(tmp_path, "training", {}, ["a"])
    run.steps[0].status, run.pid = "running", os.getpid()
    run.save()
    before = psutil.Process().create_time() - 10
    assert read_run(run.folder).steps[0].status == "running"
    os.utime(run.folder / "state.json", (before, before))
    assert (read_run(run.folder).status, read_run(run.folder).steps[0].status) == ("stopped", "stopped")


def test_artifacts_of_older_runs_are_removed_and_their_records_stay(tmp_path: Path) -> None:
    made = [finish(new_run(tmp_path, "training", {}, ["a"])) for _ in range(4)]
    for run in made:
        run.artifacts("a").mkdir(parents=True)
    made[0].pid = os.getpid()  # still running: it is left alone
    made[0].step("a").status = "running"
    made[0].save()
    newest = sorted((run.run_id for run in made), reverse=True)
    (read_run(made[1].folder).folder / "working").mkdir()  # left by a failed step
    assert drop_artifacts(tmp_path, keep=2, spare=newest[2]) == []
    assert drop_artifacts(tmp_path, keep=2) == [newest[2]]
    assert [run.run_id for run in list_runs(tmp_path)] == newest
    assert [run.artifacts("a").exists() for run in list_runs(tmp_path)] == [True, True, False, True]
    assert drop_artifacts(tmp_path, keep=2) == []


def test_artifacts_of_the_champions_run_stay_after_runs_that_the_gate_refused(tmp_path: Path) -> None:
    for version in ("1", "2"):
        run = promote_run(tmp_path, "toy", f"b{version}", version)
        run.artifacts("train-retriever").mkdir(parents=True)
    refused = [new_run(tmp_path, "training", {}, ["promote-bundle"]) for _ in range(3)]
    refused[0].step("promote-bundle").status = "failed"
    refused[0].save()
    drop_artifacts(tmp_path, keep=3)
    origin = champions_run(tmp_path)
    assert origin is not None
    assert origin.artifacts("train-retriever").exists(), "`reco refresh` and `reco extend` start from it"
    kept = [run for run in list_runs(tmp_path) if (run.folder / "artifacts").exists()]
    assert [run.run_id for run in kept] == [origin.run_id]


def test_a_password_is_never_shown_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    arguments = {"online_store": "redis://app:hunt@er2@cache:6379/0", "tracking_uri": "sqlite:////a/b.db"}
    run = new_run(tmp_path, "training", arguments, ["a"])
    shown = run.shown_arguments()
    assert shown == {"online_store": "redis://cache:6379/0", "tracking_uri": "sqlite:////a/b.db"}
    sentinel = {"online_store": "redis+sentinel://h:1/main/0?sentinel_password=TOP&x=1"}
    shown = new_run(tmp_path, "training", sentinel, ["a"]).shown_arguments()
    assert shown == {"online_store": "redis+sentinel://h:1/main/0?sentinel_password=…&x=1"}
    assert (run.folder / "state.json").stat().st_mode & 0o077 == 0
    assert read_run(run.folder).arguments == arguments
