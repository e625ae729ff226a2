"""The small cluster's API as our own client sees it."""

from collections.abc import Iterator
from typing import Any

import pytest

from components.rollout.cluster import Cluster, ClusterRefused, Stale, connect
from pipelines.live.cluster_api import ApiServer, Objects
from tests.kubernetes_api import kubernetes_api


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with kubernetes_api(Objects()) as server:
        yield server


@pytest.fixture
def cluster(api: ApiServer) -> Iterator[Cluster]:
    with connect(api.url) as client:
        yield Cluster(client, "checkout")


def job(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"for": "tests"}}, "spec": {"parallelism": 1}}


def test_an_object_is_made_once_and_patched_in_turn(cluster: Cluster) -> None:
    made = cluster.create("Job", job("a"))
    with pytest.raises(Stale, match="already exists"):
        cluster.create("Job", job("a"))
    version = made["metadata"]["resourceVersion"]
    patched = cluster.patch("Job", "a", {"spec": {"parallelism": 2}}, version)
    assert patched["metadata"]["generation"] == 2
    with pytest.raises(Stale, match="has been modified"):
        cluster.patch("Job", "a", {"spec": {"parallelism": 3}}, version)
    assert cluster.get("Job", "a")["spec"] == {"parallelism": 2}
    noted = cluster.patch(
        "Job", "a", {"metadata": {"labels": {"for": None}}}, patched["metadata"]["resourceVersion"]
    )
    assert noted["metadata"]["labels"] == {}
    assert noted["metadata"]["generation"] == 2, "a label is no change of the spec"


def test_objects_are_found_by_label_and_by_name(cluster: Cluster) -> None:
    for name in ("a", "b"):
        cluster.create("Job", job(name))
    assert [one["metadata"]["name"] for one in cluster.list("Job", "for=tests")] == ["a", "b"]
    assert cluster.list("Job", "for=others") == []
    assert cluster.find("Job", "c") is None
    with pytest.raises(ClusterRefused, match=r'404 .*"c" not found'):
        cluster.get("Job", "c")
