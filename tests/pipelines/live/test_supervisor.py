"""The supervisor: order, readiness, restarts with growing pauses, the end; with tiny real processes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from pipelines.live.supervisor import Part, PartFailed, State, Supervisor, spoken
from tests.chaos.procs import eventually

# A part that is ready once it has written a file, notes its end, and lives until a signal; SIGUSR1: a fault.
CHILD = """
import os, signal, sys, time
name, folder = sys.argv[1:]
def end(*_):
    open(folder + "/ends", "a").write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
open(folder + "/starts", "a").write(name + "\\n")
print("hello from", name, flush=True)
open(folder + "/part", "w").write(str(os.getpid()))
os.rename(folder + "/part", folder + "/" + name)
time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "


class Group:
    """A supervisor in a thread, with its messages and tables."""

    def __init__(self, folder: Path, *parts: Part) -> None:
        self.folder, self.said, self.shown = folder, list[str](), list[list[State]]()
        self.supervisor = Supervisor(
            parts,
            folder / "logs",
            lambda states: self.shown.append([copy(s) for s in states]),
            self.said.append,
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except PartFailed as error:
            self.error = error

    def __enter__(self) -> "Group":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def lines(self, file: str) -> list[str]:
        place = self.folder / file
        return place.read_text().split() if place.exists() else []


def part(folder: Path, name: str, **given: Any) -> Part:
    file = folder / name

    def check(started: float) -> str:
        return "" if file.exists() and file.stat().st_mtime >= started - 0.05 else "no file yet"

    command = [sys.executable, "-c", CHILD, name, str(folder)]
    return Part(name, command, dict(os.environ), "here", given.pop("check", check), **given)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_parts_start_in_order_of_readiness_and_end_in_reverse(tmp_path: Path) -> None:
    prepared: list[str] = []
    with Group(
        tmp_path,
        part(tmp_path, "first", prepare=lambda: prepared.append((tmp_path / "starts").read_text())),
        part(tmp_path, "second"),
        part(tmp_path, "third"),
    ) as group:
        eventually(lambda: "all parts are ready" in group.said)
        assert [state.health for state in group.shown[-1]] == ["ok"] * 3
        pids = [state.pid for state in group.shown[-1]]
        assert pids == [int((tmp_path / name).read_text()) for name in ("first", "second", "third")]
    assert prepared == ["first\n"]
    assert group.lines("starts") == ["first", "second", "third"]
    assert group.lines("ends") == ["third", "second", "first"]
    assert [state.health for state in group.shown[-1]] == ["ended"] * 3
    assert all(gone(pid) for pid in pids if pid)


@pytest.mark.slow
def test_a_dead_part_is_reported_and_restarted_with_growing_pauses(tmp_path: Path) -> None:
    with Group(tmp_path, part(tmp_path, "steady"), part(tmp_path, "mortal")) as group:
        eventually(lambda: "all parts are ready" in group.said)
        for number in (1, 2):
            mortal = group.lines("mortal")
            os.kill(int(mortal[0]), signal.SIGUSR1)
            eventually(lambda: group.lines("mortal") != mortal)  # noqa: B023 - called in this turn
            assert group.lines("starts").count("mortal") == number + 1
    deaths = [text for text in group.said if "mortal died (exit code 7)" in text]
    assert "started again in 1 s" in deaths[0]
    assert "started again in 2 s" in deaths[1]
    assert "mortal: hello from mortal" in deaths[0]
    assert group.lines("starts").count("steady") == 1
    assert max(state.restarts for states in group.shown for state in states) >= 2


def test_a_part_that_died_thousands_of_times_is_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor([part(tmp_path, "sick")], tmp_path, lambda states: None, said.append)
    sick = supervisor._all[0]
    sick.failures = 5_000
    supervisor._note_end(sick, 7)
    assert "started again in 30 s" in said[0]


@pytest.mark.slow
def test_a_part_is_started_again_though_its_log_was_removed(tmp_path: Path) -> None:
    with Group(tmp_path, part(tmp_path, "mortal")) as group:
        eventually(lambda: "all parts are ready" in group.said)
        shutil.rmtree(tmp_path / "logs")
        os.kill(int((tmp_path / "mortal").read_text()), signal.SIGUSR1)
        eventually(lambda: group.lines("starts") == ["mortal"] * 2)
    assert "hello from mortal" in (tmp_path / "logs" / "mortal.log").read_text()


@pytest.mark.slow
def test_a_part_that_cannot_start_ends_the_group_with_its_reason(tmp_path: Path) -> None:
    wrong = Part("wrong", [sys.executable, "-c", "raise SystemExit('no such bundle')"], {}, "", lambda s: "x")
    with Group(tmp_path, part(tmp_path, "first"), wrong, part(tmp_path, "never")) as group:
        group.thread.join(20)
        assert "wrong ended with exit code 1 before it was ready\n  wrong: no such bundle" in str(group.error)
    assert group.lines("ends") == ["first"]


@pytest.mark.slow
def test_waiting_for_a_part_to_become_ready_has_a_timeout(tmp_path: Path) -> None:
    with Group(tmp_path, part(tmp_path, "slow", check=lambda s: "still loading", ready_s=0.5)) as group:
        group.thread.join(20)
        assert "slow is not ready after 0.5 s (still loading)" in str(group.error)


@pytest.mark.slow
def test_health_is_shown_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.live.supervisor.CHECK_S", 0.05)
    wrong = [""]
    with Group(tmp_path, part(tmp_path, "one", check=lambda s: wrong[0])) as group:
        eventually(lambda: "all parts are ready" in group.said)
        wrong[0] = "PING: no answer"
        eventually(lambda: group.shown[-1][0].health == "unwell: PING: no answer")
        wrong[0] = ""
        eventually(lambda: group.shown[-1][0].health == "ok")
    assert group.shown[-1][0].restarts == 0


@pytest.mark.slow
def test_a_part_that_ends_by_design_is_not_restarted(tmp_path: Path) -> None:
    done = Part("done", [sys.executable, "-c", ""], {}, "", lambda s: "", once=True)
    with Group(tmp_path, part(tmp_path, "first"), done, part(tmp_path, "failed", once=True)) as group:
        eventually(lambda: "all parts are ready" in group.said)
        os.kill(int((tmp_path / "failed").read_text()), signal.SIGUSR1)
        expected = ["ok", "done", "failed, exit code 7"]
        eventually(lambda: [s.health for s in group.shown[-1]] == expected)
    assert any(text.startswith("failed: failed, exit code 7") for text in group.said)


@pytest.mark.slow
def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = threading.Event()
    log = tmp_path / "logs" / "stubborn.log"
    stubborn = Part(
        "stubborn",
        [sys.executable, "-c", STUBBORN + "time.sleep(60)"],
        {},
        "",
        lambda s: "" if log.read_text() else "not yet",
        prepare=ready.set,
        grace_s=0.2,
    )
    with Group(tmp_path, stubborn) as group:
        assert ready.wait(20)
    assert "stubborn did not end when asked to, and is killed" in group.said


PARENT = """
import sys
from pathlib import Path
from pipelines.live.supervisor import Part, Supervisor
folder = Path(sys.argv[1])
child = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); "
    "print('up', flush=True); time.sleep(600)"
)
log = folder / "child.log"
check = lambda s: "" if log.read_text() else "not yet"
part = Part("child", [sys.executable, "-c", child], {}, "", check, grace_s=600)
show = lambda states: print(states[0].pid, flush=True) if states[0].health == "ok" else None
Supervisor([part], folder, show, lambda text: None).run()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A supervisor in a process of its own, and the process id of its part."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.slow
def test_no_part_outlives_a_supervisor_that_is_killed(parent: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child = parent
    assert not gone(child)
    process.kill()
    process.wait()
    eventually(lambda: gone(child))


@pytest.mark.slow
def test_a_signal_ends_the_group_and_a_second_one_kills_it(
    tmp_path: Path, parent: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, child = parent
    process.send_signal(signal.SIGTERM)
    eventually(lambda: "asked" in (tmp_path / "child.log").read_text())
    assert process.poll() is None, "it gives the child ten minutes to end"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert gone(child)


def test_the_cause_of_a_death_is_the_exception_and_no_request() -> None:
    log = """old words
{"event": "answered", "request_id": "r1"}
Traceback (most recent call last):
  File "server.py", line 7, in main
    raise MemoryError
OSError: [Errno 28] No space left on device
{"event": "answered", "request_id": "r2"}
{"event": "log", "severity": "ERROR", "message": "gone", "exception.stacktrace": "  File x\\nKeyError"}
{"event": "log", "sev
"""
    assert spoken(log) == [
        "old words",
        "OSError: [Errno 28] No space left on device",
        "ERROR: gone: KeyError",
    ]
