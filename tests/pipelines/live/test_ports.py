import socket

import pytest

from pipelines.live.ports import answers, free_port, page
from tests.chaos.listening import http_answers


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_a_proxy_of_the_shell_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http_answers(lambda path: (404 if path == "/gone" else 200, path.encode())) as url:
        assert answers(url) == ""
        assert "Not Found" in answers(f"{url}/gone")
        assert page(f"{url}/metrics", 30.0) == b"/metrics"
    assert "refused" in answers(url)
