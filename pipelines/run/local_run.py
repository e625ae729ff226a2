"""A pipeline and its arguments -> its steps executed here, side by side where the DAG allows, resumable.

kfp.local runs a pipeline as a whole, one step after the other. It keeps no record, and a failed run must
start again from its first step. Here each step is a pipeline of its own for kfp.local, in a process of its
own (`step_process`). Order and wiring come from the compiled IR (`graph`, `step_order`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from components.home import command, locked
from feature_repo.errors import RecoError
from feature_repo.ids import closest
from pipelines.run.arguments import ArgumentsInvalid, without_passwords
from pipelines.run.graph import Outputs, Spec, downstream, step_alone, step_names
from pipelines.run.launch import compare_again
from pipelines.run.progress import Progress
from pipelines.run.runs import Run, Size, StepState, drop_artifacts, new_run, read_run, usual_steps
from pipelines.run.step_order import StepOrder
from pipelines.run.step_process import HEAVY, ServerEnded, StepProcess, StepServer
from pipelines.run.stopping import on_stop

KEPT_RUNS = 3  # a run on Complete Journey leaves 1.7 GB
TICK_S = 0.1
FEW = 3  # so few steps import less themselves than the server would
MEASURE_S = 1.0  # between two looks at the memory of all processes: each takes milliseconds


class StepFailed(RecoError):
    """A step of the run raised, or died."""

    def __init__(self, run: Run, step: str, cause: str, exit_code: int) -> None:
        message = f"{cause}\n  step {step} of run {run.run_id} failed; all it said: {run.log(step)}\n"
        if cause.startswith("GateFailed"):
            message += "  the new version stays challenger, the champion stays champion\n"
            message += f"  compare again:          {compare_again(run)}"
        else:
            again = command(run.folder.parents[1], f"run --resume {run.run_id}")
            message += f"  this step alone again:  {again} --only {step}\n"
            message += f"  go on from here:        {again}"
        super().__init__(message)
        self.run, self.step, self.exit_code = run, step, exit_code


def start_run(
    home: Path,
    pipeline: str,
    spec: Spec,
    arguments: Mapping[str, Any],
    size: Size,
    stream: IO[str],
    jobs: int = 0,
) -> Run:
    """Run a pipeline from its first step to its last and return the record; its size is for `resume_run`.

    Raises:
        StepFailed: naming the step, its own error first.
        Conflict: another run works under this home.
    """
    with locked(home / "run.lock", "running a pipeline"):
        run = new_run(home, pipeline, dict(arguments), step_names(spec), size)
        _execute(home, run, spec, [step.name for step in run.steps], stream, jobs)
    return run


def resume_run(home: Path, run: Run, spec: Spec, only: str, stream: IO[str], jobs: int = 0) -> Run:
    """Go on with a run after its last good steps, or repeat one step alone.

    Raises:
        StepFailed: naming the step, its own error first.
        ArgumentsInvalid: `only` is no step of the run.
        Conflict: another run works under this home.
        WiringChanged: the pipeline is not the one that was run before.
    """
    names = step_names(spec)
    if only and (only := only.replace("_", "-")) not in names:
        raise ArgumentsInvalid(f"run {run.run_id} has no step {only!r}: {closest(only, names)}")
    with locked(home / "run.lock", f"running {run.run_id}"):
        run = read_run(run.folder)  # another process may have ended it since the caller read it
        known = {step.name: step for step in run.steps}
        run.steps = [known.get(name, StepState(name)) for name in names]
        good = run.outputs()
        if only:
            step_alone(spec, only, run.arguments, good)  # else the record would change before this is refused
        todo = [only] if only else [name for name in names if name not in good]
        # What came of an older output is no longer true.
        stale = set().union(*(downstream(spec, name) for name in todo))
        for step in run.steps:
            if step.name in todo or step.name in stale:
                step.status = "waiting"
        if not only:
            todo = [name for name in names if name in stale or name in todo]
        _execute(home, run, spec, todo, stream, jobs)
    return run


def _execute(home: Path, run: Run, spec: Spec, todo: list[str], stream: IO[str], jobs: int) -> None:
    progress = Progress(stream)
    order = StepOrder(spec, todo, usual_steps(home, run), jobs)
    names = [step.name for step in run.steps]
    kept = sum(step.status == "done" for step in run.steps)
    run.pid, began = os.getpid(), time.monotonic()
    progress.begin(run.run_id, names, kept)
    try:
        modules = HEAVY if len(todo) > FEW else ()
        with on_stop(_interrupt), progress, StepServer(run.log("step-server"), modules) as server:
            _Execution(run, spec, order, progress, server).work()
    except KeyboardInterrupt:
        progress.say(f"stopped; go on with: {command(home, f'run --resume {run.run_id}')}")
        raise
    finally:
        if not any(step.status == "failed" for step in run.steps):  # its error may name a file in there
            shutil.rmtree(run.folder / "working", ignore_errors=True)
        run.pid, run.elapsed_s = 0, round(run.elapsed_s + time.monotonic() - began, 2)
        run.save()
        if freed := drop_artifacts(home, KEPT_RUNS, spare=run.run_id):
            old = ", ".join(freed)
            progress.say(f"artifacts of older runs removed ({old}); their bundles stay registered")


class _Execution:
    """The steps of a run that are to be executed, and those that run now."""

    def __init__(
        self, run: Run, spec: Spec, order: StepOrder, progress: Progress, server: StepServer
    ) -> None:
        self._run, self._spec, self._order, self._progress = run, spec, order, progress
        self._server = server
        self._running: dict[str, StepProcess] = {}
        self._done: set[str] = set()
        self._failure: StepFailed | None = None
        self._measured_at = 0.0

    def work(self) -> None:
        """Execute all steps. After a failure no step starts; those that run may end: their work is not lost.

        Raises:
            StepFailed: the first step that failed.
        """
        try:
            while True:
                while not self._failure and (name := self._order.next(self._running, self._done)):
                    self._start(name)
                if not self._running:
                    break
                time.sleep(TICK_S)
                self._look()
        finally:
            for name, process in self._running.items():
                process.end()
                self._run.step(name).status = "stopped"
        if self._failure:
            raise self._failure

    def _start(self, name: str) -> None:
        run = self._run
        arguments, passwords = without_passwords(run.arguments)
        component = step_alone(self._spec, name, arguments, run.outputs())
        folder, threads = run.folder / "working" / name, self._order.threads(name)
        log = run.log(name)
        try:
            self._running[name] = StepProcess(self._server, component, folder, log, threads, passwords)
        except ServerEnded as error:
            raise StepFailed(run, name, str(error), error.exit_code) from error
        self._progress.start(name)
        run.step(name).status, run.step(name).error = "running", ""
        run.save()

    def _look(self) -> None:
        """Take the running steps' output and memory, and the results of those that ended."""
        first = any(not process.peak_mib for process in self._running.values())
        if first or time.monotonic() - self._measured_at > MEASURE_S:
            self._measured_at = time.monotonic()
            together = sum(process.memory_mib() for process in self._running.values())
            self._run.peak_memory_mib = max(self._run.peak_memory_mib, together)
        for name, process in list(self._running.items()):
            ended = process.has_ended()  # asked before its lines are read: then no line is missed
            for line in process.lines():
                self._progress.hear(name, line)
            if ended:
                self._finish(name, process)
        self._progress.refresh()

    def _finish(self, name: str, process: StepProcess) -> None:
        run, state = self._run, self._run.step(name)
        outputs = process.close()
        del self._running[name]
        state.seconds, state.memory_mib = round(process.seconds, 2), process.peak_mib
        if outputs is not None:
            _keep(run, state, outputs)
            self._done.add(name)
            self._progress.done(name, state.parameters)
            return
        state.status, (state.error, code) = "failed", process.failure()
        run.save()
        self._progress.failed(name)
        if not self._failure:
            self._failure = StepFailed(run, name, state.error, code)
            if self._running:
                self._progress.say(f"waiting for {', '.join(self._running)} to end; Ctrl-C ends them now")


def _keep(run: Run, state: StepState, outputs: Outputs) -> None:
    """Move a step's artifacts to their place in the run and write down that it is done."""
    place = run.artifacts(state.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, path in outputs.artifacts.items():
        path.rename(place / name)
    state.parameters, state.artifacts = dict(outputs.parameters), sorted(outputs.artifacts)
    state.status = "done"
    run.save()


def _interrupt() -> None:
    raise KeyboardInterrupt
