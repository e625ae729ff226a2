"""The pipeline's last step on our Kubernetes API and a real MLflow database; the test plays the Job."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from components.release.register_bundle import register_bundle
from components.release.registry import Registry
from components.rollout.deploy_endpoint import LONGEST_S, ReleaseFailed, deploy_endpoint
from feature_repo.events import read_dataset, write_dataset
from feature_repo.stream.erasure import Forgotten, forget, microseconds
from feature_repo.toy_shop import toy_dataset
from pipelines.cli.rollout import release
from pipelines.live.cluster_api import ApiServer, Objects
from tests.kubernetes_api import kubernetes_api

pytestmark = pytest.mark.slow
JOBS = Path(__file__).parents[3] / "infra" / "kserve" / "release" / "jobs.yaml"


class Step:
    """The step with a clock of its own; `play` is called at each wait, with its number from 0."""

    def __init__(self, api: ApiServer, dataset: Path, uri: str, home: Path) -> None:
        self.api, self._dataset, self._uri, self._home = api, dataset, uri, home
        self.now, self.waits = 0.0, 0
        self.play: Callable[[int], None] = lambda wait: None

    def __call__(self, run_id: str = "run-1") -> dict[str, str]:
        where = (self._uri, "recommender", str(self._home), run_id, self.api.url)
        return deploy_endpoint("1", self._dataset, *where, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.play(self.waits)
        self.waits += 1

    def jobs(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.objects.list("jobs")]

    def end(self, condition: str) -> None:
        """Give the newest Job a condition."""
        status = {"conditions": [{"type": condition, "status": "True"}]}
        self.api.objects.merge(("jobs", "checkout", self.jobs()[-1]), {"status": status})


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with kubernetes_api(Objects()) as server:
        yield server


@pytest.fixture
def step(api: ApiServer, evaluated: Callable[..., Path], home: Path, uri: str, dataset: Path) -> Step:
    register_bundle(evaluated("one"), uri, "recommender")
    template = next(one for one in yaml.safe_load_all(JOBS.read_text()) if one["kind"] == "CronJob")
    api.objects.write(("cronjobs", "checkout", "release"), template)
    return Step(api, dataset, uri, home)


def test_the_job_releases_this_version_and_is_followed(
    step: Step, registry: Registry, home: Path, dataset: Path
) -> None:
    found: list[Path] = []

    def play(_: int) -> None:
        found.extend((home / "datasets").glob("*/*"))
        registry.point("champion", "1")
        step.end("Complete")

    step.play = play
    done = step()
    assert (done["version"], [done["job"]]) == ("1", step.jobs())
    job = step.api.objects.get(("jobs", "checkout", done["job"]))
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "VERSION", "value": "1"} in container["env"]
    assert container["args"][-2:] == ["--model-name", "recommender"]
    known = {option for parameter in release.params for option in parameter.opts}
    assert {one for one in container["args"] if one.startswith("--")} <= known
    assert {one.name for one in found} == {one.name for one in dataset.iterdir()}
    assert {one.parent.name for one in found} == {done["bundle_id"]}
    assert not list((home / "datasets").iterdir()), "the copy is for the Job alone"
    # The step again, after its pod died: the same Job, no second release.
    assert step() == done
    assert len(step.jobs()) == 1


def test_a_shopper_who_was_forgotten_since_the_run_read_the_data_is_not_in_the_copy(
    step: Step, home: Path, dataset: Path
) -> None:
    shop = toy_dataset()
    sealed = write_dataset(dataset, shop, pd.DataFrame({"row": [1], "user_id": ["user-000"]}))
    forget(home, "user-000", microseconds(datetime.now(UTC)))
    step.play = lambda wait: step.end("Failed")
    with pytest.raises(ReleaseFailed, match="ended as Failed"):
        step()
    [copy] = (home / "datasets").iterdir()
    data = read_dataset(copy)
    assert set(data.events["user_id"]) == set(shop.events["user_id"]) - {"user-000"}
    assert data.manifest["was"] == [sealed["data_hash"]], "the gate finds it by the evaluation's hash"
    assert not (copy / "quarantine.jsonl").read_text()


def test_an_erasure_while_the_data_are_copied_holds(
    step: Step, home: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_be_interrupted(of: Path) -> Forgotten:
        listed = Forgotten.load(of)
        if not len(listed):
            forget(of, "user-000", microseconds(datetime.now(UTC)))
        return listed

    write_dataset(dataset, toy_dataset())
    late = SimpleNamespace(load=load_and_be_interrupted)
    monkeypatch.setattr("components.rollout.deploy_endpoint.Forgotten", late)
    step.play = lambda wait: step.end("Failed")
    with pytest.raises(ReleaseFailed, match="ended as Failed"):
        step()
    [copy] = (home / "datasets").iterdir()
    users = set(read_dataset(copy).events["user_id"])
    assert users == set(toy_dataset().events["user_id"]) - {"user-000"}


def test_a_bundle_id_of_the_registry_that_is_no_name_is_refused(
    step: Step, registry: Registry, home: Path
) -> None:
    registry._client.set_model_version_tag("recommender", "1", "bundle_id", "../bundles")
    (home / "bundles").mkdir(exist_ok=True)
    with pytest.raises(ReleaseFailed, match="no name"):
        step()
    assert (home / "bundles").is_dir()


def test_another_run_of_the_same_version_starts_another_job(step: Step, registry: Registry) -> None:
    step.play = lambda wait: step.end("Failed")
    for _ in range(2):
        with pytest.raises(ReleaseFailed, match=r"ended as Failed.*logs job/release-training-1-"):
            step()
    assert len(step.jobs()) == 1, "a step that is tried again starts no second release"
    registry.point("champion", "1")
    step("a run with a long id " * 9)
    assert len(set(step.jobs())) == 2
    assert max(map(len, step.jobs())) <= 63


def test_a_job_that_completes_without_a_champion_fails_the_step(step: Step, registry: Registry) -> None:
    step.play = lambda wait: step.end("Complete")
    with pytest.raises(ReleaseFailed, match="ended as Complete, and champion is no version"):
        step()


def test_a_job_that_fails_after_the_seal_has_released_unless_it_was_rolled_back(
    step: Step, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.point("champion", "1")
    step.play = lambda wait: step.end("Failed")
    assert step()["version"] == "1"
    assert "failed after version 1 became champion: the guard ends it" in caplog.text

    registry.refuse("1", "rolled back by hand")  # the first of its registry keeps the alias
    with pytest.raises(ReleaseFailed, match=r"1 was refused \(rolled back by hand\); without a champion"):
        step()

    def roll_back(wait: int) -> None:
        registry.unpoint("champion", "1")

    step.play = roll_back
    with pytest.raises(ReleaseFailed, match="champion is no version"):
        step()


def test_an_api_that_is_away_is_asked_again_until_the_time_runs_out(
    step: Step, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.rollout.cluster.PAUSE_S", 0.0)  # this test's time is its own
    port: Any = step.api.RequestHandlerClass
    answers = port.do_GET

    def refuse(call: Any) -> None:
        call.send_error(503)

    def play(wait: int) -> None:
        if wait == 0:
            monkeypatch.setattr(port, "do_GET", refuse)
        elif wait == 20:
            monkeypatch.setattr(port, "do_GET", answers)
            registry.point("champion", "1")
            step.end("Complete")

    step.play = play
    assert step()["version"] == "1"
    assert step.waits == 21
    began = step.now

    def stay_away(wait: int) -> None:
        monkeypatch.setattr(port, "do_GET", refuse)
        step.now += 100.0

    step.play = stay_away
    with pytest.raises(ReleaseFailed, match="no end of job release-training-1-"):
        step("another run")
    assert LONGEST_S <= step.now - began < LONGEST_S + 200.0
    job = yaml.safe_load(JOBS.read_text().split("---")[0])["spec"]["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] < LONGEST_S
