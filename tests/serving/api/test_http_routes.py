"""The two routes that go past KServe, in front of the application that they stand in."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.answer.recommender import Recommender, open_recommender
from serving.api.http_routes import ARRIVED, GONE, PREDICT, RECOMMENDATIONS, TASK, routes
from serving.checkout.checkout import Checkout, Turn, rank_here
from serving.errors import ClientGone, InvalidRequest
from serving.schemas import MAX_INSTANCES
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


@pytest.fixture
def recommender(toy_bundle: Path, toy_store: str) -> Recommender:
    return open_recommender(toy_bundle, open_store(toy_store))


def ask(recommender: Recommender, path: str, document: object, **scope: Any) -> dict[str, Any]:
    checkout = Checkout(recommender, 1e9)
    answer = asyncio.run(run(checkout, path, document, **scope))
    return json.loads(answer)


async def run(checkout: Checkout, path: str, document: object, **scope: Any) -> bytes:
    return await routes(checkout)[path]({"path": path, "headers": [], **scope}, document)


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


def test_a_body_is_answered_by_one_bundle_whatever_comes_meanwhile(recommender: Recommender) -> None:
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
def test_another_body_is_refused(recommender: Recommender, document: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"instances|at most {MAX_INSTANCES}"):
        ask(recommender, PREDICT, document)


def test_a_refusal_names_the_request_it_is_about(recommender: Recommender) -> None:
    with pytest.raises(InvalidRequest, match=r"^instances\[1\]: k must be 0 or more$"):
        ask(recommender, PREDICT, {"instances": [REQUEST, {**REQUEST, "k": -1}]})


def test_the_deadline_counts_from_the_arrival(recommender: Recommender) -> None:
    late: dict[str, Any] = {ARRIVED: time.perf_counter() - 10.0, "headers": [(b"x-deadline-ms", b"9000")]}
    for path, document in ((RECOMMENDATIONS, REQUEST), (PREDICT, {"instances": [REQUEST]})):
        answer = ask(recommender, path, document, **late)
        assert answer.get("predictions", [answer])[0]["degraded_reason"] == "deadline_exceeded"
    assert ask(recommender, RECOMMENDATIONS, REQUEST, **{ARRIVED: time.perf_counter()})["rung"] == "full"


def test_a_client_that_left_before_its_turn_costs_no_work(recommender: Recommender) -> None:
    with pytest.raises(ClientGone):
        ask(recommender, RECOMMENDATIONS, REQUEST, **{GONE: True})


def test_a_client_that_leaves_while_it_waits_is_cancelled(recommender: Recommender) -> None:
    ended: list[str] = []

    async def leave(while_ranking: asyncio.Event, task: asyncio.Task[bytes], scope: dict[str, Any]) -> None:
        await while_ranking.wait()
        scope[GONE] = True  # as the HTTP server does
        scope[TASK].cancel()
        with pytest.raises(ClientGone):
            await task

    async def asked() -> None:
        ranking = asyncio.Event()

        async def rank(turn: Turn) -> np.ndarray:
            ranking.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("rank")
            raise AssertionError

        scope: dict[str, Any] = {"path": RECOMMENDATIONS, "headers": []}
        route = routes(Checkout(recommender, 1e9, rank))[RECOMMENDATIONS]
        task = asyncio.ensure_future(route(scope, REQUEST))
        await leave(ranking, task, scope)

    asyncio.run(asked())
    assert ended == ["rank"]


# ------------------------------------------------------------------------------- beside KServe's own

TIMES = re.compile(rb'"stage_ms":\{[^}]*\}')
BODIES: dict[str, object] = {
    "one": {"instances": [REQUEST]},
    "several": {"instances": [REQUEST, {**REQUEST, "k": 100, "user_id": "u2"}, {**REQUEST, "basket": []}]},
    "none": {"instances": []},
    "of every kind": {"instances": [{**REQUEST, "basket": ["⚡"], "user_id": "ü", "store_id": None, "k": 0}]},
    "no instances": {"inputs": []},
    "a wrong one": {"instances": [REQUEST, {"basket": 1}]},
    "an unknown field": {"instances": [{**REQUEST, "x": 1}]},
}


@pytest.mark.slow  # importing kserve takes seconds
@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # what KServe answers with
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_v1_answers_as_kserve_s_own_route_would_byte_for_byte(
    recommender: Recommender, body: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from kserve.model_repository import ModelRepository
    from kserve.protocol.model_repository_extension import ModelRepositoryExtension

    from serving.api.body_limits import Limits
    from serving.api.endpoint import _DataPlane, build_app
    from serving.api.transformer import Transformer

    monkeypatch.setattr(recommender.facts, "promotion", lambda codes, at, store: np.full(len(codes), 0.125))
    checkout = Checkout(recommender, 1e9)
    registry = ModelRepository()
    registry.update(Transformer(checkout))
    plane = _DataPlane(model_registry=registry)
    ours = build_app(plane, ModelRepositoryExtension(registry), checkout, Settings())
    stock = Limits(ours._app, Settings())  # the same application without our routes

    async def both() -> list[httpx.Response]:
        answers = []
        for app in (ours, stock):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answers.append(await client.post(PREDICT, json=body))
        return answers

    short, long = asyncio.run(both())
    assert short.status_code == long.status_code
    assert dict(short.headers)["content-type"] == dict(long.headers)["content-type"]
    assert TIMES.sub(b"", short.content) == TIMES.sub(b"", long.content)
    assert set(dict(short.headers)) == set(dict(long.headers))
