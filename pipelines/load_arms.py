"""A bundle and a Redis of users' rows -> the servers of the load report, each started by one command.

To add an arm is to add a line to `ARMS`. Every arm takes the same bodies at /v1/models/checkout:predict and
reads the same rows; what a version of this code, or a home, cannot start is skipped with its reason.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from components.feast_store import open_feature_store, quiet_feast
from components.home import Champion
from feature_repo.snapshots import ITEM_VIEW, USER_VIEW
from pipelines.runs import list_runs
from serving.measured_server import MeasuredServer, started
from serving.settings import Settings, variable

PREDICT = "/v1/models/checkout:predict"
OURS, NULL = "ours", "null"
ROWS_AT_ONCE = 5_000  # of one write through Feast


@dataclass(frozen=True)
class Scene:
    """What all arms serve."""

    bundle: Path
    settings: Settings  # where the Redis is; the deadline; ports and log are chosen for each arm
    feast_home: Path  # Feast's registry of that Redis
    student: Path | None  # the ranker's torch weights; None: nobody kept them


@dataclass(frozen=True)
class Arm:
    """One server to measure."""

    name: str
    what: str  # it is, in a line
    command: Callable[[Scene], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the scene's settings
    needs_student: bool = False

    def missing(self, scene: Scene) -> str:
        """Return why it cannot be measured, or an empty text."""
        known = {variable(setting.name) for setting in fields(Settings)}
        if unknown := sorted(set(self.environment) - known):
            return f"this version has no {', '.join(unknown)}"
        if self.needs_student and scene.student is None:
            return "no run under this home keeps the torch weights of the champion's student"
        return ""


def _ours(scene: Scene) -> list[str]:
    return [sys.executable, "-m", "serving.server", "--bundle", str(scene.bundle)]


def _variant(**given: Any) -> Callable[[Scene], list[str]]:
    """Return the command of a variant; a field that is True gets the scene's path of that name."""

    def command(scene: Scene) -> list[str]:
        paths = {"feast_home": scene.feast_home, "student": scene.student}
        chosen = {name: str(paths[name]) if name in paths else value for name, value in given.items()}
        document = json.dumps({"bundle": str(scene.bundle), **chosen})
        return [sys.executable, "-m", "pipelines.load_arms_variants", document]

    return command


def _tutorial(items_from_feast: bool) -> Callable[[Scene], list[str]]:
    def command(scene: Scene) -> list[str]:
        paths = {name: str(getattr(scene, name)) for name in ("bundle", "feast_home", "student")}
        document = json.dumps({**paths, "items_from_feast": items_from_feast})
        return [sys.executable, "-m", "pipelines.load_arms_tutorial", document]

    return command


ARMS = (
    Arm(OURS, "as it ships, one process", _ours),
    Arm("ours, 2 processes", "two processes behind one port", _ours, {"RECO_PROCESSES": "2"}),
    Arm("kserve-stock", "our models in KServe's own server, with its logs", _variant(door="kserve")),
    Arm("eager", "ranker in eager PyTorch, FP32", _variant(student=True), needs_student=True),
    Arm("feast-sdk", "the user's row through Feast's SDK", _variant(feast_home=True)),
    Arm("no-gc-freeze", "garbage collections over all that is loaded", _variant(freezes=False)),
    Arm("no-batching", "each request calls the ranker by itself", _variant(joins=False)),
    Arm("fastapi", "plain FastAPI and uvicorn before the same recommender", _variant(door="fastapi")),
    Arm(
        "unoptimised",
        "the tutorials' stack: KServe transformer, JSON, PyTorch predictor; user and candidates from Feast",
        _tutorial(items_from_feast=True),
        needs_student=True,
    ),
    Arm(
        "unoptimised-user-row",
        "the same, but only the user's row comes from Feast",
        _tutorial(items_from_feast=False),
        needs_student=True,
    ),
    Arm(
        NULL,
        "burns the processor time of `ours` and answers nothing",
        lambda scene: [sys.executable, "-m", "pipelines.load_arms_null"],
    ),
)


def choose_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return the arms of these names, or all; `ours` always, for all others are compared with it.

    Raises:
        ValueError: there is none of a name.
    """
    known = [arm.name for arm in ARMS]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no arm {unknown[0]!r}: choose among {', '.join(known)}")
    return tuple(arm for arm in ARMS if not names or arm.name in (OURS, *names))


@contextlib.contextmanager
def running(arm: Arm, scene: Scene, scratch: Path) -> Iterator[MeasuredServer]:
    """Start an arm with a home and a log of its own; it ends with the block.

    Raises:
        RuntimeError: it did not become ready.
    """
    place = scratch / arm.name.replace(" ", "-")
    place.mkdir()
    settings = replace(
        scene.settings, home=place, host="127.0.0.1", http_port=0, grpc_port=0, log=True, log_dir=None
    )
    environment = {**settings.to_env(), **arm.environment}
    with started(arm.command(scene), environment, place / "server.log") as server:
        yield server


def fill_store(offline_store: Path, feast_home: Path, url: str) -> dict[str, int]:
    """Write each user's first row and each item's into a Redis, through Feast; return how many of each.

    Args:
        offline_store: of the champion's home: a directory for each view.
        feast_home: gets Feast's registry.
        url: of the Redis.

    Raises:
        FileNotFoundError: the home has no offline store.
    """
    counts = {}
    with quiet_feast():
        store = open_feature_store(feast_home, url)
        for view, key in ((USER_VIEW, "user_id"), (ITEM_VIEW, "item_id")):
            rows = pq.read_table(offline_store / view / "snapshots.parquet").to_pandas()
            # The row as of the cut: the baskets that are asked about come after it.
            rows = rows.sort_values("event_timestamp").drop_duplicates(key)
            for start in range(0, len(rows), ROWS_AT_ONCE):
                store.write_to_online_store(view, df=rows.iloc[start : start + ROWS_AT_ONCE])
            counts[key.removesuffix("_id") + "s"] = len(rows)
    return counts


def student_of(home: Path, champion: Champion) -> Path | None:
    """Return the student that the champion's ranker was made from, if its run still keeps the weights."""
    for run in list_runs(home):
        evaluated = run.artifacts("evaluate-bundle") / "evaluated" / "manifest.json"
        student = run.artifacts("distill-ranker") / "ranker"
        if not evaluated.is_file() or not (student / "weights.npz").is_file():
            continue
        if json.loads(evaluated.read_bytes())["bundle_id"] == champion.bundle_id:
            return student
    return None
