"""Loads of known figures -> each trial says just those, and tells by the times what was when."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.home import read_champion
from pipelines.bench.load.arms import LoadSetup
from pipelines.bench.load.connections import OK, UNANSWERED
from pipelines.bench.load.generator import Load
from pipelines.bench.load.trials import (
    OVERLOAD_CONNECTIONS,
    Send,
    beside_a_canary,
    following,
    overload_by_priority,
    seconds_p99,
    swap_under_load,
    tail_ms,
)
from serving.release.bundle import read_manifest
from serving.settings import Settings


def load_of(ms: Any, due_s: Any, began_s: float = 0.0, **more: Any) -> Load:
    """Return the load of so many requests, all answered in full but for the given fields."""
    count = len(due_s)
    none = np.zeros(count, bool)
    status = np.full(count, OK)
    load = Load(np.asarray(due_s, float), np.full(count, ms, float), none * 0.0, status, none, none * 0, 0.0)
    return replace(load, **{"prefetch": none, "shed": none, "began_s": began_s, **more})


def one_after_the_other(*loads: Load) -> tuple[Send, list[dict[str, Any]]]:
    """Return a function that returns these loads in turn, and its calls."""
    left, asked = iter(loads), []

    def ask(seconds: float, rate: float, **plan: Any) -> Load:
        asked.append({"seconds": seconds, "rate": rate, **plan})
        return next(left)

    return ask, asked


def overloaded() -> Load:
    """Ten a second: 30 checkouts of which 3 are shed and one is late, 70 prefetches of which 9 get all."""
    number = np.arange(100)
    prefetch = number % 10 >= 3
    shed = (prefetch & (number % 10 != 9) & (number < 90)) | (prefetch & (number >= 90))
    shed |= (number < 30) & (number % 10 == 0)
    ms = np.where(shed, np.where(prefetch, 2.0, 4.0), 40.0)
    ms[1] = 51.0  # in full, but late
    return replace(
        load_of(0.0, number / 10, 100.0), client_ms=ms, prefetch=prefetch, shed=shed, degraded=shed
    )


def test_checkouts_and_prefetches_are_told_apart_under_overload() -> None:
    calm, overload = load_of(10.0, np.arange(60) / 10), overloaded()
    ask, asked = one_after_the_other(calm, overload, load_of(10.0, np.arange(60) / 10, 110.0))
    found = overload_by_priority(ask, 20.0, 50.0, 30.0, 6.0)
    assert [(one["seconds"], one["rate"]) for one in asked] == [(6.0, 10.0), (30.0, 60.0), (6.0, 10.0)]
    assert asked[1]["prefetch_ratio"] == pytest.approx(0.7)
    assert asked[1]["connections"] == OVERLOAD_CONNECTIONS
    assert asked[2]["warm_up"] == 0, "it would be the recovery"
    checkout, prefetch = found["checkout"], found["prefetch"]
    assert (checkout["requests"], checkout["shed"], checkout["late"], checkout["good"]) == (30, 3, 1, 26)
    assert checkout["good_ratio"] == pytest.approx(26 / 30)
    assert checkout["full_ratio"] == pytest.approx(0.9)
    assert prefetch["requests"] == 70
    assert prefetch["full_ratio"] == pytest.approx(9 / 70)
    assert found["shed"]["requests"] == 3 + 61
    assert (found["shed"]["ms"]["p50"], found["shed"]["ms"]["max"]) == (2.0, 4.0)


@pytest.mark.parametrize(("until", "back_s"), [(0.0, 1), (1.5, 3), (1e9, None)])
def test_the_second_is_told_in_which_the_tail_is_back(until: float, back_s: int | None) -> None:
    overload = overloaded()
    due = np.arange(600) / 100
    # Its first moment is 0.1 s after the last request of the overload was due.
    after = load_of(np.where(due + 0.1 < until, 16.0, 14.0), due, 100.0 + overload.due_s[-1] + 0.1)
    ask, _ = one_after_the_other(load_of(10.0, np.arange(60) / 10), overload, after)
    recovery = overload_by_priority(ask, 200.0, 50.0, 30.0, 6.0)["recovery"]
    assert recovery["half_p99_ms"] == 10.0
    assert recovery["back_s"] == back_s
    assert list(recovery["second_p99_ms"]) == ["1", "2", "3", "4", "5", "6"]
    assert recovery["watched_s"] == 6


def test_seconds_are_counted_from_the_end_and_those_of_few_requests_are_left_out() -> None:
    load = load_of([1.0] * 10 + [2.0] * 10 + [3.0] * 4, np.arange(24) / 10)
    assert seconds_p99(load, 2.0, 10.0) == {3: 1.0, 4: 2.0}
    assert tail_ms(np.array([3.0, 9.0])) == 9.0
    assert tail_ms(np.array([])) == np.inf


def test_a_swap_is_told_by_what_was_due_while_it_was_under_way() -> None:
    """Twice 0.1 s of loading; whoever is due then, or until a second later, takes 30 ms instead of 10."""
    moved: list[float] = []

    def flip() -> float:
        moved.append(time.monotonic())
        return moved[-1] + 0.1

    def ask(seconds: float, rate: float, **plan: Any) -> Load:
        began = time.monotonic()
        while len(moved) < 2:
            time.sleep(0.01)
        due = np.arange(4_000) / 1_000 - 0.5
        during = np.any([(due + began >= at) & (due + began <= at + 1.1) for at in moved], axis=0)
        status = np.full(4_000, OK)
        status[-1] = UNANSWERED
        degraded = np.arange(4_000) == np.argmax(during)
        return load_of(np.where(during, 30.0, 10.0), due, began, status=status, degraded=degraded)

    found = swap_under_load(ask, 50.0, 20.0, 0.5, [flip, flip])
    assert found["p99_ratio"] == 3.0
    assert found["swapped"]
    assert found["swap_s"] == pytest.approx([0.1, 0.1], abs=0.05)
    assert (found["failed"], found["degraded"]) == (1, 1)
    phases = found["phases"]
    assert found["late"] == phases["during"]["late"] == phases["during"]["requests"]
    assert (phases["during"]["degraded"], phases["after"]["failed"]) == (1, 1)
    assert sum(phase["requests"] for phase in phases.values()) == 4_000


@pytest.mark.parametrize("flips", [[lambda: None, lambda: None], [lambda: time.sleep(0.2), lambda: 0.0]])
def test_a_swap_that_did_not_happen_is_compared_with_nothing(flips: list[Callable[[], Any]]) -> None:
    def ask(seconds: float, rate: float, **plan: Any) -> Load:
        began = time.monotonic()
        time.sleep(0.1)
        return load_of(10.0, np.arange(100) / 1_000, began)

    found = swap_under_load(ask, 50.0, 20.0, 0.1, flips)
    assert not found["swapped"]
    assert found["p99_ratio"] is None
    assert None in found["swap_s"]


def test_a_tail_of_few_requests_is_compared_with_nothing() -> None:
    def ask(seconds: float, rate: float, **plan: Any) -> Load:
        return load_of(10.0, np.arange(99) / 1_000)

    found = beside_a_canary(ask, ask, 50.0, 50.0, 0.0, 1)
    assert (found["ratio"], found["with_p99_ms"]) == (None, None)


def test_stable_is_compared_with_itself_round_by_round() -> None:
    asked: list[tuple[str, float, bool]] = []
    beside = [False]
    tails = iter([(10.0, 12.0), (20.0, 20.0), (10.0, 15.0)])
    tail = [0.0, 0.0]

    def stable(seconds: float, rate: float, **plan: Any) -> Load:
        if len(asked) % 2 == 0:
            tail[:] = next(tails)
        asked.append(("stable", rate, beside[0]))
        return load_of(tail[beside[0]], np.arange(100) / 100)

    def canary(seconds: float, rate: float, **plan: Any) -> Load:
        beside[0] = True
        time.sleep(max(seconds - 0.2, 0.0))  # beside all of stable's, which take no time here
        beside[0] = False
        assert rate == 5.0
        return load_of(7.0, np.arange(10) / 10)

    found = beside_a_canary(stable, canary, 50.0, 50.0, 0.2, 3)
    assert [one[2] for one in asked] == [False, True, True, False, False, True]
    assert [one["ratio"] for one in found["rounds"]] == [1.2, 1.0, 1.5]
    assert (found["without_p99_ms"], found["with_p99_ms"], found["ratio"]) == (10.0, 15.0, 1.2)
    assert (found["canary_rate"], found["canary_p99_ms"]) == (5.0, 7.0)


@pytest.mark.slow
def test_a_flip_waits_until_the_other_bundle_answers(toy_line: Path, tmp_path: Path) -> None:
    setup = LoadSetup(toy_line / "evaluated", Settings(store_url="", deadline_ms=60_000.0), tmp_path)
    (tmp_path / "home").mkdir()
    with following(setup, tmp_path / "home") as (server, flips):
        first = read_champion(tmp_path / "home").bundle_id
        assert server.ready["bundle_id"] == first == read_manifest(toy_line / "evaluated")["bundle_id"]
        took_over = [flip() for flip in flips]
        assert None not in took_over
        events = server.events("bundle")
        other = events[0]["bundle_id"]
        assert other != first
        assert [(one["was"], one["bundle_id"]) for one in events] == [(first, other), (other, first)]
    assert not (tmp_path / "home" / "bundles" / ".part").exists()
