"""The small cluster's API as kubectl and our own client see it."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.rollout.cluster import Cluster, ClusterRefused, Stale, connect
from pipelines.live.cluster_api import ApiServer, Objects
from tests.kubernetes_api import kubernetes_api

ROUTE = Path(__file__).parents[3] / "infra" / "kserve" / "base" / "route.yaml"


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


def test_a_watch_shows_each_change(api: ApiServer, cluster: Cluster) -> None:
    path = "/apis/batch/v1/namespaces/checkout/jobs?watch=1&timeoutSeconds=5"
    with httpx.stream("GET", f"{api.url}{path}", trust_env=False) as lines:
        changes = lines.iter_lines()
        made = cluster.create("Job", job("a"))
        cluster.patch("Job", "a", {"spec": {"parallelism": 2}}, made["metadata"]["resourceVersion"])
        seen = [json.loads(next(changes)) for _ in range(2)]
    assert [(one["type"], one["object"]["spec"]["parallelism"]) for one in seen] == [
        ("ADDED", 1),
        ("MODIFIED", 2),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kubectl_applies_patches_and_waits(api: ApiServer, tmp_path: Path) -> None:
    def kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--server", api.url, "-n", "checkout", "--cache-dir", str(tmp_path), *arguments]
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "KUBECONFIG": str(tmp_path / "none")}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )

    for how in (["--server-side"], []):
        done = kubectl("apply", "--validate=false", *how, "-f", str(ROUTE))
        assert done.returncode == 0, done.stderr
    patch = '{"metadata": {"annotations": {"reco.dev/release": "{}"}}}'
    assert kubectl("patch", "httproute", "checkout", "--type=merge", "-p", patch).returncode == 0
    weights = kubectl("get", "httproute", "checkout", "-o", "jsonpath={.spec.rules[3].backendRefs[*].weight}")
    assert weights.stdout == "100 0", weights.stderr
    stale = '{"metadata": {"resourceVersion": "1"}}'
    refused = kubectl("patch", "httproute", "checkout", "--type=merge", "-p", stale)
    assert (refused.returncode, "modified" in refused.stderr) == (1, True), refused.stderr
    assert "NotFound" in kubectl("get", "httproute", "nothing").stderr
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    api.objects.merge(("httproutes", "checkout", "checkout"), {"status": ready})
    waited = kubectl("wait", "--for=condition=Ready", "httproute/checkout", "--timeout=20s")
    assert waited.returncode == 0, waited.stderr
    assert kubectl("delete", "httproute", "checkout", "--wait=false").returncode == 0
