"""A command that prints its ready line -> processor time and memory of its processes."""

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.bench.load.measured_server import MeasuredServer, processes_of, started
from serving.settings import Settings
from tests.chaos.listening import http_answers
from tests.chaos.procs import eventually

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
burnt = subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"])
sys.stderr.write('{"event": "ready", "http": "nowhere"}\\n')
sys.stderr.flush()
time.sleep(60)
"""


@pytest.mark.slow
def test_a_server_is_measured_with_its_children_and_ends_with_them(tmp_path: Path) -> None:
    said = tmp_path / "server.log"
    with started([sys.executable, "-c", BUSY], Settings().to_env(), said) as server:
        assert server.ready["http"] == "nowhere"
        family = processes_of(server.process.pid)
        assert len(family) == 2
        assert server.cpu_ms() >= 10, "the child that ended counts, too"
        memory = server.memory_mb()
        assert 0 < memory["pss"] <= memory["rss"]
        assert 0 < memory["anonymous"] < memory["rss"]
    assert server.process.returncode is not None
    eventually(lambda: not any(map(_is_alive, family)))  # a signal is on its way for a moment


@pytest.mark.slow
def test_the_last_output_of_a_server_that_fails_to_start_is_in_the_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no bundle here')"]
    with (
        pytest.raises(RuntimeError, match="did not start: no bundle here"),
        started(command, Settings().to_env(), tmp_path / "server.log"),
    ):
        pass


def test_samples_are_read_by_metric_and_label() -> None:
    text = (
        b"# TYPE reco_looks_total counter\n"
        b'reco_looks_total{level="process",outcome="hit"} 3.0\n'
        b'reco_looks_total{level="redis",outcome="miss"} 1.0\n'
        b"# TYPE reco_other_total counter\nreco_other_total 7.0\n"
    )

    with http_answers(lambda path: (200, text) if path == "/metrics" else (404, b"")) as url:
        process: Any = None
        server = MeasuredServer(process, {"http": url})
        found = server.samples("reco_looks_total")
        nothing = server.samples("reco_nothing_total")
    assert found == {("process", "hit"): 3.0, ("redis", "miss"): 1.0}
    assert nothing == {}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
