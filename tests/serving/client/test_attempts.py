import math

from serving.api.http_routes import RECOMMENDATIONS
from serving.client import attempts
from serving.client.answers import NotAnswered
from serving.client.attempts import CallBreaker, RetryBudget


def test_the_path_is_the_endpoints() -> None:
    assert attempts.PATH == RECOMMENDATIONS


def test_the_retry_budget_is_a_tenth_of_the_calls_with_a_small_reserve() -> None:
    budget, calls = RetryBudget(), 10_000
    spent = 0
    for _ in range(calls):
        budget.earn()
        spent += budget.spend()
    assert 0.09 * calls < spent <= 0.1 * calls + 1
    for _ in range(calls):
        budget.earn()
    assert sum(budget.spend() for _ in range(calls)) == math.floor(attempts.MAX_SAVED_RETRIES)


def test_the_breaker_tries_one_call_after_a_pause() -> None:
    breaker, error = CallBreaker(), NotAnswered("server_error", "500")
    for _ in range(attempts.FAILURES):
        assert breaker.allows(0.0)
        breaker.failed(0.0, error)
    assert not breaker.allows(attempts.PAUSE_S / 2)
    assert [breaker.allows(attempts.PAUSE_S) for _ in range(3)] == [True, False, False]
    breaker.failed(attempts.PAUSE_S, error)
    assert not breaker.allows(1.5 * attempts.PAUSE_S)
    assert breaker.allows(2 * attempts.PAUSE_S)
    breaker.succeed()
    assert all(breaker.allows(2 * attempts.PAUSE_S) for _ in range(3))
