"""A part of the endpoint is replaced, and the answers stay."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from pipelines.load_arms import PREDICT
from pipelines.load_arms_variants import Variant, eager, fastapi_app
from serving.online_features import MemoryStore
from serving.recommender import open_recommender
from serving.schemas import parse_request


def test_a_door_that_nobody_built_is_refused() -> None:
    with pytest.raises(ValueError, match="no door 'triton': choose one of endpoint, kserve, fastapi"):
        Variant("bundle", door="triton")


@pytest.mark.slow
def test_eager_torch_scores_as_the_graph_does(toy_line: Path) -> None:
    from components.examples import read_ranker_examples
    from components.ranker_artefact import GRAPH
    from components.scoring import OnnxRanker

    data = read_ranker_examples(toy_line / "examples", "calibration")
    found = eager(toy_line / "student")(
        np.array(data.dense, np.float32), np.array(data.categorical, np.int64)
    )
    assert np.abs(found - OnnxRanker(toy_line / "student" / GRAPH).scores(data)).max() < 1e-5


@pytest.mark.slow
def test_fastapi_answers_as_the_recommender_does(toy_line: Path) -> None:
    recommender = open_recommender(toy_line / "evaluated", MemoryStore())
    line = {"basket": ["item-001"], "at": "2024-06-12T10:00:00Z", "request_id": "r"}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(fastapi_app(recommender))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(PREDICT, json={"instances": [line]})

    [found] = asyncio.run(ask()).json()["predictions"]
    expected = recommender.recommend(parse_request(line, now=0.0, default_id="")).to_dict()
    recommender.facts.close()
    assert found["items"] == expected["items"]
    assert len(found["items"]) == 10
