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

from components.data.feast_store import open_feature_store, quiet_feast
from components.home import Champion
from feature_repo.snapshots import ITEM_VIEW, USER_VIEW
from pipelines.bench.load.measured_server import MeasuredServer, started
from pipelines.run.runs import list_runs
from serving.settings import Settings, variable

PREDICT = "/v1/models/checkout:predict"
OURS, NULL = "ours", "null"
KEPT = "ranker.onnx", "weights.npz"  # graph and torch weights of a ranker
VIEWS = {USER_VIEW: "user_id", ITEM_VIEW: "item_id"}
ROWS_AT_ONCE = 5_000  # of one write through Feast
STEPS = {"student": "distill-ranker", "pruned": "prune-ranker"}  # the scene's rankers: who made them


@dataclass(frozen=True)
class Scene:
    """What all arms serve."""

    bundle: Path
    settings: Settings  # the defaults but for where the Redis is and the deadline; places are each arm's own
    feast_home: Path  # Feast's registry of that Redis
    student: Path | None  # the ranker before it was pruned, graph and torch weights; None: nobody kept it
    mixed: bool = False  # the requests are a replay, where few are asked again
    pruned: Path | None = None  # what the bundle's ranker was quantised and compiled from, likewise


@dataclass(frozen=True)
class Arm:
    """One server to measure."""

    name: str
    what: str  # it is, in a line
    command: Callable[[Scene], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the scene's settings
    needs: str = ""  # the scene's ranker that it cannot do without, a key of `STEPS`

    @property
    def keeps_answers(self) -> bool:
        """Whether it may answer what it was asked before without computing it again."""
        return "RECO_ANSWER_CACHE" in self.environment

    def missing(self, scene: Scene) -> str:
        """Return why it cannot be measured, or an empty text."""
        known = {variable(setting.name) for setting in fields(Settings)}
        if unknown := sorted(set(self.environment) - known):
            return f"this version has no {', '.join(unknown)}"
        if self.needs and getattr(scene, self.needs) is None:
            return f"no run under this home keeps what {STEPS[self.needs]} made on the way to the champion"
        if self.keeps_answers and not scene.mixed:
            return "requests that are asked in a cycle are all hits after the first round: use --mixed"
        return ""

    def settings(self, scene: Scene, place: Path) -> Settings:
        """Return all that the server gets from its environment; nothing of it comes from the caller's shell.

        Args:
            scene: what all arms serve.
            place: the arm's own home, its log included.
        """
        own = replace(scene.settings, home=place, host="127.0.0.1", http_port=0, grpc_port=0)
        return Settings.from_env({**own.to_env(), **self.environment})


def _ours(scene: Scene) -> list[str]:
    return [sys.executable, "-m", "serving.server", "--bundle", str(scene.bundle)]


def _variant(**given: Any) -> Callable[[Scene], list[str]]:
    """Return the command of a variant; a field that is a path is given by the scene's name of it."""

    def command(scene: Scene) -> list[str]:
        chosen = {
            name: str(getattr(scene, value)) if name in ("feast_home", "weights", "graph") else value
            for name, value in given.items()
        }
        document = json.dumps({"bundle": str(scene.bundle), **chosen})
        return [sys.executable, "-m", "pipelines.bench.load.arm_variants", document]

    return command


def _tutorial(items_from_feast: bool) -> Callable[[Scene], list[str]]:
    def command(scene: Scene) -> list[str]:
        paths = {name: str(getattr(scene, name)) for name in ("bundle", "feast_home", "student")}
        document = json.dumps({**paths, "items_from_feast": items_from_feast})
        return [sys.executable, "-m", "pipelines.bench.load.arm_tutorial", document]

    return command


_NO_REQUEST_LOG = {"RECO_REQUEST_LOG": "off"}
ARMS = (
    Arm(OURS, "as it ships, one process", _ours),
    Arm("ours, 2 processes", "two processes behind one port", _ours, {"RECO_PROCESSES": "2"}),
    Arm("answer-cache", "answers are kept in the process", _ours, {"RECO_ANSWER_CACHE": "memory:"}),
    Arm("no-logs", "neither request log nor prediction log", _ours, {**_NO_REQUEST_LOG, "RECO_LOG": "off"}),
    Arm(
        "kserve-stock",
        "our models in KServe's own server, with its logs in place of our request log",
        _variant(door="kserve"),
        _NO_REQUEST_LOG,
    ),
    # The way to the file that is served, backwards: without its last steps, without pruning; `eager` is the
    # first of the two in another engine.
    Arm(
        "onnx-fp32",
        "the pruned ranker's graph as exported: FP32, neither quantised nor optimised ahead of time",
        _variant(graph="pruned"),
        needs="pruned",
    ),
    Arm(
        "unpruned",
        "the student's graph as exported: FP32 and not pruned either",
        _variant(graph="student"),
        needs="student",
    ),
    Arm("eager", "the pruned ranker in eager PyTorch, FP32", _variant(weights="pruned"), needs="pruned"),
    Arm("feast-sdk", "the user's row through Feast's SDK", _variant(feast_home="feast_home")),
    Arm("no-gc-freeze", "garbage collections over all that is loaded", _variant(freezes=False)),
    Arm(
        "fastapi",
        "plain FastAPI and uvicorn before the same recommender; no request log, no metrics",
        _variant(door="fastapi"),
    ),
    Arm(
        "fastapi-torch",
        "plain FastAPI, the student before pruning in eager PyTorch, no batching: what one writes first; "
        "no request log, no metrics",
        _variant(door="fastapi", weights="student"),
        needs="student",
    ),
    Arm(
        "unoptimised",
        "the tutorials' stack: KServe transformer, JSON, PyTorch predictor with the student before pruning, "
        "which is what people would serve; user and candidates from Feast; "
        "KServe's logs, neither request log nor prediction log",
        _tutorial(items_from_feast=True),
        needs="student",
    ),
    Arm(
        "unoptimised-user-row",
        "the same, student before pruning included, but only the user's row comes from Feast",
        _tutorial(items_from_feast=False),
        needs="student",
    ),
    Arm(
        NULL,
        "burns the processor time of `ours` and answers nothing",
        lambda scene: [sys.executable, "-m", "pipelines.bench.load.arm_null"],
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
    environment = arm.settings(scene, place).to_env()
    with started(arm.command(scene), environment, place / "server.log") as server:
        yield server


def differing(settings: Settings) -> dict[str, str]:
    """Return the variables of all settings that are not what they are by default."""
    default, environment = Settings(), settings.to_env()
    return {
        variable(one.name): environment[variable(one.name)]
        for one in fields(Settings)
        if getattr(settings, one.name) != getattr(default, one.name)
    }


def fill_store(
    offline_store: Path, feast_home: Path, url: str, views: Mapping[str, str] = VIEWS
) -> dict[str, int]:
    """Write each user's first row and each item's into a Redis, through Feast; return how many of each.

    Args:
        offline_store: of the champion's home: a directory for each view.
        feast_home: gets Feast's registry.
        url: of the Redis.
        views: which, each with its key.

    Raises:
        FileNotFoundError: the home has no offline store.
    """
    counts = {}
    with quiet_feast():
        store = open_feature_store(feast_home, url)
        for view, key in views.items():
            rows = pq.read_table(offline_store / view / "snapshots.parquet").to_pandas()
            # The row as of the cut: the baskets that are asked about come after it.
            rows = rows.sort_values("event_timestamp").drop_duplicates(key)
            for start in range(0, len(rows), ROWS_AT_ONCE):
                store.write_to_online_store(view, df=rows.iloc[start : start + ROWS_AT_ONCE])
            counts[key.removesuffix("_id") + "s"] = len(rows)
    return counts


def ranker_of(home: Path, champion: Champion, step: str) -> Path | None:
    """Return what a step made on the way to the champion's ranker, if its run still keeps it whole."""
    for run in list_runs(home):
        evaluated = run.artifacts("evaluate-bundle") / "evaluated" / "manifest.json"
        ranker = run.artifacts(step) / "ranker"
        if not all(file.is_file() for file in (evaluated, *(ranker / name for name in KEPT))):
            continue
        if json.loads(evaluated.read_bytes())["bundle_id"] == champion.bundle_id:
            return ranker
    return None
