"""A pipeline and its arguments -> its steps executed here under kfp.local, one after the other, resumable.

kfp.local runs a pipeline as a whole: it keeps no record, and a failed run must start again from its first
step. Here each step is a pipeline of its own for kfp.local. Order and wiring come from the compiled IR
(pipelines.run.graph). After each step the record of the run is written, which costs some 10 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from components.home import locked
from feature_repo.errors import RecoError
from feature_repo.spelling import closest
from pipelines.run.arguments import ArgumentsInvalid
from pipelines.run.exit_codes import exit_code_of_step
from pipelines.run.graph import Outputs, Spec, downstream, load_component, step_alone, step_names
from pipelines.run.progress import Progress, StepProgress
from pipelines.run.runs import Run, StepState, drop_artifacts, new_run, usual_seconds

ROOT = Path(__file__).parents[2]
KEPT_RUNS = 3  # a run on Complete Journey leaves 1.7 GB
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")
TRACEBACK = "Traceback (most recent call last):"


class StepFailed(RecoError):
    """A step of the run raised, or died."""

    def __init__(self, run: Run, step: str, cause: str, exit_code: int) -> None:
        """Take the run, the step, and the step's own last words."""
        told = f"{cause}\n  step {step} of run {run.run_id} failed; all it said: {run.log(step)}\n"
        if cause.startswith("GateFailed"):
            told += "  the new version stays challenger, the champion stays champion\n"
            told += "  compare again:          reco promote --dry-run"
        else:
            told += f"  this step alone again:  reco run --resume {run.run_id} --only {step}\n"
            told += f"  go on from here:        reco run --resume {run.run_id}"
        super().__init__(told)
        self.run, self.step, self.cause, self.exit_code = run, step, cause, exit_code


def start_run(
    home: Path, pipeline: str, spec: Spec, arguments: Mapping[str, Any], fast: bool, stream: IO[str]
) -> Run:
    """Run a pipeline from its first step to its last and return the record.

    Raises:
        StepFailed: naming the step, its own error first.
        Conflict: another run works under this home.
    """
    with locked(home / "run.lock", "running a pipeline"):
        run = new_run(home, pipeline, dict(arguments), step_names(spec), fast)
        _execute(home, run, spec, [step.name for step in run.steps], stream)
    return run


def resume_run(home: Path, run: Run, spec: Spec, only: str, stream: IO[str]) -> Run:
    """Go on with a run after its last good step, or repeat one step alone.

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
        known = {step.name: step for step in run.steps}
        run.steps = [known.get(name, StepState(name)) for name in names]
        good = run.outputs()
        todo = [only] if only else [name for name in names if name not in good]
        # What came of an older output is no longer true.
        stale = set().union(*(downstream(spec, name) for name in todo))
        for step in run.steps:
            if step.name in todo or step.name in stale:
                step.status = "waiting"
        if not only:
            todo = [name for name in names if name in stale or name in todo]
        _execute(home, run, spec, todo, stream)
    return run


def _execute(home: Path, run: Run, spec: Spec, todo: list[str], stream: IO[str]) -> None:
    progress = Progress(stream, usual_seconds(home, run))
    names = [step.name for step in run.steps]
    code = code_hash()
    kept = len(names) - len(todo)
    if kept and run.code not in ("", code):
        progress.say("the code changed since this run began: steps that are kept were made by the older code")
    run.code, run.pid = code, os.getpid()
    progress.begin(run.run_id, names, kept)
    try:
        with _stoppable():
            for name in todo:
                _run_step(run, spec, name, progress.step(name, names.index(name) + 1, names))
    except KeyboardInterrupt:
        _end_children()
        progress.say(f"stopped; go on with: reco run --resume {run.run_id}")
        raise
    finally:
        run.pid = 0
        run.save()
        _free_space(home, run, progress)


def _free_space(home: Path, run: Run, progress: Progress) -> None:
    """Remove what older runs left; that this fails must not hide how the run ended."""
    try:
        freed = drop_artifacts(home, KEPT_RUNS, spare=run.run_id)
    except OSError as error:
        progress.say(f"artifacts of older runs could not be removed: {error}")
        return
    if freed:
        progress.say(f"artifacts of older runs removed ({', '.join(freed)}); their bundles stay registered")


def _run_step(run: Run, spec: Spec, name: str, told: StepProgress) -> None:
    state = run.step(name)
    state.status, state.error = "running", ""
    run.save()
    log = _Log(run.log(name), told)
    component = load_component(step_alone(spec, name, run.arguments, run.outputs()))
    with told, log:
        outputs = _call(component, run.folder / "working")
    state.seconds = round(told.seconds, 2)
    # ru_maxrss is the largest process so far: of all steps, the one that needed most.
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    run.peak_memory_mib = max(run.peak_memory_mib, memory)
    if outputs is None:
        state.status = "failed"
        cause = log.cause()
        state.error = re.sub(r"^[\w.]*\.(?=\w)", "", cause)
        told.failed()
        run.save()
        raise StepFailed(run, name, state.error, exit_code_of_step(cause))
    _keep(run, state, outputs)
    told.done(state.parameters)


def _keep(run: Run, state: StepState, outputs: Outputs) -> None:
    """Move a step's artifacts to their place in the run and write down that it is done."""
    place = run.artifacts(state.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, path in outputs.artifacts.items():
        path.rename(place / name)
    shutil.rmtree(run.folder / "working", ignore_errors=True)
    state.parameters, state.artifacts = dict(outputs.parameters), sorted(outputs.artifacts)
    state.status = "done"
    run.save()


def _call(component: Any, root: Path) -> Outputs | None:
    """Execute a pipeline of one step under kfp.local; None when the step failed: its log says why."""
    from kfp import dsl, local

    shutil.rmtree(root, ignore_errors=True)
    # Threads of PyTorch that wait must not spin: beside any other work they would halve its speed and theirs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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


class _Log(io.TextIOBase):
    """Writes the output of kfp.local and of the step into the step's log file, and to its progress."""

    def __init__(self, file: Path, told: StepProgress) -> None:
        super().__init__()
        self._file, self._told = file, told
        self._line = ""
        self.lines: list[str] = []

    def __enter__(self) -> _Log:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        self._stream = self._stack.enter_context(self._file.open("w", encoding="utf-8"))
        self._stack.enter_context(contextlib.redirect_stdout(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._stream.flush()
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.lines.append(line)
            self._told.hear(line)
        return len(text)

    def cause(self) -> str:
        """Return the step's error, its class with the module: the end of its last traceback."""
        # kfp.local indents the step's output by four spaces.
        said = [line.removeprefix("    ") for line in self.lines]
        starts = [number for number, line in enumerate(said) if line == TRACEBACK]
        if not starts:
            return "the step ended without an error of Python: it was killed, or memory ran out"
        after = said[starts[-1] + 1 :]
        first = next((n for n, line in enumerate(after) if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), None)
        if first is None:
            return "the step ended within a traceback"
        cause = []
        for line in after[first:]:
            if not line.strip() or " - ERROR - Task" in line:
                break
            cause.append(line)
        return "\n".join(cause)


def code_hash() -> str:
    """Return a hash over the source of all packages: has the code changed since a step ran?"""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end the step's process too and then stop this one as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        _end_children()  # first: on its way out, kfp.local would wait for them
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: its owner stops us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_children() -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
