"""Before the first caller: the golden requests go through the whole stack and leave no trace."""

import asyncio
import json
from typing import Any

import msgspec
import orjson
import pytest

from feature_repo.ids import MAX_ID_LENGTH
from serving.answer.recommender import Recommender
from serving.api.http_routes import PREDICT, RECOMMENDATIONS, Limits, routes
from serving.api.rehearsal import V2, _tensors, rehearse
from serving.checkout.checkout import Checkout, Turn
from serving.errors import BundleInvalid
from serving.settings import SettingInvalid, Settings


def test_each_golden_request_is_sent_over_each_route(recommender: Recommender) -> None:
    asked: list[tuple[str, Any]] = []
    seen: list[Turn] = []
    checkout = Checkout(recommender, 0.0, observers=(seen.append,))

    async def v2(scope: Any, receive: Any, send: Any) -> None:
        """In place of KServe's, which takes seconds to import."""
        document = json.loads((await receive())["body"])
        asked.append((scope["path"], {i["name"]: i["data"] for i in document["inputs"]}))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"degraded":false}'})

    def watched(path: str) -> Any:
        async def route(scope: Any, body: bytes) -> bytes:
            answer = await routes(checkout)[path](scope, body)
            response = orjson.loads(answer)
            asked.append((path, response.get("predictions", [response])[0]["items"]))
            return answer

        return route

    app = Limits(v2, Settings(), {path: watched(path) for path in (RECOMMENDATIONS, PREDICT)})
    asyncio.run(rehearse(app, checkout))
    (golden,) = map(json.loads, (recommender.bundle.path / "golden.jsonl").read_text().splitlines())
    assert [path for path, _ in asked] == [RECOMMENDATIONS, PREDICT, V2]
    for _, items in asked[:2]:
        assert [item["item_id"] for item in items] == [item_id for item_id, _ in golden["expected"]]
    request = golden["request"]
    assert asked[2][1] == {name: v if isinstance(v, list) else [v] for name, v in request.items()}
    assert not seen
    assert checkout.recommender is recommender


def test_no_limit_of_bodies_refuses_the_longest_golden_request() -> None:
    """The endpoint would not start, and training again would not help."""
    longest = chr(0x20000) * MAX_ID_LENGTH  # four bytes each
    request = {"request_id": "golden-17", "basket": [longest] * 13, "at": "2017-12-05T18:30:00Z", "k": 10}
    inputs = _tensors(request | {"user_id": longest, "store_id": longest})
    length = len(msgspec.json.encode({"inputs": inputs}))
    with pytest.raises(SettingInvalid, match="RECO_BODY_LIMIT_BYTES"):
        Settings.from_env({"RECO_BODY_LIMIT_BYTES": str(length - 1)})


@pytest.mark.parametrize(
    ("status", "body"), [(500, b'{"degraded":false}'), (200, b'{"degraded":true}')], ids=["500", "degraded"]
)
def test_a_stack_that_fails_the_rehearsal_is_not_opened(
    recommender: Recommender, status: int, body: bytes
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    with pytest.raises(BundleInvalid, match="golden-0 over /v1/recommendations"):
        asyncio.run(rehearse(broken, Checkout(recommender, 50.0)))
