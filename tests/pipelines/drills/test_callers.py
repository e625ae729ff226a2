"""Bodies of 80 MB, sent to a server that refuses them: the refusals and other answers are counted."""

import socket
import threading

import pytest

from pipelines.drills import callers as drill_callers
from pipelines.drills.callers import send_long_bodies
from tests.chaos.listening import listening

REFUSED = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "status"), [(REFUSED, "413"), (b"HTTP/1.1 200 OK\r\n\r\n", "200"), (b"", "none")]
)
def test_each_body_is_counted_by_its_answer(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, status: str
) -> None:
    monkeypatch.setattr(drill_callers, "BODY_BYTES", 1_000_000)
    over, heads = threading.Event(), list[bytes]()

    def serve(client: socket.socket) -> None:
        heads.append(client.recv(200))
        if len(heads) >= 4:  # first: a reset connection ends this thread
            over.set()
        client.sendall(answer)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 20):
            pass

    with listening(serve) as (host, port):
        found = send_long_bodies(host, port, "/path", over.is_set)
    assert found.keys() == {status}
    assert found[status] >= 4
    assert all(head.startswith(b"POST /path HTTP/1.1\r\n") for head in heads)
    assert b"Content-Length" in heads[0]
    assert b"chunked" in heads[1]


def test_without_a_server_no_body_counts_as_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        host, port = closed.getsockname()
    over = threading.Event()
    threading.Timer(0.1, over.set).start()
    assert send_long_bodies(host, port, "/path", over.is_set).keys() == {"none"}
