"""The process of a run that its steps are forked from: it imports the large packages once for all.

`python -m pipelines.run.step_server LOG MODULE...` imports the modules. Then each line on stdin is a step as
JSON, and the step's process number comes back as a line. A step executes `component.json` of its folder under
kfp.local and writes `outputs.json` or `failure.json` there. kfp.local keeps its state in its module and
writes to stdout, so two steps cannot share a process. LOG, the file behind stderr, names the run in a list of
processes.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.home import write_json
from pipelines.run.exit_codes import exit_code_of_step, message_of_step
from pipelines.run.graph import Outputs, load_component

BEFORE, PRINT = frozenset(os.environ), print
WATCH_S = 0.5  # between two looks of a step at its server


def main() -> None:
    """Import, then fork a step for each line of stdin, until it closes."""
    gc.disable()  # a quarter of the time of the imports: each collection looks at all modules
    numbers = os.dup(1)
    os.dup2(2, 1)  # a module may print while it is imported
    for module in ("kfp.local", *sys.argv[2:]):
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - a step that needs it fails, and says so
            traceback.print_exc()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets steps that have ended
    server = os.getpid()
    for line in iter(sys.stdin.readline, ""):
        gc.freeze()  # a collection in a step would copy every page that it shares with the others
        if os.fork() == 0:
            _become(json.loads(line), server, numbers)


def _become(step: dict[str, Any], server: int, numbers: int) -> None:
    """Be the step's own process, and end."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.enable()
        os.setsid()
        os.write(numbers, f"{os.getpid()}\n".encode())  # before all that may fail: the run waits for it
        log = os.open(step["log"], os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(numbers)
        threading.Thread(target=_end_with, args=(server,), daemon=True).start()
        _forget_server(step["environment"], step["threads"])
        execute(Path(step["folder"]))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the run reads it
        traceback.print_exc()
        failure = {"error": message_of_step(error), "exit_code": exit_code_of_step(error)}
        write_json(Path(step["folder"]) / "failure.json", failure)
    finally:
        os._exit(code)  # to take all modules down would take a second


def _forget_server(environment: dict[str, str], threads: int) -> None:
    """Give the step an environment, threads and random numbers of its own."""
    for name in os.environ.keys() - BEFORE:  # that an import has set
        del os.environ[name]
    os.environ.update(environment)
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "OMP_NUM_THREADS" not in os.environ:
        from threadpoolctl import threadpool_limits

        os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that come later
        own = {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys()
        threadpool_limits({"openmp": threads} if own else threads)


def _end_with(server: int) -> None:
    """End this step, with all its processes, when its server has ended."""
    while os.getppid() == server:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGTERM)


def execute(folder: Path) -> None:
    """Execute the component of a folder."""
    component = load_component(json.loads((folder / "component.json").read_bytes()))
    outputs = call(component, folder / "root")
    places = {name: str(place) for name, place in outputs.artifacts.items()}
    write_json(folder / "outputs.json", {"parameters": dict(outputs.parameters), "artifacts": places})


def call(component: Any, root: Path) -> Outputs:
    """Execute a pipeline of one step under kfp.local.

    Raises:
        Exception: the step's own.
    """
    from kfp import dsl, local
    from kfp.local import subprocess_task_handler

    subprocess_task_handler.run_local_subprocess = run_here
    # Steps run in this very environment: the package is installed in it, and nothing else need be.
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(root / "workspace"),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"kfp\.")
        outputs = component().outputs
    artifacts = {name: Path(value.path) for name, value in outputs.items() if isinstance(value, dsl.Artifact)}
    return Outputs({name: value for name, value in outputs.items() if name not in artifacts}, artifacts)


def run_here(full_command: Sequence[str]) -> int:
    """Run a component's program here; kfp.local's own function starts an interpreter for it.

    Args:
        full_command: `sh -c SCRIPT PROGRAM ARGUMENT...`, where the script calls KFP's executor.
    """
    from kfp.dsl.executor_main import executor_main

    if "ephemeral_component.py" not in full_command[2]:
        raise ValueError("a component of a local run installs no packages: take packages_to_install out")
    _, _, _, program, *arguments = full_command
    file = Path(tempfile.mkdtemp(), "ephemeral_component.py")
    file.write_text(program, encoding="utf-8")
    sys.argv = [executor_main.__module__, "--component_module_path", str(file), *arguments]
    log = logging.getLogger()
    # kfp.local's own are no program's: the executor writes its own lines, and numba wants the real `print`.
    handlers, log.handlers = log.handlers, []
    builtins.print = PRINT
    try:
        executor_main()
    finally:
        log.handlers = handlers
    return 0


if __name__ == "__main__":
    main()
