import logging
import threading
import time
from collections.abc import Iterator

import pytest

from serving.stores.circuit_breaker import FAILURES, LATEST, MOST_FAILED, CircuitBreaker
from tests.chaos.procs import eventually
from tests.serving.conftest import metric


class Dependency:
    """A dependency that is healthy until a failure is injected, or its probe is broken."""

    def __init__(self) -> None:
        self.is_down = False
        self.defect: Exception | None = None
        self.probes = 0

    def probe(self) -> bool:
        self.probes += 1
        if self.defect:
            raise self.defect
        return not self.is_down


def probing() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "some-thing-probe"]


@pytest.fixture
def dependency() -> Dependency:
    return Dependency()


@pytest.fixture
def breaker(dependency: Dependency) -> Iterator[CircuitBreaker]:
    breaker = CircuitBreaker("some_thing", dependency.probe, probe_s=0.02)
    yield breaker
    breaker.close()
    assert not probing()


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.failed("down")


def test_a_few_failures_in_a_row_open_the_breaker(breaker: CircuitBreaker, dependency: Dependency) -> None:
    dependency.is_down = True
    for _ in range(2):
        fail(breaker, FAILURES - 1)
        breaker.succeeded()
        assert not breaker.is_open
    fail(breaker, FAILURES)
    assert breaker.is_open


def test_a_high_share_of_recent_failures_opens_the_breaker(
    breaker: CircuitBreaker, dependency: Dependency
) -> None:
    dependency.is_down = True
    calls = 0
    while not breaker.is_open:
        fail(breaker, 1)
        breaker.succeeded()
        calls += 2
    assert calls == 2 * MOST_FAILED <= LATEST


def test_rare_failures_never_open_the_breaker(breaker: CircuitBreaker) -> None:
    for _ in range(1_000):
        fail(breaker, 1)
        for _ in range(LATEST // MOST_FAILED):
            breaker.succeeded()
    assert not breaker.is_open


def test_probing_ends_once_the_dependency_is_healthy(dependency: Dependency) -> None:
    def shown() -> float:
        return metric("reco_breaker_open", dependency="some_thing")

    breaker = CircuitBreaker("some_thing", dependency.probe, probe_s=0.02)
    dependency.is_down = True
    fail(breaker, FAILURES)
    eventually(lambda: dependency.probes > 3)
    assert (breaker.is_open, shown()) == (True, 1)
    dependency.is_down = False
    eventually(lambda: not breaker.is_open)
    eventually(lambda: not probing() and shown() == 0)
    fail(breaker, FAILURES - 1)
    assert not breaker.is_open, "what failed before is forgotten"
    breaker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_probe_does_not_keep_the_breaker_open(
    breaker: CircuitBreaker, dependency: Dependency
) -> None:
    dependency.defect = ZeroDivisionError("a defect")
    fail(breaker, FAILURES)
    eventually(lambda: not breaker.is_open)


def test_closing_ends_the_probing(dependency: Dependency) -> None:
    breaker = CircuitBreaker("some_thing", dependency.probe, probe_s=0.02)
    dependency.is_down = True
    fail(breaker, FAILURES)
    breaker.close()
    assert not breaker.is_open
    probes = dependency.probes
    time.sleep(0.1)
    assert dependency.probes == probes


def test_many_threads_open_the_breaker_once(dependency: Dependency, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dependency.is_down = True  # else a probe closes the breaker while threads still fail
    breaker = CircuitBreaker("some_thing", dependency.probe, probe_s=60.0)
    threads = [threading.Thread(target=fail, args=(breaker, 50)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert breaker.is_open
    assert len(probing()) == 1
    assert len(caplog.records) == 1
    assert "some_thing failed 3 times in a row, in 3 of the latest 20 calls" in caplog.text
    breaker.close()
