"""Several processes behind one port: shared load, crashes, restarts and a common shutdown."""

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serving.metrics import FOLDER
from serving.prediction_log import _whole_batches, read_log
from serving.processes import (
    LONGEST_PAUSE_S,
    LONGEST_READY_PAUSE_S,
    NoneStarts,
    Processes,
    hold,
    memory_mb,
    metrics_folder,
    pause_s,
)
from serving.settings import Settings
from tests.chaos.callers import V1, calling
from tests.chaos.procs import children, eventually, workers
from tests.serving.conftest import Running, ask, refused_start


def test_the_first_restart_is_immediate_and_later_ones_back_off() -> None:
    assert [pause_s(deaths, was_ready=False) for deaths in (0, 1, 2, 3, 4)] == [0, 0, 0.5, 1, 2]
    assert pause_s(1_000, was_ready=False) == LONGEST_PAUSE_S
    assert pause_s(1_000, was_ready=True) == LONGEST_READY_PAUSE_S


def bound(port: int = 0, **options: int) -> socket.socket:
    made = socket.socket()
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    return made


def test_a_reserved_port_can_be_bound_by_the_children_only() -> None:
    with bound(SO_REUSEADDR=1) as parent:
        hold(parent)
        port = parent.getsockname()[1]
        for _ in range(2):  # before the children start, and after they end
            with pytest.raises(OSError, match="in use"):
                bound(port, SO_REUSEADDR=1)
            with (
                bound(port, SO_REUSEADDR=1, SO_REUSEPORT=1) as first,
                bound(port, SO_REUSEADDR=1, SO_REUSEPORT=1) as second,
            ):
                first.listen()
                second.listen()
                with pytest.raises(OSError, match="in use"):
                    bound(port, SO_REUSEADDR=1)


def test_memory_counts_shared_pages_once() -> None:
    own = memory_mb(os.getpid())
    assert own is not None
    assert own > 10
    assert memory_mb(2**31 - 1) is None


def test_the_metrics_folder_is_removed_at_the_end_and_that_of_a_killed_parent_by_the_next() -> None:
    with metrics_folder() as folder:
        own = Path(folder)
    assert not own.exists()
    # In a pod the endpoint before this one had the same number.
    killed = [own.with_name(f"{FOLDER}{parent}-abc") for parent in (2**31 - 1, os.getpid())]
    living = own.with_name(f"{FOLDER}{os.getppid()}-abc")
    for left in (*killed, living):
        left.mkdir()
    try:
        with metrics_folder():
            assert not any(left.exists() for left in killed)
            assert living.is_dir()
    finally:
        living.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_unread_log_line_blocks_no_process(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script = "from serving.processes import say\nsay({'event': 'bundle', 'long': 'x' * 500_000})\n"
    script += "say({'event': 'x'})\n"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as deaf:
        try:
            assert deaf.wait(60) == 0
        finally:
            deaf.kill()
    closing = f"import os\nos.close(2)\n{script}"
    assert subprocess.run([sys.executable, "-c", closing], check=False).returncode == 0
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stderr
    assert [json.loads(line).get("event") for line in said.splitlines()] == ["bundle", "x"]


# The fork server of a small endpoint. In its forks `number` counts them, and `say` reports that one is ready.
FORKS = """
import os, signal, socket, sys
from serving.fork_server import fork_on_request
number, really_fork = -1, os.fork
def fork():
    global number
    number += 1
    if number in REFUSED:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return really_fork()
os.fork = fork
request = fork_on_request(socket.socket(fileno=int(sys.argv[1])))
if request is None:
    sys.exit()
say = lambda: request[1].sendall(b'{"event": "ready"}\\n')
"""


def small_endpoint(
    tmp_path: Path,
    child: str,
    on_start: Callable[[int, list[int]], None],
    processes: int = 2,
    refused: tuple[int, ...] = (),
) -> tuple[list[int], list[float]]:
    """Run children of a small program; return the ids of all that were started, and the pauses between.

    The pauses are not made.

    Args:
        tmp_path: the home.
        child: the program; see `FORKS`.
        on_start: called after each start with its number and all ids so far.
        processes: how many at once.
        refused: the numbers of the forks that the system refuses.
    """
    pids: list[int] = []
    pauses: list[float] = []

    class Children(Processes):
        async def _pause(self, seconds: float) -> None:
            pauses.append(seconds)

        def _command(self, requests: int) -> list[str]:
            return [sys.executable, "-c", f"REFUSED = {refused}\n{FORKS}{child}", str(requests)]

        def _say_ready(self, message: dict[str, Any]) -> None:
            pass

        def _hear(self, slot: Any, message: dict[str, Any]) -> None:
            super()._hear(slot, message)
            if message["event"] == "forked":
                pids.append(message["pid"])
                on_start(len(pids), pids)

    settings = Settings(home=tmp_path, processes=processes, drain_s=0.0, grace_s=0.0)
    with bound() as http, bound(SO_REUSEADDR=1) as grpc_socket:
        Children(settings, http, grpc_socket, tmp_path, None).run()
    return pids, pauses


def end_after(number: int) -> Callable[[int, list[int]], None]:
    """Return a function that ends the endpoint when so many children were started."""

    def end(started: int, pids: list[int]) -> None:
        if started == number:
            os.kill(os.getpid(), signal.SIGTERM)

    return end


@pytest.mark.slow
def test_a_child_that_could_not_start_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, asked = asyncio.create_subprocess_exec, list[int]()

    async def seldom(*command: str, **options: Any) -> asyncio.subprocess.Process:
        asked.append(len(asked))
        if len(asked) < 4:  # more often than there are places
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", seldom)
    pids, _ = small_endpoint(tmp_path, "say(); signal.pause()", end_after(2))
    assert (len(asked), len(pids)) == (4, 2), "one process forks both"
    assert caplog.text.count("could not be started, which is tried again: [Errno 11]") == 3


@pytest.mark.slow
def test_a_refused_fork_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pids, _ = small_endpoint(tmp_path, "say(); signal.pause()", end_after(2), refused=(0, 1, 2))
    assert len(pids) == 2
    assert caplog.text.count("could not be started, which is tried again: [Errno 11]") == 3


@pytest.mark.slow
def test_children_outlive_the_process_that_forked_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outlived: list[int] = []

    def kill_the_fork_server(started: int, pids: list[int]) -> None:
        if started == 2:
            os.kill(os.getpgid(pids[0]), signal.SIGKILL)  # it leads the group of its children
        if started == 3:
            outlived.extend(pid for pid in pids[:2] if alive(pid))
            os.kill(os.getpid(), signal.SIGTERM)

    # One lives on, the other ends when its parent has ended.
    child = """
import time
say()
while number == 0 or os.getppid() == os.getpgrp():
    time.sleep(0.01)
"""
    pids, _ = small_endpoint(tmp_path, child, kill_the_fork_server)
    assert (len(pids), len(outlived)) == (3, 1)
    assert "a process died (SIGKILL); another one is started" in caplog.text


@pytest.mark.slow
def test_a_child_that_was_ready_is_started_again_without_a_pause(tmp_path: Path) -> None:
    # Eight are ready and killed, three die while they start, then one is ready and killed, and one lives.
    child = (
        "number in (8, 9, 10) or say(); number < 12 and os.kill(os.getpid(), signal.SIGKILL); signal.pause()"
    )

    _, pauses = small_endpoint(tmp_path, child, end_after(13), processes=1)
    assert pauses == [*[0.0] * 8, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.slow
def test_the_long_message_of_a_child_reaches_the_parent(tmp_path: Path) -> None:
    failed = '{"event": "failed", "message": "%s", "exit_code": 2}\\n'
    child = f"request[1].sendall(b'{failed}' % (b'x' * 200_000))"
    with pytest.raises(NoneStarts) as failure:
        small_endpoint(tmp_path, child, lambda started, pids: None, processes=1)
    assert str(failure.value) == "x" * 200_000


@pytest.mark.slow
def test_a_failed_start_has_its_own_reason_not_that_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The first is ready and killed, the second says why it fails, the third is killed, the fourth lives.
    failed = '{"event": "failed", "message": "rules.yaml, line 3", "exit_code": 2}\\n'
    child = f"""
if number == 1:
    request[1].sendall(b'{failed}')
    os._exit(2)
if number != 2:
    say()
if number != 3:
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""
    small_endpoint(tmp_path, child, end_after(4), processes=1)
    reasons = re.findall(r"tried again: (.*)", caplog.text)
    assert reasons == ["rules.yaml, line 3", "a process ended at its start (SIGKILL)"]


# ------------------------------------------------------------------------------------ a real endpoint


@pytest.fixture
def settings(tmp_path: Path, toy_store: str) -> Settings:
    return Settings(home=tmp_path, store_url=toy_store, deadline_ms=60_000.0, log_segment_s=0.5, processes=2)


def stop(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(120) == 0


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(file).startswith("socket:")
    return found


def total(client: httpx.Client, name: str) -> float:
    """Return the sum of a metric over its labels, the same from every process."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.split("[{ ]", line)[0] == name)


@contextlib.contextmanager
def a_client_of_each(http: str, pids: set[int]) -> Iterator[list[httpx.Client]]:
    """Open connections until each process has one."""
    before = {pid: sockets(pid) for pid in pids}
    with contextlib.ExitStack() as stack:
        clients: list[httpx.Client] = []

        def each_has_one() -> bool:
            clients.append(stack.enter_context(httpx.Client(base_url=http, timeout=60)))
            assert clients[-1].get("/v2/health/live").status_code == 200
            return all(sockets(pid) > before[pid] for pid in pids)

        eventually(each_has_one, 60)
        yield clients


@pytest.mark.slow
def test_two_processes_share_requests_and_counts_and_end_without_a_failure(
    toy_bundle: Path, settings: Settings, start_endpoint: Callable[..., Any]
) -> None:
    running = start_endpoint(toy_bundle, settings)
    assert running.ready["processes"] == 2
    assert running.ready["memory_mb"] > 50
    pids = workers(running.process.pid)
    assert len(pids) == 2
    body = {"instances": [{"basket": ["1000005"]}]}
    with a_client_of_each(running.http, pids) as clients:
        before = total(clients[0], "reco_responses_total")
        for client in clients:
            assert client.post(V1, json=body).status_code == 200
        answers = before + len(clients)
        for client in clients:
            for name in ("reco_responses_total", "reco_answer_seconds_count"):
                assert total(client, name) == answers
        kill(running, min(pids))  # its counts are kept
        with httpx.Client(base_url=running.http, timeout=60) as client:
            assert total(client, "reco_responses_total") == answers
            eventually(lambda: total(client, "reco_processes") == 2, 60)
            assert total(client, "reco_process_deaths_total") == 1
            assert total(client, "process_cpu_seconds_total") > 0
            eventually(lambda: total(client, "reco_bundle_cut_timestamp_seconds") > 0)

    [forks] = children(running.process.pid)
    threads = [file.read_text().strip() for file in Path(f"/proc/{forks}/task").glob("*/comm")]
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, "a fork copies the locks of other threads"
    with grpc.insecure_channel(running.grpc) as channel:
        grpc.channel_ready_future(channel).result(60)

    with calling(running.http, 6) as seen:
        eventually(lambda: len(seen.answers) > 30, 60)
        seen.shutting = True  # a load balancer would send no more requests there
        stop(running)
    assert not seen.failures
    log = read_log(settings.prediction_log_dir)
    assert set(log["request_id"].to_pylist()) >= {answer["request_id"] for answer in seen.answers}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def records(client: httpx.Client) -> dict[str, float]:
    """Return the counts of the prediction log's records, and how many were lost."""
    lines = client.get("/metrics").text.splitlines()
    found = re.findall(r'^reco_log_records_total{outcome="(.+)"} (.+)$', "\n".join(lines), re.MULTILINE)
    counts = {outcome: float(count) for outcome, count in found}
    [counts["open"]] = [float(line.split()[1]) for line in lines if line.startswith("reco_log_records_open ")]
    accounted = sum(counts.get(outcome, 0.0) for outcome in ("written", "dropped", "recovered", "open"))
    return counts | {"lost": counts["taken"] - accounted}


def streamed(log: Path) -> int:
    """Return how many records are in the log's open segments, which a killed process leaves behind."""
    return sum(len(batch) for file in log.glob(".*.tmp") for batch in _whole_batches(file))


def is_still(client: httpx.Client) -> bool:
    """Whether the counts stay: a process that lives writes its records each second."""
    before = records(client)
    time.sleep(5)
    return records(client) == before


def kill(running: Running, worker: int) -> None:
    """Kill one of two processes, and wait until another one takes its place."""
    with contextlib.suppress(ProcessLookupError):  # on a busy machine it may have looked stopped before
        os.kill(worker, signal.SIGKILL)
    eventually(lambda: len(workers(running.process.pid) - {worker}) == 2, 120)


@pytest.mark.slow
def test_the_records_that_a_killed_process_loses_are_counted(
    toy_bundle: Path, settings: Settings, start_endpoint: Callable[..., Any]
) -> None:
    running = start_endpoint(toy_bundle, replace(settings, log_segment_s=3_600.0))

    with httpx.Client(base_url=running.http, timeout=60) as client:
        with calling(running.http, 4) as seen:
            eventually(lambda: len(seen.answers) > 60, 120)
        assert records(client)["open"] == len(seen.answers)  # at once: what waits in a queue is not lost
    eventually(lambda: streamed(settings.prediction_log_dir) == len(seen.answers), 120)
    for pid in workers(running.process.pid):  # one of them may have taken all requests
        kill(running, pid)
    with httpx.Client(base_url=running.http, timeout=60) as client:
        eventually(lambda: records(client)["lost"] == 0 and records(client).get("recovered", 0) > 0, 120)
    with calling(running.http, 4) as again:
        eventually(lambda: len(again.answers) > 60, 120)
        kill(running, next(iter(workers(running.process.pid))))
    with httpx.Client(base_url=running.http, timeout=60) as client:
        eventually(lambda: is_still(client), 120)
        counts = records(client)
    stop(running)
    logged = Counter(read_log(settings.prediction_log_dir)["request_id"].to_pylist())
    assert counts["lost"] == counts["taken"] - logged.total()
    missing = Counter(answer["request_id"] for answer in (*seen.answers, *again.answers)) - logged
    assert missing.total() <= counts["lost"]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_an_error_in_every_process_ends_the_endpoint_with_its_message(
    toy_bundle: Path, settings: Settings, tmp_path: Path
) -> None:
    code, said = refused_start(tmp_path / "nowhere", replace(settings, http_port=0, grpc_port=0))
    assert code == 1
    assert said.splitlines()[-1].endswith("nowhere is not there, expected the folder of a bundle")


@pytest.mark.slow
def test_a_port_in_use_is_reported_at_once_and_free_when_its_holder_is_killed(
    toy_bundle: Path, settings: Settings, start_endpoint: Callable[..., Any]
) -> None:
    running = start_endpoint(toy_bundle, replace(settings, log=False))
    http, grpc_port = (int(address.rsplit(":", 1)[1]) for address in (running.http, running.grpc))
    pids = workers(running.process.pid)
    for processes, ports, variable in (
        (1, (0, grpc_port), "RECO_GRPC_PORT"),
        (2, (0, grpc_port), "RECO_GRPC_PORT"),
        (2, (http, 0), "RECO_HTTP_PORT"),
    ):
        other = replace(settings, http_port=ports[0], grpc_port=ports[1], processes=processes)
        code, said = refused_start(toy_bundle, other)
        assert code == 4
        assert len(said.splitlines()) == 1
        assert variable in said
    assert workers(running.process.pid) == pids, "".join(running.stderr)
    with httpx.Client(base_url=running.http, timeout=30) as client:
        assert ask(client, {"user_id": "u1", "basket": ["1000005"]})["items"]

    running.process.kill()
    running.process.wait()
    again = replace(settings, log=False, http_port=http, grpc_port=grpc_port)
    command = [sys.executable, "-m", "serving.server", "--bundle", str(toy_bundle)]
    with subprocess.Popen(command, env=again.to_env(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any('"event": "ready"' in line for line in process.stderr), "on the same ports, at once"
        process.terminate()
        process.communicate(timeout=60)
    eventually(lambda: not any(alive(pid) for pid in pids), 60)
