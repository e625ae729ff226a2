"""The adapter on its own; `test_endpoint` asks it over V2 and gRPC, `test_http_routes` over V1."""

import asyncio

import pytest

from serving.answer.recommender import Recommender
from serving.checkout.checkout import Checkout
from serving.errors import InvalidRequest

pytestmark = pytest.mark.slow  # importing kserve takes seconds


def test_a_tensor_that_is_no_text_is_refused(recommender: Recommender) -> None:
    from kserve import InferInput, InferRequest

    from serving.api.transformer import Transformer

    basket = InferInput("basket", [1], "BYTES", [b"\xff"])
    with pytest.raises(InvalidRequest, match="basket must be UTF-8"):
        asyncio.run(Transformer(Checkout(recommender, 1e6)).predict(InferRequest("checkout", [basket])))
