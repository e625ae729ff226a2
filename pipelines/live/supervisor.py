"""Parts, each a command and a check -> one group of processes that starts, lives and ends together.

The supervisor knows nothing of the parts' work. A part that dies is started again, after a longer pause each
time. If the supervisor ends, for whatever reason, all parts end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from feature_repo.errors import RecoError
from pipelines.run.stopping import on_stop

TICK_S = 0.2
CHECK_S = 2.0  # between two checks of a part's health
LONGEST_PAUSE_S = 30.0
WELL_S = 60.0  # a part that lived this long begins again with the shortest pause
TAIL_BYTES = 64_000
# Says to the kernel "kill me when my parent ends" (PR_SET_PDEATHSIG), looks whether it has ended already, and
# becomes the part. A process of its own does so because we have threads: between fork and exec ours must not.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class PartFailed(RecoError, RuntimeError):
    """A part did not become ready the first time: whatever is wrong, starting it again would not help."""


@dataclass(frozen=True)
class Part:
    """One process of the group.

    Attributes:
        name: what people call it; its log is `<name>.log`.
        command: program and arguments.
        env: its whole environment.
        address: where others reach it, to be shown.
        check: called with the time of its start (seconds since the epoch); returns the fault, or "".
        prepare: called once, when it is ready for the first time and before the next part starts.
        ready_s: how long the first start may take.
        grace_s: how long it may take to end when asked to; then it is killed.
        once: it has an end of its own and is not started again.
    """

    name: str
    command: Sequence[str]
    env: dict[str, str]
    address: str
    check: Callable[[float], str]
    prepare: Callable[[], None] | None = None
    ready_s: float = 60.0
    grace_s: float = 10.0
    once: bool = False


@dataclass
class State:
    """The state of a part: a row of the table."""

    name: str
    address: str
    pid: int | None = None
    health: str = "waiting"
    restarts: int = 0


@dataclass
class _Running:
    part: Part
    state: State
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # seconds since the epoch
    again_at: float = 0.0  # monotonic: when to start it again
    check_at: float = 0.0  # monotonic
    failures: int = 0  # in a row

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Runs a list of parts, in order; ends them in the reverse order."""

    def __init__(
        self,
        parts: Sequence[Part],
        logs: Path,
        show: Callable[[list[State]], None],
        say: Callable[[str], None],
    ) -> None:
        self._all = [_Running(part, State(part.name, part.address)) for part in parts]
        self._logs, self._show, self._say = logs, show, say
        self._stop = threading.Event()
        self._hurry = False
        self._shown: list[str] = []

    def stop(self) -> None:
        """Let `run` end all parts and return; called again, it does not wait for them to be done."""
        self._hurry = self._stop.is_set()
        self._stop.set()

    def run(self) -> None:
        """Start every part, then keep them alive until `stop`, Ctrl-C, SIGTERM or the end of the terminal.

        Raises:
            PartFailed: one of them did not become ready; its last words are in the message.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with on_stop(self.stop):
            try:
                self._show_changes()
                for one in self._all:
                    if not self._bring_up(one):
                        return
                self._show_changes()
                self._say("all parts are ready")
                while not self._stop.wait(TICK_S):
                    for one in self._all:
                        self._look_after(one)
                    self._show_changes()
            finally:
                self._end_all()

    def _bring_up(self, one: _Running) -> bool:
        """Start a part and wait until it is ready; False if stopped meanwhile."""
        part, end = one.part, time.monotonic() + one.part.ready_s
        (self._logs / f"{part.name}.log").write_bytes(b"")
        self._start(one)
        while (wrong := part.check(one.started)) or not one.alive:
            if not one.alive and one.process is not None:
                if part.once and one.process.returncode == 0:
                    break
                raise PartFailed(
                    f"{part.name} ended with {_how(one.process.returncode)} before it was ready"
                    f"{self._last_words(part)}"
                )
            if time.monotonic() > end:
                raise PartFailed(
                    f"{part.name} is not ready after {part.ready_s:g} s ({wrong}){self._last_words(part)}"
                )
            if self._stop.wait(0.05):
                return False
        if part.prepare:
            part.prepare()
        one.state.health = "ok"
        self._say(f"{part.name} is ready: {part.address}")
        return not self._stop.is_set()

    def _look_after(self, one: _Running) -> None:
        now = time.monotonic()
        if one.process is None:
            if one.again_at and now >= one.again_at:
                one.state.restarts += 1
                self._start(one)
        elif (code := one.process.poll()) is not None:
            self._note_end(one, code)
        elif now >= one.check_at:
            wrong = one.part.check(one.started)
            starting = one.state.health == "starting" and time.time() - one.started < one.part.ready_s
            one.state.health = ("starting" if starting else f"unwell: {wrong}") if wrong else "ok"
            one.check_at = time.monotonic() + CHECK_S
            if time.time() - one.started > WELL_S and not wrong:
                one.failures = 0

    def _note_end(self, one: _Running, code: int) -> None:
        name = one.part.name
        one.process, one.state.pid = None, None
        if one.part.once:
            one.state.health = "done" if code == 0 else f"failed, {_how(code)}"
            self._say(f"{name}: {one.state.health}{self._last_words(one.part) if code else ''}")
            return
        pause = min(2.0 ** min(one.failures, 10), LONGEST_PAUSE_S)  # 2.0 ** 1024 is an error
        one.failures += 1
        one.again_at = time.monotonic() + pause
        one.state.health = f"died, {_how(code)}"
        self._say(
            f"{name} died ({_how(code)}) and is started again in {pause:g} s{self._last_words(one.part)}"
        )

    def _start(self, one: _Running) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)  # a person may have removed them
        with (self._logs / f"{one.part.name}.log").open("ab") as log:
            # Ctrl-C in a terminal goes to a whole session: we want to be the one who ends the parts.
            one.process = subprocess.Popen(
                until_parent_ends(one.part.command),
                env=one.part.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        one.started, one.again_at, one.check_at = time.time(), 0.0, 0.0
        one.state.pid, one.state.health = one.process.pid, "starting"

    def _end_all(self) -> None:
        for one in reversed(self._all):
            if one.process is None:
                continue
            one.process.terminate()
            end = time.monotonic() + one.part.grace_s
            while one.alive and time.monotonic() < end and not self._hurry:
                time.sleep(0.02)
            if one.alive:
                self._say(f"{one.part.name} did not end when asked to, and is killed")
                one.process.kill()
            one.process.wait()
            one.state.pid, one.state.health = None, "ended"
        self._show_changes()

    def _show_changes(self) -> None:
        states = [one.state for one in self._all]
        if (now := [repr(state) for state in states]) != self._shown:
            self._shown = now
            self._show(states)

    def _last_words(self, part: Part) -> str:
        file = self._logs / f"{part.name}.log"
        said = spoken(tail(file))[-5:]
        return "".join(f"\n  {part.name}: {line[:300]}" for line in said) + f"\n  all it said: {file}"


def until_parent_ends(command: Sequence[str]) -> list[str]:
    """Return a command whose process is killed when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; the same as `_LAUNCH`, in a process of ours."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def await_end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for a process that was asked to end; kill it if it does not."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path) -> str:
    """Return the end of a log, which may have grown to gigabytes; "" if a person removed it."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def spoken(log: str) -> list[str]:
    """Return the lines that tell a cause: no request, no frame of a traceback, but its exception."""
    said = [_message(line) for line in log.splitlines() if line.strip() and not line[0].isspace()]
    return [line for line in said if line and not line.startswith("Traceback ")]


def _message(line: str) -> str:
    """Return the text of a line: a warning's message and its error, nothing of another line of JSON."""
    if not line.startswith("{"):
        return line
    with contextlib.suppress(ValueError):
        fields = json.loads(line)
        if fields.get("event") == "log":
            stack = fields.get("exception.stacktrace", "").splitlines()
            return ": ".join([fields["severity"], fields["message"], *stack[-1:]])
    return ""


def _how(code: int) -> str:
    """Return an exit status as people say it."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
