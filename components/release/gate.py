"""A challenger's evaluation, the champion's, the time it adds -> passed, or `GateFailed` with got, needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.hyper_parameters import GateParams
from feature_repo.errors import RecoError

HEADLINE = "ndcg_at_10"


class GateFailed(RecoError):
    """A challenger is not good enough; nothing was changed."""

    def __init__(self, metric: str, got: float | None, need: float, reason: str, more: int = 0) -> None:
        """Set the measured value (None: missing), the needed value, and the reason."""
        found = "missing" if got is None else f"{got:.4f}"
        also = f" ({more} more checks failed)" if more else ""
        super().__init__(f"{metric} is {found}, needed {need:.4f}: {reason}; bundle not promoted{also}")
        self.metric, self.got, self.need = metric, got, need


@dataclass(frozen=True)
class Check:
    """One comparison of the gate."""

    metric: str
    got: float | None
    need: float
    reason: str

    @property
    def passed(self) -> bool:
        """A missing or non-finite metric never passes."""
        return self.got is not None and math.isfinite(self.got) and self.got >= self.need


def compare(
    evaluation: Mapping[str, Any],
    champion: Mapping[str, Any] | None,
    params: GateParams | None = None,
    added_ms: float | None = None,
) -> list[Check]:
    """Return every check of the gate, passed or not.

    Args:
        evaluation: the challenger's evaluation.json.
        champion: the champion's on the same test window; None when there is no champion yet.
        params: the limits.
        added_ms: how much longer an answer takes than the champion's, both of one run; None: not measured.
    """
    params = params or GateParams()
    got = _metric(evaluation.get("served"), HEADLINE)
    checks = [
        Check(
            "baskets", _metric(evaluation, "baskets"), params.least_baskets, "fewer test baskets say nothing"
        ),
        # Nothing found at all means the path is broken, whatever the baselines do on this data.
        *(
            Check(name, _metric(evaluation.get("served"), name), 1e-6, "the served path must find something")
            for name in (HEADLINE, "recall_at_20")
        ),
    ]
    index = evaluation.get("index")
    reason = "the index must find this share of the items that are nearest by exact search"
    for name, found in (("index_recall", index), ("index_recall_at_quota", (index or {}).get("quota"))):
        checks.append(Check(name, _metric(found, "recall"), params.index_recall, reason))
    for baseline, ratio in (("blend", params.over_blend), ("two_tower", params.over_two_tower)):
        value = _metric((evaluation.get("baselines") or {}).get(baseline), HEADLINE)
        need = math.inf if value is None else gain(value, ratio)
        against = "not in its evaluation" if value is None else f"it reaches {value:.4f} in the same run"
        checks.append(
            Check(
                f"{HEADLINE} against {baseline}", got, need, f"{ratio:g} x better than {baseline}, {against}"
            )
        )
    if champion is not None:
        value = _metric(champion.get("served"), HEADLINE)
        need = -math.inf if value is None else params.over_champion * value
        reason = f"{params.over_champion:g} x the champion's {value or 0:.4f} on the same test window"
        unknown = "" if added_ms is not None else "; its latency beside the champion's was not measured"
        checks.append(Check(f"{HEADLINE} against champion", got, need, reason + unknown))
        if added_ms is not None:
            lost = sales_lost_share(added_ms, params.sales_lost_per_100_ms)
            left = None if got is None else got * (1 - lost)
            reason += f", with {lost:.2%} of sales lost to the {added_ms:+.1f} ms that an answer takes"
            checks.append(Check(f"{HEADLINE} less latency against champion", left, need, reason))
    return checks


def sales_lost_share(added_ms: float, lost_per_100_ms: float) -> float:
    """Return the share of sales, 0 to 1, that answers lose by coming `added_ms` later; sooner ones win none.

    The value of a saved millisecond was never measured, and speed must not pay for worse answers.
    """
    return min(max(added_ms / 100 * lost_per_100_ms, 0.0), 1.0)


def gain(baseline: float, ratio: float) -> float:
    """Return the value that is `ratio` times better than a baseline between 0 and 1.

    Better by 1.2 means the metric times 1.2. If the baseline is too good for that, it means that the gap to 1
    is divided by 1.2. The nearer of the two counts. A ratio of 0 asks for nothing.
    """
    if ratio <= 0:
        return 0.0
    return min(baseline * ratio, 1 - (1 - baseline) / ratio)


def enforce(checks: list[Check]) -> None:
    """Raise `GateFailed` for the first check that failed."""
    failed = [check for check in checks if not check.passed]
    if failed:
        first = failed[0]
        raise GateFailed(first.metric, first.got, first.need, first.reason, len(failed) - 1)


def _metric(found: Any, name: str) -> float | None:
    value = found.get(name) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
