"""A champion and worse copies of it -> each way in which a release can go, with shoppers in the loop.

Every case starts a small cluster of this machine: API, gateway, and an endpoint process for each slot. Load
goes through the gateway all the time. Versions and alias are a file here, because the registry has to be away
in one case; the gate before the traffic is another drill's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from components.home import Conflict, write_json
from components.release.registry import RegistryUnreachable
from components.rollout import NAMESPACE
from components.rollout.cluster import Cluster, connect
from components.rollout.observe import Observer
from components.rollout.plan import FINAL, ROLLBACK, Pace, Release
from components.rollout.publishing import publish_bundle
from components.rollout.release import Aborted, Rollout
from feature_repo.errors import RecoError
from pipelines.bench.load.goals import Goal, part_of
from pipelines.bench.load.waiting import NotReached, wait_for
from pipelines.live.small_cluster import SmallCluster

log = logging.getLogger(__name__)

RATE = 50.0  # requests a second, through the client and straight, half each
LONGEST_S = 1_200.0
LOOK_S = 0.1
BEFORE_S = 5.0
# Cases about crashes and registries hurry through the steps; those about the gate keep its numbers.
HURRY = Pace(
    weights={1: 5, 5: 10, 25: 100, 50: 100},
    reveals=1.0,
    shadow_answers=60,
    look_s=1.0,
    hold_s=6.0,
    orphan_s=6.0,
    missing_s=10.0,
)
GATE = Pace(look_s=2.0, hold_s=6.0, ready_s=60.0, missing_s=10.0)


class DrillVersions:
    """The versions that were champion, in a file; while `away` is there, too, no registry answers.

    While `moved` is there, a person has moved the alias by hand.
    """

    def __init__(self, home: Path, bundles: Mapping[str, str]) -> None:
        """Take the folder, and the bundle id of each version."""
        self._home, self._bundles = home, bundles
        if not (home / "champions.json").is_file():
            write_json(home / "champions.json", ["1"])

    def champions(self) -> list[str]:
        """Return the versions that were champion, the last one now."""
        return list(json.loads((self._home / "champions.json").read_bytes()))

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
            raise RegistryUnreachable("the drill's registry is away")
        if (self._home / "moved").exists():
            raise Conflict("the alias champion was moved by hand")
        champions = self.champions()
        if champions[-1] != record.version:
            write_json(
                self._home / "champions.json",
                champions[:-1] if is_back else [*champions, record.version],
            )


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

    @functools.cached_property
    def watcher(self) -> Rollout:
        """A deployer that only looks: a new one at each look takes processor time from the release."""
        return self.rollout()

    def seen(self) -> tuple[str, int]:
        """Return the state of the release and the canary's weight."""
        record, split = self.watcher.status()
        return ("", 0) if record is None else (record.state, split[record.canary])

    def end(self) -> dict[str, Any]:
        """Return how the release ended, and the gate's last looks."""
        record, _ = self.watcher.status()
        assert record
        return {"ended": record.state, "reason": record.reason, "gate": list(record.gate)}

    def await_weight(self, weight: int) -> None:
        """Wait until the canary has a weight, or the release is over."""
        self.await_seen(lambda state, now: now == weight or state in FINAL)

    def await_seen(self, is_it: Callable[[str, int], bool], look_s: float = LOOK_S) -> None:
        """Wait for a state and a weight of the canary."""
        try:
            wait_for(lambda: is_it(*self.seen()), "the release goes on", LONGEST_S, look_s)
        except NotReached as error:
            raise NotReached(f"{error}; it is at {self.seen()}") from error


def deployer(home: Path, api: str, gateway: str, versions: DrillVersions, pace: Pace) -> Rollout:
    """Return a deployer as `reco release` makes it."""
    cluster = Cluster(connect(api), NAMESPACE)
    observer = Observer(cluster, httpx.Client(trust_env=False), gateway, "", pace, time.time)
    name = f"{multiprocessing.current_process().pid}:{threading.get_ident()}"
    return Rollout(cluster, observer, versions, pace, name, time.time, time.sleep, log.info)


Act = Callable[[Shop], dict[str, Any]]


def _release(shop: Shop) -> dict[str, Any]:
    with contextlib.suppress(Aborted):
        shop.rollout().start("2", shop.versions.place)
    return shop.end()


def _roll_back_later(shop: Shop) -> dict[str, Any]:
    found = _release(shop)
    if found["ended"] != "done":
        return found  # nothing to roll back
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(shop.rollout().rollback, shop.versions.place)
        shop.await_seen(lambda state, _: going.done() or shop.watcher.status()[1]["blue"] == 100)
        back_s = time.monotonic() - began
        going.result()
    return {**found, "back_s": back_s}


def _metrics_away(shop: Shop) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(_release, shop)
        shop.await_weight(5)
        pods = shop.cluster.objects.list("pods")
        for pod in (one for one in pods if "green" in one["metadata"]["name"]):
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
    with contextlib.suppress(Aborted):
        while time.monotonic() < killed + LONGEST_S:
            record = shop.rollout().guard()
            if record is None or not record.active:
                break
            time.sleep(1.0)
    return {"guarded_s": time.monotonic() - killed, **shop.end()}


def _deploy(home: Path, api: str, gateway: str, versions: DrillVersions, pace: Pace) -> None:
    deployer(home, api, gateway, versions, pace).start("2", versions.place)


def _registry_away(shop: Shop) -> dict[str, Any]:
    (shop.home / "away").touch()
    code = _exit_code(shop, RegistryUnreachable)
    state, weight = shop.seen()
    (shop.home / "away").unlink()
    if state in FINAL:
        return shop.end()
    patient = replace(shop, pace=replace(shop.pace, hold_s=600.0))
    with ThreadPoolExecutor(2) as threads:
        going = threads.submit(_until_conflict, patient.rollout())
        shop.await_seen(lambda state, _: going.done() or state == "hold")
        sealed = shop.versions.champions()[-1]
        time.sleep(3.0)
        began = time.monotonic()
        back = threads.submit(shop.rollout().rollback, shop.versions.place)
        shop.await_seen(lambda _, weight: back.done() or weight == 0, LOOK_S / 4)
        back_s = time.monotonic() - began
        back.result()
        going.result()
    return {
        "ended": shop.seen()[0],
        "reason": f"exit code {code} at {weight} %, resumed to champion {sealed}, rolled back in the hold",
        "back_s": back_s,
    }


def _exit_code(shop: Shop, expected: type[RecoError]) -> int:
    """Return the exit code of a release that ends with this error, or is aborted; 0: it goes through."""
    try:
        shop.rollout().start("2", shop.versions.place)
    except (expected, Aborted) as error:
        return error.exit_code
    return 0


def _alias_moved(shop: Shop) -> dict[str, Any]:
    (shop.home / "moved").touch()
    code = _exit_code(shop, Conflict)
    state, weight = shop.seen()
    (shop.home / "moved").unlink()
    if state in FINAL:
        return shop.end()
    record = shop.rollout().rollback(shop.versions.place)
    return {"ended": record.state, "reason": f"exit code {code} at {weight} %, {record.reason}"}


def _until_conflict(rollout: Rollout) -> None:
    with contextlib.suppress(RecoError):  # the rollback takes the release from it
        rollout.resume()


@dataclass(frozen=True)
class Case:
    """One way in which a release can go."""

    name: str
    proves: str
    says: str  # a part of the reason of its end
    act: Act = _release
    ends: str = "aborted"  # its state
    fault: str = ""  # of `bad_endpoint`, for the canary
    most_weight: int = 100
    most_failed: int = 0  # answers other than 200 at callers without the client
    pace: Pace = GATE
    goals: Sequence[Goal] = ()


def _worse(fault: str, proves: str, says: str, most_failed: int = 0) -> Case:
    """Return the case of a canary whose answers to shoppers are worse."""
    found = (
        Goal("time to detect", "<=", 60.0, " s", part_of("detect_s")),
        Goal("time to abort", "<=", 2.0, " s", part_of("abort_s")),
        Goal("weight of a bad canary", "<=", 5, " %", part_of("largest_weight")),
    )
    return Case(fault, proves, says, fault=fault, most_failed=most_failed, goals=found)


CASES = (
    Case(
        "good",
        "a good bundle gets all traffic, and from its parked slot the old one comes back",
        "",
        _roll_back_later,
        "done",
        goals=(
            Goal("time to all traffic", "<=", 300.0, " s", part_of("full_s")),
            Goal("rollback from a parked slot", "<=", 60.0, " s", part_of("back_s")),
        ),
    ),
    _worse("slow", "p99 x 3 is aborted", "slower than"),
    _worse("failing", "2 % errors are aborted", "errors"),
    _worse("less", "10 % fewer full answers are aborted", "less than full"),
    _worse("slow-live", "p99 x 3 that shows after the shadow is aborted", "%: slower than"),
    # Of the 175 answers of 1 and 5 % a fifth fails: no gate sees a fault before it happens.
    _worse("failing-live", "20 % errors that show after the shadow are aborted", "%: errors", most_failed=35),
    _worse("less-live", "10 % fewer full answers after the shadow are aborted", "%: less than full"),
    Case(
        "wrong-golden",
        "an endpoint that answers golden requests with other scores gets no request",
        "golden request",
        fault="wrong-golden",
        most_weight=0,
    ),
    Case(
        "never-ready",
        "pods that do not start get no request",
        "stage after",
        fault="hanging",
        most_weight=0,
        pace=replace(HURRY, ready_s=10.0),
    ),
    Case(
        "metrics-away",
        "without metrics the gate holds, and then aborts",
        "no metrics",
        _metrics_away,
        most_weight=5,
        pace=HURRY,
    ),
    Case(
        "deployer-killed",
        "the guard ends a release whose deployer was killed at 25 %",
        "its deployer was silent",
        _deployer_killed,
        most_weight=25,
        pace=replace(HURRY, weights={**HURRY.weights, 25: 100_000}),
        goals=(
            Goal("until the guard has aborted", "<=", 20.0, " s", part_of("guarded_s")),
            Goal("weight at which it was killed", ">=", 25, " %", part_of("largest_weight")),
        ),
    ),
    Case(
        "registry-away",
        "without a registry the traffic stays; the release is resumed, and rolled back in its hold",
        "exit code 3 at 100 %, resumed to champion 2",
        _registry_away,
        pace=HURRY,
        goals=(Goal("rollback in the hold", "<=", 2.0, " s", part_of("back_s")),),
    ),
    Case(
        "alias-moved",
        "an alias that was moved by hand stops the seal; the traffic stays until a rollback",
        "exit code 4 at 100 %, rolled back by hand",
        _alias_moved,
        pace=HURRY,
    ),
)
