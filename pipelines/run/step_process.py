"""One step in a process of its own: kfp.local in it, its output in a log file, its results in a folder.

kfp.local keeps its state in the module and writes to stdout, so two steps cannot share a process.
`python -m pipelines.run.step_process FOLDER` executes `component.json` there and writes `outputs.json`.
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
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from components.home import write_json
from pipelines.run.graph import Outputs, Spec, load_component

END_S = 10.0  # that a step gets between SIGTERM and SIGKILL


class StepProcess:
    """A running step."""

    def __init__(
        self,
        component: Spec,
        folder: Path,
        log: Path,
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it.

        Args:
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
        # kfp leaves a folder of each step there. Not under home: a socket's path must be short.
        self._scratch = tempfile.TemporaryDirectory(prefix="reco-step-", ignore_cleanup_errors=True)
        # Threads of PyTorch that wait must not spin: beside any other work they would halve its speed.
        usual = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
        own = {"PYTHONUNBUFFERED": "1", "TMPDIR": self._scratch.name}
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.run.step_process", str(folder)],
                stdin=subprocess.PIPE,  # never written: it closes when this process ends, however it ends
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**usual, **os.environ, **environment, **own},
                umask=0o077,  # its files may name shoppers
                start_new_session=True,  # Ctrl-C is for us alone: we end the step, with all its processes
            )
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
        return self._process.poll() is not None

    def lines(self) -> list[str]:
        """Return the lines of its output since the last call."""
        *lines, self._line = (self._line + self._log.read()).split("\n")
        return lines

    def memory_mib(self) -> int:
        """Return the resident memory of all its processes now; pages that they share count for each."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            for each in (own, *own.children(recursive=True)):
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

    def end(self) -> None:
        """End the step with all its processes."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._release()

    def _release(self) -> None:
        self._signal(signal.SIGKILL)  # whatever an ended step has left
        self._log.close()
        self._process.communicate()
        self._scratch.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def call(component: Any, root: Path) -> Outputs | None:
    """Execute a pipeline of one step under kfp.local; None when the step failed: its output says why."""
    from kfp import dsl, local

    # Steps run in this very environment: the package is installed in it, and nothing else need be.
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(root / "workspace"),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = component().outputs
    except RuntimeError:  # kfp.local's only way to say that a step failed
        return None
    artifacts = {name: Path(value.path) for name, value in outputs.items() if isinstance(value, dsl.Artifact)}
    return Outputs({name: value for name, value in outputs.items() if name not in artifacts}, artifacts)


def _end_with_parent() -> None:
    while os.read(0, 1):  # nothing comes, and then the end of the file
        pass
    os.killpg(0, signal.SIGTERM)


def main() -> None:
    """Execute the component of a folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = Path(sys.argv[1])
    component = load_component(json.loads((folder / "component.json").read_bytes()))
    outputs = call(component, folder / "root")
    if outputs is None:
        sys.exit(1)
    places = {name: str(place) for name, place in outputs.artifacts.items()}
    write_json(folder / "outputs.json", {"parameters": dict(outputs.parameters), "artifacts": places})


if __name__ == "__main__":
    main()
