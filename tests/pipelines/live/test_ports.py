import socket

import pytest

from pipelines.live.ports import PortInUse, answers, claim_port, free_port, page
from tests.chaos.listening import http_answers


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_a_port_in_use_is_refused_with_the_option_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {taken} .* choose another one with --port"):
            claim_port(taken, "--port")
    assert claim_port(taken, "--port") == taken


def test_a_proxy_of_the_shell_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http_answers(lambda path: (404 if path == "/gone" else 200, path.encode())) as url:
        assert answers(url) == ""
        assert "Not Found" in answers(f"{url}/gone")
        assert page(f"{url}/metrics", 30.0) == b"/metrics"
    assert "refused" in answers(url)
