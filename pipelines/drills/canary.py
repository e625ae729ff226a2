"""A champion and worse copies of it -> each way in which a release can go, with shoppers in the loop.

Every case starts a small cluster of this machine: API, gateway, and an endpoint process for each slot. Load
goes through the gateway all the time. Versions and alias are in memory here: the gate before the traffic, and
a registry that is away, are those of tests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from components.rollout import NAMESPACE
from components.rollout.cluster import Cluster, connect
from components.rollout.observe import Observer
from components.rollout.plan import ROLLBACK, Pace, Release
from components.rollout.publishing import publish_bundle
from components.rollout.release import Aborted, Rollout
from pipelines.bench.load.goals import Goal, part_of
from pipelines.bench.load.waiting import NotReached, wait_for
from pipelines.live.small_cluster import SmallCluster

log = logging.getLogger(__name__)

RATE = 50.0  # requests a second, through the client and straight, half each
LONGEST_S = 1_200.0
LOOK_S = 0.1
BEFORE_S = 5.0
GATE = Pace(look_s=2.0, hold_s=6.0, ready_s=60.0, missing_s=10.0)


class DrillVersions:
    """Two versions, of which the first is champion; their bundles lie in a folder."""

    def __init__(self, home: Path, bundles: Mapping[str, str]) -> None:
        self._home, self._bundles = home, bundles
        self.champions = ["1"]  # the versions that were champion, the last one now

    def find(self, version: str) -> tuple[str, str]:
        """Return a version and its bundle."""
        return version, self._bundles[version]

    def previous(self) -> tuple[str, str]:
        """Return the version before the champion."""
        return self.find(self.champions[-2])

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
        if self.champions[-1] == record.version:
            return
        if record.kind == ROLLBACK:
            self.champions.pop()
        else:
            self.champions.append(record.version)

    def undo(self, record: Release) -> None:
        """Move the alias back."""
        if record.kind != ROLLBACK and self.champions[-1] == record.version:
            self.champions.pop()


@dataclass(frozen=True)
class Shop:
    """A cluster that runs, with load, for one case."""

    cluster: SmallCluster
    versions: DrillVersions
    pace: Pace

    def rollout(self) -> Rollout:
        """Return a deployer of this process, as `reco release` makes it."""
        cluster, http = Cluster(connect(self.cluster.api.url), NAMESPACE), httpx.Client(trust_env=False)
        observer = Observer(cluster, http, self.cluster.gateway.url, "", self.pace, time.time)
        name = f"{os.getpid()}:{threading.get_ident()}"
        return Rollout(cluster, observer, self.versions, self.pace, name, time.time, time.sleep, log.info)

    @functools.cached_property
    def watcher(self) -> Rollout:
        """A deployer that only looks: a new one at each look takes processor time from the release."""
        return self.rollout()

    def seen(self) -> tuple[str, int]:
        """Return the state of the release and the canary's weight."""
        record, split = self.watcher.status()
        return ("", 0) if record is None else (record.state, split[record.canary])

    def end(self) -> dict[str, Any]:
        """Return how the release ended, and why."""
        record, _ = self.watcher.status()
        assert record
        return {"ended": record.state, "reason": record.reason}

    def await_seen(self, is_it: Callable[[str, int], bool]) -> None:
        """Wait for a state and a weight of the canary."""
        try:
            wait_for(lambda: is_it(*self.seen()), "the release goes on", LONGEST_S, LOOK_S)
        except NotReached as error:
            raise NotReached(f"{error}; it is at {self.seen()}") from error


Act = Callable[[Shop], dict[str, Any]]


def _release(shop: Shop) -> dict[str, Any]:
    with contextlib.suppress(Aborted):
        shop.rollout().start("2")
    return shop.end()


def _roll_back_later(shop: Shop) -> dict[str, Any]:
    found = _release(shop)
    if found["ended"] != "done":
        return found  # nothing to roll back
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(shop.rollout().rollback)
        shop.await_seen(lambda state, _: going.done() or shop.watcher.status()[1]["blue"] == 100)
        back_s = time.monotonic() - began
        going.result()
    return {**found, "back_s": back_s}


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
        "never-ready",
        "pods that do not start get no request",
        "stage after",
        fault="hanging",
        most_weight=0,
        pace=replace(GATE, ready_s=10.0),
    ),
)
