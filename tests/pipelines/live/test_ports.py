import socket

import pytest

from pipelines.live.ports import PortInUse, claim_port, free_port


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_a_port_in_use_is_refused_with_the_option_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {taken} .* choose another one with --port"):
            claim_port(taken, "--port")
    assert claim_port(taken, "--port") == taken
