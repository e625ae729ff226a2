"""Ours alone: long baskets, prefetches, a swap of bundles, a canary, endurance -> the figures of each trial.

`pipelines.bench.load.measure` gives each trial a function that sends requests, and the measured capacity.
`pipelines.bench.load.goals` judges the figures.
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
import orjson

from components.home import Champion, write_champion
from pipelines.bench.load.arms import OURS, LoadSetup, choose_arms
from pipelines.bench.load.generator import Load, LoadGenerator
from pipelines.bench.load.measured_server import MeasuredServer, started
from pipelines.bench.report import percentiles
from serving.release.bundle import load_bundle, read_manifest, seal_bundle

OVERLOAD, CHECKOUTS = 3.0, 0.9  # times the capacity: all requests, and the checkouts among them
OVERLOAD_CONNECTIONS = 512  # so that the requests wait at the server, not at the client
FEWEST = 20  # requests; a share of fewer means nothing
RECOVERED = 1.5  # times the p99 at half of the capacity
FLIPS = (0.25, 0.6)  # of the time of a run, when the pointer moves
SETTLING_S = 1.0  # after a bundle took over, its swap is still under way
LOOK_S = 0.1  # between two looks for the event
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # items in a basket
BASKETS = 200  # different ones of a length
AHEAD_S = 0.5  # a canary gets requests before and after the measured ones of stable
CANARY = 0.1  # of the rate of stable

Send = Callable[..., Load]  # seconds, rate, and other fields of a Plan -> the outcome of the requests
Flip = Callable[[], float | None]  # moves the pointer; returns when the other bundle answered, None: not yet


def overload_by_priority(
    send: Send, capacity: float, goal_ms: float, seconds: float, half_s: float
) -> dict[str, Any]:
    """Send three times the capacity: checkouts for nine tenths of it, the rest prefetches.

    Args:
        send: to ours.
        capacity: requests a second.
        goal_ms: an answer in time.
        seconds: of the overload.
        half_s: at half of the capacity, before and right after it.
    """
    before = send(half_s, capacity / 2, seed=400)
    share = 1 - CHECKOUTS / OVERLOAD
    load = send(
        seconds, OVERLOAD * capacity, seed=401, connections=OVERLOAD_CONNECTIONS, prefetch_ratio=share
    )
    after = send(half_s, capacity / 2, seed=402, warm_up=0)  # a warm-up would be the recovery
    half_p99_ms = tail_ms(before.client_ms)
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
        load: the requests after that.
        since_s: from that end to the first moment of the load.
        rate: a second counts with half as many requests.
    """
    numbers = np.floor(since_s + load.due_s).astype(int) + 1
    seconds, counts = np.unique(numbers, return_counts=True)
    return {
        int(second): tail_ms(load.client_ms[numbers == second])
        for second, count in zip(seconds, counts, strict=True)
        if count >= rate / 2
    }


def tail_ms(ms: np.ndarray) -> float:
    """Return the 99th percentile, of few values the largest; infinite without values."""
    found = percentiles(ms)
    tail = found["max"] if found["p99"] is None else found["p99"]
    return float("inf") if tail is None else tail


def basket_lengths(
    send: Callable[[str], Load],
    generator: LoadGenerator,
    bundle: Path,
    requests: Sequence[Mapping[str, Any]],
    rounds: int,
) -> dict[str, Any]:
    """Send baskets of each of `LENGTHS`, popular items more often, by the shoppers of the requests.

    Args:
        send: sends a file of bodies for some time, one request after the other.
        generator: keeps the bodies.
        bundle: whose items are in the baskets.
        requests: request lines.
        rounds: of all lengths.
    """
    statistics = load_bundle(bundle).statistics
    sold = np.asarray(statistics.basket_count, np.float64)
    rng = np.random.default_rng(0)
    files = {}
    for length in (length for length in LENGTHS if length <= len(sold) // 2):
        bodies = []
        for request in requests[:BASKETS]:
            codes = rng.choice(len(sold), length, replace=False, p=sold / sold.sum())
            basket = statistics.item_ids[codes].tolist()
            bodies.append(orjson.dumps({"instances": [{**request, "basket": basket}]}))
        files[length] = generator.bodies(bodies)
    took: dict[int, list[np.ndarray]] = {length: [] for length in files}
    for _ in range(rounds):
        for length, file in files.items():
            load = send(file)
            took[length].append(load.client_ms[load.answered])
    rows = {str(length): percentiles(np.concatenate(ms)) for length, ms in took.items()}
    first, *_, last = rows.values()
    growth = {
        name: (last[name] or 0.0) / (first[name] or np.inf) if last[name] and first[name] else None
        for name in ("p50", "p99")
    }
    return {"ms": rows, "growth": growth}


def memory_growth(send: Send, server: MeasuredServer, requests: int, steps: int = 20) -> dict[str, Any]:
    """Send requests without a pause, four at a time; return memory and its slope after the first quarter."""
    each = max(requests // steps, 1)
    points = [(0, server.memory_mb()["rss"])]
    failed = 0
    for _ in range(steps):
        load = send(3_600.0, requests=each, connections=4, warm_up=0, patience_s=60.0)
        failed += int((~load.answered).sum())
        points.append((points[-1][0] + len(load.status), server.memory_mb()["rss"]))
    counts, rss = np.array(points[steps // 4 :], np.float64).T
    slope = float(np.polyfit(counts, rss, 1)[0])
    return {
        "requests": points[-1][0],
        "failed": failed,
        "rss_mb": points,
        "mb_per_1000_requests": slope * 1e3,
        "mb_after_warm_up": float(rss[-1] - rss[0]),
    }


def swap_under_load(
    send: Send, rate: float, goal_ms: float, seconds: float, flips: Sequence[Flip]
) -> dict[str, Any]:
    """Send requests at a rate while the champion is replaced by another bundle, and then by the first.

    Args:
        send: to the endpoint that follows it; it must be warm, or the cold start would hide in `before`.
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
            load = send(seconds, rate, seed=500)
        finally:
            ended.set()
        flipping.result()
    return {"rate": rate, "seconds": seconds, **_swap_figures(load, swaps, goal_ms)}


def _swap_figures(load: Load, swaps: Sequence[dict[str, float | None]], goal_ms: float) -> dict[str, Any]:
    """Separate the requests due before the first flip, those during any swap, and the rest."""
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
    """Return counts of outcomes; an unanswered request has failed."""
    failed = summary["failed"] + summary["unanswered"]
    return {**{name: summary[name] for name in ("requests", "degraded", "late")}, "failed": failed}


@contextlib.contextmanager
def following(setup: LoadSetup, home: Path) -> Iterator[tuple[MeasuredServer, list[Flip]]]:
    """Start ours so that it follows a home; yield it and two flips: to another bundle, and back.

    The other bundle holds the same files: its manifest names another purpose, so that its id differs.

    Args:
        setup: of the bundle and the settings.
        home: an empty folder; the bundle is copied there.
    """
    champions = [released(setup.bundle, home, made_for) for made_for in ("", "a swap under load")]
    write_champion(home, champions[0])
    [ours] = [arm for arm in choose_arms([OURS]) if arm.name == OURS]
    command = [sys.executable, "-m", "serving.server", "--home", str(home)]
    with started(command, ours.settings(setup, home).to_env(), home / "server.log") as server:
        yield server, [_flip(server, home, champion) for champion in reversed(champions)]


def released(bundle: Path, home: Path, made_for: str) -> Champion:
    """Copy a bundle under a home, as a promotion does; with a purpose it gets another id."""
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
    stable: Send, canary: Send, rate: float, goal_ms: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Send requests to stable, with and without a canary that gets a tenth of the rate at the same time.

    Args:
        stable: to ours.
        canary: to another of ours on the same machine, by another generator.
        rate: requests a second.
        goal_ms: an answer in time.
        seconds: each time.
        rounds: of both, in turn; which comes first changes.
    """
    canary(seconds, CANARY * rate, seed=600)  # a warm-up
    found: list[dict[str, Any]] = []
    canary_ms: list[np.ndarray] = []
    for number in range(rounds):
        loads: dict[str, Load] = {}
        for kind in ("without", "with") if number % 2 == 0 else ("with", "without"):
            with contextlib.ExitStack() as stack:
                if kind == "with":
                    beside = stack.enter_context(_sent_beside(canary, seconds, rate, number))
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
    canary_p99_ms = tail_ms(np.concatenate(canary_ms))
    return {
        "rate": rate,
        "canary_rate": CANARY * rate,
        **medians,
        "canary_p99_ms": canary_p99_ms,
        "rounds": found,
    }


@contextlib.contextmanager
def _sent_beside(canary: Send, seconds: float, rate: float, seed: int) -> Iterator[list[Load]]:
    """Send requests to the canary from shortly before the block on; its load is there after the block."""
    loads: list[Load] = []
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(canary, seconds + 2 * AHEAD_S, CANARY * rate, seed=620 + seed)
        time.sleep(AHEAD_S)
        yield loads
        loads.append(asking.result())
