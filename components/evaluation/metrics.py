"""Ranked lists and purchases -> recall, NDCG, calibration, and their confidence intervals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.schemas import MAX_K

BOOTSTRAP_DRAWS = 300
METRICS = ("recall_at_10", "recall_at_20", "ndcg_at_10", "hit_ratio_at_10", "hit_ratio_at_3", "mrr")
DISCOUNT = 1 / np.log2(np.arange(2, 12))

Pair = tuple[np.ndarray, np.ndarray]  # probability and label of every candidate of one request


@dataclass
class Tally:
    """Metrics of one system, one entry per test basket."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    # Found and wanted among repeat purchases and among new ones, top 20.
    repeat: list[tuple[float, float]] = field(default_factory=list)
    new: list[tuple[float, float]] = field(default_factory=list)
    shown: set[int] = field(default_factory=set)

    def values(self, metric: str) -> np.ndarray:
        """Return one of METRICS of each basket, (baskets,)."""
        return np.array(self.rows)[:, METRICS.index(metric)]

    def add_best(self, scores: np.ndarray, bought: np.ndarray, before: np.ndarray) -> None:
        """Count the list of the items with the best of some scores, one for each code; see `add`."""
        top = np.argpartition(-scores, min(MAX_K, len(scores) - 1))[:MAX_K]
        self.add(top[np.argsort(-scores[top], kind="stable")], bought, before)

    def add(self, ranked: np.ndarray, bought: np.ndarray, before: np.ndarray) -> None:
        """Count one ranked list of item codes, best first.

        Args:
            ranked: (n,) codes shown.
            bought: (m,) codes the shopper bought, m at least 1.
            before: (m,) bool, whether each had been bought on an earlier occasion.
        """
        same = ranked[:MAX_K, None] == bought
        hit = same.any(1)
        wanted = len(bought)
        ideal = DISCOUNT[: min(10, wanted)].sum()
        first = np.flatnonzero(hit)
        self.rows.append(
            (
                hit[:10].sum() / wanted,
                hit[:20].sum() / wanted,
                float(DISCOUNT[: len(hit[:10])] @ hit[:10]) / ideal,
                float(hit[:10].any()),
                float(hit[:3].any()),
                1 / (first[0] + 1) if len(first) else 0.0,
            )
        )
        found = same[:20].any(0)
        self.repeat.append((float(found[before].sum()), float(before.sum())))
        self.new.append((float(found[~before].sum()), float((~before).sum())))
        self.shown.update(ranked[:10].tolist())


class Bootstrap:
    """Draws users with replacement; the same draws serve every system, so differences are paired."""

    def __init__(self, users: list[str]) -> None:
        _, self._row = np.unique(users, return_inverse=True)
        count = int(self._row.max()) + 1 if users else 1
        rng, chances = np.random.default_rng(0), np.full(count, 1 / count)
        self._weight = rng.multinomial(count, chances, BOOTSTRAP_DRAWS).astype(float)
        self._size = self._weight @ np.bincount(self._row, minlength=count)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over baskets in each draw, (draws,)."""
        totals: np.ndarray = self._weight @ np.bincount(self._row, values, self._weight.shape[1]) / self._size
        return totals

    def interval(self, values: np.ndarray) -> list[float]:
        """Return the 95 % interval of the mean."""
        return _percentiles(self.means(values))

    def ratio_interval(self, values: np.ndarray, others: np.ndarray) -> list[float | None]:
        """Return the 95 % interval of the ratio of the two means; None for an end that has no limit.

        A draw in which both are 0 counts as 0.
        """
        ours, theirs = self.means(values), self.means(others)
        draws = np.divide(ours, theirs, out=np.where(ours > 0, np.inf, 0.0), where=theirs > 0)
        return [end if np.isfinite(end) else None for end in _percentiles(draws)]


def _percentiles(draws: np.ndarray) -> list[float]:
    with np.errstate(invalid="ignore"):  # between two infinite draws
        return [round(float(x), 5) for x in np.percentile(draws, [2.5, 97.5])]


def summary(tally: Tally, boot: Bootstrap, items: int) -> dict[str, Any]:
    """Return the means over baskets with their intervals; coverage is of a catalogue of `items`."""
    values = np.array(tally.rows)
    found: dict[str, Any] = {name: round(float(values[:, i].mean()), 5) for i, name in enumerate(METRICS)}
    found["interval"] = {name: boot.interval(values[:, i]) for i, name in enumerate(METRICS)}
    for name, pairs in (("repeat_recall_at_20", tally.repeat), ("new_recall_at_20", tally.new)):
        recall, some = _recalls(pairs)
        found[name] = round(float(recall.sum() / max(some.sum(), 1.0)), 5)
        found["interval"][name] = boot.ratio_interval(recall, some)
    found["coverage_at_10"] = round(len(tally.shown) / items, 4)
    return found


def _recalls(pairs: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the share found in each basket, 0 in those that want none, and 1 for each that wants any."""
    found, wanted = np.array(pairs).T
    return found / np.maximum(wanted, 1.0), (wanted > 0).astype(float)


def ratios(served: Tally, other: Tally, boot: Bootstrap) -> dict[str, Any]:
    """Return the ratios of the means of two systems that answered the same baskets.

    A ratio is None where the other system finds nothing.
    """
    names = ("ndcg_at_10", "recall_at_20")
    pairs = {name: [tally.values(name) for tally in (served, other)] for name in names}
    pairs["new_recall_at_20"] = [_recalls(tally.new)[0] for tally in (served, other)]
    found: dict[str, Any] = {}
    for name, (ours, theirs) in pairs.items():
        some = bool(theirs.any())
        found[name] = round(float(ours.mean() / theirs.mean()), 4) if some else None
        found[f"{name}_interval"] = boot.ratio_interval(ours, theirs) if some else [None, None]
    return found


def calibration(pairs: list[Pair]) -> dict[str, Any]:
    """Return how true the probabilities are, over all candidates of all requests."""
    p = np.clip(np.concatenate([scores for scores, _ in pairs]).astype(np.float64), 1e-7, 1 - 1e-7)
    y = np.concatenate([label for _, label in pairs]).astype(np.float64)
    base = y.mean()
    edges = np.quantile(p, np.linspace(0, 1, 21)[1:-1])
    bucket = np.searchsorted(edges, p)
    size = np.bincount(bucket, minlength=20)
    gap = np.abs(np.bincount(bucket, p, 20) - np.bincount(bucket, y, 20))
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base)) if 0 < base < 1 else 1.0
    log_loss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    return {
        "candidates": int(size.sum()),
        "mean_probability": round(float(p.mean()), 6),
        "purchase_rate": round(float(base), 6),
        "expected_calibration_error": round(float(gap.sum() / size.sum()), 6),
        "log_loss": round(float(log_loss), 6),
        "normalised_entropy": round(float(log_loss / entropy), 5),
        "auc": round(auc(p, y), 5),
        "gauc": round(float(np.mean([auc(s, t) for s, t in pairs if 0 < t.sum() < len(t)] or [0.5])), 5),
    }


def auc(scores: np.ndarray, label: np.ndarray) -> float:
    """Return the area under the ROC curve (rank statistic, ties counted half)."""
    label = label.astype(bool)
    positives, negatives = int(label.sum()), int((~label).sum())
    if not positives or not negatives:
        return 0.5
    _values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[inverse][label].sum() - positives * (positives + 1) / 2) / (positives * negatives))
