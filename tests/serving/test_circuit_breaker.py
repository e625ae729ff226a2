import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from serving.circuit_breaker import CircuitBreaker
from serving.errors import FeaturesUnavailable, RowInvalid
from serving.online_features import UserRow
from tests.chaos.procs import eventually

ROW = UserRow(b"row", 1.0)


class Store:
    """Knows user 42; fails as long as it is told to."""

    def __init__(self) -> None:
        self.failure: Callable[[], Exception] | None = None
        self.reads = 0
        self.closed = False

    def read(self, user_id: str) -> UserRow | None:
        self.reads += 1
        if self.failure:
            raise self.failure()
        return ROW if user_id == "42" else None

    def close(self) -> None:
        self.closed = True


def down() -> Exception:
    return FeaturesUnavailable("down")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def breaker(store: Store) -> Iterator[CircuitBreaker]:
    breaker = CircuitBreaker(store, probe_s=0.02)
    yield breaker
    breaker.close()
    assert store.closed
    assert not [one for one in threading.enumerate() if one.name == "store-probe"]


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        with pytest.raises(FeaturesUnavailable):
            breaker.read("42")


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_it_reads_through(breaker: CircuitBreaker) -> None:
    assert breaker.read("42") == ROW
    assert breaker.read("43") is None


def test_three_failures_in_a_row_open_it_and_a_success_between_does_not(
    breaker: CircuitBreaker, store: Store
) -> None:
    for _ in range(5):
        store.failure = down
        fail(breaker, 2)
        store.failure = None
        assert breaker.read("42") == ROW
    store.failure = down
    fail(breaker, 3)
    assert breaker.is_open


def test_an_open_one_does_not_ask_and_closes_when_the_store_is_back(store: Store) -> None:
    breaker = CircuitBreaker(store, probe_s=0.2)
    store.failure = down
    fail(breaker, 3)
    asked = store.reads
    fail(breaker, 50)
    assert store.reads - asked <= 1, "only the one in the background"
    eventually(lambda: store.reads > asked + 1)  # it goes on trying
    assert breaker.is_open
    store.failure = None
    assert eventually(lambda: not breaker.is_open) < 2
    assert breaker.read("42") == ROW
    breaker.close()


def test_a_bad_row_of_one_user_takes_nobody_elses_away(breaker: CircuitBreaker, store: Store) -> None:
    store.failure = lambda: RowInvalid("torn")
    fail(breaker, 10)
    assert not breaker.is_open
    store.failure = None
    assert breaker.read("42") == ROW


def test_an_answer_of_any_kind_closes_it(breaker: CircuitBreaker, store: Store) -> None:
    store.failure = down
    fail(breaker, 3)
    store.failure = lambda: RowInvalid("torn")
    eventually(lambda: not breaker.is_open)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_while_probing_does_not_leave_it_open_for_ever(
    breaker: CircuitBreaker, store: Store
) -> None:
    store.failure = down
    fail(breaker, 3)
    store.failure = lambda: ZeroDivisionError("a defect")
    eventually(lambda: not breaker.is_open)


def test_closing_ends_the_probing_and_a_later_read_asks_again(breaker: CircuitBreaker, store: Store) -> None:
    store.failure = down
    fail(breaker, 3)
    breaker.close()
    asked = store.reads
    time.sleep(0.1)
    assert store.reads == asked
    store.failure = None
    assert breaker.read("42") == ROW


def test_many_threads_open_it_once_and_all_are_answered(breaker: CircuitBreaker, store: Store) -> None:
    store.failure = down
    outcomes: list[str] = []

    def ask() -> None:
        for _ in range(50):
            try:
                breaker.read("42")
                outcomes.append("row")
            except FeaturesUnavailable:
                outcomes.append("unavailable")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["unavailable"] * 400
    assert len([one for one in threading.enumerate() if one.name == "store-probe"]) == 1


def test_reads_are_counted_by_outcome_and_the_gauge_tells(breaker: CircuitBreaker, store: Store) -> None:
    def counted() -> dict[str, float]:
        names = ("found", "absent", "invalid", "failed", "refused")
        return {name: sample("reco_store_reads_total", outcome=name) for name in names}

    before = counted()
    breaker.read("42")
    breaker.read("43")
    store.failure = lambda: RowInvalid("torn")
    fail(breaker, 1)
    store.failure = down
    fail(breaker, 4)
    assert sample("reco_store_breaker_open") == 1
    store.failure = None
    eventually(lambda: not breaker.is_open)
    assert sample("reco_store_breaker_open") == 0
    gained = {name: value - before[name] for name, value in counted().items()}
    assert gained == {"found": 1, "absent": 1, "invalid": 1, "failed": 3, "refused": 1}
