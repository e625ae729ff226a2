"""A bundle and a Redis of users' rows -> the servers of the load report, each started by one command.

Each arm decides one claim of the design.

* `ours`: the endpoint as it ships.
* `kserve-stock`: the models in KServe's own server. Decides whether an HTTP server of our own is worth it.
* `onnx-fp32`: the ranker as exported. Decides whether quantising and compiling it is worth it.
* `fastapi-torch`: plain FastAPI and eager PyTorch, nothing kept or shared. The unoptimised path of the goals.

All arms take the same bodies at /v1/models/checkout:predict and read the same rows. An arm that this version
or this home cannot start is skipped with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from components.data.feast_store import open_feature_store, quiet_feast
from feature_repo.snapshots import USER_VIEW
from pipelines.bench.load.goals import OURS, UNOPTIMISED
from pipelines.bench.load.measured_server import private
from pipelines.run.runs import evaluated_runs, lineage
from serving.release.champion import Champion
from serving.settings import Settings

PREDICT = "/v1/models/checkout:predict"
RANKER_FILES = "ranker.onnx", "weights.npz"  # graph and torch weights
ROWS_AT_ONCE = 5_000  # of one write through Feast
STEPS = {"student": "distill-ranker", "pruned": "prune-ranker"}  # the rankers and the steps that made them


@dataclass(frozen=True)
class LoadSetup:
    """The parts that all arms serve from."""

    bundle: Path
    settings: Settings  # the defaults but for the Redis and the deadline; homes are each arm's own
    # Graph and torch weights on the way to the bundle's ranker, a key of `STEPS` each; None: no run has it.
    rankers: Mapping[str, Path | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """One server to measure."""

    name: str
    what: str  # a line for the report
    kind: str = ""  # see `arm_variants`; empty: the endpoint as it ships
    needs: str = ""  # a ranker of the setup
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the setup's settings

    def command(self, setup: LoadSetup) -> list[str]:
        """Return the command that starts it."""
        python = [sys.executable, "-P", "-m"]
        if not self.kind:
            return [*python, "serving.server", "--bundle", str(setup.bundle)]
        ranker = [str(setup.rankers[self.needs])] if self.needs else []
        return [*python, "pipelines.bench.load.arm_variants", self.kind, str(setup.bundle), *ranker]

    def missing(self, setup: LoadSetup) -> str:
        """Return why it cannot be measured, or an empty text."""
        if self.needs and setup.rankers.get(self.needs) is None:
            return f"no run under this home keeps what {STEPS[self.needs]} made on the way to the champion"
        return ""

    def settings(self, setup: LoadSetup, home: Path) -> Settings:
        """Return the whole environment of the server; nothing of it comes from the caller's shell."""
        settings = private(setup.settings, home=home)
        return Settings.from_env({**settings.to_env(), **self.environment})


ARMS = (
    Arm(OURS, "as it ships, one process"),
    Arm(
        "kserve-stock",
        "our models in KServe's own server, with its logs in place of our request log",
        "kserve",
        environment={"RECO_REQUEST_LOG": "off"},
    ),
    Arm(
        "onnx-fp32",
        "the pruned ranker's graph as exported: FP32, neither quantised nor optimised ahead of time",
        "graph",
        "pruned",
    ),
    Arm(
        UNOPTIMISED,
        "plain FastAPI, the student before pruning in eager PyTorch, no batching: what one writes first; "
        "no request log, no metrics",
        "fastapi",
        "student",
    ),
)


def fill_store(offline_store: Path, feast_home: Path, url: str) -> int:
    """Write each user's first row into a Redis, through Feast; return their number.

    Raises:
        FileNotFoundError: the home has no offline store.
    """
    rows = pq.read_table(offline_store / USER_VIEW / "snapshots.parquet").to_pandas()
    # The row as of the cut: the baskets of the requests come after it.
    rows = rows.sort_values("event_timestamp").drop_duplicates("user_id")
    with quiet_feast():
        store = open_feature_store(feast_home, url)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            store.write_to_online_store(USER_VIEW, df=rows.iloc[start : start + ROWS_AT_ONCE])
    return len(rows)


def ranker_of(home: Path, champion: Champion, step: str) -> Path | None:
    """Return the ranker that a step made on the way to the champion, if its run still has it whole."""
    ids = set(lineage(home, champion.bundle_id))
    for bundle_id, run in evaluated_runs(home):
        ranker = run.artifacts(step) / "ranker"
        if bundle_id in ids and all((ranker / name).is_file() for name in RANKER_FILES):
            return ranker
    return None
