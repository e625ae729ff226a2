"""The requests around some faults -> counts and times before, during and after each, and its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.bench.load.generator import Load
from pipelines.bench.report import percentiles
from serving.client.client import SOURCE
from serving.schemas import NOTHING_LEFT

CLIENT, RAW = "client", "raw"  # the streams through the project's client, and without it
LATE_MS = 5.0  # after the deadline: the tolerance of a call
WHOLE = 10  # answers in a row that say that a fault is over
SAME_SCORE = 1e-4  # two answers to one question whose scores are so close are the same


@dataclass(frozen=True)
class Answer:
    """The outcome of one request; times are the machine's monotonic clock, in seconds."""

    question: int
    due: float
    ms: float  # from due to the answer
    took_ms: float  # from the call to the answer: the wait of the caller
    status_ok: bool
    document: Mapping[str, Any]  # the response; empty without an answer

    @property
    def done(self) -> float:
        """When the answer was there."""
        return self.due + self.ms / 1e3

    @property
    def degraded(self) -> bool:
        """Whether it says that it is degraded."""
        return self.document.get("degraded") is True

    @property
    def whole(self) -> bool:
        """Whether it is an answer of the endpoint, and not degraded."""
        return self.status_ok and not self.degraded and self.document.get("rung") == "full"

    @property
    def from_client(self) -> bool:
        """Whether the client gave it because the endpoint gave none."""
        items = self.document.get("items", ())
        return any(item["source"] == SOURCE for item in items) or not self.document.get("bundle_id", "-")

    @property
    def labelled(self) -> bool:
        """Whether a degraded answer says so, and why."""
        less = self.document.get("rung") != "full" or self.from_client or self.degraded
        reason = self.document.get("degraded_reason")
        return not less or reason == NOTHING_LEFT or (self.degraded and bool(reason))

    @property
    def valid(self) -> bool:
        """Whether its list can be shown: finite scores, nothing twice."""
        items = self.document.get("items", ())
        ids = [item["item_id"] for item in items]
        return len(set(ids)) == len(ids) and all(math.isfinite(item["score"]) for item in items)

    @property
    def features_ms(self) -> float | None:
        """How long the endpoint spent on features; on everything, where a fallback answered in the end.

        A missing answer may have waited for them until its caller gave up: all that time counts.
        """
        if self.from_client:
            return self.took_ms
        stages = self.document.get("stage_ms", {})
        found: float | None = stages.get("features", stages.get("total"))
        return found

    def differs(self, other: Answer) -> float:
        """Return how far its scores are from those of another answer; infinite if items differ."""
        scores = {item["item_id"]: item["score"] for item in self.document["items"]}
        theirs = {item["item_id"]: item["score"] for item in other.document["items"]}
        if scores.keys() != theirs.keys():
            return math.inf
        return max((abs(score - theirs[item]) for item, score in scores.items()), default=0.0)


@dataclass(frozen=True)
class Fault:
    """The time of a fault: from the order to break a part until all was mended again."""

    name: str
    began: float
    mending: float  # from then on some of it may be whole already
    ended: float


def answers_of(load: Load, questions: int) -> list[Answer]:
    """Return the answers of a generator, whose bodies were sent in turn from the first."""
    times = zip(load.due_s.tolist(), load.late_ms.tolist(), load.answered.tolist(), strict=True)
    return [
        Answer(n % questions, load.began_s + due_s, ms, ms - late_ms, ok, document)
        for n, ((due_s, late_ms, ok), (ms, document)) in enumerate(zip(times, load.responses(), strict=True))
    ]


def outcome_of(
    streams: Mapping[str, Sequence[Answer]],
    faults: Sequence[Fault],
    ended: float,
    deadline_ms: float,
    late_ms: float = LATE_MS,
) -> dict[str, Any]:
    """Return the outcome of a drill, as plain JSON types.

    Args:
        streams: `client`, those of the project's client, and `raw`, those without it.
        faults: in the order of time, apart from each other.
        ended: when nothing more was due.
        deadline_ms: of a call of the client.
        late_ms: the tolerance of a call after that.

    Returns:
        `before`, `during` and `after` all faults, and the same for each fault, with a tally for each stream;
        `recovery_s` of each, and the longest: None where the client's answers were not whole again.
    """

    def where(chosen: Callable[[Answer], bool]) -> dict[str, list[Answer]]:
        return {name: list(filter(chosen, some)) for name, some in streams.items()}

    def in_fault(fault: Fault) -> Callable[[Answer], bool]:  # at some moment between request and answer
        return lambda a: a.due < fault.ended and a.done >= fault.began

    def between(began: float, end: float) -> Callable[[Answer], bool]:
        return lambda a: a.due >= began and a.done < end

    before = where(lambda a: a.done < faults[0].began)
    expected = {name: {a.question: a for a in some if a.whole} for name, some in before.items()}

    def tallies(of: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
        return {name: tally(some, deadline_ms, expected[name], late_ms) for name, some in of.items()}

    during, after = ({name: list[Answer]() for name in streams} for _ in range(2))
    rows: list[dict[str, Any]] = []
    ends = [*(fault.began for fault in faults[1:]), ended]
    for fault, end in zip(faults, ends, strict=True):
        ones, others = where(in_fault(fault)), where(between(fault.ended, end))
        for name in streams:
            during[name] += ones[name]
            after[name] += others[name]
        rows.append(
            {
                "name": fault.name,
                "seconds": fault.ended - fault.began,
                "during": tallies(ones),
                "after": tallies(others),
                "told_s": told_s(ones[CLIENT], fault),
                "recovery_s": recovery_s(others[CLIENT], fault.ended),
            }
        )
    recoveries = [row["recovery_s"] for row in rows]
    return {
        "before": tallies(before),
        "during": tallies(during),
        "after": tallies(after),
        "all": tallies(streams),
        "faults": rows,
        "recovery_s": None if None in recoveries else max(recoveries),
    }


def tally(
    answers: Sequence[Answer],
    deadline_ms: float,
    expected: Mapping[int, Answer] | None = None,
    late_ms: float = LATE_MS,
) -> dict[str, Any]:
    """Return counts and times of some answers; `moved` is the change of their scores from those expected.

    Unlabelled are the degraded answers that do not say so. An answer that claims to be whole, with other
    items or scores than the same question had before the fault, is one of them.
    """
    answered = [answer for answer in answers if answer.status_ok]
    known = expected or {}
    moved = [a.differs(known[a.question]) for a in answered if a.whole and a.question in known]
    on_features = [answer.features_ms for answer in answered if answer.features_ms is not None]
    waits = np.array([answer.ms for answer in answered])
    times = percentiles(waits)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(answered),
        "degraded": sum(answer.degraded for answer in answered),
        "late": sum(answer.took_ms > deadline_ms + late_ms for answer in answered),
        "unlabelled": sum(not answer.labelled for answer in answered)
        + sum(change > SAME_SCORE for change in moved),
        "invalid": sum(not answer.valid for answer in answered),
        "from_client": sum(answer.from_client for answer in answered),
        "reasons": dict(Counter(str(a.document["degraded_reason"]) for a in answered if a.degraded)),
        "bundles": sorted({a.document["bundle_id"] for a in answered if a.document.get("bundle_id")}),
        "p50_ms": times["p50"],
        "p95_ms": times["p95"],
        "p99_ms": times["max"] if times["p99"] is None else times["p99"],
        "max_ms": times["max"],
        "features_max_ms": max(on_features, default=None),
        # An answer with other items has no distance: it is counted as unlabelled.
        "moved": round(max((change for change in moved if math.isfinite(change)), default=0.0), 9),
    }


def told_s(answers: Sequence[Answer], fault: Fault) -> float:
    """Return how long after a fault began there still were whole answers; 0 if there were none."""
    whole = (a for a in answers if a.whole and a.due >= fault.began and a.done < fault.mending)
    return max((answer.due - fault.began for answer in whole), default=0.0)


def recovery_s(answers: Sequence[Answer], ended: float) -> float | None:
    """Return when, after a fault ended, the first of WHOLE whole answers in a row was due; None: never."""
    row = 0
    for number, answer in enumerate(answers):
        row = row + 1 if answer.whole else 0
        if row == WHOLE:
            return answers[number - WHOLE + 1].due - ended
    return None
