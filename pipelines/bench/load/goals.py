"""The figures of the load bench -> each goal of the endpoint, its figure, and whether it is reached.

Goals are typed here and nowhere else; figures come from the result alone. A goal whose arm or part was not
measured is open: neither reached nor missed. The goals against `fastapi-torch` are the gains wanted over the
unoptimised path: 62.5 % of p50, which is 2.67 x, and 3.2 x the throughput.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OURS, UNOPTIMISED = "ours", "fastapi-torch"
ENDURED = 60_000  # requests
MOST_DEGRADED = 0.01  # of the answers one at a time: a fallback leaves out the stages that it is judged by
STAGE_P99_MS = {"features": 0.5, "retrieval": 1.0, "ranking": 1.0, "reranking": 0.5}
# Percentile, sign and milliseconds, of an open loop at half of the capacity.
HALF_MS = (("p50", "<=", 45), ("p95", "<=", 90), ("p99", "<", 100))
WORDS = {"<=": "within", "<": "below"}
HOLDS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}
INFINITE = float("inf")
Result = Mapping[str, Any]
# A figure; None if it was not measured; infinite if the other arm holds no rate to compare with.
Read = Callable[[Result], float | None]


@dataclass(frozen=True)
class Goal:
    """One figure with its bound."""

    name: str
    sign: str  # "<=", "<" or ">="
    bound: float
    unit: str
    read: Read

    @property
    def wanted(self) -> str:
        """The bound as people write it."""
        return f"{self.sign} {self.bound:g}{self.unit}"

    def judge(self, result: Result) -> dict[str, Any]:
        """Return the goal with its figure, as plain JSON types; `reached` is None without a figure."""
        measured = self.read(result)
        reached = None if measured is None else HOLDS[self.sign](measured, self.bound)
        return {
            "name": self.name,
            "goal": self.wanted,
            "measured": measured if measured is None or measured < INFINITE else None,
            "unit": self.unit,
            "reached": reached,
        }


def judge_goals(result: Result) -> list[dict[str, Any]]:
    """Return every goal with its figure; that of --endurance only if it was measured."""
    return [goal.judge(result) for goal in _goals(result)]


def _goals(result: Result) -> Iterator[Goal]:
    within = f"99 % within {result['goal_ms']:g} ms"
    yield Goal("p50 over KServe REST, one at a time", "<=", 2.0, " ms", _in_full(OURS, "alone", "p50_ms"))
    yield Goal("p99 over KServe REST, one at a time", "<=", 4.0, " ms", _in_full(OURS, "alone", "p99_ms"))
    for stage, bound in STAGE_P99_MS.items():
        yield Goal(f"p99 of {stage}", "<", bound, " ms", _in_full(OURS, "stages", stage, "p99"))
    together = "p99 of retrieval, ranking and re-ranking of an answer together, within 50 ms"
    yield Goal(together, "<=", 50, " ms", _of(OURS, "choosing", "p99"))
    explained = "share of the client's mean time that the stages explain, at least 75 %"
    rest = _in_full(OURS, "stages", "unexplained", "share")
    yield Goal(explained, ">=", 75, " %", _changed(rest, lambda share: 100 * (1 - share)))
    yield Goal("processor time of an answer", "<=", 1.8, " ms", _in_full(OURS, "cpu_ms"))
    yield Goal(f"answers a second, one process, {within}", ">=", 500, "", _of(OURS, "capacity", "rate"))
    # Theirs over ours, round by round; a rate of 0 is infinitely less.
    lower = _in_full(UNOPTIMISED, "ratio", "p50_ms", "median")
    gain = _of(UNOPTIMISED, "ratio", "capacity", "median")
    higher = _changed(gain, lambda ratio: 1 / ratio if ratio else INFINITE)
    yield Goal(f"p50 lower than that of `{UNOPTIMISED}`", ">=", 2.67, " x", lower)
    yield Goal(f"capacity higher than that of `{UNOPTIMISED}`", ">=", 3.2, " x", higher)
    growth = part_of("basket_length", "growth", "p99")
    yield Goal("p99 with the longest basket, against one item", "<=", 1.5, " x", growth)
    goodput = _changed(_of(OURS, "overload", "goodput_ratio"), lambda ratio: 100 * ratio)
    yield Goal("full answers in time at three times the capacity", ">=", 90, " %", goodput)
    for name, sign, bound in HALF_MS:
        title = f"{name} at half of the capacity, {WORDS[sign]} {bound} ms"
        yield Goal(title, sign, bound, " ms", _of(OURS, "half", "ms", name))
    yield Goal("slowest answer at half of the capacity, within 2 s", "<=", 2_000, " ms", _slowest)
    yield Goal("from start to ready, within 20 s", "<=", 20, " s", _of(OURS, "ready_s"))
    yield Goal("first answer of all, within 2 x the warm p99", "<=", 2, " x", _first)
    if "endurance" in result:
        yield Goal(f"growth of memory in {ENDURED:,} requests", "<=", 5, " MiB", _memory)


def part_of(*path: str) -> Read:
    """Return a reader of the figure at this path."""

    def read(result: Result) -> float | None:
        figure: Any = result
        for name in path:
            figure = None if figure is None else figure.get(name)
        return None if figure is None else float(figure)

    return read


def _of(arm: str, *path: str) -> Read:
    return part_of("arms", arm, *path)


def _in_full(arm: str, *path: str) -> Read:
    """Read a figure of requests one at a time; none if our answers to them were too often degraded."""

    def read(result: Result) -> float | None:
        rounds = result["arms"][OURS]["alone"]["rounds"]
        degraded, answered = (sum(row[name] for row in rounds) for name in ("degraded", "answered"))
        return None if degraded > MOST_DEGRADED * answered else _of(arm, *path)(result)

    return read


def _changed(read: Read, change: Callable[[float], float]) -> Read:
    def changed(result: Result) -> float | None:
        figure = read(result)
        return None if figure is None else change(figure)

    return changed


def _memory(result: Result) -> float | None:
    endurance = result["endurance"]
    # The slope of a few hundred requests does not extend to so many.
    return endurance["mb_per_1000_requests"] * ENDURED / 1e3 if endurance["requests"] >= ENDURED else None


def _slowest(result: Result) -> float | None:
    # An unanswered request waited longer than any answered one.
    return INFINITE if _of(OURS, "half", "unanswered")(result) else _of(OURS, "half", "ms", "max")(result)


def _first(result: Result) -> float | None:
    ours, warm = result["arms"][OURS], _of(OURS, "alone", "p99_ms")(result)
    if "first_ms" not in ours or warm is None:
        return None
    # A missing or degraded answer was not in time.
    return INFINITE if ours["first_ms"] is None or ours["first_degraded"] else ours["first_ms"] / warm
