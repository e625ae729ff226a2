"""One step in a process of its own: its output in a log file, its results in a folder.

The processes come from a `StepServer`: one process that imports the large packages and forks the steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

from components.release.registry import MLFLOW_ENVIRONMENT
from feature_repo.errors import CHECK_FAILED, RecoError
from pipelines.run.graph import Outputs, Spec

END_S, LOOK_S = 10.0, 0.02  # that a step gets between SIGTERM and SIGKILL; between two looks
# Most steps of a training import them: seconds each. The last two are of PyTorch's export.
EXPORT = ("onnxscript.function_libs.torch_lib.ops", "torch._functorch.partitioners")
HEAVY = (
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "torch",
    "torch._dynamo",
    "pandas",
    "numba",
    *EXPORT,
)


class ServerEnded(RecoError):
    """The process that forks the steps has ended."""


class StepServer:
    """The process that forks the steps of a run; it ends with the process that started it."""

    def __init__(self, log: Path, modules: Sequence[str] = ()) -> None:
        """Start it with a file for its own output, and modules to import meanwhile."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch(mode=0o600)
        # Threads of PyTorch that wait must not spin: beside any other work they would halve its speed.
        usual = {"OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.run.step_server", str(log), *modules],
                stdin=subprocess.PIPE,  # it closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**usual, **MLFLOW_ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"},
                umask=0o077,  # files of steps may name shoppers
                start_new_session=True,  # Ctrl-C is for us alone: we end the steps, with all their processes
            )

    def fork(self, step: Mapping[str, Any]) -> int:
        """Start a step and return its process number.

        Raises:
            ServerEnded: it was killed.
        """
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(step) + "\n")
            self._process.stdin.flush()
        if not (number := self._process.stdout.readline()):
            code = self._process.wait()
            raise ServerEnded(
                f"the process that starts steps ended with {code}: was it killed, or did memory run out? "
                f"All it said: {self._log}"
            )
        return int(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End it; steps that still run end with it."""
        self._process.kill()
        self._process.communicate()


class StepProcess:
    """A running step."""

    def __init__(
        self,
        server: StepServer,
        component: Spec,
        folder: Path,
        log: Path,
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it.

        Args:
            server: forks it.
            component: a pipeline that is this step alone.
            folder: for everything it writes; what lies there is removed.
            log: the file for everything it says.
            threads: of the numeric libraries, where the environment does not say.
            environment: variables beside those of this process.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)  # an argument may hold the online store's password
        (folder / "component.json").write_text(json.dumps(component), encoding="utf-8")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        log.touch(mode=0o600)  # a line may name a shopper
        # kfp leaves a folder of each step there. Not under home: a socket's path must be short.
        self._scratch = tempfile.TemporaryDirectory(prefix="reco-step-", ignore_cleanup_errors=True)
        step = {
            "folder": str(folder),
            "log": str(log),
            "threads": threads,
            "environment": {**environment, "TMPDIR": self._scratch.name},
        }
        try:
            self._number = server.fork(step)
        except BaseException:
            self._scratch.cleanup()
            raise
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self._number)
        self._began = time.monotonic()
        self._folder, self._log = folder, log.open(encoding="utf-8", errors="replace")
        self._line = ""
        self.peak_mib = 0

    @property
    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.monotonic() - self._began

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process and self._process.is_running():
                return self._process.status() == psutil.STATUS_ZOMBIE
        return True

    def lines(self) -> list[str]:
        """Return the lines of its output since the last call."""
        *lines, self._line = (self._line + self._log.read()).split("\n")
        return lines

    def memory_mib(self) -> int:
        """Return the resident memory of all its processes now; pages that they share count for each."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = self._process
            for each in (own, *own.children(recursive=True)) if own else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += each.memory_info().rss
        self.peak_mib = max(self.peak_mib, total >> 20)
        return total >> 20

    def close(self) -> Outputs | None:
        """Release all that an ended step holds, and return its results; None when it failed."""
        self._release()
        try:
            document = json.loads((self._folder / "outputs.json").read_bytes())
        except FileNotFoundError:
            return None
        places = {name: Path(place) for name, place in document["artifacts"].items()}
        return Outputs(document["parameters"], places)

    def failure(self) -> tuple[str, int]:
        """Return the error of a step that gave no results, and its exit code."""
        try:
            failure = json.loads((self._folder / "failure.json").read_bytes())
        except FileNotFoundError:
            said = "the step left no error of Python: it was killed, memory ran out or the disk is full"
            return said, CHECK_FAILED
        return failure["error"], failure["exit_code"]

    def end(self) -> None:
        """End the step with all its processes."""
        self._signal(signal.SIGTERM)
        until = time.monotonic() + END_S
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(LOOK_S)
        self._release()

    def _release(self) -> None:
        self._signal(signal.SIGKILL)  # whatever an ended step has left
        self._log.close()
        self._scratch.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._number, number)
