"""Commands that train: their arguments, and the files they write."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.home import Running, announced, locked
from pipelines.run.graph import Spec, step_names
from pipelines.run.runs import Run, Size, new_run
from pipelines.run.submit import Kubeflow, Mount, Submitted
from pipelines.training import LAPTOP_TEACHERS, TEACHERS
from tests.pipelines.cli.conftest import answered, reco


def test_listing_no_runs_succeeds(tmp_path: Path) -> None:
    done = reco(tmp_path, "runs")
    assert (done.exit_code, done.output) == (0, f"no runs yet: reco --home {tmp_path} run\n")
    assert json.loads(reco(tmp_path, "runs", "--output", "json").output) == []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the runs that would have been started."""
    launched: list[dict[str, Any]] = []

    def start(home: Path, pipeline: str, spec: object, arguments: dict[str, Any], *_: object) -> Run:
        launched.append(arguments)
        return new_run(home, pipeline, arguments, ["promote-bundle"])

    monkeypatch.setattr("pipelines.run.local_run.start_run", start)
    return launched


@pytest.mark.parametrize(
    ("served", "params", "filled"),
    [
        ("", [], ""),
        ("redis://:word@cache:6379/1", [], "redis://:word@cache:6379/1"),
        ("rediss://cache", [], "rediss://cache"),
        ("sqlite:///elsewhere.db", [], None),
        ("sqlite:///elsewhere.db", ["online_store="], ""),
        ("memory:", [], ""),
        ("redis://cache", ["online_store=redis://other"], "redis://other"),
        ("redis://cache", ["online_store="], ""),
    ],
)
def test_a_run_fills_the_redis_of_the_endpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[dict[str, Any]],
    served: str,
    params: list[str],
    filled: str | None,
) -> None:
    monkeypatch.setenv("RECO_STORE_URL", served)
    done = reco(tmp_path, "run", "--data", "toy", *(word for one in params for word in ("--param", one)))
    if filled is None:
        assert (done.exit_code, "fill no other file than" in done.stderr, launched) == (2, True, [])
        return
    assert done.exit_code == 0, done.output
    assert [arguments["online_store"] for arguments in launched] == [filled]


@pytest.mark.parametrize(
    ("options", "size"), [([], "default"), (["--full"], "full"), (["--fast"], "fast")], ids=str
)
def test_a_run_has_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], size: str
) -> None:
    def start(
        home: Path, pipeline: str, spec: Spec, arguments: dict[str, Any], size: Size, *_: object
    ) -> Run:
        teachers = sum(name.startswith("train-ranker") for name in step_names(spec))
        assert teachers == len(TEACHERS if size == "full" else LAPTOP_TEACHERS)
        return new_run(home, pipeline, arguments, ["promote-bundle"], size)

    monkeypatch.setattr("pipelines.run.local_run.start_run", start)
    assert answered(reco(tmp_path, "run", "--data", "toy", *options, "--output", "json"))["size"] == size


def test_the_parameters_of_a_group_are_listed(tmp_path: Path) -> None:
    rows = answered(reco(tmp_path, "params", "gate_params", "--output", "json"))
    assert rows[0].keys() == {"name", "default", "kind", "meaning"}
    assert rows[0]["name"] == "gate_params.over_blend"
    text = reco(tmp_path, "params").output
    assert "student_params.epochs " in text
    rows = answered(reco(tmp_path, "params", "--output", "json"))
    longest = max((str(row["default"]) for row in rows), key=len)
    assert len(longest) > 100
    assert longest in text, "a pipe gets it whole"
    done = reco(tmp_path, "params", "gate_parms")
    assert (done.exit_code, "did you mean 'gate_params'" in done.output) == (2, True)


def test_a_run_shows_the_time_and_memory_of_its_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path, "training", {}, ["ingest-events"])
    step = run.step("ingest-events")
    step.status, step.seconds, step.memory_mib, step.parameters = "done", 61.0, 1_234, {"cut": "2024-06-10"}
    run.save()
    shown = reco(tmp_path, "runs", "last").output.splitlines()[1]
    assert re.split(r" {2,}", shown) == ["ingest-events", "done", "1 min 01", "1,234 MiB", "cut 2024-06-10"]


def test_a_run_beside_reco_up_fills_its_redis(tmp_path: Path, launched: list[dict[str, Any]]) -> None:
    running = Running("redis://127.0.0.1:16379/0", "127.0.0.1:19092", True)
    with locked(tmp_path / "up.lock", "running `reco up`"), announced(tmp_path, running):
        assert reco(tmp_path, "run", "--data", "toy").exit_code == 0
    assert [arguments["online_store"] for arguments in launched] == ["redis://127.0.0.1:16379/0"]


def test_a_submission_fills_the_named_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, Any]] = []
    pipelines: list[str] = []

    def submit(pipeline: Any, cluster: Kubeflow, arguments: dict[str, Any]) -> Submitted:
        launched.append(arguments)
        pipelines.append(pipeline.name)
        return Submitted("r1", "url", "p1", "v1", "PENDING")

    monkeypatch.setattr("pipelines.run.submit.submit_pipeline", submit)
    monkeypatch.setenv("RECO_STORE_URL", "redis://of-this-machine")
    common = ["submit", "--host", "http://kfp", "--tracking-uri", "http://mlflow", "--volume", "reco"]
    for more in ([], ["--online-store", "redis://cache:6379"]):
        done = reco(tmp_path, *common, *more)
        assert done.exit_code == 0, done.output
    assert [arguments["online_store"] for arguments in launched] == ["", "redis://cache:6379"]
    for more in (["--online-store", "redis://:pa55@cache"], ["--tracking-uri", "https://me:pa55@mlflow"]):
        refused = reco(tmp_path, *common, *more)
        assert refused.exit_code == 2
        assert "RECO_STORE_PASSWORD" in refused.output
        assert "pa55" not in refused.output
    assert len(launched) == 2
    assert reco(tmp_path, *common, "--release").exit_code == 0
    assert pipelines == ["training", "training", "training-by-canary"]
    refused = reco(tmp_path, *common, "--release", "--model-name", "other")
    assert (refused.exit_code, len(launched)) == (2, 3)
    assert "guard and rollback of the cluster ask for checkout-recommender alone" in refused.output


def test_a_token_that_is_being_replaced_is_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "token", list[str]()
    file.write_text("first")

    def wait(host: str, run_id: str, token: Callable[[], str]) -> str:
        for content in ("second", "", "half a token"):
            file.write_text(content)
            seen.append(token())
        file.unlink()
        seen.append(token())
        return "SUCCEEDED"

    given = Submitted("r1", "url", "p1", "v1", "PENDING")
    monkeypatch.setattr("pipelines.run.submit.submit_pipeline", lambda *_: given)
    monkeypatch.setattr("pipelines.run.submit.wait_for_run", wait)
    common = ["submit", "--host", "http://kfp", "--tracking-uri", "http://mlflow", "--volume", "reco"]
    assert reco(tmp_path, *common, "--wait", "--token-file", str(file)).exit_code == 0
    assert seen == ["second"] * 4, "the first one expires before a training ends"


def test_a_schedule_watches_the_champion_of_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def schedule(pipeline: Any, *given: Any) -> dict[str, Any]:
        asked.append((pipeline.name, *given))
        return {"url": "url", "replaced": 0}

    def equip(pipeline: Any, image: str, mount: Mount) -> Any:
        assert mount == Mount("reco", "/mnt/reco")
        return pipeline

    monkeypatch.setattr("pipelines.run.submit.schedule_pipeline", schedule)
    monkeypatch.setattr("pipelines.run.submit.equipped", equip)
    where = ["--host", "http://kfp", "--data", "/mnt/reco/offline_store", "--volume", "reco"]
    assert reco(tmp_path, "schedule", *where).exit_code == 0
    [(name, cluster, arguments, cron)] = asked
    assert (name, cluster.host, cron) == ("watch", "http://kfp", "0 0 6 * * *")
    assert arguments == {"bundle": "/mnt/reco", "data": "/mnt/reco/offline_store", "log": ""}


@pytest.mark.slow
def test_the_pipeline_is_written_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "training.yaml"
    done = answered(reco(tmp_path, "compile", "--file", str(file), "--output", "json"))
    assert done == {"file": str(file), "steps": 21}
    assert file.read_text().startswith("# PIPELINE DEFINITION")
    answered(reco(tmp_path, "compile", "--file", str(file), "--volume", "shop", "--output", "json"))
    assert file.read_text().count("mountPath: /mnt/reco\n") == 21
