"""`reco serve` and `reco up`; test_shell.py has the values that they refuse."""

import shutil
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


def test_unknown_variables_are_named(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `.env` as well, which the endpoint does not read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("RECO_AUDIT=1\nRECO_CALLER_TOKEN=x\n")
    monkeypatch.setenv("RECO_DEADLIN_MS", "5")
    monkeypatch.setattr("os.execve", lambda *call: None)
    monkeypatch.setattr("pipelines.live.supervisor.Supervisor.run", lambda self: None)
    served = reco(shop, "serve", "--http-port", "0")
    assert ".env: no setting is named RECO_AUDIT or RECO_CALLER_TOKEN, so it has no effect" in served.stderr
    own = shutil.copytree(shop, tmp_path / "shop")
    up = reco(own, "up", "--port", "0", "--grpc-port", "0", "--store-port", "0", "--broker-port", "0")
    assert "no setting is named RECO_AUDIT or RECO_CALLER_TOKEN or RECO_DEADLIN_MS, so" in up.stderr
