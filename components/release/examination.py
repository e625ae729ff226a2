"""A challenger, the champion and a data set -> the gate's own measurements, made in a limited child process.

Nothing that the bundle says about itself counts: its evaluation is only compared with these figures. The
child opens files that strangers may have written. So it has no credentials in its environment, an empty home,
bounded memory and time, and ends with its parent. It runs as the same user: it is no sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas as pd
import psutil

from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, serve, window_s
from components.evaluation.metrics import Bootstrap, Tally
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task, read_tasks
from components.measurement import control_groups
from components.release.gate import HEADLINE
from components.release.served_latency import served_latency
from feature_repo.errors import UNREACHABLE, RecoError
from feature_repo.events import read_dataset
from feature_repo.queries import Rows
from feature_repo.schema import model_inputs
from feature_repo.statistics import Statistics
from serving.answer.recommender import Recommender, verify_golden
from serving.errors import BundleInvalid
from serving.release.bundle import NEW_VECTORS, Bundle, load_bundle
from serving.schemas import DEFAULT_PROFILE
from serving.stages.item_index import read_faiss
from serving.stages.retrieval import Quotas
from serving.stores.online_features import MemoryStore

MEMORY_BYTES = 8 << 30
LEAST_MEMORY_BYTES = 3 << 30  # an honest bundle of 26,000 items reserves 2.4 GiB, and uses half of it
CPU_S = 3_600
WALL_S = 7_200.0
RESULT_BYTES = 1 << 24  # largest file that the child may write
SCANNED_ROWS = 10_000
ASKED = 200  # test baskets whose latency and index recall are measured
ROWS_A_CALL = 4_096
LEAST_SPREAD = 1e-6  # standard deviation of the scanned scores
ENDED_BY_MEMORY = (-signal.SIGABRT, -signal.SIGKILL)  # C++ without memory; the kernel, without memory
KEPT_ENVIRONMENT = ("PATH", "LANG", "TMPDIR", "PYTHONPATH", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS")

# Measures a challenger (bundle, champion's bundle or None, data set, baskets) for `components.release.gate`.
Examine = Callable[[Path, Path | None, Path, int], dict[str, Any]]


class MemoryShort(RecoError):
    """Too little memory is free to examine a bundle: that says nothing about the bundle."""

    exit_code = UNREACHABLE


class ExaminationFailed(RecoError):
    """The data set or a measurement failed, not the bundle: nothing was judged."""

    exit_code = UNREACHABLE


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that are free on this machine and within the limits of our control groups (v2)."""
    free = [psutil.virtual_memory().available]
    for group in control_groups(root):
        with suppress(OSError, ValueError):  # no limit: the file is absent, or holds "max"
            limit = int((group / "memory.max").read_text())
            cached = re.findall(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free.append(limit - int((group / "memory.current").read_text()) + sum(map(int, cached)))
    return min(free)


def examine_apart(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
    """Do as `examine` in a child process; a bundle that kills it, or takes too much, is unreadable.

    Raises:
        MemoryShort: nothing was opened, or the memory that was free did not suffice.
        ExaminationFailed: for example, a file of the data set was changed.
    """
    memory = min(MEMORY_BYTES, free_memory())  # with more it might end other processes
    short = (
        f"{memory >> 20} MiB of memory are too few to examine the bundle, "
        f"expected {LEAST_MEMORY_BYTES >> 20} or more: "
        "try again when other processes have ended, or raise the limit of the pod"
    )
    if memory < LEAST_MEMORY_BYTES:
        raise MemoryShort(short)
    program = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(memory), str(os.getpid())]
    paths = [str(path) for path in (challenger, dataset, *([champion] if champion else []))]
    environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    with (
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryDirectory() as empty,
    ):
        code = 0
        try:
            code = subprocess.run(
                [*program, str(sample), *paths],
                env=environment | {"HOME": empty},
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=said,
                timeout=WALL_S,
                check=False,
            ).returncode
            ended = f"ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"took more than {WALL_S:g} s"
        for stream in (result, said):
            stream.seek(0)
        try:
            measured = json.loads(result.read(RESULT_BYTES))
        except ValueError:
            if code in ENDED_BY_MEMORY and memory < MEMORY_BYTES:
                raise MemoryShort(short) from None
            lines = said.read(RESULT_BYTES).decode(errors="replace").strip().splitlines()
            fault = f"the process that opened it {ended}, allowed {memory >> 20} MiB"
            return {"verdicts": {"readable": f"{fault}: {(lines or ['no message'])[-1][:300]}"}}
    if error := measured.get("error"):
        if error.partition(":")[0].endswith("MemoryError"):  # NumPy's and Arrow's have names of their own
            raise MemoryShort(short)
        raise ExaminationFailed(f"the examination failed, not the bundle: {error}")
    return dict(measured)


def examine(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
    """Return the measurements that the gate compares.

    Args:
        challenger: the bundle that asks for promotion.
        champion: the bundle to compare with; it answers the same baskets.
        dataset: the data set that holds the weeks after the challenger's cut.
        sample: the most baskets to ask.

    Returns:
        `verdicts` by name, each with its fault; if there are no faults, the measurements; `champion_fault`
        if the champion cannot be read.
    """
    verdicts: dict[str, str] = {}
    measured: dict[str, Any] = {"verdicts": verdicts}
    with _judged(verdicts, "readable"):
        bundle = load_bundle(challenger)
    if any(verdicts.values()):
        return measured
    with _judged(verdicts, "golden requests"):
        verify_golden(bundle)
    purchases = purchases_of(read_dataset(dataset).events)
    tasks, baskets = sample_tasks(bundle, purchases, sample)
    if not tasks:
        return measured | {"baskets": 0, "served": {}}
    asked = tasks[:ASKED]
    with _judged(verdicts, "readable"):
        scores = scan(bundle, asked)
    if not verdicts["readable"]:
        verdicts |= _verdicts_on(scores)
    if any(verdicts.values()):
        return measured
    measured |= {"baskets": baskets, "sampled": len(tasks), "index_recall": index_recall(bundle, asked)}
    champions: dict[str, str] = {}
    with _judged(champions, "champion_fault"):
        theirs = None if champion is None else load_bundle(champion)
    if any(champions.values()):
        return measured | champions
    with _judged(verdicts, "readable"):
        baselines = {name: Tally() for name in ("blend", "two_tower")}
        served, _ = serve(bundle, tasks, Nightly(bundle, purchases), baselines)
        measured |= {name: _means(tally) for name, tally in ({"served": served} | baselines).items()}
    if any(verdicts.values()):
        return measured
    if theirs is not None:
        measured |= _beside(theirs, bundle, tasks, served, purchases)
    measured["latency"] = served_latency(bundle, theirs, asked)
    return measured


def _beside(
    champion: Bundle, challenger: Bundle, tasks: list[Task], served: Tally, purchases: Purchases
) -> dict[str, Any]:
    """Return the champion's quality on the challenger's tasks, and the share of sales that each one knows."""
    start = pd.Timestamp(challenger.manifest["cut"])
    translated = [_translate(task, challenger.statistics, champion.statistics) for task in tasks]
    champions, _ = serve(champion, translated, Nightly(champion, purchases, start))
    pairs = (tally.values(HEADLINE) for tally in (served, champions))
    interval = Bootstrap([task.user_id for task in tasks]).ratio_interval(*pairs)
    both = {"challenger": challenger, "champion": champion}
    known = {name: known_share(one.statistics, purchases, start) for name, one in both.items()}
    return {"champion": {**_means(champions), "interval": interval}, "known": known}


def _verdicts_on(scores: np.ndarray) -> dict[str, str]:
    wrong = int((~((scores >= 0) & (scores <= 1))).sum())
    spread = float(np.std(scores)) if not wrong else np.inf
    return {
        "finite scores": (
            f"{wrong} of {len(scores)} scores are no probability: look at the ranker's graph" if wrong else ""
        ),
        "scores that differ": (
            "" if spread > LEAST_SPREAD else f"{len(scores)} scores deviate by {spread:.2g}: it ranks nothing"
        ),
    }


@contextmanager
def _judged(verdicts: dict[str, str], name: str) -> Iterator[None]:
    """Make an error of the bundle, whichever it is, the fault of a verdict.

    Raises:
        MemoryError: the process may take less than MEMORY_BYTES, so the bundle may be good.
    """
    verdicts.setdefault(name, "")
    try:
        yield
    except Exception as error:  # ONNX Runtime's and Faiss' errors share no base class
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if any(isinstance(one, MemoryError) for one in (error, error.__cause__)) and 0 < limit < MEMORY_BYTES:
            raise MemoryError(str(error)) from error
        is_named = isinstance(error, BundleInvalid)
        verdicts[name] = str(error) if is_named else f"{type(error).__name__}: {str(error)[:300]}"


def sample_tasks(bundle: Bundle, purchases: Purchases, most: int) -> tuple[list[Task], int]:
    """Return at most so many test baskets of a bundle, in time order, and how many there are.

    The bundle's id draws them: trying again asks the same baskets, sealing again asks others.
    """
    start = pd.Timestamp(bundle.manifest["cut"])
    every = read_tasks(purchases, bundle.statistics, *window_s(start)).hidden
    rng = np.random.default_rng(int(hashlib.sha256(bundle.bundle_id.encode()).hexdigest()[:15], 16))
    chosen = np.sort(rng.permutation(len(every))[:most])
    return [every[row] for row in chosen.tolist()], len(every)


def known_share(statistics: Statistics, purchases: Purchases, start: pd.Timestamp) -> float:
    """Return the share of the lines bought in the test weeks whose item is in a catalogue.

    Items that were first sold in these weeks do not count: a champion that is refreshed each night knows
    them, and no training until their beginning can.
    """
    begin, end = window_s(start)
    sold = np.bincount(purchases.item[purchases.at < begin], minlength=len(purchases.item_ids)) > 0
    bought = purchases.item[(purchases.at >= begin) & (purchases.at < end)]
    known = np.isin(purchases.item_ids, np.asarray(statistics.item_ids))
    lines = known[bought[sold[bought]]]
    return float(lines.mean()) if len(lines) else 1.0


def scan(bundle: Bundle, tasks: Sequence[Task]) -> np.ndarray:
    """Return scores of the whole catalogue for one shopper after the other, SCANNED_ROWS or more of them."""
    recommender, scores = Recommender(bundle, MemoryStore()), [np.empty(0, np.float32)]
    items = np.arange(len(bundle.statistics.item_ids))
    for turn in range(-(-SCANNED_ROWS // len(items))):
        task = tasks[turn % len(tasks)]
        (_, prepared), *_ = prepared_tasks(bundle, [task])
        for first in range(0, len(items), ROWS_A_CALL):
            dense, categorical = model_inputs(Rows(prepared.query, items[first : first + ROWS_A_CALL]))
            scores.append(recommender.rank(dense, categorical))
    return np.concatenate(scores)


def _means(tally: Tally) -> dict[str, float]:
    column = tally.values(HEADLINE)
    means = {name: float(tally.values(name).mean()) for name in (HEADLINE, "recall_at_20")}
    return means | {"error": float(column.std() / np.sqrt(len(column)))}


def _translate(task: Task, ours: Statistics, theirs: Statistics) -> Task:
    """Return a task with its hidden items in another catalogue's codes; items that it lacks are misses."""
    return replace(task, hidden=theirs.each_code(ours.item_ids[task.hidden].tolist()))


def index_recall(bundle: Bundle, tasks: Sequence[Task]) -> float:
    """Return the share of the nearest items by exact search that the default profile's search finds.

    New items of one type have equal vectors: each that is as near as the last of the nearest counts.
    If that profile asks for none, the usual number is searched: other profiles use the index, too.
    """
    statistics = bundle.statistics
    left = len(statistics.item_ids) - len(bundle.removed)
    k = min(bundle.settings.quotas.tower or Quotas.tower, statistics.known_items, left)
    queries = [one.query for _, one in prepared_tasks(bundle, tasks) if one.query.says_something]
    if not queries:
        return 1.0  # nothing is ever searched
    tower, stored, near = bundle.profiles[DEFAULT_PROFILE].tower, _stored_vectors(bundle), 0
    for query in queries:
        exact = stored @ tower.vector(query)[0]  # of one query: of all at once they would take gigabytes
        exact[bundle.removed] = -np.inf
        last = np.partition(exact, -k)[-k]
        last -= 1e-5 * max(abs(last), 1.0)  # the index adds in another order
        near += int(np.count_nonzero(exact[tower.search(query, k)] >= last))
    return near / len(queries) / k


def _stored_vectors(bundle: Bundle) -> np.ndarray:
    index = read_faiss(bundle.path / "index.faiss")
    if isinstance(index, faiss.IndexIVF):
        index.make_direct_map()
    vectors = index.reconstruct_n(0, index.ntotal)
    added = bundle.path / NEW_VECTORS
    return np.concatenate([vectors, np.load(added, allow_pickle=False)]) if added.is_file() else vectors


def main() -> None:
    """Examine the bundles of the arguments, within the limits; write the result to stdout as JSON."""
    memory, parent, sample, *paths = sys.argv[1:]
    challenger, dataset, *champion = map(Path, paths)
    for name, most in (
        (resource.RLIMIT_DATA, int(memory)),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, RESULT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(name)
        resource.setrlimit(name, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard))
    threading.Thread(target=partial(_end_with, int(parent)), daemon=True).start()
    result = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    try:
        measured = examine(challenger, next(iter(champion), None), dataset, int(sample))
    except Exception as error:  # noqa: BLE001 - the edge of the process: the parent reports it
        measured = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(result, "w") as stream:
        json.dump(measured, stream)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
