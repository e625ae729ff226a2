"""A champion and real baskets -> the load report: ours beside what people would build instead.

All servers run at once, each in its own processes, and take turns in short rounds, so that whatever else the
machine does meets all of them; who is not asked idles, and what that costs is printed. Ratios are taken
within a round. One client process asks them all (`pipelines.bench.load.generator`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd

from components.data.fit_statistics import Purchases
from components.evaluation.evaluate_bundle import window_s
from components.evaluation.traffic import AGAIN_RATIO, ANONYMOUS_RATIO, anonymous_users, asks_of
from components.home import Champion
from components.measurement import measured_on
from components.release.model_card import DOLLARS_A_CORE_HOUR, WATTS_A_CORE, dollars_a_million, watt_hours
from feature_repo.atomic_files import write_file
from pipelines.bench.frozen_store import local_server
from pipelines.bench.latency import first_answer
from pipelines.bench.load.arms import (
    NULL,
    OURS,
    PREDICT,
    STEPS,
    Arm,
    Scene,
    choose_arms,
    differing,
    fill_store,
    ranker_of,
    running,
)
from pipelines.bench.load.capacity_search import GOAL_MS, PRECISION, Knee, Probe, knee_search
from pipelines.bench.load.generator import UNANSWERED, Load, LoadGenerator, Plan, load_generator, percentiles
from pipelines.bench.load.goals import judge_goals
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.bench.load.report import draw_load, load_table
from pipelines.bench.load.trials import (
    FEWEST,
    OVERLOAD,
    OVERLOAD_CONNECTIONS,
    beside_a_canary,
    following,
    overload_by_priority,
    swap_under_load,
)
from serving.api.http_routes import RECOMMENDATIONS
from serving.release.bundle import load_bundle, read_manifest
from serving.settings import Settings

log = logging.getLogger(__name__)

PROBE_REQUESTS = 200  # a probe takes so long that about so many are due, within limits
LOOKUPS = "reco_cache_lookups_total"  # in /metrics, by level and outcome
WARM_UP = 20  # requests before each run: a server that idled has cold caches
PATIENCE_S = 60.0  # with the first answer of all
CHOOSING = ("retrieval", "ranking", "reranking")  # the stages that choose the list
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # items in a basket


@dataclass(frozen=True)
class Effort:
    """How long everything is measured."""

    rounds: int = 5
    alone_s: float = 3.0  # one request at a time, a round
    probe_s: float = 4.0  # one rate on the way to the knee; slow servers up to four times as long
    precision: float = PRECISION  # of the knee
    half_s: float = 6.0  # at half of the capacity, a round
    overload_s: float = 6.0
    lengths_s: float = 1.0  # a length and round
    priority_s: float = 30.0  # of an overload that is mostly prefetches
    swap_s: float = 16.0  # while the champion is another one, and then again the first
    endurance: int = 60_000  # requests


QUICK = Effort(
    rounds=1,
    alone_s=0.5,
    probe_s=0.5,
    precision=1.0,
    half_s=0.5,
    overload_s=0.5,
    lengths_s=0.2,
    priority_s=0.5,
    swap_s=6.0,
    endurance=400,
)


@dataclass
class Runner:
    """An arm that runs, and what was found of it so far."""

    arm: Arm
    server: MeasuredServer
    bodies: str
    listed: int  # how many bodies there are
    request_bytes: float
    ready_s: float
    settings: Mapping[str, str]  # its variables that are not what they are by default
    rounds: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)  # with `client_ms`, one at a time
    asked: int = (
        0  # requests so far, warm-ups too: the next run goes on in the list where the last one stopped
    )
    burn_ms: float = 0.0  # of the null server

    @property
    def url(self) -> str:
        """Where it is asked."""
        return str(self.server.ready["http"]) + PREDICT

    @property
    def laps(self) -> float:
        """How often it went round its list so far."""
        return self.asked / self.listed

    @property
    def cpu_ms(self) -> float:
        """Processor time of all its processes for one request."""
        return float(np.median([one["cpu_ms"] for one in self.rounds]))


@dataclass(frozen=True)
class Bench:
    """All that the parts of the report share."""

    generator: LoadGenerator
    runners: Sequence[Runner]
    requests: Sequence[Mapping[str, Any]]
    scene: Scene
    effort: Effort
    goal_ms: float

    @property
    def ours(self) -> Runner:
        """The arm that all others are compared with."""
        return next(runner for runner in self.runners if runner.arm.name == OURS)

    def ask(self, runner: Runner, seconds: float, rate: float = 0.0, **plan: Any) -> Load:
        """Ask one arm: one request at a time, or at a rate."""
        # A stack of seconds an answer is waited for as long; nothing that is due gets lost.
        patience_s = 2.0 + 10 * runner.cpu_ms / 1e3 if runner.rounds else 30.0
        given = {"connections": 64 if rate else 1, "warm_up": WARM_UP, "patience_s": patience_s, **plan}
        # Warm-ups go on in the list, too: whoever keeps answers must not know them by heart.
        runner.asked += given["warm_up"]
        load = self.generator.run(Plan(runner.url, runner.bodies, seconds, rate, start=runner.asked, **given))
        runner.asked += len(load.status)
        return load

    def turns(self, rounds: int) -> Iterator[tuple[int, Runner]]:
        """Yield every arm once a round, each round beginning with another one."""
        for number in range(rounds):
            first = number % len(self.runners)
            for runner in (*self.runners[first:], *self.runners[:first]):
                yield number, runner


def bench_load(
    home: Path,
    champion: Champion,
    requests: Sequence[Mapping[str, Any]],
    out_dir: Path,
    names: Sequence[str] = (),
    effort: Effort | None = None,
    goal_ms: float = GOAL_MS,
    endurance: bool = False,
    deadline_ms: float | None = None,
    mixed: bool = False,
) -> dict[str, Any]:
    """Measure everything and write `load.json`, `load.md` and `load.png`; return what the JSON holds.

    Those of a mixed replay are called `load-mixed`.

    Args:
        home: of the champion; its offline store fills a Redis of the bench's own.
        champion: whose bundle all arms serve.
        requests: request lines, asked in turn.
        out_dir: where the results go.
        names: of the arms; all if there are none.
        effort: how long.
        goal_ms: p99 that a capacity must keep, and the deadline of a good answer.
        endurance: whether to ask ours for very long and watch its memory.
        deadline_ms: of the endpoint; else its default. Nothing else of the endpoint is the caller's to set.
        mixed: whether the requests are those of `replayed_requests`, for the report to say.

    Raises:
        ValueError: no requests were given, or an arm is none.
        RuntimeError: our own endpoint did not start.
    """
    if not requests:
        raise ValueError("no requests to ask: give at least one request line")
    arms = choose_arms(names)
    load_before, effort = os.getloadavg(), effort or Effort()
    bundle = champion.bundle(home)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reco-load-")))
        url, _ = stack.enter_context(local_server())
        rows = fill_store(home / "offline_store", scratch / "feast", url)
        given = Settings(store_url=url, user_limit_per_s=0.0)  # a few shoppers ask for all
        if deadline_ms is not None:
            given = replace(given, deadline_ms=deadline_ms)
        rankers = {name: ranker_of(home, champion, step) for name, step in STEPS.items()}
        scene = Scene(bundle, given, scratch / "feast", mixed=mixed, **rankers)
        generator = stack.enter_context(load_generator())
        runners, skipped = _start(stack, arms, scene, generator, requests, scratch)
        bench = Bench(generator, runners, requests, scene, effort, goal_ms)
        result: dict[str, Any] = {
            "bundle_id": read_manifest(bundle)["bundle_id"],
            **measured_on(),
            "load_average_before": load_before,
            "effort": asdict(effort),
            "goal_ms": goal_ms,
            "deadline_ms": given.deadline_ms,
            "requests": len(requests),
            "candidates": read_manifest(bundle)["settings"]["quotas"]["total"],
            "mixed": {"anonymous": ANONYMOUS_RATIO, "again": AGAIN_RATIO} if mixed else None,
            "online_store": rows,
            "constants": {"watts_a_core": WATTS_A_CORE, "dollars_a_core_hour": DOLLARS_A_CORE_HOUR},
            "skipped": skipped,
        }
        result["floor"] = _measure_arms(bench)
        result["arms"] = {runner.arm.name: _row(bench, runner) for runner in runners}
        parts: dict[str, Callable[[Bench], Any]] = {"basket_length": basket_lengths, "payloads": payloads}
        if bench.ours.found["capacity"]["rate"]:
            parts |= {"priority": priority, "swap": swap, "canary": canary}
        if endurance:
            parts["endurance"] = memory_growth
        for name, part in parts.items():
            log.info("%s", name.replace("_", " "))
            result[name] = part(bench)
    result["load_average_after"] = os.getloadavg()
    result["goals"] = judge_goals(result)
    name = "load-mixed" if mixed else "load"
    write_file(out_dir / f"{name}.json", orjson.dumps(result, option=orjson.OPT_INDENT_2))
    write_file(out_dir / f"{name}.md", load_table(result).encode())
    draw_load(result, out_dir / f"{name}.png")
    return result


def _start(
    stack: contextlib.ExitStack,
    arms: Sequence[Arm],
    scene: Scene,
    generator: LoadGenerator,
    requests: Sequence[Mapping[str, Any]],
    scratch: Path,
) -> tuple[list[Runner], dict[str, str]]:
    """Start what can be started; return it, and why the rest was skipped."""
    bodies = [orjson.dumps({"instances": [request]}) for request in requests]
    file, size = generator.bodies(bodies), float(np.mean([len(body) for body in bodies]))
    runners: list[Runner] = []
    skipped: dict[str, str] = {}
    for arm in arms:
        if why := arm.missing(scene):
            skipped[arm.name] = why
            continue
        began = time.perf_counter()
        try:
            server = stack.enter_context(running(arm, scene, scratch))
        except RuntimeError as error:
            if arm.name == OURS:
                raise
            skipped[arm.name] = str(error).strip().splitlines()[-1]
            log.warning("%s is left out: %s", arm.name, error)
            continue
        settings = differing(arm.settings(scene, scratch / arm.name))
        took_s = time.perf_counter() - began
        runners.append(Runner(arm, server, file, len(bodies), size, took_s, settings))
        runners[-1].found |= first_request(generator, runners[-1])
        log.info("%s is ready after %.1f s", arm.name, runners[-1].ready_s)
    return runners, skipped


def first_request(generator: LoadGenerator, runner: Runner) -> dict[str, Any]:
    """Ask a server that nobody has asked yet, once; return what its first answer took, connecting included.

    There is no time where no answer came. The null server is not asked: it takes other bodies.
    """
    if runner.arm.name == NULL:
        return {"first_ms": None, "first_degraded": False}
    plan = Plan(
        *(runner.url, runner.bodies, 1.0),
        connections=1,
        requests=1,
        warm_up=0,
        start=runner.asked,
        patience_s=PATIENCE_S,
    )
    load = generator.run(plan)
    runner.asked += 1
    [ms], [ok], [degraded] = load.client_ms.tolist(), load.answered, load.degraded
    return {"first_ms": ms if ok else None, "first_degraded": bool(degraded)}


def _measure_arms(bench: Bench) -> dict[str, float] | None:
    """Measure every arm in every way; return what a bare HTTP answer takes, if the null server is there."""
    floor = _set_null(bench)
    for runner, idle_ratio in zip(bench.runners, _idle(bench.runners), strict=True):
        runner.found["idle_cpu_ratio"] = idle_ratio
    for number, runner in bench.turns(bench.effort.rounds):
        runner.rounds.append(_alone(bench, runner))
        log.info("round %d, %s: %s", number + 1, runner.arm.name, runner.rounds[-1])
    keeping = [runner for runner in bench.runners if runner.arm.keeps_answers]
    looked = [runner.server.samples(LOOKUPS) for runner in keeping]
    for runner, knee in zip(bench.runners, _knees(bench), strict=True):
        runner.found["capacity"] = knee.to_dict()
        log.info("%s: %.0f requests a second within %g ms", runner.arm.name, knee.rate, bench.goal_ms)
    for runner, first in zip(keeping, looked, strict=True):
        runner.found["cache"] = {**hits(first, runner.server.samples(LOOKUPS)), "laps": runner.laps}
    half: dict[str, list[Load]] = {runner.arm.name: [] for runner in bench.runners}
    cpu: dict[str, list[float]] = {runner.arm.name: [] for runner in bench.runners}
    for number, runner in bench.turns(min(bench.effort.rounds, 3)):
        if rate := runner.found["capacity"]["rate"] / 2:
            before = runner.server.cpu_ms()
            load = bench.ask(runner, _long_enough(bench.effort.half_s, rate), rate, seed=100 + number)
            half[runner.arm.name].append(load)
            cpu[runner.arm.name].append((runner.server.cpu_ms() - before) / (len(load.status) + WARM_UP))
    for runner in bench.runners:
        if loads := half[runner.arm.name]:
            # Refused and failed ones are fast and would flatter; who was never answered waited to the end.
            waited = [load.client_ms[load.answered | (load.status == UNANSWERED)] for load in loads]
            together = np.concatenate(waited)
            summaries = [load.summary(bench.goal_ms) for load in loads]
            counts = {
                name: sum(one[name] for one in summaries)
                for name in ("requests", "answered", "failed", "refused", "unanswered", "degraded", "late")
            }
            runner.found["half"] = {
                "rate": runner.found["capacity"]["rate"] / 2,
                "ms": percentiles(together),
                "cpu_ms": float(np.median(cpu[runner.arm.name])),
                **counts,
                "generator_late_ms": percentiles(np.concatenate([load.late_ms for load in loads])),
            }
            runner.found["overload"] = overload(bench, runner)
    for runner in bench.runners:
        runner.found["laps"] = None if runner.arm.name == NULL else runner.laps
    return floor


def hits(before: Mapping[tuple[str, ...], float], after: Mapping[tuple[str, ...], float]) -> dict[str, Any]:
    """Return what came of the looks for an answer between two readings of `LOOKUPS`, and the share found.

    What Redis has counts as found; what is stale was answered at once, so it does, too.
    """
    counts = {
        f"{level} {outcome}": int(count - before.get((level, outcome), 0.0))
        for (level, outcome), count in after.items()
    }
    looks = sum(count for name, count in counts.items() if name.startswith("process "))
    found = sum(counts.get(name, 0) for name in ("process hit", "process stale", "redis hit"))
    return {"lookups": counts, "hit_ratio": found / looks if looks else None}


def _set_null(bench: Bench) -> dict[str, float] | None:
    """Have the null server burn what a request of ours costs beyond what it costs itself."""
    null = next((runner for runner in bench.runners if runner.arm.name == NULL), None)
    if null is None:
        return None
    null.bodies, null.listed, null.request_bytes = bench.generator.bodies([b"0"]), 1, 1.0
    bare, ours = _alone(bench, null), _alone(bench, bench.ours)
    null.burn_ms = max(ours["cpu_ms"] - bare["cpu_ms"], 0.0)
    null.bodies = bench.generator.bodies([f"{null.burn_ms:.4f}".encode()])
    bench.ours.answers.clear()
    return {"mean_ms": bare["mean_ms"], "p50_ms": bare["p50_ms"], "cpu_ms": bare["cpu_ms"]}


def _idle(runners: Sequence[Runner]) -> list[float]:
    """Return what share of a core each arm uses while nobody asks it."""
    before, began = [runner.server.cpu_ms() for runner in runners], time.perf_counter()
    time.sleep(2.0)
    took_ms = (time.perf_counter() - began) * 1e3
    return [(runner.server.cpu_ms() - b) / took_ms for runner, b in zip(runners, before, strict=True)]


def _alone(bench: Bench, runner: Runner) -> dict[str, Any]:
    """Ask one request after the other."""
    before = runner.server.cpu_ms()
    load = bench.ask(runner, bench.effort.alone_s, keep=True)
    cpu_ms = (runner.server.cpu_ms() - before) / (len(load.status) + WARM_UP)
    summary = load.summary(bench.goal_ms)
    for ms, ok, answer in zip(load.client_ms.tolist(), load.answered, load.answers, strict=True):
        if ok and runner.arm.name != NULL:
            runner.answers.append({"client_ms": ms, **first_answer(answer).get("stage_ms", {})})
    return {
        **{f"{name}_ms": summary["ms"][name] for name in ("p50", "p99", "mean", "max")},
        "cpu_ms": cpu_ms,
        **{name: summary[name] for name in ("requests", "answered", "failed", "refused", "degraded")},
        "answer_bytes": float(load.answer_bytes[load.answered].mean()) if load.answered.any() else None,
    }


def _knees(bench: Bench) -> list[Knee]:
    """Search the knees of all arms, a probe each in turn."""
    searches = [
        knee_search(0.4e3 / max(runner.cpu_ms, 0.01), bench.goal_ms, bench.effort.precision)
        for runner in bench.runners
    ]
    rates = [next(search) for search in searches]
    knees: list[Knee | None] = [None] * len(searches)
    for seed in itertools.count():
        for i, runner in enumerate(bench.runners):
            if knees[i] is None:
                seconds = _long_enough(bench.effort.probe_s, rates[i])
                load = bench.ask(runner, seconds, rates[i], seed=seed)
                rates[i], knees[i] = _next(searches[i], Probe.of(rates[i], load.summary(bench.goal_ms)))
        found = [knee for knee in knees if knee is not None]
        if len(found) == len(knees):
            return found
    raise AssertionError("each search ends")


def _next(search: Generator[float, Probe, Knee], probe: Probe) -> tuple[float, Knee | None]:
    try:
        return search.send(probe), None
    except StopIteration as end:
        return 0.0, end.value


def _long_enough(seconds: float, rate: float) -> float:
    """Return for how long to ask: so that a slow server is asked often enough, but not forever."""
    return float(np.clip(PROBE_REQUESTS / rate, seconds, 4 * seconds))


def overload(bench: Bench, runner: Runner) -> dict[str, Any]:
    """Ask three times as much as it can; what counts is what still comes in time and in full.

    What comes in time from a fallback is told beside it: a capacity is one of full answers.
    """
    capacity = runner.found["capacity"]["rate"]
    rate = OVERLOAD * capacity
    seconds = _long_enough(bench.effort.overload_s, rate)
    load = bench.ask(runner, seconds, rate, connections=OVERLOAD_CONNECTIONS, seed=300)
    summary = load.summary(bench.goal_ms)
    good, less = summary["good_per_s"], summary["degraded_in_time_per_s"]
    enough = summary["requests"] >= FEWEST
    return {
        "rate": rate,
        "goodput_ratio": good / capacity if enough else None,
        "degraded_ratio": less / capacity if enough else None,
        **summary,
    }


def _row(bench: Bench, runner: Runner) -> dict[str, Any]:
    """Return all that was found of an arm, and how it compares with ours, round by round."""
    cpu_ms = runner.cpu_ms
    row = {
        "what": runner.arm.what,
        "settings": runner.settings,
        "ready_s": runner.ready_s,
        "memory_mb": runner.server.memory_mb(),
        "alone": {
            **{f"{name}_ms": _median(runner, f"{name}_ms") for name in ("p50", "p99", "mean")},
            "rounds": runner.rounds,
        },
        "cpu_ms": cpu_ms,
        "dollars_a_million": dollars_a_million(cpu_ms),
        "wh_a_million": watt_hours(cpu_ms / 1e3 * 1e6),
        "request_bytes": runner.request_bytes,
        "answer_bytes": _median(runner, "answer_bytes"),
        "stages": stages_of(runner),
        "choosing": choosing_of(runner),
        **runner.found,
    }
    if runner is not bench.ours:
        pairs = list(zip(runner.rounds, bench.ours.rounds, strict=True))
        row["ratio"] = {
            name: _spread([theirs[name] / ours[name] for theirs, ours in pairs])
            for name in ("p50_ms", "p99_ms", "cpu_ms")
            if all(theirs[name] and ours[name] for theirs, ours in pairs)
        }
        ours = bench.ours.found["capacity"]["rate"]
        row["ratio"]["capacity"] = runner.found["capacity"]["rate"] / ours if ours else None
    return row


def _median(runner: Runner, name: str) -> float | None:
    values = [one[name] for one in runner.rounds if one[name] is not None]
    return float(np.median(values)) if values else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def stages_of(runner: Runner) -> dict[str, dict[str, float | None]] | None:
    """Return what of the client's time each stage explains; means add up, `unexplained` being the rest.

    An answer spent no time in a stage that it does not name: a fallback has others than the full path.
    """
    timed = [answer for answer in runner.answers if "total" in answer]
    if not timed:
        return None
    every = dict.fromkeys(name for answer in timed for name in answer)  # in the order they first appear
    names = [name for name in every if name not in ("client_ms", "total")]
    rows = {name: np.array([answer.get(name, 0.0) for answer in timed]) for name in names}
    client = np.array([answer["client_ms"] for answer in timed])
    rows["unexplained"] = client - np.sum(list(rows.values()), axis=0)
    rows["client"] = client
    shares = {name: float(values.mean() / client.mean()) for name, values in rows.items()}
    return {name: {**percentiles(values), "share": shares[name]} for name, values in rows.items()}


def choosing_of(runner: Runner) -> dict[str, float | None] | None:
    """Return what the stages that choose the list take together, answer by answer.

    An answer that lacks one of them was late there, or broke: it counts with all that the client waited.
    """
    took = [
        sum(answer[name] for name in CHOOSING)
        if all(name in answer for name in CHOOSING)
        else answer["client_ms"]
        for answer in runner.answers
        if "total" in answer
    ]
    return percentiles(np.array(took)) if took else None


def basket_lengths(bench: Bench) -> dict[str, Any]:
    """Ask ours for baskets of so many items, popular ones more often, by the shoppers of the requests."""
    statistics = load_bundle(bench.scene.bundle).statistics
    sold = np.asarray(statistics.basket_count, np.float64)
    rng = np.random.default_rng(0)
    files = {}
    for length in (length for length in LENGTHS if length <= len(sold) // 2):
        chosen = (rng.choice(len(sold), length, replace=False, p=sold / sold.sum()) for _ in bench.requests)
        bodies = [
            orjson.dumps({"instances": [{**request, "basket": statistics.item_ids[codes].tolist()}]})
            for request, codes in zip(bench.requests, itertools.islice(chosen, 200), strict=False)
        ]
        files[length] = bench.generator.bodies(bodies)
    took: dict[int, list[np.ndarray]] = {length: [] for length in files}
    for _ in range(bench.effort.rounds):
        for length, file in files.items():
            load = bench.ask(replace(bench.ours, bodies=file), bench.effort.lengths_s)
            took[length].append(load.client_ms[load.answered])
    rows = {str(length): percentiles(np.concatenate(ms)) for length, ms in took.items()}
    first, *_, last = rows.values()
    growth = {
        name: (last[name] or 0.0) / (first[name] or np.inf) if last[name] and first[name] else None
        for name in ("p50", "p99")
    }
    return {"ms": rows, "growth": growth}


def payloads(bench: Bench) -> dict[str, dict[str, Any]]:
    """Ask ours the same in each protocol, in turns: bytes of the message and milliseconds."""
    ready = bench.ours.server.ready
    ways = {
        "REST V1": (bench.ours.url, [orjson.dumps({"instances": [one]}) for one in bench.requests]),
        "REST V2": (
            f"{ready['http']}/v2/models/checkout/infer",
            [orjson.dumps({"inputs": v2_inputs(one)}) for one in bench.requests],
        ),
        "own REST route": (
            str(ready["http"]) + RECOMMENDATIONS,
            [orjson.dumps(one) for one in bench.requests],
        ),
    }
    if ready.get("grpc"):
        method = "inference.GRPCInferenceService/ModelInfer"
        ways["gRPC"] = (f"grpc://{ready['grpc']}/{method}", [grpc_message(one) for one in bench.requests])
        method = "reco.v1.Recommendations/Recommend"
        ways["typed gRPC"] = (
            f"grpc://{ready['grpc']}/{method}",
            [typed_message(one) for one in bench.requests],
        )
    files = {name: bench.generator.bodies(bodies) for name, (_, bodies) in ways.items()}
    loads: dict[str, list[Load]] = {name: [] for name in ways}
    for _ in range(bench.effort.rounds):
        for name, (url, _) in ways.items():
            plan = Plan(url, files[name], bench.effort.alone_s, connections=1, warm_up=WARM_UP)
            loads[name].append(bench.generator.run(plan))
    rows: dict[str, dict[str, Any]] = {}
    for name, (_, bodies) in ways.items():
        answered = np.concatenate([load.answered for load in loads[name]])
        sizes = np.concatenate([load.answer_bytes for load in loads[name]])[answered]
        rows[name] = {
            "request_bytes": float(np.mean([len(body) for body in bodies])),
            "answer_bytes": float(sizes.mean()) if len(sizes) else None,
            "failed": int((~answered).sum()),
            "ms": percentiles(np.concatenate([load.client_ms for load in loads[name]])[answered]),
        }
    return rows


def v2_inputs(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a request line as the tensors of the Open Inference Protocol."""
    kinds = {"k": "INT64"}
    values = {name: value if name == "basket" else [value] for name, value in request.items()}
    return [
        {"name": name, "shape": [len(data)], "datatype": kinds.get(name, "BYTES"), "data": data}
        for name, data in values.items()
    ]


def grpc_message(request: Mapping[str, Any]) -> bytes:
    """Return a request line as the ModelInferRequest that travels."""
    from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest

    message = ModelInferRequest(model_name="checkout")
    for tensor in v2_inputs(request):
        added = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        if tensor["datatype"] == "BYTES":
            added.contents.bytes_contents.extend(text.encode() for text in tensor["data"])
        else:
            added.contents.int64_contents.extend(tensor["data"])
    return bytes(message.SerializeToString())


def typed_message(request: Mapping[str, Any]) -> bytes:
    """Return a request line as the RecommendRequest that travels."""
    from serving.proto.recommendations_pb2 import RecommendRequest

    message = RecommendRequest(**{name: value for name, value in request.items() if name != "at"})
    if request.get("at"):
        message.at.FromDatetime(datetime.fromisoformat(request["at"]))
    return bytes(message.SerializeToString())


def priority(bench: Bench) -> dict[str, Any]:
    """Ask ours for more than it can, most of it prefetches."""
    effort, capacity = bench.effort, bench.ours.found["capacity"]["rate"]
    ask = partial(bench.ask, bench.ours)
    return overload_by_priority(ask, capacity, bench.goal_ms, effort.priority_s, effort.half_s)


def swap(bench: Bench) -> dict[str, Any]:
    """Ask one that follows a home at half of the capacity of ours while its bundle is swapped."""
    rate = bench.ours.found["capacity"]["rate"] / 2
    with (
        tempfile.TemporaryDirectory(prefix="reco-load-") as home,
        following(bench.scene, Path(home)) as (server, flips),
    ):
        ask = partial(bench.ask, replace(bench.ours, server=server))
        ask(bench.effort.half_s, rate)  # it has just begun: what is cold would hide what a swap costs
        return swap_under_load(ask, rate, bench.goal_ms, bench.effort.swap_s, flips)


def canary(bench: Bench) -> dict[str, Any]:
    """Ask ours at half of its capacity, with and without a second one that is asked at the same time."""
    ours, effort = bench.ours, bench.effort
    arm, rate = replace(ours.arm, name="canary"), ours.found["capacity"]["rate"] / 2
    with (
        tempfile.TemporaryDirectory(prefix="reco-load-") as scratch,
        running(arm, bench.scene, Path(scratch)) as server,
        load_generator() as generator,
    ):
        ask = partial(replace(bench, generator=generator).ask, replace(ours, arm=arm, server=server))
        rounds = min(effort.rounds, 3)
        return beside_a_canary(
            partial(bench.ask, ours), ask, rate, bench.goal_ms, _long_enough(effort.half_s, rate), rounds
        )


def memory_growth(bench: Bench, steps: int = 20) -> dict[str, Any]:
    """Ask ours without a pause, four at a time; return its memory and the slope after the first quarter."""
    ours, each = bench.ours, max(bench.effort.endurance // steps, 1)
    points = [(0, ours.server.memory_mb()["rss"])]
    failed = 0
    for _ in range(steps):
        load = bench.ask(ours, 3_600.0, requests=each, connections=4, warm_up=0, patience_s=60.0)
        failed += int((~load.answered).sum())
        points.append((points[-1][0] + len(load.status), ours.server.memory_mb()["rss"]))
    asked, rss = np.array(points[steps // 4 :], np.float64).T
    slope = float(np.polyfit(asked, rss, 1)[0])
    return {
        "requests": points[-1][0],
        "failed": failed,
        "rss_mb": points,
        "mb_per_1000_requests": slope * 1e3,
        "mb_after_warm_up": float(rss[-1] - rss[0]),
    }


def replayed_requests(purchases: Purchases, cut: str, limit: int) -> list[dict[str, Any]]:
    """Return request lines of the weeks after the cut in time order, see `components.evaluation.traffic`.

    Nothing is sampled: shoppers and items are as popular, and come as often again, as in the data.
    """
    start, end = window_s(pd.Timestamp(cut))
    anonymous = anonymous_users(len(purchases.user_ids), ANONYMOUS_RATIO)
    lines = []
    for ask in asks_of(purchases, start, end, AGAIN_RATIO)[:limit]:
        line: dict[str, Any] = {"basket": list(ask.items)}
        if not anonymous[ask.user]:
            at = datetime.fromtimestamp(ask.at, UTC).isoformat()
            line |= {"user_id": str(purchases.user_ids[ask.user]), "at": at}
        lines.append({**line, "store_id": ask.store_id} if ask.store_id else line)
    return lines
