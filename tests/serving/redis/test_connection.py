"""A server of bytes that the test writes: what comes, how late, how much at a time."""

import socket
import time
from collections.abc import Callable

import pytest

from serving.redis.address import RedisAddress
from serving.redis.connection import Connection, ReplyError, connect, connect_to_master
from tests.chaos.listening import listening


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    def serve(client: socket.socket) -> None:
        for answer in answers:
            if not client.recv(1_000):
                return
            client.sendall(answer)

    return serve


def dial(node: tuple[str, int]) -> Connection:
    return Connection(socket.create_connection(node))


def soon() -> float:
    return time.perf_counter() + 5


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-7\r\n", -7),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
        (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", [b"a", [1]]),
    ],
)
def test_each_kind_of_reply_is_read(answer: bytes, reply: object) -> None:
    with listening(answering(answer, b"+next\r\n")) as node:
        connection = dial(node)
        assert connection.ask(soon(), b"ANY") == reply
        assert connection.ask(soon(), b"ANY") == b"next", "nothing of the first was left"
        connection.close()


def test_what_is_sent_is_the_command() -> None:
    heard: list[bytes] = []

    def serve(client: socket.socket) -> None:
        heard.append(client.recv(1_000))
        client.sendall(b"+OK\r\n")

    with listening(serve) as node:
        connection = dial(node)
        connection.ask(soon(), b"GET", b"a\r\nb", b"")
        connection.close()
    assert heard == [b"*3\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n$0\r\n\r\n"]


def test_an_error_shows_its_code_alone_and_the_connection_stays_good() -> None:
    with listening(answering(b"-WRONGPASS for user 'hunter2'\r\n", b"+OK\r\n")) as node:
        connection = dial(node)
        with pytest.raises(ReplyError, match=r"^WRONGPASS$") as caught:
            connection.ask(soon(), b"AUTH")
        assert caught.value.code == "WRONGPASS"
        assert connection.ask(soon(), b"PING") == b"OK"
        connection.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"*1\r\n-ERR\r\n", b"*1\r\n" * 30, b"x" * 100_000, b"\r\n"],
)
def test_what_is_no_reply_is_told(answer: bytes) -> None:
    with listening(answering(answer)) as node:
        connection = dial(node)
        with pytest.raises(ValueError):
            connection.ask(soon(), b"PING")
        connection.close()


@pytest.mark.parametrize("answer", [b"", b"$10\r\nabc", b"*2\r\n$1\r\na\r\n"])
def test_half_an_answer_and_an_end_is_a_lost_connection(answer: bytes) -> None:
    with listening(answering(answer)) as node:
        connection = dial(node)
        with pytest.raises(ConnectionError):
            connection.ask(soon(), b"PING")
        connection.close()


@pytest.mark.parametrize("head", [b"+", b"$9999\r\n", b"*9999\r\n", b"*1000000000\r\n$1\r\na\r\n"])
def test_a_server_that_drips_holds_nobody_beyond_the_deadline(head: bytes) -> None:
    def drip(client: socket.socket) -> None:
        client.recv(1_000)
        client.sendall(head)
        for _ in range(400):
            client.sendall(b"1")
            time.sleep(0.004)

    with listening(drip) as node:
        connection = dial(node)
        began = time.perf_counter()
        with pytest.raises(TimeoutError):
            connection.ask(began + 0.03, b"PING")
        assert time.perf_counter() - began < 0.5, "each wait of its own would have taken 1.6 s"
        connection.close()


def test_a_deadline_that_is_over_asks_nothing() -> None:
    with listening(answering(b"+OK\r\n")) as node:
        connection = dial(node)
        with pytest.raises(TimeoutError):
            connection.ask(time.perf_counter() - 1, b"PING")
        connection.close()


@pytest.mark.parametrize(
    ("here", "reply"), [(b"+OK\r\n", b"OK"), (b"", None), (b"+O", None), (b"$9\r\nhalf", None)]
)
def test_what_is_here_when_this_thread_comes_late_is_taken_and_nothing_waited_for(
    monkeypatch: pytest.MonkeyPatch, here: bytes, reply: bytes | None
) -> None:
    clock = iter([0.0, 1.0, 1.0, 1.0])  # the question is in time, what follows is not
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(here)
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        connection = Connection(ours)
        if reply is not None:
            assert connection.ask(0.5, b"PING") == reply
        else:
            with pytest.raises(TimeoutError, match="no reply in time"):
                connection.ask(0.5, b"PING")


def test_a_server_that_accepts_and_never_answers_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = RedisAddress("server", (mute.getsockname(),), tls=False)
        for tls in (False, True):
            with pytest.raises(TimeoutError):
                connect(
                    RedisAddress("server", address.nodes, tls=tls),
                    mute.getsockname(),
                    time.perf_counter() + 0.05,
                )


def test_a_frozen_sentinel_leaves_time_for_the_next_and_the_master() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, listening(answering(b"+PONG\r\n")) as master:
        where = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(master[1])), master[1])
        with listening(answering(where)) as sentinel:
            address = RedisAddress("sentinel", (mute.getsockname(), sentinel), service="shop")
            connect_to_master(address, time.perf_counter() + 3).close()


def test_a_service_that_no_sentinel_watches_is_named() -> None:
    with listening(answering(b"*-1\r\n")) as sentinel:
        address = RedisAddress("sentinel", (sentinel,), service="shop")
        with pytest.raises(ConnectionError, match="watch no service 'shop'"):
            connect_to_master(address, soon())
