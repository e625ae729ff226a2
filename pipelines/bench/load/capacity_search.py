"""Probes of a server at one rate after another -> its capacity: the knee of latency over rate."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

GOAL_MS = 50.0
ANSWERED = 0.99  # of the due requests, answered in the run
DEGRADED = 0.01  # of the answers, at most: degraded ones are cheap
PRECISION = 0.05  # between the highest rate that held and the lowest that did not
LOWEST, HIGHEST = 0.25, 1e5  # requests per second: the bounds of the search


@dataclass(frozen=True, slots=True)
class Probe:
    """The figures of a server at one rate."""

    rate: float  # requests per second that were due
    answered_ratio: float
    failed: int  # refused, broken, never answered
    p50_ms: float | None
    p99_ms: float | None
    degraded_ratio: float = 0.0

    @classmethod
    def of(cls, rate: float, summary: dict[str, Any]) -> Probe:
        """Read it from `Load.summary`; a run too short for a p99 is judged by its maximum."""
        ms = summary["ms"]
        failed = summary["failed"] + summary["refused"] + summary["unanswered"]
        p99 = ms["max"] if ms["p99"] is None else ms["p99"]
        answered = summary["answered"] / max(summary["requests"], 1)
        degraded = summary["degraded"] / max(summary["answered"], 1)
        return cls(rate, answered, failed, ms["p50"], p99, degraded)

    def holds(self, goal_ms: float) -> bool:
        """Return whether p99 is within the goal, nothing failed, and enough was answered in full."""
        return (
            self.p99_ms is not None
            and self.p99_ms <= goal_ms
            and self.failed == 0
            and self.answered_ratio >= ANSWERED
            and self.degraded_ratio <= DEGRADED
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that held, 0 if none did, and every probe on the way there."""

    rate: float
    goal_ms: float
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)


def search_capacity(
    start: float, goal_ms: float = GOAL_MS, precision: float = PRECISION
) -> Generator[float, Probe, Capacity]:
    """Yield the next rate, take its probe, return the knee.

    Doubling until a rate does not hold, then bisection on a log scale. A rate that holds while doubling is
    probed once. Near the edge each rate is probed twice, and a third time if the two disagree. As a generator
    it waits between two rates, so that two searches can take turns on one machine.

    Args:
        start: requests per second to begin with.
        goal_ms: p99 that still counts.
        precision: how near the two ends come.
    """
    probes: list[Probe] = []

    def ask(rate: float) -> Generator[float, Probe, bool]:
        probe = yield rate
        probes.append(probe)
        return probe.holds(goal_ms)

    def settle(rate: float, first: bool) -> Generator[float, Probe, bool]:
        second = yield from ask(rate)
        return first if first == second else (yield from ask(rate))

    low, high, rate = 0.0, math.inf, min(max(start, LOWEST), HIGHEST)
    while LOWEST <= rate <= HIGHEST and high > low * (1 + precision):
        held = yield from ask(rate)
        if not held or high < math.inf:
            held = yield from settle(rate, held)
        if held:
            low = rate
        else:
            high = rate
        rate = math.sqrt(low * high) if low and high < math.inf else low * 2 or high / 2
    return Capacity(low, goal_ms, tuple(probes))
