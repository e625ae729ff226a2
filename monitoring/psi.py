"""One column in two windows -> histograms in the same bins, their PSI, and the PSI that chance alone gives.

PSI (population stability index) is `sum((p - q) * log(p / q))` over the bins. Two windows of the same
distribution never have a PSI of 0: the fewer baskets, the larger the PSI. `noise` measures it: it draws as
many baskets from the reference as the window holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

QUANTILES = np.arange(1, 10) / 10
FEW_VALUES = 20  # a number with no more values than this gets a bin for each
MOST_LEVELS = 500  # a text column's further levels are counted together, as RARE
SMALLEST_SHARE = 1e-4  # the share of an empty bin: with 0, one absent level makes PSI infinite
RARE, NEW = "(rare)", "(new)"
DRAWS = 32


@dataclass(frozen=True)
class Codes:
    """A column of both windows as bin numbers; -1 where the value is missing."""

    labels: tuple[str, ...]
    current: np.ndarray
    reference: np.ndarray

    def histogram(self, name: str) -> Histogram:
        """Return how many rows fall into each bin."""
        return Histogram(
            name,
            self.labels,
            _count(self.current, len(self.labels)),
            _count(self.reference, len(self.labels)),
        )


@dataclass(frozen=True)
class Histogram:
    """How many rows of each window fall into each bin; rows without a value are in none."""

    name: str
    labels: tuple[str, ...]
    current: np.ndarray
    reference: np.ndarray

    def psi(self) -> float:
        """Return the population stability index of the two windows."""
        return float(psi(self.current, self.reference))

    def kl(self) -> float:
        """Return the Kullback-Leibler divergence of the window from the reference, in nats."""
        p, q = shares(self.current), shares(self.reference)
        return float((p * np.log(p / q)).sum())

    def moved(self, most: int) -> list[tuple[str, float, float]]:
        """Return the bins that add most to the PSI: label, share in the reference, share in the window."""
        p, q = shares(self.current), shares(self.reference)
        order = np.argsort(-(p - q) * np.log(p / q), kind="stable")[:most]
        return [(self.labels[i], float(q[i]), float(p[i])) for i in order if p[i] != q[i]]


def encode(current: pd.Series, reference: pd.Series) -> Codes:
    """Return both columns in the bins that the reference defines.

    Numbers: deciles of the reference, or one bin a value when it has few, and one bin below its
    smallest and one above its largest value. Text: its levels. NaN, None, the empty text and infinite
    numbers are missing. A number column that turned into text has no values at all.
    """
    if is_number(reference):
        return _encode_numbers(numbers(current), numbers(reference))
    return _encode_levels(texts(current), texts(reference))


def is_number(column: pd.Series) -> bool:
    """Return whether the column is compared by deciles; true/false columns are compared by level."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def numbers(column: pd.Series) -> np.ndarray:
    """Return the column as float64, NaN where it holds no finite number."""
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def texts(column: pd.Series) -> pd.Series:
    """Return the column as text, missing where it is null or empty."""
    as_text = column.astype("string")
    return as_text.mask(as_text == "")


def missing_share(column: pd.Series, like: pd.Series) -> float:
    """Return the share of rows without a value, read as `like` (the reference) is read."""
    if len(column) == 0:
        return 0.0
    missing = np.isnan(numbers(column)) if is_number(like) else texts(column).isna().to_numpy()
    return float(missing.mean())


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Return the counts with each bin at least SMALLEST_SHARE of all rows, and at least one row."""
    least = np.maximum(1, np.rint(SMALLEST_SHARE * counts.sum(axis=-1, keepdims=True)))
    return np.maximum(counts, least).astype(np.int64)


def shares(counts: np.ndarray) -> np.ndarray:
    """Return the smoothed counts as shares that add up to one."""
    rows = smoothed(counts)
    return rows / rows.sum(axis=-1, keepdims=True)


def psi(current: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the PSI of counts along the last axis, (..., bins) -> (...)."""
    p, q = shares(current), shares(reference)
    return np.asarray(((p - q) * np.log(p / q)).sum(axis=-1))


@dataclass(frozen=True)
class Draws:
    """How often each unit (basket, request) of the reference is in each of DRAWS windows drawn from it."""

    unit: np.ndarray  # (rows,) the unit each row of the reference belongs to
    times: np.ndarray  # (draws, units)
    size: int  # units in a drawn window: as many as the window under test has

    @classmethod
    def of(cls, unit: np.ndarray, size: int, seed: int = 0) -> Draws:
        """Draw DRAWS windows of `size` units from the units that are named for each row."""
        units = int(unit.max()) + 1
        rng = np.random.default_rng(seed)
        times = np.empty((DRAWS, units), np.float32)
        for row in times:
            row[:] = np.bincount(rng.integers(0, units, size), minlength=units)
        return cls(unit, times, size)

    def noise(self, codes: np.ndarray, bins: int) -> tuple[float, float]:
        """Return mean and standard deviation of the PSI between two windows that do not differ.

        Whole units are drawn: the lines of one basket are not independent of each other. A drawn window
        has no noise of the reference in it, so the PSI is scaled to what two samples of these sizes give.
        """
        known = codes >= 0
        code, unit = codes[known], self.unit[known]
        drawn = np.array([np.bincount(code, times[unit], bins) for times in self.times])
        found = psi(drawn, _count(codes, bins)) * (1 + self.size / self.times.shape[1])
        return float(found.mean()), float(found.std(ddof=1))


def _count(codes: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount(codes[codes >= 0], minlength=bins)


def _encode_numbers(current: np.ndarray, reference: np.ndarray) -> Codes:
    known = reference[~np.isnan(reference)]
    if not len(known):
        return Codes(("all",), _place(current, np.empty(0)), _place(reference, np.empty(0)))
    values = np.unique(known)
    few = len(values) <= FEW_VALUES
    upper = values if few else np.unique(np.quantile(known, [*QUANTILES, 1], method="inverted_cdf"))
    # Bin i holds edges[i-1] < x <= edges[i].
    edges = np.concatenate([[np.nextafter(values[0], -np.inf)], upper])
    return Codes(_number_labels(values[0], upper, few), _place(current, edges), _place(reference, edges))


def _place(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    codes = np.searchsorted(edges, values, side="left").astype(np.int32)
    return np.where(np.isnan(values), np.int32(-1), codes)


def _number_labels(smallest: float, upper: np.ndarray, few: bool) -> tuple[str, ...]:
    lower = [smallest, *upper[:-1]]
    inner = [
        f"{high:.6g}" if few or low == high else f"{low:.6g} to {high:.6g}"
        for low, high in zip(lower, upper, strict=True)
    ]
    return distinct([f"below {smallest:.6g}", *inner, f"above {upper[-1]:.6g}"])


def distinct(labels: Sequence[str]) -> tuple[str, ...]:
    """Number the labels that became equal by rounding or by removing signs."""
    return tuple(f"{label} #{i}" if labels.count(label) > 1 else label for i, label in enumerate(labels))


def _encode_levels(current: pd.Series, reference: pd.Series) -> Codes:
    frequent = reference.value_counts()
    levels = frequent.index[:MOST_LEVELS]
    rare, new = len(levels), len(levels) + 1
    codes_reference = levels.get_indexer(reference)
    codes_reference[codes_reference < 0] = rare
    codes_current = levels.get_indexer(current)
    outside = codes_current < 0
    codes_current[outside] = np.where(frequent.index.get_indexer(current[outside]) < 0, new, rare)
    codes_reference[reference.isna().to_numpy()] = -1
    codes_current[current.isna().to_numpy()] = -1
    labels = distinct([*map(str, levels), RARE, NEW])
    # An empty bin in both windows would still take SMALLEST_SHARE of each.
    used = max(int(codes_current.max(initial=-1)), int(codes_reference.max(initial=-1)), 0) + 1
    return Codes(labels[:used], codes_current.astype(np.int32), codes_reference.astype(np.int32))
