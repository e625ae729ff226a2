import json
import math

import pytest

from serving.api.http_routes import RECOMMENDATIONS
from serving.client import attempts
from serving.client.attempts import Breaker, Budget, NotAnswered, read_answer
from serving.schemas import REASONS, RUNGS


def test_the_path_is_the_endpoints() -> None:
    assert attempts.PATH == RECOMMENDATIONS


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
def test_what_is_no_answer(body: bytes) -> None:
    with pytest.raises(NotAnswered) as raised:
        read_answer(body, "r")
    assert raised.value.reason == attempts.MALFORMED_ANSWER


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "invalid_request"),
        (413, "invalid_request"),
        (422, "invalid_request"),
        (429, "overloaded"),
        (503, "overloaded"),
        (500, "server_error"),
        (504, "server_error"),
        (301, "unexpected_status"),
        (404, "unexpected_status"),
    ],
)
def test_what_a_status_means(status: int, reason: str) -> None:
    assert attempts._meaning(status) == reason


def test_the_budget_is_a_tenth_of_the_calls_and_saves_up_a_few() -> None:
    budget, calls = Budget(), 10_000
    spent = 0
    for _ in range(calls):
        budget.earn()
        spent += budget.spend()
    assert 0.09 * calls < spent <= 0.1 * calls + 1
    for _ in range(calls):
        budget.earn()
    assert sum(budget.spend() for _ in range(calls)) == math.floor(attempts.RETRIES_SAVED)


def test_the_breaker_tries_one_call_after_a_pause() -> None:
    breaker, error = Breaker(), NotAnswered("server_error", "500")
    for _ in range(attempts.FAILURES):
        assert breaker.lets_through(0.0)
        breaker.failed(0.0, error)
    assert not breaker.lets_through(attempts.PAUSE_S / 2)
    assert [breaker.lets_through(attempts.PAUSE_S) for _ in range(3)] == [True, False, False]
    breaker.failed(attempts.PAUSE_S, error)
    assert not breaker.lets_through(1.5 * attempts.PAUSE_S)
    assert breaker.lets_through(2 * attempts.PAUSE_S)
    breaker.well()
    assert all(breaker.lets_through(2 * attempts.PAUSE_S) for _ in range(3))


@pytest.mark.parametrize("rung", RUNGS)
def test_each_rung_and_its_reason_reach_the_caller(rung: str) -> None:
    said = {"items": [], "rung": rung, "degraded": rung != "full", "degraded_reason": REASONS[0]}
    answer = read_answer(json.dumps(said).encode(), "r1")
    assert (answer.rung, answer.degraded, answer.degraded_reason) == (rung, rung != "full", REASONS[0])
