"""The pipeline's last step on our Kubernetes API and a real MLflow database; the test plays the Job."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.release.register_bundle import register_bundle
from components.rollout.cluster import ClusterRefused
from components.rollout.deploy_endpoint import ReleaseFailed, deploy_endpoint
from pipelines.cli.rollout import release
from pipelines.live.cluster_api import ApiServer, Objects
from tests.kubernetes_api import kubernetes_api

pytestmark = pytest.mark.slow
JOBS = Path(__file__).parents[3] / "infra" / "kserve" / "release" / "jobs.yaml"
KEY = ("jobs", "checkout", "release-training-1")


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with kubernetes_api(Objects()) as server:
        yield server


@pytest.fixture
def deploy(
    api: ApiServer, evaluated: Callable[..., Path], home: Path, uri: str, dataset: Path
) -> Callable[[], dict[str, str]]:
    register_bundle(evaluated("one"), uri, "recommender")
    return lambda: deploy_endpoint("1", dataset, uri, "recommender", str(home), api.url, 0.01)


def give_template(api: ApiServer) -> None:
    template = next(one for one in yaml.safe_load_all(JOBS.read_text()) if one["kind"] == "CronJob")
    api.objects.write(("cronjobs", "checkout", "release"), template)


def end(api: ApiServer, condition: str, look: Callable[[], None] = lambda: None) -> threading.Thread:
    """Give the Job a condition as soon as there is a Job; first look around."""
    changes = api.objects.watch("jobs")

    def follow() -> None:
        change, _ = changes.get(timeout=60)
        assert change == "ADDED"
        look()
        api.objects.merge(KEY, {"status": {"conditions": [{"type": condition, "status": "True"}]}})

    thread = threading.Thread(target=follow)
    thread.start()
    return thread


def test_the_job_releases_this_version_and_is_followed(
    api: ApiServer, deploy: Callable[[], dict[str, str]], home: Path, dataset: Path
) -> None:
    give_template(api)
    found: list[Path] = []
    player = end(api, "Complete", lambda: found.extend((home / "datasets").glob("*/*")))
    done = deploy()
    player.join()
    assert (done["version"], done["job"]) == ("1", KEY[2])
    [container] = api.objects.get(KEY)["spec"]["template"]["spec"]["containers"]
    assert {"name": "VERSION", "value": "1"} in container["env"]
    assert container["args"][-2:] == ["--model-name", "recommender"]
    known = {option for parameter in release.params for option in parameter.opts}
    assert {one for one in container["args"] if one.startswith("--")} <= known
    assert {one.name for one in found} == {one.name for one in dataset.iterdir()}
    assert {one.parent.name for one in found} == {done["bundle_id"]}
    assert not list((home / "datasets").iterdir()), "the copy is for the Job alone"
    # The step again, after its pod died: the same Job, no second release.
    assert deploy() == done
    assert len(api.objects.list("jobs")) == 1


def test_a_failed_release_fails_the_step_and_is_not_started_again(
    api: ApiServer, deploy: Callable[[], dict[str, str]]
) -> None:
    give_template(api)
    player = end(api, "Failed")
    for _ in range(2):
        with pytest.raises(ReleaseFailed, match="logs job/release-training-1"):
            deploy()
    player.join()
    assert len(api.objects.list("jobs")) == 1


def test_without_the_template_the_error_says_what_to_apply(deploy: Callable[[], Any]) -> None:
    with pytest.raises(ClusterRefused, match="infra/kserve"):
        deploy()
