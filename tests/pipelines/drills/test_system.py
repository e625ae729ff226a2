"""The parts of the system that drills break: each can be started, broken and restored."""

import socket
from typing import Any

import pytest

from pipelines.drills.system import (
    ESTABLISHED,
    LISTENING,
    address_of,
    sockets_of,
    time_proto,
    two_crowds,
)
from serving.stores.online_features import timestamp
from tests.chaos.rows import TIMESTAMP


def asked(user: str | None, *basket: str) -> dict[str, Any]:
    return {"basket": list(basket)} | ({} if user is None else {"user_id": user})


def test_two_crowds_share_no_shopper_and_repeat_no_request() -> None:
    requests = [asked(f"u{n % 7}", "a", f"b{n % 5}") for n in range(200)] + [asked(None, "a")]
    first, second = two_crowds(requests, 6)
    assert len(first) == len(second) == 6
    users = [{request["user_id"] for request in crowd} for crowd in (first, second)]
    assert not users[0] & users[1]
    for crowd in (first, second):
        assert len({(request["user_id"], *request["basket"]) for request in crowd}) == 6


def test_one_shopper_is_not_enough() -> None:
    with pytest.raises(ValueError, match="one shopper"):
        two_crowds([asked("u1", "a"), asked("u1", "b"), asked(None, "c")], 5)


def test_times_are_encoded_as_in_feast() -> None:
    assert time_proto(1_700_000_000) == TIMESTAMP
    assert timestamp(time_proto(1_700_000_000.25)) == pytest.approx(1_700_000_000.25)


def test_listening_and_accepted_sockets_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sockets_of(port, LISTENING) == 1
        with socket.create_connection(server.getsockname()):
            accepted, _ = server.accept()
            assert sockets_of(port, ESTABLISHED) == 1, "the caller has a port of its own"
            accepted.close()
    assert sockets_of(port, LISTENING) == 0


def test_an_address_is_host_and_port_with_or_without_a_scheme() -> None:
    assert address_of("http://127.0.0.1:8080") == address_of("127.0.0.1:8080") == ("127.0.0.1", 8080)
