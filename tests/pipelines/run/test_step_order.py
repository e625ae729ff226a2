from typing import Any

import pytest

from pipelines.run import step_order
from pipelines.run.runs import StepState
from pipelines.run.step_order import MEMORY_MIB, StepOrder


def graph(**needs: str) -> dict[str, Any]:
    tasks = {name.replace("_", "-"): {"dependentTasks": on.split()} for name, on in needs.items()}
    return {"root": {"dag": {"tasks": tasks}}}


def usual(*names: str) -> dict[str, StepState]:
    return {name: StepState(name, memory_mib=100) for name in names}


# Two branches from `a`, which meet in `z`.
BRANCHES = graph(a="", short="a", long="a", later="long", z="short later")
NAMES = ["a", "short", "long", "later", "z"]


def test_the_first_step_of_the_dag_that_is_ready_starts() -> None:
    plan = StepOrder(BRANCHES, NAMES, {}, 2)
    assert plan.next((), ()) == "a"
    assert plan.next({"a"}, ()) is None
    assert plan.next((), {"a"}) == "short"
    assert plan.next({"short"}, {"a"}) == "long"
    assert plan.next({"long", "short"}, {"a"}) is None
    assert plan.next({"short"}, {"a", "long"}) == "later"
    assert plan.next((), set(NAMES)) is None


def test_a_step_alone_does_not_wait_for_steps_that_are_kept() -> None:
    assert StepOrder(BRANCHES, ["z"], {}, 2).next((), ()) == "z"


def test_one_job_is_one_step_at_a_time() -> None:
    assert StepOrder(BRANCHES, NAMES, {}, 1).next({"long"}, {"a"}) is None


def test_a_step_that_measures_time_runs_alone() -> None:
    spec = graph(a="", build_index="", b="")
    plan = StepOrder(spec, ["a", "build-index", "b"], usual("a", "build-index", "b"), 4)
    assert plan.next((), ()) == "a"
    assert plan.next({"a"}, ()) == "b"
    assert plan.next({"a"}, {"b"}) is None
    assert plan.next((), {"a"}) == "build-index"
    assert plan.next({"build-index"}, {"a"}) is None


def test_steps_that_need_more_than_the_memory_run_one_after_the_other() -> None:
    spec = graph(a="", b="")
    known = usual("a", "b")
    assert StepOrder(spec, ["a", "b"], known, 2).next({"a"}, ()) == "b"
    known["a"].memory_mib = MEMORY_MIB - 50
    assert StepOrder(spec, ["a", "b"], known, 2).next({"a"}, ()) is None
    known["a"].memory_mib = 2 * MEMORY_MIB
    assert StepOrder(spec, ["a", "b"], known, 2).next((), ()) == "a", "alone it may try"


def test_steps_share_the_cores_where_they_may_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_order, "cores", lambda: 8)
    plan = StepOrder(BRANCHES, NAMES, {}, 4)
    threads = {name: plan.threads(name) for name in NAMES}
    assert threads == {"a": 8, "long": 4, "later": 4, "short": 2, "z": 8}
    assert StepOrder(BRANCHES, NAMES, {}, 1).threads("short") == 8
    timed = graph(compile_ranker="", b="")
    assert StepOrder(timed, ["compile-ranker", "b"], {}, 4).threads("compile-ranker") == 8
