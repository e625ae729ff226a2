"""Counters of both slots since a step began -> go, hold or abort, with the reason and the power of the step.

Both slots answer at the same time, so that a busy hour or a slow store counts for both. A share of the canary
is refused if it lies above the stable slot's share plus a margin, by an exact binomial test. The test is
strict (ALPHA), because it is repeated at each look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

ALPHA = 0.001  # of one look at one share; a release takes about 60 looks
POWER = 0.9
SLOWER = 1.5  # times the stable slot's p99: an answer that takes longer is slow
MARGINS = {"errors": 0.002, "less than full": 0.01, "slow": 0.01}
GO, HOLD, ABORT = "go", "hold", "abort"


class SeriesMissing(Exception):
    """A page of metrics lacks a series that the gate needs."""


@dataclass(frozen=True)
class SlotCounts:
    """Counters of one pod, or of a slot."""

    answers: float = 0.0
    errors: float = 0.0  # refused or failed
    less: float = 0.0  # of rungs below `full`
    buckets: Mapping[float, float] = field(default_factory=dict)  # upper bound in seconds -> answers below it

    def minus(self, earlier: SlotCounts) -> SlotCounts:
        """Return the counts since an earlier look; all of it if the counters began again."""
        if self.answers < earlier.answers:
            return self
        below = {bound: count - earlier.buckets.get(bound, 0.0) for bound, count in self.buckets.items()}
        return SlotCounts(
            self.answers - earlier.answers, self.errors - earlier.errors, self.less - earlier.less, below
        )

    def slower_than(self, bound: float) -> float:
        """Return the number of answers that took longer than a bucket's bound."""
        return max(self.buckets.values(), default=0.0) - self.buckets.get(bound, 0.0)

    def p99_s(self) -> float:
        """Return the 99th percentile, interpolated inside its bucket."""
        wanted, lower, before = 0.99 * max(self.buckets.values(), default=0.0), 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= wanted > 0.0:
                return (
                    lower + (bound - lower) * (wanted - before) / (count - before)
                    if count > before
                    else bound
                )
            lower, before = bound, count
        return lower


def total(parts: Iterable[SlotCounts]) -> SlotCounts:
    """Return the sum over pods."""
    parts = list(parts)
    bounds = {bound for part in parts for bound in part.buckets}
    return SlotCounts(
        sum(part.answers for part in parts),
        sum(part.errors for part in parts),
        sum(part.less for part in parts),
        {bound: sum(part.buckets.get(bound, 0.0) for part in parts) for bound in sorted(bounds)},
    )


def read_metrics(text: str) -> tuple[SlotCounts, str]:
    """Return a pod's counters and the bundle that answers, from its page of metrics.

    Raises:
        SeriesMissing: the page cannot be read, or lacks the named series.
    """
    answers, errors, less, bundle = 0.0, 0.0, 0.0, ""
    buckets: dict[float, float] = {}
    for sample in _samples(text):
        if sample.name == "reco_responses_total":
            answers += sample.value
            less += sample.value if sample.labels["rung"] != "full" else 0.0
        elif sample.name in ("reco_rejected_total", "reco_faults_total"):
            errors += sample.value
        elif sample.name == "reco_answer_seconds_bucket":
            buckets[float(sample.labels["le"])] = sample.value
        elif sample.name == "reco_bundle_info" and sample.value == 1:
            bundle = sample.labels["bundle_id"]
    if not buckets or not bundle:
        raise SeriesMissing(f"{'reco_answer_seconds' if bundle else 'reco_bundle_info'} is missing")
    return SlotCounts(answers, errors, less, buckets), bundle


def _samples(text: str) -> list[Sample]:
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except ValueError as error:
        raise SeriesMissing(f"the page of metrics cannot be read ({error})") from error
    for sample in samples:
        if sample.name.startswith("reco_") and math.isnan(sample.value):
            raise SeriesMissing(f"{sample.name} is not a number")
    return samples


@dataclass(frozen=True)
class GateVerdict:
    """What the gate says of one look, with a row for each share."""

    outcome: str  # go | hold | abort
    reason: str
    rows: tuple[dict[str, Any], ...] = ()


def compare(stable: SlotCounts, canary: SlotCounts, enough: int, reveals: float = 1.0) -> GateVerdict:
    """Return the verdict on the canary.

    Args:
        stable: counters of the slot that has the traffic, since the step began.
        canary: those of the new one, since the same time.
        enough: answers of the canary without which the step does not end.
        reveals: share of answers below `full`, over the stable slot's, that the answers must reveal. A stable
            slot that is degraded itself hides more, so the step waits for more answers.
    """
    bound = _slow_bound(stable)
    shares = {
        "errors": (stable.errors, canary.errors),
        "less than full": (stable.less, canary.less),
        "slow": (stable.slower_than(bound), canary.slower_than(bound)),
    }
    rows, worst = [], ""
    for name, (before, now) in shares.items():
        of, asked = stable.answers, canary.answers
        if name == "errors":  # requests without an answer
            of, asked = of + stable.errors, asked + canary.errors
        base = (before + 0.5) / (of + 1.0) + MARGINS[name]  # half a fault more: 0 of 3 is not 0 %
        is_worse = _is_more(now, asked, base)
        rows.append(
            {
                "share": name if name != "slow" else f"slower than {bound * 1e3:g} ms",
                "stable": f"{before:g} of {of:g}",
                "canary": f"{now:g} of {asked:g}",
                "reveals": revealed(asked, base),
                "verdict": ABORT if is_worse else "ok",
            }
        )
        if is_worse and not worst:
            worst = f"{rows[-1]['share']}: {rows[-1]['canary']}, of the stable slot {rows[-1]['stable']}"
    if worst:
        return GateVerdict(ABORT, worst, tuple(rows))
    if canary.answers < enough or stable.answers < enough:
        least = min(canary.answers, stable.answers)
        return GateVerdict(HOLD, f"{least:g} of {enough} answers", tuple(rows))
    before, found = stable.less / stable.answers, float(rows[1]["reveals"] or 1.0)
    if found - before > reveals:
        reason = f"{canary.answers:g} answers reveal {found:.0%} below full, {before + reveals:.0%} is asked"
        return GateVerdict(HOLD, reason, tuple(rows))
    return GateVerdict(GO, "as good as the stable slot", tuple(rows))


def _slow_bound(stable: SlotCounts) -> float:
    """Return the bucket's bound from which on an answer is slow."""
    wanted = SLOWER * stable.p99_s()
    finite = [bound for bound in sorted(stable.buckets) if bound != float("inf")]
    return next((bound for bound in finite if bound >= wanted), finite[-1] if finite else 0.0)


def _is_more(count: float, answers: float, base: float) -> bool:
    """Say whether so many or more of a binomial distribution are improbable."""
    from scipy.special import betainc

    is_judged = count > 0 and answers > 0 and base < 1.0
    return is_judged and bool(betainc(count, answers - count + 1, base) < ALPHA)


def revealed(answers: float, base: float) -> float | None:
    """Return the smallest share that so many answers reveal with a probability of POWER; None: no share."""
    from scipy.special import betainc, betaincinv

    counts = np.arange(1, int(answers) + 1)
    refused = counts[betainc(counts, answers - counts + 1, min(base, 1.0)) < ALPHA]
    if not len(refused):
        return None
    least = float(betaincinv(refused[0], answers - refused[0] + 1, POWER))  # the inverse of `betainc`
    return round(max(least, base), 4)
