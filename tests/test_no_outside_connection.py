"""The endpoint and `reco drift` connect to configured places only; the test of the tutorial covers a run.

The guard of all other tests is `tests/chaos/connections.py`.
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serving.settings import Settings
from tests.conftest import taken_connections
from tests.pipelines.conftest import toy_home
from tests.programs import outside, run_python, watched

SERVED_S = 14.0  # ONNX Runtime's telemetry looks its host up 4 to 12 s after the first session

pytestmark = pytest.mark.slow
OUTSIDE = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 53))"
LOOK_UP = "import socket; socket.getaddrinfo(b'shop.example', 443)"


def test_a_program_of_a_test_reaches_this_machine_only() -> None:
    again = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {OUTSIDE!r}]))"
    for program, act in ((OUTSIDE, "connects to ('192.0.2.1'"), (again, "192.0.2.1"), (LOOK_UP, "looks up")):
        with pytest.raises(AssertionError, match=f"ConnectionRefusedError: a test .*{re.escape(act)}"):
            run_python("-c", program)
        assert act in taken_connections()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("strace") is None:
        pytest.skip("no strace on this machine")
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)  # of the tests themselves
    return tmp_path / "connections.log"


def test_a_connection_is_seen(log: Path) -> None:
    run_python("-I", "-c", OUTSIDE, before=watched(log))  # -I: without the guard
    [line] = outside(log)
    assert "192.0.2.1" in line


def test_a_look_up_through_a_resolver_on_this_machine_is_seen(log: Path) -> None:
    program = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('127.0.0.53', {}))"
    for port, seen in ((53, 1), (5353, 0)):
        run_python("-c", program.format(port), before=watched(log))
        assert len(outside(log)) == seen


def test_the_endpoint_connects_to_nothing(toy_line: Path, tmp_path: Path, log: Path) -> None:
    home = toy_home(tmp_path / "home", toy_line)
    settings = Settings(home=home, store_url=f"sqlite:///{home}/online_store.db", http_port=0, grpc_port=0)
    command = [*watched(log), sys.executable, "-m", "serving.server", "--home", str(home)]
    environment = settings.to_env()
    assert "ORT_DISABLE_TELEMETRY" not in environment
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any('"event": "ready"' in line for line in process.stderr)
        time.sleep(SERVED_S)
        [endpoint] = psutil.Process(process.pid).children()
        endpoint.terminate()
        process.communicate(timeout=60)
    assert not outside(log)


def test_drift_connects_to_nothing(toy_line: Path, tmp_path: Path, log: Path) -> None:
    home = toy_home(tmp_path / "home", toy_line)
    window = ["--from", "2024-03-01", "--until", "2024-04-01", "--reference-from", "2024-02-01"]
    arguments = ["--data", str(toy_line / "dataset"), *window, "--reference-until", "2024-03-01"]
    run_python("-m", "pipelines.cli", "--home", home, "drift", *arguments, before=watched(log))
    assert not outside(log)
