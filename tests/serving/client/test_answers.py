import json

import pytest

from serving import schemas
from serving.client import answers
from serving.client.answers import NotAnswered, Recommendations, RecommendedItem, read_answer
from serving.schemas import REASONS, RUNGS


def test_the_limits_are_those_of_the_endpoint() -> None:
    assert (answers.DEFAULT_K, answers.MAX_K) == (schemas.DEFAULT_K, schemas.MAX_K)


def test_unknown_fields_are_ignored() -> None:
    document = {"items": [{"item_id": "i1", "score": 1, "stars": [5]}], "mood": {"good": True}}
    answer = read_answer(json.dumps(document).encode(), "r")
    assert answer == Recommendations("r", (RecommendedItem("i1", 1.0, "", ""),), "")


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"items": null}',
        b'{"items": [1]}',
        b'{"items": [{"item_id": "i"}]}',
        b'{"items": [{"item_id": 7, "score": 0.5}]}',
        b'{"items": [{"item_id": "i", "score": NaN}]}',
        b'{"items": [{"item_id": "i", "score": 1e999}]}',
        b'{"items": [{"item_id": "i", "score": 0.5, "price": "cheap"}]}',
        b'{"items": [], "request_id": "of somebody else"}',
        b"[" * 100_000,
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_a_malformed_answer_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnswered) as raised:
        read_answer(body, "r")
    assert raised.value.reason == answers.MALFORMED_ANSWER


@pytest.mark.parametrize("rung", RUNGS)
def test_each_rung_and_its_reason_reach_the_caller(rung: str) -> None:
    document = {"items": [], "rung": rung, "degraded": rung != "full", "degraded_reason": REASONS[0]}
    answer = read_answer(json.dumps(document).encode(), "r1")
    assert (answer.rung, answer.degraded, answer.degraded_reason) == (rung, rung != "full", REASONS[0])
