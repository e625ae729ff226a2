import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from components import steps
from components.home import default_tracking_uri
from components.hyper_parameters import GROUPS, RetrieverParams
from components.release.registry import Registry
from feature_repo.toy_shop import START
from pipelines.run.arguments import complete_arguments
from pipelines.run.graph import WiringChanged, read_spec, step_names
from pipelines.run.local_run import StepFailed, resume_run
from pipelines.run.runs import Run, Size, champions_run, new_run
from pipelines.training import (
    FAST,
    LAPTOP_TEACHERS,
    TEACHERS,
    arguments_of,
    training_of,
)
from serving.release.champion import read_champion
from tests.pipelines.cli.conftest import answered, reco


def spec_of(size: Size, by_canary: bool = False) -> dict[str, Any]:
    return read_spec(training_of(size, by_canary))


def test_every_step_is_in_the_pipeline_under_its_own_name() -> None:
    ours = [name.replace("_", "-") for name, value in vars(steps).items() if hasattr(value, "python_func")]
    named = [re.sub(r"-\d+$", "", name) for name in step_names(spec_of("full"))]
    assert sorted({*named, *step_names(spec_of("full", by_canary=True))[-2:]}) == sorted(ours)
    assert {name: named.count(name) for name in named if named.count(name) > 1} == {"train-ranker": 5}


@pytest.mark.parametrize(("size", "teachers"), [("full", TEACHERS), ("fast", LAPTOP_TEACHERS)])
def test_the_teachers_are_tasks_that_do_not_wait_for_each_other(
    size: Size, teachers: tuple[str, ...]
) -> None:
    tasks = spec_of(size)["root"]["dag"]["tasks"]
    trained = {name: task for name, task in tasks.items() if name.startswith("train-ranker")}
    models = {task["inputs"]["parameters"]["model"]["runtimeValue"]["constant"] for task in trained.values()}
    assert models == set(teachers)
    assert all(sorted(t["dependentTasks"]) == ["build-examples", "fit-statistics"] for t in trained.values())
    taught = tasks["distill-ranker"]["inputs"]["artifacts"]
    from_tasks = {source["taskOutputArtifact"]["producerTask"] for source in taught.values()}
    assert from_tasks == {"build-examples", "fit-statistics", *trained}


def test_the_pipeline_begins_with_events_and_ends_with_a_champion_and_users() -> None:
    names = step_names(spec_of("full"))
    assert names[0] == "ingest-events"
    assert names[-3:] == ["register-bundle", "promote-bundle", "publish-features"]
    spec = spec_of("full", by_canary=True)
    by_canary = step_names(spec)
    assert by_canary[:-2] == names[:-2]
    assert by_canary[-2:] == ["deploy-endpoint", "publish-features"]
    given = spec["root"]["dag"]["tasks"]["deploy-endpoint"]["inputs"]["parameters"]["run_id"]
    assert given["runtimeValue"]["constant"] == "{{$.pipeline_job_uuid}}", "KFP fills in the id of the run"


@pytest.mark.parametrize(("by_canary", "gate"), [(False, "promote-bundle"), (True, "deploy-endpoint")])
def test_the_served_state_changes_only_after_the_gate(by_canary: bool, gate: str) -> None:
    """Before the gate, steps only read the list of forgotten users; stores are filled after promotion."""
    tasks = spec_of("full", by_canary)["root"]["dag"]["tasks"]
    told = {
        name
        for name, task in tasks.items()
        for source in task.get("inputs", {}).get("parameters", {}).values()
        if source.get("componentInputParameter") in ("online_store", "home")
    }
    assert told == {"ingest-events", gate, "publish-features"}
    assert gate in tasks["publish-features"]["dependentTasks"]


def evaluated_run(toy_line: Path, home: Path) -> Run:
    """The record of a run on the toy shop up to the evaluated bundle."""
    given = {"home": str(home), "tracking_uri": default_tracking_uri(home), "data": "toy"}
    run = new_run(home, "training", complete_arguments(spec_of("full"), given), step_names(spec_of("full")))
    cut = (toy_line / "cut.txt").read_text()
    for name, artifact, source in (
        ("ingest-events", "dataset", "dataset"),
        ("fit-statistics", "statistics", "statistics"),
        ("materialize-features", "features", "features"),
        ("build-examples", "examples", "examples"),
        ("train-retriever", "checkpoint", "retriever"),
        *((f"train-ranker{number}", "ranker", "teacher") for number in ("", "-2", "-3", "-4", "-5")),
        ("distill-ranker", "ranker", "student"),
        ("prune-ranker", "ranker", "pruned"),
        ("quantize-ranker", "variants", "variants"),
        ("compile-ranker", "ranker", "ranker"),
        ("export-retriever", "graphs", "graphs"),
        ("build-index", "index", "index"),
        ("assemble-bundle", "bundle", "bundle"),
        ("evaluate-bundle", "evaluated", "evaluated"),
    ):
        step = run.step(name)
        step.status, step.parameters, step.artifacts = "done", {"Output": {}}, [artifact]
        shutil.copytree(toy_line / source, run.artifacts(name) / artifact)
    run.step("ingest-events").parameters = {"cut": cut, "data_hash": "toy"}
    run.save()
    return run


def files(home: Path) -> dict[str, bytes]:
    """The files under a home that the endpoint and Feast read."""
    served = [home / name for name in ("online_store.db", "online_store.json", "registry.db")]
    return {str(path): path.read_bytes() for path in [*served, *home.glob("offline_store/**/*.parquet")]}


@pytest.mark.slow
def test_a_refused_bundle_leaves_the_online_store_as_it_was(
    toy_line: Path, migrated: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(toy_line / "home", home)
    shutil.copyfile(migrated, home / "mlflow.db")
    before = files(home)
    run = evaluated_run(toy_line, home)
    run.arguments["gate_params"] = {"over_blend": 1_000.0}
    run.save()
    with pytest.raises(StepFailed, match="GateFailed") as refused:
        resume_run(home, run, spec_of("full"), "", sys.stderr)
    run = refused.value.run
    assert (run.step("promote-bundle").status, run.step("publish-features").status) == ("failed", "waiting")
    assert files(home) == before
    # Nor can the step be sent alone past the gate.
    with pytest.raises(WiringChanged, match="takes 'Output' of promote-bundle"):
        resume_run(home, run, spec_of("full"), "publish-features", sys.stderr)
    assert files(home) == before

    run.arguments["gate_params"] = {"over_blend": 0.1, "over_two_tower": 0.1, "least_baskets": 1}
    run.save()
    run = resume_run(home, run, spec_of("full"), "", sys.stderr)
    assert run.status == "done"
    note = json.loads((home / "online_store.json").read_text())
    champion = read_champion(home)
    assert (note["bundle_id"], note["cut"]) == (champion.bundle_id, champion.cut)
    assert run.step("publish-features").parameters["Output"]["users"] == note["users"] > 0

    # The nightly count makes a challenger of the champion, without any training.
    done = answered(reco(home, "refresh", "--data", "toy", "--output", "json"))
    registry = Registry(default_tracking_uri(home), "checkout-recommender")
    assert registry.alias("challenger") == done["version"] == "2"
    assert done["until"] == (START + pd.Timedelta(weeks=28)).isoformat(), "the last day counts, too"
    assert read_champion(home) == champion
    assert answered(reco(home, "refresh", "--output", "json")) == done, "the archive holds the same events"
    # The second night starts from the first one's champion, which no run has promoted.
    gate = {"over_blend": 0.1, "over_two_tower": 0.1, "least_baskets": 1, "p99_over_champion": 1e3}
    params = [word for name, value in gate.items() for word in ("--gate", f"{name}={value}")]
    answered(reco(home, "promote", *params, "--output", "json"))
    assert read_champion(home).bundle_id == done["bundle_id"] != champion.bundle_id
    assert answered(reco(home, "refresh", "--output", "json"))["until"] == done["until"]
    origin = champions_run(home)
    assert origin is not None
    assert origin.run_id == run.run_id


@pytest.mark.slow
def test_a_size_names_parameters_that_exist_and_leaves_given_ones() -> None:
    assert arguments_of("full", {}) == {}
    laptop = arguments_of("default", {})
    assert laptop["quantize_params"] == {"tune_epochs": 0}
    assert laptop["retriever_params"]["epochs"] < RetrieverParams().epochs
    assert arguments_of("default", {"quantize_params": {"tune_epochs": 2}})["quantize_params"] == {
        "tune_epochs": 2
    }
    assert FAST.keys() <= GROUPS.keys() <= spec_of("full")["root"]["inputDefinitions"]["parameters"].keys()
    complete_arguments(spec_of("full"), {"home": "x", "tracking_uri": "y", **FAST})
