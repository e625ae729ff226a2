"""The record of a local run on disk -> its arguments, its progress, and the outputs of each step.

<home>/runs/<run id>/state.json      this record, rewritten after each step
                     artifacts/<step>/<name>/
                     logs/<step>.log
                     working/<step>/          of steps that run; after a failure it stays
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

import psutil

from components.home import command, write_json
from feature_repo.atomic_files import read_json
from feature_repo.errors import USAGE, RecoError, without_password
from feature_repo.ids import is_name
from pipelines.run.graph import Outputs
from serving.errors import BundleInvalid, NoChampion
from serving.release.champion import FILE as POINTER
from serving.release.champion import read_champion
from serving.release.manifest import read_manifest

CLOCKS_S = 2.0  # how far the times of files and of processes may differ
Size = Literal["full", "default", "fast"]  # of the pipeline: see `pipelines.training`


class RunUnknown(RecoError):
    """No run of that name under this home."""

    exit_code = USAGE


@dataclass
class StepState:
    """One step of a run."""

    name: str
    status: str = "waiting"  # waiting | running | stopped | done | failed
    seconds: float = 0.0
    memory_mib: int = 0  # the most that its processes held together
    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class Run:
    """One run of a pipeline on this machine."""

    run_id: str
    folder: Path
    pipeline: str
    arguments: dict[str, Any]
    created_at: str
    steps: list[StepState]
    pid: int = 0
    size: Size = "full"
    elapsed_s: float = 0.0  # of the processes that worked on it: less than its steps', which ran side by side
    peak_memory_mib: int = 0  # the most that the processes of all steps held together

    @property
    def status(self) -> str:
        """Return done, failed, running, stopped (no process works on it) or waiting."""
        states = {step.status for step in self.steps}
        if states == {"done"}:
            return "done"
        if self._is_worked_on():
            return "running"
        return "failed" if "failed" in states else "stopped" if states != {"waiting"} else "waiting"

    @property
    def saved_at(self) -> float:
        """When the record was last written, seconds since the epoch."""
        return (self.folder / "state.json").stat().st_mtime

    def _is_worked_on(self) -> bool:
        """Return whether the process that saved the record still runs.

        Another process may have its number by now: in a container each run has the number 1. A process that
        began after the last save is another one.
        """
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            return bool(self.pid) and psutil.Process(self.pid).create_time() <= self.saved_at + CLOCKS_S
        return False

    def shown_arguments(self) -> dict[str, Any]:
        """Return the arguments without the passwords that their URLs may hold."""
        return {
            name: re.sub("password=[^&]*", "password=…", without_password(value))
            if isinstance(value, str)
            else value
            for name, value in self.arguments.items()
        }

    @property
    def seconds(self) -> float:
        """Return how long it took, without pauses between the first try and a resumption."""
        return self.elapsed_s or sum(step.seconds for step in self.steps)  # an older record has no own time

    def step(self, name: str) -> StepState:
        """Return a step by its name."""
        return next(step for step in self.steps if step.name == name)

    def outputs(self) -> dict[str, Outputs]:
        """Return the outputs of the good steps, as far as they still exist."""
        given = {}
        for step in self.steps:
            places = {name: self.artifacts(step.name) / name for name in step.artifacts}
            if step.status == "done" and all(place.exists() for place in places.values()):
                given[step.name] = Outputs(step.parameters, places)
        return given

    def artifacts(self, step: str) -> Path:
        """Return the folder of a step's artifacts."""
        return self.folder / "artifacts" / step

    def log(self, step: str) -> Path:
        """Return the file with everything a step said."""
        return self.folder / "logs" / f"{step}.log"

    def save(self) -> None:
        """Write the record, atomically."""
        document = {"kind": "run", **asdict(self)}
        del document["folder"]
        write_json(self.folder / "state.json", document)
        (self.folder / "state.json").chmod(0o600)  # an argument may hold the online store's password


def new_run(
    home: Path, pipeline: str, arguments: dict[str, Any], steps: list[str], size: Size = "full"
) -> Run:
    """Make the folder and the record of a new run."""
    now = datetime.now(UTC)
    name = now.strftime("%Y%m%d-%H%M%S")
    places = (home / "runs" / (name if number == 1 else f"{name}-{number}") for number in count(1))
    folder = next(place for place in places if not place.exists())
    folder.mkdir(parents=True)
    created_at, states = now.isoformat(timespec="seconds"), [StepState(step) for step in steps]
    run = Run(folder.name, folder, pipeline, arguments, created_at, states, size=size)
    run.save()
    return run


def list_runs(home: Path) -> Iterator[Run]:
    """Yield the runs under a home, newest first; folders that hold no readable record are left out."""
    for folder in sorted((home / "runs").glob("*/"), reverse=True):
        try:
            yield read_run(folder)
        except RunUnknown:
            continue


def read_run(folder: Path) -> Run:
    """Return the run recorded in a folder.

    Raises:
        RunUnknown: there is no readable record.
    """
    try:
        document = read_json((folder / "state.json").read_bytes())
        del document["kind"]
        document.pop("code", None)  # of an older record
        steps = [StepState(**step) for step in document.pop("steps")]
        run = Run(folder=folder, steps=steps, **document)
        run.arguments = _follow_move(run.arguments, folder.absolute().parents[1])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunUnknown(f"{folder / 'state.json'} is not the record of a run ({error})") from error
    if run.status != "running":  # its process was killed, and could not write it down
        for step in run.steps:
            step.status = "stopped" if step.status == "running" else step.status
    return run


def _follow_move(arguments: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return a run's arguments with the paths of the home that holds its record now: it may have moved."""
    before = re.compile(rf"^(sqlite:///)?{re.escape(str(arguments.get('home', home)))}(?=/|$)")
    return {
        name: before.sub(lambda match: (match[1] or "") + str(home), value)
        if isinstance(value, str)
        else value
        for name, value in arguments.items()
    }


def find_run(home: Path, name: str) -> Run:
    """Return a run by its id, the beginning of it, or `last`.

    Raises:
        RunUnknown: none or several match; the message names the newest ones.
    """
    known = list(list_runs(home))
    matching = known[:1] if name == "last" else [run for run in known if run.run_id == name]
    matching = matching or [run for run in known if run.run_id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    newest = ", ".join(run.run_id for run in known[:5])
    newest = newest or f"none yet: start one with `{command(home, 'run')}`"
    found = "several runs begin with" if matching else "no run"
    raise RunUnknown(f"{found} {name!r} under {home / 'runs'}; newest: {newest}")


def champions_run(home: Path) -> Run | None:
    """Return the newest run that promoted the champion or, if it was refreshed, an ancestor of it."""
    promoted: dict[str, Run] = {}
    for run in promoted_runs(home):
        promoted.setdefault(run.step("promote-bundle").parameters["Output"]["bundle_id"], run)
    ids = lineage(home, read_champion(home).bundle_id)
    return next((promoted[bundle_id] for bundle_id in ids if bundle_id in promoted), None)


def promoted_runs(home: Path) -> list[Run]:
    """Return the runs that promoted a bundle, newest first."""
    return [
        run
        for run in list_runs(home)
        if any(step.name == "promote-bundle" and step.parameters.get("Output") for step in run.steps)
    ]


def shops_run(home: Path) -> Run | None:
    """Return the run whose data name the shop of a home.

    That is the champion's run or, if the pointer is damaged, the newest one that promoted a bundle.
    """
    try:
        return champions_run(home)
    except NoChampion:
        return next(iter(promoted_runs(home)), None) if (home / POINTER).exists() else None


def lineage(home: Path, bundle_id: str) -> Iterator[str]:
    """Yield a bundle's id and those of its ancestors, as far as the home holds them."""
    while is_name(bundle_id):
        yield bundle_id
        try:
            bundle_id = str(read_manifest(home / "bundles" / bundle_id)["made_from"].get("parent", ""))
        except BundleInvalid:
            return  # it was promoted elsewhere, or removed: its ancestors are unknown


def evaluated_runs(home: Path) -> Iterator[tuple[str, Run]]:
    """Yield the runs that still hold an evaluated bundle, newest first, each after the id of its bundle."""
    for run in list_runs(home):
        with contextlib.suppress(BundleInvalid):
            yield str(read_manifest(run.artifacts("evaluate-bundle") / "evaluated")["bundle_id"]), run


def drop_artifacts(home: Path, keep: int, spare: str = "") -> list[str]:
    """Remove the artifacts of all but the newest runs, the run `spare` and the champion's.

    Records and logs stay. A refresh and an extension need the artifacts of the champion's run.

    Returns:
        The ids of the runs that were freed.
    """
    spared, freed = {spare}, []
    with contextlib.suppress(NoChampion):
        spared |= {run.run_id for run in [champions_run(home)] if run}
    for run in list(list_runs(home))[keep:]:
        left = [place for name in ("artifacts", "working") if (place := run.folder / name).exists()]
        if left and run.run_id not in spared and run.status != "running":
            for place in left:
                shutil.rmtree(place, ignore_errors=True)
            if not any(place.exists() for place in left):
                freed.append(run.run_id)
    return freed


def usual_steps(home: Path, run: Run) -> dict[str, StepState]:
    """Return the steps of the newest finished run with the same data and models: they need as much memory."""
    same = ("data", "train_until", "example_params", "retriever_params", "ranker_params")
    for other in list_runs(home):
        alike = all(other.arguments.get(key) == run.arguments.get(key) for key in same)
        kind = (other.pipeline, other.size, other.status) == (run.pipeline, run.size, "done")
        if other.run_id != run.run_id and kind and alike:
            return {step.name: step for step in other.steps}
    return {}
