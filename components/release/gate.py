"""What the gate measured of a challenger -> every check, passed or not; `GateFailed` with got and needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.hyper_parameters import GateParams
from feature_repo.errors import RecoError

HEADLINE = "ndcg_at_10"
STATED = 0.005  # beside sampling error: other processors round differently


class GateFailed(RecoError):
    """A challenger is not good enough; nothing was changed."""

    def __init__(self, check: Check, more: int = 0) -> None:
        """Take the first check that failed, and how many others did."""
        # A challenger may miss its limit by less than four places show.
        places = 4 if check.got is None or f"{check.got:.4f}" != f"{check.need:.4f}" else 10
        got = "missing" if check.got is None else f"{check.got:.{places}f}"
        limit = f"{'allowed' if check.at_most else 'needed'} {check.need:.{places}f}"
        values = "" if check.is_verdict else f" is {got}, {limit}"
        also = f" ({more} more checks failed)" if more else ""
        super().__init__(f"{check.metric}{values}: {check.reason}; bundle not promoted{also}")


@dataclass(frozen=True)
class Check:
    """One comparison of the gate, or one yes or no."""

    metric: str
    got: float | None
    need: float
    reason: str
    at_most: bool = False
    is_verdict: bool = False  # a yes or no: `got` is 1 or 0

    @property
    def passed(self) -> bool:
        """A missing or non-finite metric never passes."""
        if self.got is None or not math.isfinite(self.got):
            return False
        return self.got <= self.need if self.at_most else self.got >= self.need


def verdict(metric: str, fault: str = "") -> Check:
    """Return the check of a yes or no; a fault says why not."""
    return Check(metric, float(not fault), 1.0, fault, is_verdict=True)


def compare(measured: Mapping[str, Any], params: GateParams | None = None) -> list[Check]:
    """Return every check of the gate, passed or not, of what `components.release.examination` measured."""
    params = params or GateParams()
    checks = [verdict(name, fault) for name, fault in measured.get("verdicts", {}).items()]
    if not all(check.passed for check in checks):
        return checks  # an unreadable bundle cannot be measured
    served = measured.get("served")
    got = _metric(served, HEADLINE)
    reason = "fewer test baskets say nothing"
    checks.append(Check("baskets", _metric(measured, "baskets"), params.least_baskets, reason))
    # Nothing found at all means the path is broken, whatever the baselines do on this data.
    reason = "the served path must find something"
    checks += [Check(name, _metric(served, name), 1e-6, reason) for name in (HEADLINE, "recall_at_20")]
    checks.append(_as_stated(measured, got))
    reason = "share of the nearest items by exact search that the index must find"
    checks.append(Check("index_recall", _metric(measured, "index_recall"), params.index_recall, reason))
    reason = "the certificates' NDCG@10 of the served ranker, over that of its teachers"
    checks.append(Check("quality of the teachers", _metric(measured, "chain"), params.over_teachers, reason))
    for baseline, ratio in (("blend", params.over_blend), ("two_tower", params.over_two_tower)):
        value = _metric(measured.get(baseline), HEADLINE)
        need = math.inf if value is None else gain(value, ratio)
        against = "was not measured" if value is None else f"reaches {value:.4f} on the same baskets"
        reason = f"{ratio:g} x better than {baseline}, which {against}"
        checks.append(Check(f"{HEADLINE} against {baseline}", got, need, reason))
    if measured.get("champion") is not None:
        checks += _against_champion(measured, got, params)
    return checks


def _as_stated(measured: Mapping[str, Any], got: float | None) -> Check:
    """Compare the bundle's own evaluation with the measurement; chance fails it once in 16,000 times."""
    stated = _metric(measured.get("stated"), HEADLINE)
    allowed = STATED + 4 * (_metric(measured.get("served"), "error") or 0.0)
    gap = None if got is None or stated is None else abs(got - stated)
    reason = f"evaluation.json says {stated}; 4 standard errors and {STATED:g} are allowed: evaluate it again"
    return Check(f"{HEADLINE} beside evaluation.json", gap, allowed, reason, at_most=True)


def _against_champion(measured: Mapping[str, Any], got: float | None, params: GateParams) -> list[Check]:
    value = _metric(measured["champion"], HEADLINE)
    need = math.inf if value is None else params.over_champion * value
    reason = f"{params.over_champion:g} x the champion's {value or 0:.4f} on the same baskets"
    reason += _paired(measured["champion"])
    checks = [Check(f"{HEADLINE} against champion", got, need, reason)]
    latency = measured.get("latency") or {}
    added_ms = _metric(latency, "added_ms")
    lost = sales_lost_share(added_ms or 0.0, params.sales_lost_per_100_ms)
    left = None if got is None or added_ms is None else got * (1 - lost)
    reason += f", with {lost:.2%} of sales lost to the {added_ms or 0:+z.1f} ms that an answer takes"
    checks.append(Check(f"{HEADLINE} less latency against champion", left, need, reason))
    p99, theirs = (_metric(latency.get(name), "p99_ms") for name in ("challenger", "champion"))
    allowed = -math.inf if theirs is None else params.p99_over_champion * theirs
    reason = f"{params.p99_over_champion:g} x the champion's {theirs or 0:.3f} ms on the same requests"
    if params.p99_over_champion:
        checks.append(Check("p99_ms against champion", p99, allowed, reason, at_most=True))
    knows, theirs = (_metric(measured.get("known"), name) for name in ("challenger", "champion"))
    need = math.inf if theirs is None else params.catalogue_of_champion * theirs
    reason = (
        f"share of the lines bought in the test weeks whose item it knows; the champion: {theirs or 0:.4f}"
    )
    checks.append(Check("catalogue against champion", knows, need, reason))
    return checks


def _paired(champion: Any) -> str:
    """Return the paired interval of the challenger's NDCG@10 over the champion's, in words.

    It decides nothing: a bound that it must lie below would let a loss pass that few baskets hide.
    """
    interval = champion.get("interval") if isinstance(champion, Mapping) else None
    if not interval or None in interval:  # a champion that found next to nothing
        return ""
    low, high = interval
    chance = "a difference of 0 is possible" if low <= 1 <= high else "the difference is not chance"
    return f" (basket by basket {low:.3f} to {high:.3f} x the champion's: {chance})"


def sales_lost_share(added_ms: float, lost_per_100_ms: float) -> float:
    """Return the share of sales, 0 to 1, that answers lose by coming `added_ms` later; sooner ones win none.

    The value of a saved millisecond was never measured, and speed must not pay for worse answers.
    """
    return min(max(added_ms / 100 * lost_per_100_ms, 0.0), 1.0)


def gain(baseline: float, ratio: float) -> float:
    """Return the value that is `ratio` times better than a baseline between 0 and 1.

    Better by 1.2 means the metric times 1.2. If the baseline is too good for that, it means that the gap to 1
    is divided by 1.2. The nearer of the two counts. A ratio of 1 or less is a share of the metric.
    """
    if ratio <= 1:
        return baseline * ratio
    return min(baseline * ratio, 1 - (1 - baseline) / ratio)


def enforce(checks: list[Check]) -> None:
    """Raise `GateFailed` for the first check that failed."""
    failed = [check for check in checks if not check.passed]
    if failed:
        raise GateFailed(failed[0], len(failed) - 1)


def _metric(found: Any, name: str) -> float | None:
    value = found.get(name) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
