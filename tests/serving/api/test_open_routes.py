"""Every route of the endpoint, by name: none changes state, and metrics can move to another address.

A route that a new KServe adds fails here until a developer decides whether it may be offered.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from serving.api.openapi import openapi
from serving.api.problems import problem
from tests.chaos.procs import free_port
from tests.serving.conftest import Running

pytestmark = pytest.mark.slow

READS = {
    "/": "GET",
    "/healthz": "GET",
    "/metrics": "GET",
    "/openapi.json": "GET",
    "/v1/models": "GET",
    "/v1/models/{model_name}": "GET",
    "/v2": "GET",
    "/v2/health/live": "GET",
    "/v2/health/ready": "GET",
    "/v2/models": "GET",
    "/v2/models/{model_name}": "GET",
    "/v2/models/{model_name}/ready": "GET",
}
ASKS = {"/v1/models/{model_name}:predict": "POST", "/v2/models/{model_name}/infer": "POST"}
OURS = {"/v1/recommendations": "POST", "/v1/models/checkout:predict": "POST"}
REFUSED = {
    "/v1/models/{model_name}:explain": "POST",
    "/v2/models/{model_name}/versions/{model_version}": "GET",
    "/v2/models/{model_name}/versions/{model_version}/ready": "GET",
    "/v2/models/{model_name}/versions/{model_version}/infer": "POST",
    "/v2/repository/models/{model_name}/load": "POST",
    "/v2/repository/models/{model_name}/unload": "POST",
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "HEAD")
REFUSED_CALLS = ("RepositoryModelLoad", "RepositoryModelUnload")
CALLS = {
    "inference.GRPCInferenceService": {
        *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"),
        *REFUSED_CALLS,
    },
    "reco.v1.Recommendations": {"Recommend"},
}


def routes_of(app: Any) -> dict[str, set[str]]:
    """Path -> methods of each route of a FastAPI application, those of its routers among them."""
    found: dict[str, set[str]] = {}
    for route in app.routes:
        if hasattr(route, "original_router"):
            found |= routes_of(route.original_router)
        else:
            found.setdefault(route.path, set()).update(route.methods)
    return found


def test_every_route_of_the_application_is_listed() -> None:
    from fastapi import FastAPI
    from kserve.model_repository import ModelRepository
    from kserve.protocol.dataplane import DataPlane
    from kserve.protocol.model_repository_extension import ModelRepositoryExtension
    from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
    from kserve.protocol.rest.v2_endpoints import register_v2_endpoints

    registry = ModelRepository()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    register_v1_endpoints(app, DataPlane(registry), ModelRepositoryExtension(registry))
    register_v2_endpoints(app, DataPlane(registry), ModelRepositoryExtension(registry))
    kserves = {path: methods - {"HEAD"} for path, methods in routes_of(app).items()}
    assert kserves == {path: {method} for path, method in (READS | ASKS | REFUSED).items() if path in kserves}
    assert (READS | ASKS | REFUSED).keys() - kserves.keys() == {
        *("/", "/healthz", "/metrics", "/openapi.json")
    }


def filled(path: str) -> str:
    return path.replace("{model_name}", "checkout").replace("{model_version}", "1")


def test_routes_that_change_state_do_not_exist(client: httpx.Client) -> None:
    for path, method in REFUSED.items():
        answer = client.request(method, filled(path), json={} if method == "POST" else None)
        assert (answer.status_code, answer.json()) == (404, problem(404, "no such path")), path
    assert client.get("/v2/models/checkout/ready").json() == {"name": "checkout", "ready": True}


def test_a_path_takes_only_its_own_method(client: httpx.Client) -> None:
    for path, method in (READS | ASKS | OURS).items():
        for other in METHODS:
            if other != method:
                answer = client.request(other, filled(path))
                assert answer.status_code in (404, 405), (other, path)
                assert other == "HEAD" or answer.json()["status"] == answer.status_code
        if method == "GET":
            assert client.get(filled(path)).status_code == 200, path


def test_the_root_names_the_routes_to_ask_and_to_read(client: httpx.Client) -> None:
    root = client.get("/").json()
    assert root["status"] == "alive"
    method, path = root["ask"].split()
    assert client.request(method, path, json={"basket": []}).status_code == 200
    assert path in client.get(root["described"]).json()["paths"]


@pytest.mark.parametrize("host", ["evil.example", "", "a b", "[::1", "x" * 500])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "no type"])
def test_neither_host_nor_content_type_changes_an_answer(client: httpx.Client, host: str, kind: str) -> None:
    headers = {"host": host, "content-type": kind}
    body = {"basket": [], "k": 3, "at": "2017-12-05T18:30:00Z"}
    for path in OURS:
        document = json.dumps(body if path == "/v1/recommendations" else {"instances": [body]})
        assert client.post(path, content=document, headers=headers).status_code == 200
    for path in READS:
        answer = client.get(filled(path) + "/", headers=headers)
        assert "location" not in answer.headers, "no redirect to where a caller says"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/debug", "/admin", "/config", "/v2/repository/index"])
def test_other_paths_do_not_exist(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        assert client.request(method, path, json={}).status_code == 404


def test_every_grpc_call_is_listed_and_none_changes_state(endpoint: Any) -> None:
    import grpc
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as v2

    from serving.proto import recommendations_pb2 as ours

    services = [service for file in (v2, ours) for service in file.DESCRIPTOR.services_by_name.values()]
    assert {s.full_name: {method.name for method in s.methods} for s in services} == CALLS
    with grpc.insecure_channel(endpoint.grpc) as channel:

        def call(path: str) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(path)(b"", timeout=10)
            return refused.value.code()

        for name in REFUSED_CALLS:
            assert call(f"/inference.GRPCInferenceService/{name}") is grpc.StatusCode.UNIMPLEMENTED
        for hidden in (
            "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "grpc.channelz.v1.Channelz/GetServers",
        ):
            assert call(f"/{hidden}") is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("processes", [1, 2])
def test_metrics_can_move_to_another_address(start_toy: Callable[..., Running], processes: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    running = start_toy(processes=processes, metrics_address=address)
    with httpx.Client(base_url=running.http, timeout=30) as client:
        for _ in range(20):
            assert client.post("/v1/recommendations", json={"basket": []}).status_code == 200
        assert client.get("/metrics").status_code == 404
        document = client.get("/openapi.json").json()
    assert document["paths"].keys() == openapi(running.settings)["paths"].keys()
    assert "/metrics" not in document["paths"]
    text = httpx.get(f"http://{address}/metrics", timeout=30).text
    answers = [line for line in text.splitlines() if line.startswith("reco_responses_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in answers) == 20


ASKED: dict[str, Any] = {"basket": ["1000005"], "k": 5, "at": "2017-12-05T18:30:00Z"}


def shape(document: dict[str, Any]) -> tuple[Any, ...]:
    """All of an answer but ids, scores and times."""
    assert document["degraded"] == (document["degraded_reason"] is not None)
    told = (document["rung"], document["degraded_reason"], len(document["items"]))
    return *told, tuple(document), tuple(document["stage_ms"]), {tuple(item) for item in document["items"]}


def shapes_of(http: str, users: Iterable[str | None], **headers: str) -> list[tuple[Any, ...]]:
    """Status and shape of the answer to each shopper; all protocols write the same answer."""
    bodies = [ASKED if user is None else {**ASKED, "user_id": user} for user in users]
    url = f"{http}/v1/recommendations"
    answers = [httpx.post(url, json=body, headers=headers, timeout=30) for body in bodies]
    return [(answer.status_code, *shape(answer.json())) for answer in answers]


def test_known_and_unknown_shoppers_get_answers_of_one_shape(endpoint: Any) -> None:
    """A client cannot find out whether a shopper is known: not by status, fields or reason."""
    known, unknown, nobody = shapes_of(endpoint.http, ("u1", "nobody", None))
    assert known == unknown == nobody
    assert known[:2] == (200, "full")


def test_answers_keep_one_shape_without_a_store_and_without_time(start_toy: Callable[..., Running]) -> None:
    """An answer to a user id reports a missing history, whether there is one or not."""
    running = start_toy(store_url="redis://127.0.0.1:1/0")
    known, unknown = shapes_of(running.http, ("u1", "nobody"))
    assert known == unknown
    assert known[:3] == (200, "full", "features_unavailable")
    hurried = shapes_of(running.http, ("u1", "nobody"), **{"x-deadline-ms": "0.01"})
    assert [one[:2] for one in hurried] == [(200, "popular")] * 2
