"""The adapter on its own: the checkout gets an answer in spite of any error behind it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serving.answer.recommender import Recommender
from serving.checkout.checkout import Checkout

pytestmark = pytest.mark.slow  # importing kserve takes seconds

REQUEST = {"request_id": "r1", "user_id": "u1", "basket": ["1000005"], "at": "2017-12-05T18:30:00Z", "k": 4}
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask() -> Ask:
    from serving.api.transformer import Transformer

    def answers(
        recommender: Recommender, *requests: dict[str, Any], deadline_ms: float = 1e6
    ) -> list[dict[str, Any]]:
        model = Transformer(Checkout(recommender, deadline_ms))
        given, _ = asyncio.run(model({"instances": list(requests)}, {}))
        return given["predictions"]

    return answers


def test_each_request_of_a_body_has_its_own_state(recommender: Recommender, ask: Ask) -> None:
    requests = [{**REQUEST, "k": k, "request_id": f"r{k}"} for k in range(5)]
    together = ask(recommender, *requests)
    alone = [ask(recommender, request)[0] for request in requests]
    assert [[i["item_id"] for i in a["items"]] for a in together] == [
        [i["item_id"] for i in a["items"]] for a in alone
    ]
    assert [a["request_id"] for a in together] == [f"r{k}" for k in range(5)]
