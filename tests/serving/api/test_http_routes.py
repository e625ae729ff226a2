"""The two routes that bypass KServe, in front of their application."""

import asyncio
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from serving.answer.recommender import Recommender
from serving.api.http_routes import ARRIVED, PREDICT, RECOMMENDATIONS, Limits, Route, routes
from serving.api.problems import problem
from serving.checkout.checkout import Checkout, Turn, rank_here
from serving.errors import InvalidRequest, Overloaded
from serving.schemas import MAX_INSTANCES, read_call
from serving.settings import Settings
from serving.stores.online_features import open_store

REQUEST: dict[str, Any] = {
    "request_id": "r1",
    "user_id": "u1",
    "basket": ["1000005", "1000031"],
    "store_id": "store-2",
    "at": "2017-12-05T18:30:00Z",
    "k": 7,
}


def ask(recommender: Recommender, path: str, document: object, **scope: Any) -> dict[str, Any]:
    checkout = Checkout(recommender, 1e9)
    answer = asyncio.run(run(checkout, path, document, **scope))
    return json.loads(answer)


async def run(checkout: Checkout, path: str, document: object, **scope: Any) -> bytes:
    return await routes(checkout)[path]({"path": path, "headers": [], **scope}, orjson.dumps(document))


def test_our_route_takes_a_request_and_gives_a_response(recommender: Recommender) -> None:
    answer = ask(recommender, RECOMMENDATIONS, REQUEST)
    (prediction,) = ask(recommender, PREDICT, {"instances": [REQUEST]})["predictions"]
    for response in (answer, prediction):
        assert set(response.pop("stage_ms")) == {"features", "retrieval", "ranking", "reranking", "total"}
    assert answer == prediction
    assert (answer["request_id"], answer["rung"], len(answer["items"])) == ("r1", "full", 7)


def test_each_request_of_a_body_has_its_own_id_and_state(recommender: Recommender) -> None:
    raws = [{"basket": ["1000005"], "k": k} for k in range(4)]
    headers = [(b"x-request-id", b"till-4"), (b"accept", b"*/*")]
    answers = ask(recommender, PREDICT, {"instances": raws}, headers=headers)["predictions"]
    assert [a["request_id"] for a in answers] == ["till-4", "till-4-1", "till-4-2", "till-4-3"]
    assert [len(a["items"]) for a in answers] == [0, 1, 2, 3]
    assert ask(recommender, PREDICT, {"instances": []}) == {"predictions": []}


def test_one_bundle_answers_a_whole_body_during_a_swap(recommender: Recommender) -> None:
    bundle = recommender.bundle
    plain = replace(bundle, bundle_id="other", settings=replace(bundle.settings, profiles={}))
    other = Recommender(plain, open_store("memory:"))

    async def rank(turn: Turn) -> np.ndarray:
        checkout.recommender = other  # a swap
        return await rank_here(turn)

    checkout = Checkout(recommender, 1e9, rank)
    document = {"instances": [{**REQUEST, "profile": "premium"}] * 3}
    answers = json.loads(asyncio.run(run(checkout, PREDICT, document)))["predictions"]
    assert [(a["bundle_id"], a["rung"], len(a["items"])) for a in answers] == [
        (bundle.bundle_id, "full", 7)
    ] * 3


@pytest.mark.parametrize(
    "document",
    [[], {}, {"inputs": []}, {"instances": {}}, {"instances": [], "x": 1}, {"instances": [{}] * 65}],
)
def test_a_body_without_valid_instances_is_refused(recommender: Recommender, document: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"instances|`object`|length <= {MAX_INSTANCES}"):
        ask(recommender, PREDICT, document)


def test_the_deadline_counts_from_the_arrival(recommender: Recommender) -> None:
    late: dict[str, Any] = {ARRIVED: time.perf_counter() - 10.0, "headers": [(b"x-deadline-ms", b"9000")]}
    for path, document in ((RECOMMENDATIONS, REQUEST), (PREDICT, {"instances": [REQUEST]})):
        answer = ask(recommender, path, document, **late)
        assert answer.get("predictions", [answer])[0]["degraded_reason"] == "deadline_exceeded"
    assert ask(recommender, RECOMMENDATIONS, REQUEST, **{ARRIVED: time.perf_counter()})["rung"] == "full"


# ---------------------------------------------------------------------------------- limits of a body

SETTINGS = Settings(body_limit_bytes=1_024, body_timeout_ms=50.0)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the headers and the body that it received."""
    body = (await receive())["body"] if scope["method"] != "GET" else b""
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send(
        {"type": "http.response.body", "body": orjson.dumps({"headers": headers, "body": body.decode()})}
    )


def send(
    chunks: Iterable[bytes],
    *,
    headers: dict[str, str] | None = None,
    method: str = "POST",
    settings: Settings = SETTINGS,
    path: str = "/",
    own: Mapping[str, Route] | None = None,
    first: dict[str, Any] | None = None,
) -> tuple[int, dict[str, Any], list[tuple[bytes, bytes]]]:
    """Send the chunks, after the message `first`; return status, body and headers of the answer.

    Status 0 means no answer was given.
    """
    waiting = list(chunks)
    before = [first] if first else []
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if before:
            return before.pop()
        if waiting:
            chunk = waiting.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(waiting)}
        await asyncio.sleep(60)
        raise AssertionError

    async def take(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(Limits(echo, settings, own)(scope, receive, take))
    if not sent:
        return 0, {}, []
    start, body = sent
    return start["status"], orjson.loads(body["body"]), start["headers"]


def test_a_valid_body_is_passed_on_whole_as_json() -> None:
    headers = {"Content-Type": "text/plain", "CE-Id": "7", "X-Request-Id": "r"}
    status, answer, _ = send([b'{"a"', b": 1}"], headers=headers)
    passed_on = {"x-request-id": "r", "content-type": "application/json"}
    assert (status, answer) == (200, {"body": '{"a": 1}', "headers": passed_on})
    assert send([], method="GET")[0] == 200


def test_a_prefetch_without_time_is_a_429() -> None:
    async def refuses(scope: Any, body: bytes) -> bytes:
        raise Overloaded("overloaded: ask later")

    status, answer, headers = send([b"{}"], path="/own", own={"/own": refuses})
    assert (status, answer) == (429, problem(429, "overloaded: ask later"))
    assert (b"content-type", b"application/problem+json") in headers


def test_a_web_page_is_refused_on_loopback_only() -> None:
    page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert send([b"{}"], headers=page)[0] == 403
    assert send([b"{}"], headers=page, settings=replace(SETTINGS, host="0.0.0.0"))[0] == 200
    assert send([b"{}"], headers={"Content-Type": "text/plain"})[0] == 200


def test_a_disconnected_client_gets_no_answer() -> None:
    assert send([], first={"type": "http.disconnect"}) == (0, {}, [])


def test_a_body_that_is_not_json_is_refused() -> None:
    status, answer, _ = send([b"{"])
    assert status == 400
    assert answer["detail"].startswith("the body is not JSON")


def test_binary_tensors_are_refused() -> None:
    assert send([b"{}"], headers={"Inference-Header-Content-Length": "2"})[0] == 400


def test_our_paths_take_post_only_and_read_no_other_body() -> None:
    async def never(scope: Any, body: bytes) -> bytes:
        raise AssertionError

    for method in ("GET", "PUT", "DELETE", "TRACE"):  # no body is there to read: that would be a 408
        status, answer, headers = send(
            [], method=method, headers={"content-length": "9"}, path="/own", own={"/own": never}
        )
        assert (status, answer) == (405, problem(405, "method not allowed here"))
        assert (b"allow", b"POST") in headers


# ------------------------------------------------------------------------------- beside KServe's own

TIMES = re.compile(rb'"stage_ms":\{[^}]*\}')
BODIES: dict[str, object] = {
    "several": {
        "instances": [REQUEST, {**REQUEST, "k": 100, "user_id": "u2"}, {**REQUEST, "basket": ["⚡"]}]
    },
    "none": {"instances": []},
    "a wrong one": {"instances": [REQUEST, {"basket": 1}]},
}


@pytest.mark.slow  # importing kserve takes seconds
@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # KServe's encoder of answers
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_v1_answers_match_the_kserve_route_byte_for_byte(
    recommender: Recommender, body: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from kserve.model_repository import ModelRepository
    from kserve.protocol.model_repository_extension import ModelRepositoryExtension

    from serving.api.endpoint import _DataPlane, build_app
    from serving.api.transformer import Transformer

    monkeypatch.setattr(recommender.facts, "promotion", lambda codes, at, store: np.full(len(codes), 0.125))
    checkout = Checkout(recommender, 1e9)
    registry = ModelRepository()
    registry.update(Transformer(checkout))
    plane = _DataPlane(model_registry=registry)
    ours = build_app(plane, ModelRepositoryExtension(registry), checkout, Settings())
    stock = Limits(ours._app, Settings())  # the same application without our routes
    answers = []
    for app in (ours, stock):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answers.append(await client.post(PREDICT, json=body))
    short, long = answers
    assert short.status_code == long.status_code
    assert dict(short.headers)["content-type"] == dict(long.headers)["content-type"]
    assert TIMES.sub(b"", short.content) == TIMES.sub(b"", long.content)
    assert set(dict(short.headers)) == set(dict(long.headers))


def test_a_request_to_kserve_s_routes_counts_from_its_arrival() -> None:
    """KServe gives a model the headers alone, and a burst waits long before one of its requests is parsed."""
    arrived, seen = time.perf_counter() - 5.0, list[float]()

    async def v2(scope: Any, receive: Any, send: Any) -> None:
        seen.append(read_call({}, "V2", 1.0).arrived)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def take(message: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v2/x", "headers": [], ARRIVED: arrived}
    asyncio.run(Limits(v2, SETTINGS)(scope, receive, take))
    assert seen == [arrived]
    assert read_call({}, "gRPC", 1.0).arrived > arrived + 5.0, "another task has none"
