import socket
import time
from collections.abc import Iterator

import pytest

from pipelines.drills.fault_proxy import Proxy
from tests.chaos.listening import listening


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Before a server that answers each message with itself, twice."""

    def echo(client: socket.socket) -> None:
        while data := client.recv(100):
            client.sendall(data * 2)

    with listening(echo) as address, Proxy(address) as proxy:
        yield proxy


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=2)


def exchange(client: socket.socket) -> bytes:
    client.sendall(b"abc")
    answer = b""
    while len(answer) < 6 and (piece := client.recv(100)):
        answer += piece
    return answer


def test_the_proxy_forwards_requests_and_answers(proxy: Proxy) -> None:
    with dial(proxy) as client:
        assert exchange(client) == b"abcabc"
    assert proxy.accepted == 1


def test_latency_and_drip_slow_an_answer_down(proxy: Proxy) -> None:
    with dial(proxy) as client:
        proxy.latency_s = lambda: 0.05
        began = time.perf_counter()
        assert exchange(client) == b"abcabc"
        assert time.perf_counter() - began >= 0.05
        proxy.heal()
        proxy.drip = (1, 0.01)
        began = time.perf_counter()
        assert exchange(client) == b"abcabc"
        assert time.perf_counter() - began >= 0.05


def test_a_frozen_proxy_accepts_connections_and_answers_after_it_thaws(proxy: Proxy) -> None:
    proxy.frozen = True
    with dial(proxy) as client:
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            exchange(client)
        proxy.heal()
        client.settimeout(2)
        assert client.recv(100) == b"abcabc"


def keep_asking(client: socket.socket) -> None:
    """Ask until a reset that is on its way arrives; a reply that is cut short before is no error yet."""
    for _ in range(200):
        exchange(client)
        time.sleep(0.01)


def test_limit_data_cuts_an_answer_and_reset_peer_the_connection(proxy: Proxy) -> None:
    with dial(proxy) as client:
        proxy.limit_bytes = 2
        assert exchange(client) == b"ab"
    proxy.heal()
    with dial(proxy) as client:
        assert exchange(client) == b"abcabc"
        proxy.reset_peer()
        with pytest.raises(ConnectionError):
            keep_asking(client)
