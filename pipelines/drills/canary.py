"""A champion and worse copies of it -> each way in which a release can go, with shoppers in the loop.

Every case starts a small cluster of this machine: API, gateway, and an endpoint process for each slot. Load
goes through the gateway all the time. Versions and alias are a file here, because the registry has to be away
in one case; the gate before the traffic is another drill's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from components.home import write_json
from components.measurement import machine_state
from components.rollout.cluster import Cluster, connect
from components.rollout.comparison import read_metrics
from components.rollout.manifests import metrics_url
from components.rollout.observe import Observer
from components.rollout.plan import ROLLBACK, Pace, Release
from components.rollout.publishing import publish_bundle
from components.rollout.release import Aborted, Rollout
from feature_repo.errors import UNREACHABLE, RecoError
from pipelines.bench.load.arms import PREDICT
from pipelines.bench.load.generator import LoadGenerator, LoadPlan, load_generator
from pipelines.bench.load.goals import Goal
from pipelines.bench.report import write_report
from pipelines.drills.outcome import CLIENT, RAW, Answer, answers_of
from pipelines.drills.report import release_table
from pipelines.drills.system import DrillEffort, Testbed, bodies_of, open_testbed, released
from pipelines.live.slots import SERVER
from pipelines.live.small_cluster import SmallCluster, small_cluster
from serving.client.client import DEADLINE_MS
from serving.release.bundle import load_bundle, read_manifest, seal_bundle
from serving.release.champion import Champion
from serving.settings import Settings

log = logging.getLogger(__name__)

RATE = 50.0  # requests a second, through the client and straight, half each
LONGEST_S = 1_200.0
LOOK_S = 0.1
BEFORE_S = 3.0
# Cases about crashes and registries hurry through the steps; those about the gate keep its numbers.
HURRY = Pace(
    weights={1: 5, 5: 10, 25: 100, 50: 100},
    shadow_answers=60,
    look_s=1.0,
    hold_s=6.0,
    orphan_s=6.0,
    missing_s=10.0,
)
GATE = Pace(look_s=2.0, hold_s=6.0, ready_s=60.0, missing_s=10.0)


class DrillVersions:
    """Two versions and the alias, in a file; while the file `away` is there, no registry answers."""

    def __init__(self, home: Path, bundles: Mapping[str, str]) -> None:
        """Take the folder, and the bundle id of each version."""
        self._home, self._bundles = home, bundles
        if not (home / "alias.json").is_file():
            write_json(home / "alias.json", ["1"])

    def champions(self) -> list[str]:
        """Return the versions that were champion, the last one now."""
        return list(json.loads((self._home / "alias.json").read_bytes()))

    def find(self, version: str) -> tuple[str, str]:
        """Return a version and its bundle."""
        return version, self._bundles[version]

    def previous(self) -> tuple[str, str]:
        """Return the version before the champion."""
        return self.find(self.champions()[-2])

    def place(self, bundle_id: str) -> str:
        """Return where pods load a bundle from."""
        return (self._home / "published" / bundle_id).as_uri()

    def bundle(self, record: Release) -> Path:
        """Return a version's bundle."""
        return self._home / "bundles" / record.bundle_id

    def check(self, record: Release) -> None:
        """Let each version through: the gate before the traffic is not drilled here."""

    def publish(self, record: Release) -> None:
        """Publish it, as on a cluster."""
        publish_bundle(self.bundle(record), record.source)

    def seal(self, record: Release) -> None:
        """Move the alias."""
        self._move(record, record.kind == ROLLBACK)

    def undo(self, record: Release) -> None:
        """Move the alias back."""
        if record.kind != ROLLBACK and self.champions()[-1] == record.version:
            self._move(replace(record, version=self.champions()[-2]), True)

    def _move(self, record: Release, is_back: bool) -> None:
        if (self._home / "away").exists():
            raise RegistryGone("the drill's registry is away")
        champions = self.champions()
        if champions[-1] != record.version:
            write_json(self._home / "alias.json", champions[:-1] if is_back else [*champions, record.version])


class RegistryGone(RecoError):
    """The drill's registry is away."""

    exit_code = UNREACHABLE


@dataclass(frozen=True)
class Shop:
    """A cluster that runs, with load, for one case."""

    home: Path
    cluster: SmallCluster
    versions: DrillVersions
    pace: Pace

    def rollout(self) -> Rollout:
        """Return a deployer of this process."""
        return deployer(self.home, self.cluster.api.url, self.cluster.gateway.url, self.versions, self.pace)

    def seen(self) -> tuple[str, int]:
        """Return the state of the release and the canary's weight."""
        record, split = self.rollout().status()
        return ("", 0) if record is None else (record.state, split[record.canary])

    def await_weight(self, weight: int) -> None:
        """Wait until the canary has a weight."""
        until = time.monotonic() + LONGEST_S
        while self.seen()[1] != weight and time.monotonic() < until:
            time.sleep(LOOK_S)


def deployer(home: Path, api: str, gateway: str, versions: DrillVersions, pace: Pace) -> Rollout:
    """Return a deployer as `reco release` makes it."""
    cluster = Cluster(connect(api), "checkout")
    observer = Observer(cluster, httpx.Client(trust_env=False), gateway, "", pace, time.time)
    name = f"{multiprocessing.current_process().pid}:{threading.get_ident()}"
    return Rollout(cluster, observer, versions, pace, name, time.time, time.sleep, log.info)


Act = Callable[[Shop], dict[str, Any]]


def _release(shop: Shop) -> dict[str, Any]:
    try:
        record = shop.rollout().start("2", shop.versions.place)
    except Aborted:
        [record] = [one for one in [shop.rollout().status()[0]] if one]
    return {
        "ended": record.state,
        "reason": record.reason,
        "gate": list(record.gate),
        "overlap": record.overlap,
    }


def _roll_back_later(shop: Shop) -> dict[str, Any]:
    found = _release(shop)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(shop.rollout().rollback, shop.versions.place)
        while shop.rollout().status()[1]["blue"] != 100:
            time.sleep(LOOK_S)
        back_s = time.monotonic() - began
        going.result()
    return {**found, "back_s": back_s}


def _metrics_away(shop: Shop) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(_release, shop)
        shop.await_weight(5)
        pods = shop.cluster.objects.list("pods")
        [pod] = [one for one in pods if "green" in one["metadata"]["name"]]
        pod["spec"]["containers"][0]["ports"][1]["containerPort"] = 9  # nothing listens there
        shop.cluster.objects.write(("pods", "checkout", pod["metadata"]["name"]), pod)
        return going.result()


def _deployer_killed(shop: Shop) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    arguments = (shop.home, shop.cluster.api.url, shop.cluster.gateway.url, shop.versions, shop.pace)
    process = context.Process(target=_deploy, args=arguments, daemon=True)
    process.start()
    shop.await_weight(25)
    process.kill()
    process.join()
    killed = time.monotonic()
    try:
        while (record := shop.rollout().guard()) is not None and record.active:
            time.sleep(1.0)
    except Aborted:
        pass
    return {"ended": shop.seen()[0], "reason": "the guard", "guarded_s": time.monotonic() - killed}


def _deploy(home: Path, api: str, gateway: str, versions: DrillVersions, pace: Pace) -> None:
    deployer(home, api, gateway, versions, pace).start("2", versions.place)


def _registry_away(shop: Shop) -> dict[str, Any]:
    (shop.home / "away").touch()
    code = 0
    try:
        shop.rollout().start("2", shop.versions.place)
    except RegistryGone as error:
        code = error.exit_code
    stayed = shop.seen()
    (shop.home / "away").unlink()
    patient = replace(shop, pace=replace(shop.pace, hold_s=600.0))
    with ThreadPoolExecutor(1) as thread:
        resumed = patient.rollout()
        going = thread.submit(_until_conflict, resumed)
        while shop.seen()[0] != "hold":
            time.sleep(LOOK_S)
        sealed = shop.versions.champions()[-1]
        time.sleep(3.0)
        began = time.monotonic()
        back = ThreadPoolExecutor(1).submit(shop.rollout().rollback, shop.versions.place)
        while shop.seen()[1] != 0:
            time.sleep(LOOK_S / 4)
        back_s = time.monotonic() - began
        back.result()
        going.result()
    return {
        "ended": shop.seen()[0],
        "reason": "rolled back in the hold",
        "exit_code": code,
        "stayed": stayed,
        "sealed": sealed,
        "back_s": back_s,
    }


def _until_conflict(rollout: Rollout) -> None:
    with contextlib.suppress(RecoError):  # the rollback takes the release from it
        rollout.resume()


@dataclass(frozen=True)
class Case:
    """One way in which a release can go."""

    name: str
    proves: str
    act: Act
    ends: str  # the state
    fault: str = ""  # of `bad_endpoint`, for the canary
    wrong_golden: bool = False
    most_weight: int = 100
    pace: Pace = GATE
    goals: Sequence[Goal] = ()


def _of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda outcome: outcome.get(name)


ABORT_GOALS = (
    Goal("time to detect", "<=", 60.0, " s", _of("detect_s")),
    Goal("time to abort", "<=", 2.0, " s", _of("abort_s")),
    Goal("requests touched", "<=", 5.0, " %", _of("touched")),
    Goal("weight of a bad canary", "<=", 5, " %", _of("largest_weight")),
)
CASES = (
    Case(
        "good",
        "a good bundle gets all traffic, and from its parked slot the old one comes back",
        _roll_back_later,
        "done",
        goals=(
            Goal("time to all traffic", "<=", 300.0, " s", _of("full_s")),
            Goal("rollback from a parked slot", "<=", 60.0, " s", _of("back_s")),
        ),
    ),
    Case("slow", "p99 x 3 is aborted", _release, "aborted", "slow", goals=ABORT_GOALS),
    Case(
        "failing", "2 % errors are aborted", _release, "aborted", "failing", most_weight=5, goals=ABORT_GOALS
    ),
    Case(
        "less",
        "10 % fewer full answers are aborted",
        _release,
        "aborted",
        "less",
        most_weight=5,
        goals=ABORT_GOALS,
    ),
    Case(
        "wrong-golden",
        "a bundle with wrong golden answers gets no request",
        _release,
        "aborted",
        wrong_golden=True,
        most_weight=0,
    ),
    Case(
        "never-ready",
        "pods that do not start get no request",
        _release,
        "aborted",
        "hanging",
        most_weight=0,
        pace=replace(HURRY, ready_s=10.0),
    ),
    Case(
        "metrics-away",
        "without metrics the gate holds, and then aborts",
        _metrics_away,
        "aborted",
        most_weight=5,
        pace=HURRY,
    ),
    Case(
        "deployer-killed",
        "the guard ends a release whose deployer was killed at 25 %",
        _deployer_killed,
        "aborted",
        most_weight=25,
        pace=replace(HURRY, weights={**HURRY.weights, 25: 100_000}),
        goals=(Goal("until the guard has aborted", "<=", 20.0, " s", _of("guarded_s")),),
    ),
    Case(
        "registry-away",
        "without a registry the traffic stays; the release is resumed, and rolled back in its hold",
        _registry_away,
        "aborted",
        pace=HURRY,
        goals=(Goal("rollback in the hold", "<=", 2.0, " s", _of("back_s")),),
    ),
)


def drill_release(
    bundle: Path,
    offline_store: Path,
    requests: Sequence[Mapping[str, Any]],
    out_dir: Path,
    names: Sequence[str] = (),
    rate: float = RATE,
    deadline_ms: float = DEADLINE_MS,
) -> dict[str, Any]:
    """Carry the cases out and write `release.json` and `release.md`; return the content of the JSON.

    Args:
        bundle: that is served; the canary is a copy with another id.
        offline_store: of its home.
        requests: request lines with known shoppers.
        out_dir: where the results go.
        names: of the cases; empty: all.
        rate: requests a second.
        deadline_ms: of a call of the client, and of the endpoint.
    """
    before, outcomes = machine_state(), {}
    cases = [case for case in CASES if not names or case.name in names]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reco-drill-")))
        effort = DrillEffort()
        testbed = stack.enter_context(
            open_testbed(bundle, offline_store, requests, folder, effort, deadline_ms)
        )
        generators = {name: stack.enter_context(load_generator()) for name in (CLIENT, RAW)}
        for case in cases:
            log.info("%s: %s", case.name, case.proves)
            outcomes[case.name] = run_case(case, testbed, generators, rate)
            log.info("  %s", "passed" if outcomes[case.name]["passed"] else "MISSED")
    figures = {
        "bundle_id": read_manifest(bundle)["bundle_id"],
        "rate": rate,
        "pace": {**asdict(Pace()), "weights": {str(at): n for at, n in Pace().weights.items()}},
        "cases": outcomes,
        "passed": all(one["passed"] for one in outcomes.values()),
    }
    return write_report(out_dir, "release", figures, release_table, before)


def run_case(
    case: Case, testbed: Testbed, generators: Mapping[str, LoadGenerator], rate: float
) -> dict[str, Any]:
    """Carry one case out; return its outcome, judged."""
    home = testbed.folder / case.name
    champions = [released(testbed.bundle, home, made_for) for made_for in ("", case.name)]
    if case.wrong_golden:
        champions[1] = _with_wrong_golden(home, champions[1].bundle(home))
    bundles = {str(number): one.bundle_id for number, one in enumerate(champions, 1)}
    versions = DrillVersions(home, bundles)
    store_url = f"redis://{testbed.proxy.address}/0"
    settings = Settings(home, http_port=0, store_url=store_url, deadline_ms=testbed.deadline_ms)

    def launch(served: Path) -> Sequence[str]:
        if not case.fault or served.name != bundles["2"]:
            return SERVER
        slow_s = str(2.0 * _p99_s(cluster))  # so much later, each answer has three times the p99
        return sys.executable, "-m", "pipelines.drills.bad_endpoint", case.fault, slow_s

    first = champions[0].bundle(home)
    settings = replace(settings, log_segment_s=1.0)
    with small_cluster(first, settings, home / "slots", launch=launch) as cluster:
        shop = Shop(home, cluster, versions, case.pace)
        _await_ready(cluster)
        with _watched(shop) as seen, _loaded(testbed, cluster, generators, rate) as streams:
            time.sleep(BEFORE_S)
            outcome = case.act(shop)
            time.sleep(2.0)
    outcome |= _figures(seen, streams, bundles["2"])
    outcome["proves"] = case.proves
    common = (
        Goal("answers that failed at the client", "<=", 0, "", _of("failed_at_client")),
        Goal("largest weight of the canary", "<=", case.most_weight, " %", _of("largest_weight")),
    )
    outcome["goals"] = [goal.judge(outcome) for goal in (*common, *case.goals)]
    reached = all(goal["reached"] for goal in outcome["goals"])
    outcome["passed"] = reached and outcome["ended"] == case.ends
    return outcome


def _with_wrong_golden(home: Path, bundle: Path) -> Champion:
    """Seal a bundle again with recorded answers that are wrong."""
    manifest, settings = read_manifest(bundle), load_bundle(bundle).settings
    file = bundle / "golden.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["expected"] = [[item, 1.0 - score] for item, score in row["expected"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle_id = seal_bundle(bundle, cut=manifest["cut"], settings=settings, made_from=manifest["made_from"])
    bundle.rename(home / "bundles" / bundle_id)
    return Champion(bundle_id, "2", "checkout", f"bundles/{bundle_id}", manifest["cut"], "")


def _p99_s(cluster: SmallCluster) -> float:
    """Return the stable slot's p99 so far."""
    [pod] = [one for one in cluster.objects.list("pods") if "blue" in one["metadata"]["name"]]
    counts, _ = read_metrics(httpx.get(metrics_url(pod), trust_env=False).text)
    return counts.p99_s()


def _await_ready(cluster: SmallCluster) -> None:
    until = time.monotonic() + 180.0
    while not cluster.objects.list("pods"):
        if time.monotonic() > until:
            raise RuntimeError("the first slot did not start")
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _watched(shop: Shop) -> Iterator[list[tuple[float, str, int]]]:
    """Note each state and weight of the route with its time, until the block ends."""
    seen: list[tuple[float, str, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            now = shop.seen()
            if not seen or seen[-1][1:] != now:
                seen.append((time.monotonic(), *now))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _loaded(
    testbed: Testbed, cluster: SmallCluster, generators: Mapping[str, LoadGenerator], rate: float
) -> Iterator[dict[str, list[Answer]]]:
    """Send both streams through the gateway until the block ends; their answers are there after it."""
    over = testbed.folder / f"over-{time.monotonic_ns()}"
    common: dict[str, Any] = {"connections": 16, "warm_up": 3, "keep": True, "stop": str(over)}
    client = LoadPlan(
        f"client+{cluster.gateway.url}",
        generators[CLIENT].bodies(bodies_of(testbed.asked, wrapped=False)),
        *(LONGEST_S, rate / 2),
        **common,
        best_sellers=str(testbed.best_sellers),
        deadline_ms=testbed.deadline_ms,
    )
    raw_bodies = generators[RAW].bodies(bodies_of(testbed.raw, wrapped=True))
    raw = LoadPlan(f"{cluster.gateway.url}{PREDICT}", raw_bodies, LONGEST_S, rate / 2, **common, seed=1)
    streams: dict[str, list[Answer]] = {}
    with ThreadPoolExecutor(2) as threads:
        asking = {
            name: threads.submit(generators[name].run, plan) for name, plan in ((CLIENT, client), (RAW, raw))
        }
        try:
            yield streams
        finally:
            over.touch()
        for name, questions in ((CLIENT, len(testbed.asked)), (RAW, len(testbed.raw))):
            streams[name] = answers_of(asking[name].result(), questions)


def _figures(
    seen: Sequence[tuple[float, str, int]], streams: Mapping[str, Sequence[Answer]], canary: str
) -> dict[str, Any]:
    """Return times and counts of a case."""
    first = {state: at for at, state, _ in reversed(seen)}
    answers = [answer for some in streams.values() for answer in some]
    touched = [one for one in answers if one.document.get("bundle_id") == canary]
    aborted, shadow = first.get("abort"), first.get("shadow")
    after = [one.due - aborted for one in touched if aborted is not None and one.due > aborted]
    full = next((at for at, _, weight in seen if weight == 100), None)
    began = next((at for at, state, _ in seen if state), None)
    failed = {name: sum(not one.status_ok for one in some) for name, some in streams.items()}
    return {
        "requests": len(answers),
        "failed_at_client": failed[CLIENT],
        "failed_straight": failed[RAW],
        "touched": 100.0 * len(touched) / max(len(answers), 1),
        "hurt": failed[RAW] + sum(not one.whole for one in touched),
        "largest_weight": max((weight for _, _, weight in seen), default=0),
        "detect_s": aborted - shadow if aborted is not None and shadow is not None else None,
        "abort_s": max(after, default=0.0) if aborted is not None else None,
        "full_s": full - began if full is not None and began is not None else None,
        "steps": [[round(at - seen[0][0], 1), state, weight] for at, state, weight in seen],
    }
