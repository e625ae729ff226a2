"""The runs of one arm -> its row of the load report, and its ratios to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.bench.report import percentiles

if TYPE_CHECKING:
    from pipelines.bench.load.measure import ArmRun

CHOOSING = ("retrieval", "ranking", "reranking")  # the stages that choose the list
FEWEST = 20  # requests; a share of fewer means nothing
ROUNDS = ("p50_ms", "p99_ms", "cpu_ms")
COUNTS = ("requests", "failed", "refused", "unanswered", "degraded")
Answers = Sequence[Mapping[str, float]]  # of each answer the stages' milliseconds, and `client_ms`


def pooled_row(runs: Sequence[ArmRun], goal_ms: float) -> dict[str, Any]:
    """Return the figures of an arm over its runs: ours has one in each pair, all others have one."""
    first = runs[0]
    rounds = [row for run in runs for row in run.rounds]
    answers = [answer for run in runs for answer in run.answers]
    row = {
        "what": first.arm.what,
        "ready_s": _median([run.ready_s for run in runs]),
        "first_ms": _median([run.first_ms for run in runs]),
        "first_degraded": any(run.first_degraded for run in runs),
        "memory_mb": {
            name: _median(_values([run.memory_mb for run in runs], name)) for name in first.memory_mb
        },
        "alone": {
            **{name: _median(_values(rounds, name)) for name in ("p50_ms", "p99_ms")},
            "rounds": rounds,
        },
        "cpu_ms": _median(_values(rounds, "cpu_ms")) or 0.0,
        "stages": stages_of(answers),
        "choosing": choosing_of(answers),
        "capacity": _capacity(runs),
    }
    if any(run.half for run in runs):
        row["half"] = _half(runs, goal_ms)
        row["overload"] = _overload(runs, goal_ms)
    return row


def _capacity(runs: Sequence[ArmRun]) -> dict[str, Any]:
    capacities = [capacity for run in runs for capacity in run.capacities]
    rates = [capacity.rate for capacity in capacities]
    probes = [asdict(probe) for capacity in capacities for probe in capacity.probes]
    return {"rate": _median(rates) or 0.0, "rates": rates, "probes": probes}


def _half(runs: Sequence[ArmRun], goal_ms: float) -> dict[str, Any]:
    loads = [load for run in runs for load in run.half]
    summaries = [load.summary(goal_ms) for load in loads]
    return {
        "rate": _median([run.rate / 2 for run in runs if run.half]),
        "ms": percentiles(np.concatenate([load.waits_ms for load in loads])),
        **{name: sum(summary[name] for summary in summaries) for name in COUNTS},
    }


def _overload(runs: Sequence[ArmRun], goal_ms: float) -> dict[str, Any]:
    """Return the shares of the capacity that still come in time and in full at three times the capacity.

    Answers of a fallback that come in time are shown beside: a capacity is one of full answers.
    """
    loads = [(run.rate, run.overload.summary(goal_ms)) for run in runs if run.overload is not None]
    enough = [(rate, summary) for rate, summary in loads if summary["requests"] >= FEWEST]
    return {
        "goodput_ratio": _median([summary["good_per_s"] / rate for rate, summary in enough]),
        "degraded_ratio": _median([summary["degraded_in_time_per_s"] / rate for rate, summary in enough]),
        **{name: sum(summary[name] for _, summary in loads) for name in COUNTS},
    }


def ratios(run: ArmRun, ours: ArmRun) -> dict[str, Any]:
    """Return an arm's figures over those of ours in the same pair, round by round: median and range."""
    series = {name: (_values(run.rounds, name), _values(ours.rounds, name)) for name in ROUNDS}
    rates = ([capacity.rate for capacity in one.capacities] for one in (run, ours))
    series["capacity"] = (next(rates), next(rates))
    found: dict[str, Any] = {}
    for name, (theirs, own) in series.items():
        if all(own) and None not in theirs:
            values = [a / b for a, b in zip(theirs, own, strict=True)]
            found[name] = {"median": float(np.median(values)), "min": min(values), "max": max(values)}
    return found


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _median(values: Sequence[float | None]) -> float | None:
    existing = [value for value in values if value is not None]
    return float(np.median(existing)) if existing else None


def stages_of(answers: Answers) -> dict[str, dict[str, float | None]] | None:
    """Return the part of the client's time in each stage; means add up with `unexplained`, the rest.

    An answer spent no time in a stage that it does not name: a fallback has others than the full path.
    """
    timed = [answer for answer in answers if "total" in answer]
    if not timed:
        return None
    every = dict.fromkeys(name for answer in timed for name in answer)  # in the order they first appear
    names = [name for name in every if name not in ("client_ms", "total")]
    rows = {name: np.array([answer.get(name, 0.0) for answer in timed]) for name in names}
    client = np.array([answer["client_ms"] for answer in timed])
    rows["unexplained"] = client - np.sum(list(rows.values()), axis=0)
    rows["client"] = client
    shares = {name: float(values.mean() / client.mean()) for name, values in rows.items()}
    return {name: {**percentiles(values), "share": shares[name]} for name, values in rows.items()}


def choosing_of(answers: Answers) -> dict[str, float | None] | None:
    """Return the time of the stages that choose the list, added up answer by answer.

    An answer without one of them was late there, or broke: it counts with all that the client waited.
    """
    took = [
        sum(answer[name] for name in CHOOSING)
        if all(name in answer for name in CHOOSING)
        else answer["client_ms"]
        for answer in answers
        if "total" in answer
    ]
    return percentiles(np.array(took)) if took else None
