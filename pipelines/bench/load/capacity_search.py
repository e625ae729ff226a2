"""Probes of a server at one rate after another -> its capacity: the rate at which 99 % are in time."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

GOAL_MS = 50.0
IN_TIME = 0.99  # of the due requests: answered in full within the goal
PRECISION = 0.1  # between the highest rate that held and the lowest that did not
LOWEST, HIGHEST = 0.25, 1e5  # requests per second: the bounds of the search


@dataclass(frozen=True, slots=True)
class Probe:
    """The figures of a server at one rate."""

    rate: float  # requests per second that were due
    in_time_ratio: float
    p99_ms: float | None

    @classmethod
    def of(cls, rate: float, summary: dict[str, Any]) -> Probe:
        """Read it from `Load.summary`; a run too short for a p99 shows its maximum."""
        ms = summary["ms"]
        p99 = ms["max"] if ms["p99"] is None else ms["p99"]
        return cls(rate, summary["good"] / max(summary["requests"], 1), p99)

    @property
    def holds(self) -> bool:
        """Return whether enough requests were answered in full and in time."""
        return self.in_time_ratio >= IN_TIME


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that held, 0 if none did, and every probe on the way there."""

    rate: float
    probes: tuple[Probe, ...]


def search_capacity(start: float, precision: float = PRECISION) -> Generator[float, Probe, Capacity]:
    """Yield the next rate, take its probe, return the highest rate that held.

    Doubling until a rate does not hold, then bisection on a log scale. One pause of the machine may end a
    search too early: a bench searches several times and shows the spread. As a generator it waits between two
    rates, so that two searches can take turns on one machine.

    Args:
        start: requests per second to begin with.
        precision: how near the two ends come.
    """
    probes: list[Probe] = []
    low, high, rate = 0.0, math.inf, min(max(start, LOWEST), HIGHEST)
    while LOWEST <= rate <= HIGHEST and high > low * (1 + precision):
        probes.append((yield rate))
        if probes[-1].holds:
            low = rate
        else:
            high = rate
        rate = math.sqrt(low * high) if low and high < math.inf else low * 2 or high / 2
    return Capacity(low, tuple(probes))
