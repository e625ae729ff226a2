"""A Kubernetes API that is away or refuses; tests/pipelines/live/test_cluster_api.py has the rest."""

import httpx
import pytest

from components.rollout.cluster import Cluster, ClusterRefused, ClusterUnreachable, NoCluster, connect
from pipelines.live.ports import free_port


def test_an_api_that_is_away_is_named() -> None:
    with (
        connect(f"http://127.0.0.1:{free_port()}") as client,
        pytest.raises(ClusterUnreachable, match="does not answer"),
    ):
        Cluster(client, "checkout").get("Job", "a")


@pytest.mark.parametrize(
    ("url", "says"),
    [("", "give --cluster URL"), ("http://[::", "is no address"), ("cluster:8001", "expected http://HOST")],
)
def test_an_address_that_is_none_is_refused(url: str, says: str) -> None:
    with pytest.raises(NoCluster, match=says):
        connect(url)


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (403, ClusterRefused, "rights of infra/kserve/release/rights.yaml"),
        (404, ClusterRefused, "apply infra/kserve"),
        (429, ClusterUnreachable, "answers 429 \\(busy\\)"),
        (503, ClusterUnreachable, "answers 503 \\(busy\\)"),
    ],
)
def test_a_refusal_has_its_kind(status: int, error: type[Exception], says: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"message": "busy"}))
    client = httpx.Client(base_url="http://api", transport=transport)
    with pytest.raises(error, match=says):
        Cluster(client, "checkout").get("Pod", "a")


@pytest.mark.parametrize("status", [0, 429, 503])
def test_a_read_is_repeated_after_a_fault_that_passes_and_a_write_is_not(status: int) -> None:
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        if len(calls) not in (1, 2, 4):
            return httpx.Response(200, json={"kind": "Job"})
        if not status:
            raise httpx.ReadError("reset")
        return httpx.Response(status, text="reset")

    cluster = Cluster(httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer)), "checkout")
    assert cluster.get("Job", "a") == {"kind": "Job"}
    with pytest.raises(ClusterUnreachable, match="reset"):
        cluster.create("Job", {})
    assert calls == ["GET"] * 3 + ["POST"]
