import socket
import threading
import time
from collections.abc import Iterator

import pytest

from serving.redis.connection import Connection, ReplyError
from serving.redis.pool import MAX_CONNECTIONS, Pool
from tests.chaos.procs import eventually


class Opened:
    """Opens connections to nowhere and knows which are still open."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.delay_s = 0.0
        self.failure: Exception | None = None
        self.calls = 0

    def __call__(self, deadline: float) -> Connection:
        self.calls += 1
        time.sleep(self.delay_s)
        if self.failure:
            raise self.failure
        one, other = socket.socketpair()
        other.close()
        self.sockets.append(one)
        return Connection(one)

    @property
    def open(self) -> int:
        return sum(one.fileno() >= 0 for one in self.sockets)


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    assert opened.open == 0, "a closed pool keeps nothing open"


def soon(seconds: float = 5.0) -> float:
    return time.perf_counter() + seconds


def test_a_connection_is_used_again(opened: Opened) -> None:
    pool = Pool(opened)
    for _ in range(5):
        with pool.connection(soon()):
            assert opened.open == 1
    assert opened.calls == 1
    pool.close()


def test_two_at_once_have_one_each_and_no_more_than_so_many_are_opened(opened: Opened) -> None:
    pool, together = Pool(opened), threading.Barrier(MAX_CONNECTIONS + 1)
    refused: list[Exception] = []
    held: list[Connection] = []

    def take() -> None:
        with pool.connection(soon()) as connection:
            held.append(connection)
            together.wait(10)

    threads = [threading.Thread(target=take) for _ in range(MAX_CONNECTIONS)]
    for thread in threads:
        thread.start()
    eventually(
        lambda: len(held) == MAX_CONNECTIONS, 5
    )  # opened is too early: it could still be had by another
    try:
        with pool.connection(soon(0.02)):
            pass
    except TimeoutError as error:
        refused.append(error)
    together.wait(10)
    for thread in threads:
        thread.join()
    assert refused
    assert opened.calls == MAX_CONNECTIONS
    pool.close()


def test_an_error_of_the_server_keeps_the_connection_and_any_other_replaces_it(opened: Opened) -> None:
    pool = Pool(opened)
    with pytest.raises(ReplyError), pool.connection(soon()):
        raise ReplyError("NOPERM no")
    assert opened.calls == 1
    for kind in (TimeoutError, ConnectionResetError, ValueError, KeyboardInterrupt):
        with pytest.raises(kind), pool.connection(soon()):
            raise kind
        with pool.connection(soon()):
            assert opened.open == 1
    assert opened.calls == 5
    pool.close()


def test_a_lost_connection_takes_the_ready_ones_with_it_and_a_late_one_does_not(opened: Opened) -> None:
    for kind, left in ((TimeoutError, 1), (ConnectionResetError, 0)):
        pool = Pool(opened)
        with pool.connection(soon()), pool.connection(soon()):
            pass
        assert opened.open == 2
        opened.delay_s = 0.05  # the replacement comes later
        with pytest.raises(kind), pool.connection(soon()):
            raise kind
        assert opened.open == left
        opened.delay_s = 0
        with pool.connection(soon()):
            pass
        pool.close()
        time.sleep(0.1)


def test_waiting_ends_at_the_deadline_and_the_late_connection_serves_the_next(opened: Opened) -> None:
    pool = Pool(opened)
    opened.delay_s = 0.1
    began = time.perf_counter()
    with pytest.raises(TimeoutError), pool.connection(began + 0.01):
        pass
    with pool.connection(soon()):
        assert opened.calls == 1
    pool.close()


def test_a_failure_to_connect_is_told_at_once_and_tried_anew_by_the_next(opened: Opened) -> None:
    pool = Pool(opened)
    opened.failure = ConnectionRefusedError("nobody")
    for calls in (1, 2):
        with pytest.raises(ConnectionRefusedError), pool.connection(soon()):
            pass
        assert opened.calls == calls
    opened.failure = None
    with pool.connection(soon()):
        pass
    pool.close()


def test_what_is_taken_or_being_opened_when_the_pool_closes_is_closed_later(opened: Opened) -> None:
    pool = Pool(opened)
    with pool.connection(soon()):
        pool.close()
        assert opened.open == 1
    assert opened.open == 0
    opened.delay_s = 0.05
    pool.prepare()
    pool.close()
    eventually(lambda: len(opened.sockets) == 2 and opened.open == 0, 5)


def test_many_hurried_reads_of_a_slow_server_gather_no_threads(opened: Opened) -> None:
    pool = Pool(opened)
    opened.delay_s = 0.1
    for _ in range(50):
        with pytest.raises(TimeoutError), pool.connection(soon(0.0005)):
            pass
    assert opened.calls <= 2
    with pool.connection(soon()):
        pass
    time.sleep(0.2)
    pool.close()
