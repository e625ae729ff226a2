"""Ours under prefetches, under a swap of bundles and beside a canary -> what the checkouts noticed of each.

Parts of the load report that no other arm takes part in: `pipelines.bench.load.measure` gives them a way to
ask
and the capacity that was found, and `pipelines.bench.load.goals` judges what they return.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from components.home import Champion, write_champion
from pipelines.bench.load.arms import OURS, Scene, choose_arms
from pipelines.bench.load.generator import Load, percentiles
from pipelines.bench.load.measured_server import MeasuredServer, started
from serving.release.bundle import load_bundle, read_manifest, seal_bundle

OVERLOAD, CHECKOUTS = 3.0, 0.9  # times the capacity: all requests, and those of them where somebody waits
OVERLOAD_CONNECTIONS = 512  # so that the crowd stands at the server's door, not at the client's
FEWEST = 20  # requests of which a share can be told
RECOVERED = 1.5  # times the p99 at half of the capacity
FLIPS = (0.25, 0.6)  # of the time of a run, when the pointer moves
SETTLING_S = 1.0  # after a bundle took over, its swap is still under way
LOOK_S = 0.1  # how often to look whether one did
AHEAD_S = 0.5  # a canary is asked before and after those who are measured beside it
CANARY = 0.1  # of the rate of stable

Ask = Callable[..., Load]  # seconds, rate, and what else a Plan has -> what became of the requests
Flip = Callable[[], float | None]  # moves the pointer; returns when the other bundle answered, None: not yet


def overload_by_priority(
    ask: Ask, capacity: float, goal_ms: float, seconds: float, half_s: float
) -> dict[str, Any]:
    """Ask three times the capacity, of which the checkouts are nine tenths of it and the rest prefetches.

    Args:
        ask: ours.
        capacity: requests a second.
        goal_ms: an answer in time.
        seconds: of the overload.
        half_s: at half of the capacity, before and right after it.
    """
    before = ask(half_s, capacity / 2, seed=400)
    share = 1 - CHECKOUTS / OVERLOAD
    load = ask(seconds, OVERLOAD * capacity, seed=401, connections=OVERLOAD_CONNECTIONS, prefetch_ratio=share)
    after = ask(half_s, capacity / 2, seed=402, warm_up=0)  # a warm-up would be the recovery
    half_p99_ms = p99(before.client_ms)
    each_s = seconds_p99(after, after.began_s - load.began_s - float(load.due_s[-1]), capacity / 2)
    back = (second for second, ms in each_s.items() if ms <= RECOVERED * half_p99_ms)
    return {
        "rate": OVERLOAD * capacity,
        "seconds": seconds,
        "checkout": _kind(load.only(~load.prefetch), goal_ms),
        "prefetch": _kind(load.only(load.prefetch), goal_ms),
        "shed": {"requests": int(load.shed.sum()), "ms": percentiles(load.client_ms[load.shed])},
        "recovery": {
            "half_p99_ms": half_p99_ms,
            "second_p99_ms": {str(second): ms for second, ms in each_s.items()},
            "watched_s": max(each_s, default=0),
            "back_s": next(back, None),
        },
    }


def _kind(load: Load, goal_ms: float) -> dict[str, Any]:
    summary = load.summary(goal_ms)
    asked = summary["requests"]
    full = int((load.answered & ~load.degraded).sum())
    return {
        "good_ratio": summary["good"] / asked if asked >= FEWEST else None,
        "full_ratio": full / asked if asked >= FEWEST else None,
        "shed": int(load.shed.sum()),
        **{name: summary[name] for name in ("requests", "good", "late", "refused", "failed", "unanswered")},
    }


def seconds_p99(load: Load, since_s: float, rate: float) -> dict[int, float]:
    """Return the p99 of each second after something ended; a second of few requests is left out.

    Args:
        load: what was asked then.
        since_s: from that end to the first moment of the load.
        rate: of which half must have been asked within a second for it to count.
    """
    numbers = np.floor(since_s + load.due_s).astype(int) + 1
    seconds, counts = np.unique(numbers, return_counts=True)
    return {
        int(second): p99(load.client_ms[numbers == second])
        for second, count in zip(seconds, counts, strict=True)
        if count >= rate / 2
    }


def p99(ms: np.ndarray) -> float:
    """Return the 99th percentile, of few values the largest; infinite if there is none."""
    return float(np.percentile(ms, 99, method="higher")) if len(ms) else float("inf")


def swap_under_load(
    ask: Ask, rate: float, goal_ms: float, seconds: float, flips: Sequence[Flip]
) -> dict[str, Any]:
    """Ask an endpoint at a rate while its champion is another one, and then again the first.

    Args:
        ask: the endpoint that follows it; it has been asked before, or what is cold would hide in `before`.
        rate: requests a second.
        goal_ms: an answer in time.
        seconds: altogether.
        flips: one after the other, each waiting until the other bundle answers.
    """
    swaps: list[dict[str, float | None]] = []
    ended = threading.Event()

    def flip_in_turn(began: float) -> None:
        for flip, share in zip(flips, FLIPS, strict=True):
            if ended.wait(max(began + share * seconds - time.monotonic(), 0.0)):
                return
            swaps.append({"flipped_s": time.monotonic(), "took_over_s": None})
            swaps[-1]["took_over_s"] = flip()

    with ThreadPoolExecutor(1) as thread:
        flipping = thread.submit(flip_in_turn, time.monotonic())
        try:
            load = ask(seconds, rate, seed=500)
        finally:
            ended.set()
        flipping.result()
    return {"rate": rate, "seconds": seconds, **_noticed(load, swaps, goal_ms)}


def _noticed(load: Load, swaps: Sequence[dict[str, float | None]], goal_ms: float) -> dict[str, Any]:
    """Tell apart what was due before the first flip, during any swap, and else."""
    due = load.began_s + load.due_s
    during = np.zeros(len(due), bool)
    windows = []
    for swap in swaps:
        flipped, over = swap["flipped_s"], swap["took_over_s"]
        assert flipped is not None
        during |= (due >= flipped) & (due <= (np.inf if over is None else over + SETTLING_S))
        windows.append(None if over is None else over - flipped)
    first = min((swap["flipped_s"] or 0.0 for swap in swaps), default=np.inf)
    phases = {"before": due < first, "during": during, "after": (due >= first) & ~during}
    summary = load.summary(goal_ms)
    whole = all(took_s is not None for took_s in windows) and len(windows) == len(FLIPS)
    found = {name: _phase(load.only(which), goal_ms) for name, which in phases.items()}
    before, within = found["before"]["p99_ms"], found["during"]["p99_ms"]
    return {
        "swap_s": windows,
        "refused": summary["refused"],
        **_counts(summary),
        "phases": found,
        "p99_ratio": within / before if whole and before and within else None,
        "swapped": whole,
    }


def _phase(load: Load, goal_ms: float) -> dict[str, Any]:
    summary = load.summary(goal_ms)
    return {
        "p50_ms": summary["ms"]["p50"],
        "p99_ms": summary["ms"]["p99"],
        **_counts(summary),
    }


def _counts(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return what became of requests; one that was never answered has failed."""
    failed = summary["failed"] + summary["unanswered"]
    return {**{name: summary[name] for name in ("requests", "degraded", "late")}, "failed": failed}


@contextlib.contextmanager
def following(scene: Scene, home: Path) -> Iterator[tuple[MeasuredServer, list[Flip]]]:
    """Start ours so that it follows a home; yield it and two flips: to another bundle, and back.

    The other bundle holds the same files: its manifest says what it was made for, so that its id is its own.

    Args:
        scene: whose bundle and settings it has.
        home: an empty folder; the bundle is copied there.
    """
    champions = [released(scene.bundle, home, made_for) for made_for in ("", "a swap under load")]
    write_champion(home, champions[0])
    [ours] = [arm for arm in choose_arms([OURS]) if arm.name == OURS]
    command = [sys.executable, "-m", "serving.server", "--home", str(home)]
    with started(command, ours.settings(scene, home).to_env(), home / "server.log") as server:
        yield server, [_flip(server, home, champion) for champion in reversed(champions)]


def released(bundle: Path, home: Path, made_for: str) -> Champion:
    """Copy a bundle under a home, as a promotion does; made for something, it is another one."""
    part = home / "bundles" / ".part"
    shutil.copytree(bundle, part)
    manifest = read_manifest(part)
    if made_for:
        settings = load_bundle(part).settings
        made_from = {**manifest["made_from"], "made_for": made_for}
        bundle_id = seal_bundle(part, cut=manifest["cut"], settings=settings, made_from=made_from)
    else:
        bundle_id = manifest["bundle_id"]
    part.rename(home / "bundles" / bundle_id)
    return Champion(bundle_id, "1", "checkout", f"bundles/{bundle_id}", manifest["cut"], "")


def _flip(server: MeasuredServer, home: Path, champion: Champion, wait_s: float = 60.0) -> Flip:
    def flip() -> float | None:
        known = len(server.events("bundle"))
        write_champion(home, champion)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if len(server.events("bundle")) > known:
                return time.monotonic()
            time.sleep(LOOK_S)
        return None

    return flip


def beside_a_canary(
    stable: Ask, canary: Ask, rate: float, goal_ms: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Ask stable at a rate, with and without a canary that is asked a tenth of it at the same time.

    Args:
        stable: ours.
        canary: another of ours on the same machine, asked by another generator.
        rate: requests a second.
        goal_ms: an answer in time.
        seconds: each time.
        rounds: of both, in turn; which comes first changes.
    """
    canary(seconds, CANARY * rate, seed=600)  # it was not asked so far
    found: list[dict[str, Any]] = []
    canary_ms: list[np.ndarray] = []
    for number in range(rounds):
        loads: dict[str, Load] = {}
        for kind in ("without", "with") if number % 2 == 0 else ("with", "without"):
            with contextlib.ExitStack() as stack:
                if kind == "with":
                    beside = stack.enter_context(_asked_beside(canary, seconds, rate, number))
                loads[kind] = stable(seconds, rate, seed=610 + number)  # the same times in both
            if kind == "with":
                canary_ms.append(beside[0].client_ms)
        without_ms, with_ms = (percentiles(loads[kind].client_ms)["p99"] for kind in ("without", "with"))
        summary = loads["with"].summary(goal_ms)
        found.append(
            {
                "without_p99_ms": without_ms,
                "with_p99_ms": with_ms,
                "ratio": with_ms / without_ms if with_ms and without_ms else None,
                **_counts(summary),
            }
        )
    medians: dict[str, float | None] = {}
    for name in ("without_p99_ms", "with_p99_ms", "ratio"):
        values = [one[name] for one in found]
        medians[name] = None if None in values else float(np.median(values))
    canary_p99_ms = p99(np.concatenate(canary_ms))
    return {
        "rate": rate,
        "canary_rate": CANARY * rate,
        **medians,
        "canary_p99_ms": canary_p99_ms,
        "rounds": found,
    }


@contextlib.contextmanager
def _asked_beside(canary: Ask, seconds: float, rate: float, seed: int) -> Iterator[list[Load]]:
    """Ask the canary while the block runs, from a little before it; its load is there after the block."""
    loads: list[Load] = []
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(canary, seconds + 2 * AHEAD_S, CANARY * rate, seed=620 + seed)
        time.sleep(AHEAD_S)
        yield loads
        loads.append(asking.result())
