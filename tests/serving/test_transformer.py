"""The adapter on its own: whatever breaks behind it, the checkout gets an answer."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.online_features import open_store
from serving.prediction_log import PredictionLog, read_log
from serving.recommender import Recommender, open_recommender

pytestmark = pytest.mark.slow  # importing kserve takes seconds

REQUEST = {"request_id": "r1", "user_id": "u1", "basket": ["1000005"], "at": "2017-12-05T18:30:00Z", "k": 4}
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def recommender(toy_bundle: Path, toy_store: str) -> Recommender:
    return open_recommender(toy_bundle, open_store(toy_store))


@pytest.fixture
def ask() -> Ask:
    from serving.predictor import Ranker
    from serving.transformer import Checkout

    def answers(
        recommender: Recommender, *requests: dict[str, Any], deadline_ms: float = 1e6
    ) -> list[dict[str, Any]]:
        model = Checkout(recommender, Ranker(recommender.rank, [999, 99, 99, 99]), deadline_ms)
        given, _ = asyncio.run(model({"instances": list(requests)}, {}))
        return given["predictions"]

    return answers


def test_a_broken_ranker_is_answered_by_best_sellers(
    recommender: Recommender, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Recommender(replace(recommender.bundle, ranker=None), open_store("memory:"))
    (answer,) = ask(broken, REQUEST)
    assert (answer["rung"], answer["degraded"], answer["degraded_reason"]) == (
        "popular",
        True,
        "predict_error",
    )
    assert [item["item_id"] for item in answer["items"]] == ["1000000", "1000001", "1000002", "1000003"]
    assert caplog.records[0].exc_info


def test_broken_retrieval_is_answered_by_the_store_s_best_sellers(recommender: Recommender, ask: Ask) -> None:
    broken = Recommender(replace(recommender.bundle, query_tower=None), open_store("memory:"))
    answers = ask(broken, {**REQUEST, "store_id": "store-1"}, REQUEST)
    assert [a["rung"] for a in answers] == ["segment", "popular"]
    assert {a["degraded_reason"] for a in answers} == {"preprocess_error"}
    assert {item["source"] for item in answers[0]["items"]} == {"store"}


def test_when_all_is_broken_the_answer_is_an_empty_list(
    recommender: Recommender, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = Recommender(recommender.bundle, open_store("memory:"))
    nothing.bundle = replace(recommender.bundle, statistics=None)  # type: ignore[arg-type]
    (answer,) = ask(nothing, REQUEST)
    assert (answer["items"], answer["rung"], answer["degraded"]) == ([], "empty", True)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


def test_a_late_answer_steps_down(recommender: Recommender, ask: Ask, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, ())
    late = Recommender(recommender.bundle, open_store("memory:"), log)
    answers = ask(late, REQUEST, REQUEST, deadline_ms=1e-6)
    log.close()
    assert {a["degraded_reason"] for a in answers} == {"deadline_exceeded"}
    assert read_log(tmp_path)["degraded_reason"].to_pylist() == ["deadline_exceeded"] * 2


def test_each_request_of_a_body_has_its_own_state(recommender: Recommender, ask: Ask) -> None:
    requests = [{**REQUEST, "k": k, "request_id": f"r{k}"} for k in range(5)]
    together = ask(recommender, *requests)
    alone = [ask(recommender, request)[0] for request in requests]
    assert [[i["item_id"] for i in a["items"]] for a in together] == [
        [i["item_id"] for i in a["items"]] for a in alone
    ]
    assert [a["request_id"] for a in together] == [f"r{k}" for k in range(5)]
