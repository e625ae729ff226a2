"""What a server does at one rate after another -> its capacity: the knee of latency over rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any

GOAL_MS = 50.0
ANSWERED = 0.99  # of what was due, answered in the run
DEGRADED = 0.01  # of the answers may say that they are less than they should be: those are cheap
PRECISION = 0.05  # between the highest rate that held and the lowest that did not
LOWEST, HIGHEST = 0.25, 1e5  # requests per second, between which a knee is looked for


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server did at one rate."""

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
        """Return whether all was well: p99 within the goal, nothing failed, enough answered in full."""
        return (
            self.p99_ms is not None
            and self.p99_ms <= goal_ms
            and self.failed == 0
            and self.answered_ratio >= ANSWERED
            and self.degraded_ratio <= DEGRADED
        )


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest rate that held, 0 if none did, and every probe on the way there."""

    rate: float
    goal_ms: float
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)


def knee_search(
    start: float, goal_ms: float = GOAL_MS, precision: float = PRECISION
) -> Generator[float, Probe, Knee]:
    """Yield the rate to ask next, take what came of it, return the knee.

    Doubling until a rate does not hold, then bisection on a log scale. A rate that holds while doubling is
    taken at its word; near the edge each is asked twice, and a third time if the two disagree. As it waits
    between two rates, many searches can take turns on one machine.

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
    return Knee(low, goal_ms, tuple(probes))


def find_knee(probe: Callable[[float], Probe], start: float, goal_ms: float = GOAL_MS) -> Knee:
    """Search one server alone."""
    search = knee_search(start, goal_ms)
    rate = next(search)
    while True:
        try:
            rate = search.send(probe(rate))
        except StopIteration as found:
            knee: Knee = found.value
            return knee
