"""A champion and real baskets -> the load report: ours beside other ways to serve the same.

Each arm is measured beside ours in a pair: two servers run at once and take turns in short rounds, so that
whatever else the machine does meets both, and no idle server takes caches or processor. Ratios are those of a
round or of a pair; the figures of ours are medians over all pairs. One client process sends all requests
(`pipelines.bench.load.generator`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from components.measurement import machine_state
from pipelines.bench.load.arms import (
    ARMS,
    PREDICT,
    STEPS,
    Arm,
    LoadSetup,
    fill_store,
    ranker_of,
)
from pipelines.bench.load.capacity_search import GOAL_MS, PRECISION, Capacity, Probe, search_capacity
from pipelines.bench.load.generator import Load, LoadGenerator, LoadPlan, bodies_of, load_generator
from pipelines.bench.load.goals import judge_goals
from pipelines.bench.load.local_store import local_server
from pipelines.bench.load.measured_server import MeasuredServer, started
from pipelines.bench.load.report import draw_load, load_table
from pipelines.bench.load.rows import pooled_row, ratios
from pipelines.bench.report import percentiles, write_report
from serving.release.bundle import load_bundle
from serving.release.champion import Champion
from serving.release.manifest import read_manifest
from serving.settings import Settings

log = logging.getLogger(__name__)

PROBE_REQUESTS = 200  # a probe is so long that about so many are due, within limits
WARM_UP = 20  # requests before each run: a server that idled has cold caches
PATIENCE_S = 60.0  # with the first answer of all
FIRST_LOAD = 0.4  # of one processor: the first guess at half of the capacity
OVERLOAD = 3.0  # times the capacity
OVERLOAD_CONNECTIONS = 512  # so that the requests wait at the server, not at the client
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # items in a basket
BASKETS = 200  # different ones of a length
ENDURANCE_STEPS = 60


@dataclass(frozen=True)
class LoadEffort:
    """The length of each measurement."""

    rounds: int = 5
    searches: int = 4  # of the capacity
    alone_s: float = 3.0  # one request at a time, a round
    probe_s: float = 3.0  # one rate of the capacity search; slow servers up to four times as long
    precision: float = PRECISION  # of the capacity
    half_s: float = 6.0  # at half of the capacity, a round
    overload_s: float = 6.0
    lengths_s: float = 1.0  # a length and round
    endurance: int = 60_000  # requests


QUICK = LoadEffort(
    rounds=1,
    searches=1,
    alone_s=0.5,
    probe_s=0.5,
    precision=1.0,
    half_s=0.5,
    overload_s=0.5,
    lengths_s=0.2,
    endurance=400,
)


@dataclass
class ArmRun:
    """A server of an arm that runs, and its figures so far."""

    arm: Arm
    server: MeasuredServer
    bodies: Sequence[bytes]
    ready_s: float
    first_ms: float | None = None
    first_degraded: bool = False
    rounds: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)  # with `client_ms`, one at a time
    capacities: list[Capacity] = field(default_factory=list)  # one a search
    half: list[Load] = field(default_factory=list)  # a load a round, at half of the capacity
    overload: Load | None = None
    memory_mb: Mapping[str, float] = field(default_factory=dict)
    position: int = 0  # in the list of requests: the next run continues there

    @property
    def url(self) -> str:
        """Where it takes requests."""
        return str(self.server.ready["http"]) + PREDICT

    @property
    def cpu_ms(self) -> float:
        """Processor time of all its processes for one request."""
        return float(np.median([row["cpu_ms"] for row in self.rounds]))

    @property
    def rate(self) -> float:
        """Its capacity in answers a second: the median of the searches."""
        return float(np.median([capacity.rate for capacity in self.capacities]))


@dataclass(frozen=True)
class LoadBench:
    """The parts that all measurements share."""

    generator: LoadGenerator
    requests: Sequence[Mapping[str, Any]]
    bodies: Sequence[bytes]  # the requests as the generator sends them
    setup: LoadSetup
    effort: LoadEffort
    goal_ms: float
    scratch: Path

    def send(self, run: ArmRun, seconds: float, rate: float = 0.0, **plan: Any) -> Load:
        """Send requests to one arm: one at a time, or at a rate."""
        # A slow server gets time in proportion, so that no request that is due gets lost.
        patience_s = 2.0 + 10 * run.cpu_ms / 1e3 if run.rounds else 30.0
        options = {"connections": 64 if rate else 1, "warm_up": WARM_UP, "patience_s": patience_s, **plan}
        run.position += options["warm_up"]
        load = self.generator.run(LoadPlan(run.url, run.bodies, seconds, rate, start=run.position, **options))
        run.position += len(load.status)
        return load

    @contextlib.contextmanager
    def running(self, arm: Arm) -> Iterator[ArmRun]:
        """Start an arm and send its first request; it ends with the block.

        Raises:
            RuntimeError: it did not become ready.
        """
        home = Path(tempfile.mkdtemp(dir=self.scratch)) / arm.name
        home.mkdir()
        environment = arm.settings(self.setup, home).to_env()
        began = time.perf_counter()
        with started(arm.command(self.setup), environment, home / "server.log") as server:
            ready_s = time.perf_counter() - began
            run = ArmRun(arm, server, self.bodies, ready_s)
            send_first(self.generator, run)
            log.info("%s is ready after %.1f s", arm.name, ready_s)
            yield run


def bench_load(
    home: Path,
    champion: Champion,
    requests: Sequence[Mapping[str, Any]],
    out_dir: Path,
    arms: Sequence[Arm] = ARMS,
    effort: LoadEffort | None = None,
    goal_ms: float = GOAL_MS,
    endurance: bool = False,
    deadline_ms: float | None = None,
) -> dict[str, Any]:
    """Measure everything and write `load.json`, `load.md` and `load.png`; return the content of the JSON.

    Args:
        home: of the champion; its offline store fills a Redis of the bench's own.
        champion: whose bundle all arms serve.
        requests: request lines, sent in turn.
        out_dir: folder of the results.
        arms: ours first.
        effort: the length of each measurement.
        goal_ms: the deadline of a good answer; a capacity keeps it for 99 % of the requests.
        endurance: whether to send ours very many requests and watch its memory.
        deadline_ms: of the endpoint; else its default. The caller can set nothing else of the endpoint.

    Raises:
        ValueError: no requests were given.
        RuntimeError: our own endpoint did not start.
    """
    bodies = bodies_of(requests)
    ours, *others = arms
    before, effort = machine_state(), effort or LoadEffort()
    bundle = champion.bundle(home)
    manifest = read_manifest(bundle)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reco-load-")))
        url = stack.enter_context(local_server())
        users = fill_store(home / "offline_store", scratch / "feast", url)
        settings = Settings(store_url=url, user_limit_per_s=0.0)  # a few shoppers send all requests
        if deadline_ms is not None:
            settings = replace(settings, deadline_ms=deadline_ms)
        rankers = {name: ranker_of(home, champion, step) for name, step in STEPS.items()}
        setup = LoadSetup(bundle, settings, rankers)
        generator = stack.enter_context(load_generator())
        bench = LoadBench(generator, requests, bodies, setup, effort, goal_ms, scratch)
        figures: dict[str, Any] = {
            "bundle_id": manifest["bundle_id"],
            "effort": asdict(effort),
            "goal_ms": goal_ms,
            "deadline_ms": settings.deadline_ms,
            "requests": len(requests),
            "candidates": manifest["settings"]["quotas"]["total"],
            "online_store": {"users": users},
            **measure_arms(bench, ours, others),
        }
        figures |= measure_ours(bench, ours, endurance)
    figures["goals"] = judge_goals(figures)
    result = write_report(out_dir, "load", figures, load_table, before)
    draw_load(result, out_dir / "load.png")
    return result


def measure_arms(bench: LoadBench, ours: Arm, others: Sequence[Arm]) -> dict[str, Any]:
    """Measure each other arm in a pair with ours; return all rows and the skipped arms."""
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    runs_of_ours: list[ArmRun] = []
    for arm in others:
        if why := arm.missing(bench.setup):
            skipped[arm.name] = why
            continue
        with contextlib.ExitStack() as stack:
            our_run = stack.enter_context(bench.running(ours))
            try:
                run = stack.enter_context(bench.running(arm))
            except RuntimeError as error:
                skipped[arm.name] = str(error).strip().splitlines()[-1]
                log.warning("%s is left out: %s", arm.name, error)
                continue
            measure_pair(bench, our_run, run)
        runs_of_ours.append(our_run)
        rows[arm.name] = {**pooled_row([run], bench.goal_ms), "ratio": ratios(run, our_run)}
    if not runs_of_ours:
        with bench.running(ours) as our_run:
            measure_pair(bench, our_run)
        runs_of_ours.append(our_run)
    return {
        "skipped": skipped,
        "arms": {ours.name: pooled_row(runs_of_ours, bench.goal_ms), **rows},
    }


def measure_pair(bench: LoadBench, ours: ArmRun, other: ArmRun | None = None) -> None:
    """Measure ours and another arm in turns."""
    runs = [ours] if other is None else [ours, other]

    def in_turn(rounds: int) -> Iterator[tuple[int, ArmRun]]:
        for number, run in itertools.product(range(rounds), range(len(runs))):
            yield number, runs[(number + run) % len(runs)]

    for number, run in in_turn(bench.effort.rounds):
        run.rounds.append(send_alone(bench, run))
        log.info("round %d, %s: %s", number + 1, run.arm.name, run.rounds[-1])
    for number in range(bench.effort.searches):
        find_capacities(bench, runs if number % 2 == 0 else runs[::-1])
    for number, run in in_turn(min(bench.effort.rounds, 3)):
        if run.rate:
            seconds = long_enough(bench.effort.half_s, run.rate / 2)
            run.half.append(bench.send(run, seconds, run.rate / 2, seed=100 + number))
    for run in runs:
        if run.rate:
            rate = OVERLOAD * run.rate
            seconds = long_enough(bench.effort.overload_s, rate)
            run.overload = bench.send(run, seconds, rate, connections=OVERLOAD_CONNECTIONS, seed=300)
        run.memory_mb = run.server.memory_mb()


def send_first(generator: LoadGenerator, run: ArmRun) -> None:
    """Send a new server its first request, once; note the time of the answer, connecting included.

    There is no time without an answer.
    """
    plan = LoadPlan(run.url, run.bodies, 1.0, connections=1, requests=1, warm_up=0, patience_s=PATIENCE_S)
    load = generator.run(plan)
    run.position += 1
    [ms], [is_answered], [is_degraded] = load.client_ms.tolist(), load.answered, load.degraded
    run.first_ms, run.first_degraded = ms if is_answered else None, bool(is_degraded)


def send_alone(bench: LoadBench, run: ArmRun) -> dict[str, Any]:
    """Send one request after the other; return the figures, and keep the answers."""
    before = run.server.cpu_ms()
    load = bench.send(run, bench.effort.alone_s, keep=True)
    cpu_ms = (run.server.cpu_ms() - before) / (len(load.status) + WARM_UP)
    summary = load.summary(bench.goal_ms)
    run.answers += [{"client_ms": ms, **one.get("stage_ms", {})} for ms, one in load.responses() if one]
    return {
        **{f"{name}_ms": summary["ms"][name] for name in ("p50", "p99")},
        "cpu_ms": cpu_ms,
        **{name: summary[name] for name in ("requests", "answered", "failed", "refused", "degraded")},
    }


def find_capacities(bench: LoadBench, runs: Sequence[ArmRun]) -> None:
    """Search the capacities of a pair once more, a probe each in turn."""
    searches, number = {}, len(runs[0].capacities)
    rng = np.random.default_rng(number)
    for run in runs:
        # Near where the earlier ones ended, but not on the same rates: those would agree by their grid alone.
        start = (run.capacities and run.rate) or FIRST_LOAD * 1e3 / max(run.cpu_ms, 0.01)
        search = search_capacity(start * 2 ** rng.uniform(-0.5, 0.5), bench.effort.precision)
        searches[run.arm.name] = (run, search, next(search))
    for seed in itertools.count(1_000 * number):
        for name, (run, search, rate) in list(searches.items()):
            load = bench.send(run, long_enough(bench.effort.probe_s, rate), rate, seed=seed)
            try:
                following_rate = search.send(Probe.of(rate, load.summary(bench.goal_ms)))
                searches[name] = (run, search, following_rate)
            except StopIteration as end:
                run.capacities.append(end.value)
                del searches[name]
                log.info("%s: %.0f requests a second within %g ms", name, end.value.rate, bench.goal_ms)
        if not searches:
            return


def long_enough(seconds: float, rate: float) -> float:
    """Return the time for a rate: a slow server gets enough requests, within limits."""
    return float(np.clip(PROBE_REQUESTS / rate, seconds, 4 * seconds))


def measure_ours(bench: LoadBench, arm: Arm, endurance: bool) -> dict[str, Any]:
    """Measure ours alone: long baskets, memory."""
    with bench.running(arm) as ours:
        send_alone(bench, ours)
        log.info("basket length")
        figures = {"basket_length": basket_lengths(bench, ours)}
        if endurance:
            log.info("endurance")
            send = partial(bench.send, ours)
            figures["endurance"] = memory_growth(send, ours.server, bench.effort.endurance)
    return figures


def basket_lengths(bench: LoadBench, ours: ArmRun) -> dict[str, Any]:
    """Send baskets of each of `LENGTHS`, popular items more often, by the shoppers of the requests."""
    statistics = load_bundle(bench.setup.bundle).statistics
    sold = np.asarray(statistics.basket_count, np.float64)
    rng = np.random.default_rng(0)

    def basket(length: int) -> list[str]:
        codes = rng.choice(len(sold), length, replace=False, p=sold / sold.sum())
        return statistics.item_ids[codes].tolist()

    asked = {
        length: bodies_of([{**request, "basket": basket(length)} for request in bench.requests[:BASKETS]])
        for length in LENGTHS
        if length <= len(sold) // 2
    }
    took: dict[int, list[np.ndarray]] = {length: [] for length in asked}
    for _ in range(bench.effort.rounds):
        for length, bodies in asked.items():
            load = bench.send(replace(ours, bodies=bodies), bench.effort.lengths_s)
            took[length].append(load.client_ms[load.answered])
    rows = {str(length): percentiles(np.concatenate(ms)) for length, ms in took.items()}
    first, *_, last = rows.values()
    growth = {
        name: (last[name] or 0.0) / (first[name] or np.inf) if last[name] and first[name] else None
        for name in ("p50", "p99")
    }
    return {"ms": rows, "growth": growth}


def memory_growth(send: Callable[..., Load], server: MeasuredServer, requests: int) -> dict[str, Any]:
    """Send requests without a pause, four at a time; return anonymous memory at each step, and its growth.

    Memory rises and falls with each segment of the prediction log, so a line through all steps is mostly
    chance. Growth is from the median of the second quarter to that of the last one.
    """
    each = max(requests // ENDURANCE_STEPS, 1)
    points = [(0, server.memory_mb()["anonymous"])]
    failed = 0
    for _ in range(ENDURANCE_STEPS):
        load = send(3_600.0, requests=each, connections=4, warm_up=0, patience_s=60.0)
        failed += int((~load.answered).sum())
        points.append((points[-1][0] + len(load.status), server.memory_mb()["anonymous"]))
    quarters = np.array_split(np.array(points[1:], np.float64), 4)
    apart, grown = np.median(quarters[3], axis=0) - np.median(quarters[1], axis=0)
    return {
        "requests": points[-1][0],
        "failed": failed,
        "anonymous_mb": points,
        "mb_grown": float(grown),
        "mb_per_1000_requests": float(1e3 * grown / apart),
    }
