"""`reco serve`; test_shell.py has the values that it and `reco up` refuse."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.cli.conftest import reco


def test_the_endpoint_replaces_the_command(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *call: started.extend(call))
    assert reco(shop, "serve", "--http-port", "0").exit_code == 0
    program, arguments, environment = started
    assert (program, arguments[1:]) == (sys.executable, ["-P", "-m", "serving.server", "--home", str(shop)])
    assert environment["RECO_HTTP_PORT"] == "0"
