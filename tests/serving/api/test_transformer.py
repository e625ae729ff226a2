"""The adapter on its own; `test_endpoint` asks it over V2 and gRPC, `test_http_routes` over V1."""

import asyncio

import pytest

from serving.answer.recommender import Recommender
from serving.checkout.checkout import Checkout, Turn
from serving.errors import InvalidRequest

pytestmark = pytest.mark.slow  # importing kserve takes seconds


def test_a_tensor_that_is_no_text_is_refused(recommender: Recommender) -> None:
    from kserve import InferInput, InferRequest

    from serving.api.transformer import Transformer

    basket = InferInput("basket", [1], "BYTES", [b"\xff"])
    with pytest.raises(InvalidRequest, match="basket must be UTF-8"):
        asyncio.run(Transformer(Checkout(recommender, 1e6)).predict(InferRequest("checkout", [basket])))


def test_an_output_that_is_unknown_is_refused_before_an_answer_is_logged(recommender: Recommender) -> None:
    """A list that was not shown would count as one: in the log, in the next training, in the KPIs."""
    from kserve import InferInput, InferRequest
    from kserve.errors import InvalidInput
    from kserve.protocol.infer_type import RequestedOutput

    from serving.api.transformer import Transformer

    seen: list[Turn] = []
    transformer = Transformer(Checkout(recommender, 1e6, observers=(seen.append,)))
    basket = InferInput("basket", [0], "BYTES", [])

    def ask(output: str) -> None:
        wanted = InferRequest("checkout", [basket], request_outputs=[RequestedOutput(output)])
        asyncio.run(transformer.predict(wanted))

    with pytest.raises(InvalidInput, match="unknown output; this model has item_id, score"):
        ask("items")
    assert not seen
    ask("item_id")
    assert len(seen) == 1
