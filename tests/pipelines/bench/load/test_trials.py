"""Loads of known figures -> each trial reports exactly those."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.bench.load.connections import OK
from pipelines.bench.load.generator import Load
from pipelines.bench.load.trials import (
    Send,
    beside_a_canary,
    tail_ms,
)


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


def test_a_tail_of_few_requests_is_their_maximum() -> None:
    assert tail_ms(np.array([3.0, 9.0])) == 9.0
    assert tail_ms(np.arange(200.0)) == 198.0
    assert tail_ms(np.array([])) == np.inf


def test_a_ratio_of_few_requests_is_missing() -> None:
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
