"""The gateway of a small cluster: which pod a request reaches."""

import contextlib
import http.client
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from components.rollout import NAMESPACE
from components.rollout.manifests import weights
from pipelines.live.gateway import Gateway, choose
from pipelines.live.slots import new_cluster
from tests.chaos.procs import eventually, free_port


class Pod(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append(self.headers["x-request-id"])
        if self.server.breaks:
            self.server.breaks -= 1
            self.close_connection = True
            return
        self.server.may_answer.wait(10)
        content = json.dumps({"slot": self.server.slot, "asked": json.loads(body)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client did not wait for a late answer
            self.wfile.write(content)
        self.close_connection = self.server.ends_connections  # without a word of it in the answer

    def log_message(self, *_: Any) -> None: ...


def ready(slot: str, port: int) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"serving.kserve.io/inferenceservice": f"checkout-{slot}"}},
        "spec": {"containers": [{"ports": [{"name": "http1", "containerPort": port}]}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


@pytest.fixture
def shop(tmp_path: Any) -> Iterator[tuple[Gateway, dict[str, Any]]]:
    objects = new_cluster("file://bundles/b1", tmp_path)
    pods: dict[str, Any] = {}
    for slot in ("blue", "green"):
        pod: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pod)
        pod.slot, pod.seen, pod.breaks, pods[slot] = slot, [], 0, pod
        pod.may_answer, pod.ends_connections = threading.Event(), False
        pod.may_answer.set()
        objects.write(("pods", NAMESPACE, slot), ready(slot, pod.server_address[1]))
    with Gateway(objects) as gateway:
        servers = [*pods.values(), gateway]
        threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in servers]
        for thread in threads:
            thread.start()
        yield gateway, pods
        for one in servers:
            one.shutdown()
            one.server_close()


def split(gateway: Gateway, green: int, mirror: int = 0) -> None:
    objects = gateway._objects
    route = objects.get(("httproutes", NAMESPACE, "checkout"))
    rule = route["spec"]["rules"][-1]
    for one, weight in zip(rule["backendRefs"], (100 - green, green), strict=True):
        one["weight"] = weight
    if mirror:
        to = {"backendRef": {"name": "checkout-green-predictor", "port": 80}, "percent": mirror}
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": to}]
    objects.write(("httproutes", NAMESPACE, "checkout"), route)


def test_requests_follow_weights_headers_and_mirror(shop: tuple[Gateway, dict[str, Any]]) -> None:
    gateway, pods = shop
    with httpx.Client(base_url=gateway.url, trust_env=False) as client:

        def ask(**headers: str) -> str:
            answer = client.post("/v1/recommendations", json={"basket": ["1"]}, headers=headers)
            assert answer.json()["asked"] == {"basket": ["1"]}
            return str(answer.json()["slot"])

        assert Counter(ask() for _ in range(20)) == {"blue": 20}
        assert ask(**{"x-reco-slot": "green"}) == "green"
        split(gateway, 50)
        counts = Counter(ask() for _ in range(200))
        assert min(counts["blue"], counts["green"]) > 50
        split(gateway, 0, mirror=100)
        before = len(pods["green"].seen)
        assert ask(**{"x-request-id": "r-mirrored"}) == "blue"
        eventually(lambda: len(pods["green"].seen) > before)
        assert pods["green"].seen[-1] == "r-mirrored", "both know the request by the same id"
        [route] = gateway._objects.list("httproutes")
        assert weights(route) == {"blue": 100, "green": 0}


def test_without_a_ready_pod_the_answer_is_503(shop: tuple[Gateway, dict[str, Any]]) -> None:
    gateway, _ = shop
    gateway._objects.delete(("pods", NAMESPACE, "blue"))
    answer = httpx.post(f"{gateway.url}/v1/recommendations", json={}, trust_env=False)
    assert (answer.status_code, answer.text) == (503, "no pod of checkout-blue-predictor is ready")


def post(gateway: Gateway) -> int:
    return httpx.post(f"{gateway.url}/v1/recommendations", json={}, trust_env=False).status_code


def test_a_pod_beside_a_closed_port_answers(shop: tuple[Gateway, dict[str, Any]]) -> None:
    gateway, pods = shop
    gateway._objects.write(("pods", NAMESPACE, "ended"), ready("blue", free_port()))
    assert [post(gateway) for _ in range(10)] == [200] * 10
    assert len(pods["blue"].seen) == 10


@pytest.mark.parametrize("before", [0, 1], ids=["new connection", "kept connection"])
def test_a_silent_pod_gets_a_request_once(
    shop: tuple[Gateway, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    gateway, pods = shop
    assert [post(gateway) for _ in range(before)] == [200] * before
    monkeypatch.setattr("pipelines.live.gateway.PATIENCE_S", 0.2)
    pods["blue"].may_answer.clear()
    assert post(gateway) == 504
    pods["blue"].may_answer.set()
    assert len(pods["blue"].seen) == before + 1


def test_a_request_whose_connection_breaks_is_sent_once_more(shop: tuple[Gateway, dict[str, Any]]) -> None:
    gateway, pods = shop
    pods["blue"].breaks = 1
    assert post(gateway) == 200
    pods["blue"].breaks = 2
    assert post(gateway) == 503
    assert len(pods["blue"].seen) == 4


def test_a_pod_may_close_idle_connections(
    shop: tuple[Gateway, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, pods = shop
    pod, closed = pods["blue"], threading.Event()
    close = pod.shutdown_request

    def close_and_say(connection: Any) -> None:
        close(connection)
        closed.set()

    monkeypatch.setattr(pod, "shutdown_request", close_and_say)
    pod.ends_connections = True
    for _ in range(3):
        assert post(gateway) == 200
        assert closed.wait(10)
        closed.clear()
    assert len(pod.seen) == 3
    assert not caplog.records, "nor a warning of the pool"


def test_a_request_reaches_no_host_that_its_target_names(shop: tuple[Gateway, dict[str, Any]]) -> None:
    gateway, pods = shop
    host = f"127.0.0.1:{pods['green'].server_address[1]}"
    for target, status in ((f"@{host}/x", 400), (f"http://{host}/x", 400), (f"//{host}/x", 200)):
        with contextlib.closing(http.client.HTTPConnection(*gateway.server_address)) as client:
            client.request("POST", target, b"{}")
            assert client.getresponse().status == status
    assert (len(pods["blue"].seen), pods["green"].seen) == (1, [])


@pytest.mark.parametrize(("dice", "slot"), [(0.0, "blue"), (0.94, "blue"), (0.95, "green"), (0.99, "green")])
def test_the_dice_choose_by_weight(tmp_path: Any, dice: float, slot: str) -> None:
    rules = new_cluster("file://b", tmp_path).list("httproutes")[0]["spec"]["rules"]
    rules[-1]["backendRefs"][0]["weight"], rules[-1]["backendRefs"][1]["weight"] = 95, 5
    assert choose(rules, "/v1/recommendations", {}, dice) == (f"checkout-{slot}-predictor", 80, None)
    assert choose(rules, "/metrics", {}, dice)[0] == "checkout-blue-predictor", "no rule: the larger slot"
