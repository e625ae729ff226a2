"""The ranker on its own, over real HTTP: rows in, probabilities out, no row that affects others."""

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest
from kserve import InferInput, InferRequest

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.answer.recommender import Recommender
from serving.api.predictor import Predictor
from serving.checkout.admission import STANDING_S
from serving.checkout.checkout import Checkout
from serving.errors import Overloaded
from serving.schemas import Call, parse_request

pytestmark = pytest.mark.slow


def ranker_inputs(dense: list[list[float]], categorical: list[list[int]]) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "name": "dense",
                "datatype": "FP32",
                "shape": list(np.shape(dense)),
                "data": np.ravel(dense).tolist(),
            },
            {
                "name": "categorical",
                "datatype": "INT64",
                "shape": list(np.shape(categorical)),
                "data": np.ravel(categorical).tolist(),
            },
        ]
    }


def test_the_ranker_scores_the_rows_it_is_given(client: httpx.Client, recommender: Recommender) -> None:
    prepared = recommender.prepare(
        parse_request({"user_id": "u1", "basket": ["1000031"]}, now=1.5e9, default_id="")
    )
    dense, categorical = prepared.dense[:5], prepared.categorical[:5]
    body = ranker_inputs(dense.tolist(), categorical.tolist())
    (output,) = client.post("/v2/models/ranker/infer", json=body).json()["outputs"]
    assert output["data"] == pytest.approx(recommender.rank(dense, categorical).tolist(), abs=1e-6)


def test_rows_of_others_wait_for_the_checkouts_of_this_endpoint(recommender: Recommender) -> None:
    checkout = Checkout(recommender, 50.0)
    ranker = Predictor(checkout)
    tensors = [
        InferInput("dense", [1, len(DENSE_NAMES)], "FP32", [0.0] * len(DENSE_NAMES)),
        InferInput("categorical", [1, len(CATEGORICAL)], "INT64", [0] * len(CATEGORICAL)),
    ]
    request = InferRequest("ranker", tensors)
    assert asyncio.run(ranker.predict(request)).outputs[0].shape == [1]
    now = time.perf_counter()
    for at in np.arange(
        now - 2 * STANDING_S, now + 60, 0.04
    ):  # checkouts are refused, until this test has ended
        checkout.service.admission.admits(Call(at - 1, at - 0.95, "late"), float(at))
    with pytest.raises(Overloaded, match="ask it later"):
        asyncio.run(ranker.predict(request))


@pytest.mark.parametrize(
    ("dense", "categorical"),
    [
        ([[0.0] * len(DENSE_NAMES)], [[-1, 0, 0]]),
        ([[0.0] * len(DENSE_NAMES)], [[0, 0, 10**9]]),
        ([[0.0] * len(DENSE_NAMES)], [[0, 0, 0], [0, 0, 0]]),
        ([[0.0, 1.0]], [[0, 0, 0]]),
        ([[1e39] * len(DENSE_NAMES)], [[0, 0, 0]]),
    ],
    ids=["code -1", "code too large", "row counts differ", "width", "beyond float32"],
)
def test_the_ranker_refuses_rows_that_would_break_a_batch(
    client: httpx.Client, dense: list[list[float]], categorical: list[list[int]]
) -> None:
    answer = client.post("/v2/models/ranker/infer", json=ranker_inputs(dense, categorical))
    assert answer.status_code == 422
    assert len(answer.content) < 1_000


def test_the_ranker_supports_v2_only(client: httpx.Client) -> None:
    assert client.post("/v1/models/ranker:predict", json={"instances": []}).status_code == 422


def test_no_rows_have_no_scores_and_the_metadata_has_the_shapes(client: httpx.Client) -> None:
    body = ranker_inputs([], [])
    for tensor, width in zip(body["inputs"], (len(DENSE_NAMES), len(CATEGORICAL)), strict=True):
        tensor["shape"] = [0, width]
    (output,) = client.post("/v2/models/ranker/infer", json=body).json()["outputs"]
    assert (output["shape"], output["data"]) == ([0], [])
    told = client.get("/v2/models/ranker").json()
    assert [tensor["shape"] for tensor in told["inputs"]] == [[-1, len(DENSE_NAMES)], [-1, len(CATEGORICAL)]]
