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
def test_a_read_and_a_patch_are_repeated_after_a_fault_that_passes(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("components.rollout.cluster.PAUSE_S", 0.0)
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        if len(calls) not in (1, 2, 4, 5, 7):
            return httpx.Response(200, json={"kind": "Job"})
        if not status:
            raise httpx.ReadError("reset")
        return httpx.Response(status, text="reset")

    cluster = Cluster(httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer)), "checkout")
    assert cluster.get("Job", "a") == {"kind": "Job"}
    assert cluster.patch("Job", "a", {}, "1") == {"kind": "Job"}
    with pytest.raises(ClusterUnreachable, match="reset"):
        cluster.create("Job", {})
    assert calls == ["GET"] * 3 + ["PATCH"] * 3 + ["POST"], "a second POST would meet the first one's object"


@pytest.mark.parametrize(
    ("asked", "waits_s"),
    [
        *(("1", 1.0), ("0", 0.3), ("3600", 10.0), ("", 0.3), ("soon", 0.3)),
        *(("Fri, 31 Dec 2199 23:59:59 GMT", 10.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.3)),
    ],
)
def test_the_next_attempt_waits_as_long_as_the_api_asks(
    monkeypatch: pytest.MonkeyPatch, asked: str, waits_s: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("components.rollout.cluster.time.sleep", slept.append)
    answers = iter([httpx.Response(429, headers={"retry-after": asked}), httpx.Response(200, json={})])
    transport = httpx.MockTransport(lambda request: next(answers))
    Cluster(httpx.Client(base_url="http://api", transport=transport), "checkout").get("Job", "a")
    assert slept == [waits_s]
