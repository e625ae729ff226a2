"""Compared columns -> a verdict: each column's limits and distance, and one sentence that sums it up.

    insufficient_data   too few baskets or requests for a verdict, or too few with logged features
    schema_change       a column is new, gone, or lost its values or its type: mend the data, do not retrain
    drifted             a column that counts is past its alarm line: retraining is worth it
    warn                something moved, but retraining is not worth it yet
    ok

A column's lines lie above its noise floor: the PSI of two windows of these sizes when nothing changed. The
floor is drawn again for each check, so the same lines fit a window of a day and of a month. On a week of
Complete Journey the floor of `category` is 0.014: it warns at 0.064 and alarms at 0.104. The share of each
department and store is tested, too: see `monitoring.shares`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal

from monitoring.psi import Histogram
from monitoring.shares import ShareChange
from monitoring.windows import Window

Status = Literal["ok", "warn", "drifted", "insufficient_data", "schema_change"]
ColumnStatus = Literal["ok", "warn", "alarm", "insufficient_data", "schema_change"]

FAILED = ("drifted", "schema_change")
MISSING_WARN, MISSING_ALARM = 0.05, 0.10  # rise of the share of rows without a value
# The lines also lie above random variation: a column of few bins in a small window has a wide spread.
SPREADS_WARN, SPREADS_ALARM = 4.0, 8.0
MOVED = 3
WITH_FEATURES = "score"  # this column of an answer is compared together with its features only


@dataclass(frozen=True)
class ColumnRule:
    """How far above its noise floor a column's PSI may rise, and whether passing `alarm` means drift."""

    warn: float = 0.05
    alarm: float = 0.09
    pages: bool = True
    shares: bool = False  # whether the share of each level is tested, too


SHOWN = ColumnRule(pages=False)
# All other columns have the usual rule. PSI of `category`: quiet weeks 0.02-0.04, holiday weeks 0.12-0.18.
RULES: Mapping[str, ColumnRule] = {
    "department": ColumnRule(shares=True),  # few levels: PSI stays at 0.013 when a share grows by 30 %
    "store_id": ColumnRule(0.15, 0.25, shares=True),  # users move slowly; an opening or closing jumps
    "hour": SHOWN,  # moves with the seasons and with clock changes; no model input
    "rung": SHOWN,  # fallbacks are counted in reco_responses_total; no retraining helps
    "source": SHOWN,  # follows from the features and the rows of the online store
}


@dataclass(frozen=True)
class Moved:
    """One bin that adds to a column's PSI, with its share of the rows in both windows."""

    label: str
    reference: float
    current: float


@dataclass(frozen=True)
class ColumnDrift:
    """The result of one column; `psi`, the floor and the lines are None if it was not compared."""

    name: str
    status: ColumnStatus
    pages: bool
    note: str
    n_current: int
    n_reference: int
    missing_current: float
    missing_reference: float
    psi: float | None = None
    noise_floor: float | None = None
    warn_at: float | None = None
    alarm_at: float | None = None
    kl: float | None = None  # for information: the verdict follows PSI
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class DriftVerdict:
    """The result of one check; `columns` begin with the column furthest past its alarm line."""

    status: Status
    reason: str
    compared: str
    window: Window
    reference: Window
    columns: tuple[ColumnDrift, ...]
    since: datetime | None = None  # the begin of the first day on which a column passed its line
    place: str = ""  # the department or store in which that column moved most

    @property
    def failed(self) -> bool:
        """Return whether the verdict needs attention: drifted, or the columns changed."""
        return self.status in FAILED

    def column(self, name: str) -> ColumnDrift:
        """Return the row of one column."""
        return next(column for column in self.columns if column.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON types."""
        return {
            "status": self.status,
            "reason": self.reason,
            "compared": self.compared,
            "window": self.window.to_dict(),
            "reference": self.reference.to_dict(),
            "columns": [asdict(column) for column in self.columns],
            "since": None if self.since is None else self.since.isoformat(),
            "place": self.place,
        }


@dataclass(frozen=True)
class Comparison:
    """One column brought into bins, or the reason why it cannot be: then `histogram` is None."""

    row: ColumnDrift
    histogram: Histogram | None = None
    noise: tuple[float, float] = (0.0, 0.0)  # mean and standard deviation of PSI without any change
    rule: ColumnRule = ColumnRule()
    changes: tuple[ShareChange, ...] = ()  # the levels whose share is past its line


def judge(comparisons: Sequence[Comparison], psi: Mapping[str, float] | None = None) -> DriftVerdict:
    """Turn the PSI of each column into a verdict.

    Args:
        comparisons: the columns in bins.
        psi: the PSI of each column; computed here if it is None.
    """
    rows = [_judge_column(comparison, psi) for comparison in comparisons]
    rows.sort(key=_urgency, reverse=True)
    status = _status(rows)
    return DriftVerdict(status, _reason(status, rows), "", Window(), Window(), tuple(rows))


def _judge_column(comparison: Comparison, psi: Mapping[str, float] | None) -> ColumnDrift:
    row, histogram, rule = comparison.row, comparison.histogram, comparison.rule
    if histogram is None:
        return row
    floor, spread = comparison.noise
    warn_at = floor + max(rule.warn, SPREADS_WARN * spread)
    alarm_at = floor + max(rule.alarm, SPREADS_ALARM * spread)
    found = histogram.psi() if psi is None else psi[row.name]
    lost = row.missing_current - row.missing_reference
    status: ColumnStatus = "ok"
    if found >= alarm_at or lost >= MISSING_ALARM or comparison.changes:
        status = "alarm"
    elif found >= warn_at or lost >= MISSING_WARN:
        status = "warn"
    return replace(
        row,
        status=status,
        note=_lost(row) if lost >= MISSING_WARN else "; ".join(map(str, comparison.changes[:MOVED])),
        psi=round(found, 5),
        noise_floor=round(floor, 5),
        warn_at=round(warn_at, 5),
        alarm_at=round(alarm_at, 5),
        kl=round(histogram.kl(), 5),
        moved=tuple(Moved(label, round(q, 5), round(p, 5)) for label, q, p in histogram.moved(MOVED)),
    )


def _lost(row: ColumnDrift) -> str:
    return f"rows without a value: {row.missing_reference:.1%} -> {row.missing_current:.1%}"


def _urgency(row: ColumnDrift) -> tuple[bool, bool, bool, float]:
    past = (row.psi or 0.0) / (row.alarm_at or 1.0)
    return row.status == "schema_change", row.status == "alarm" and row.pages, row.status == "alarm", past


def _status(rows: Sequence[ColumnDrift]) -> Status:
    found = {row.status for row in rows}
    if found <= {"insufficient_data"}:
        return "insufficient_data"
    if "schema_change" in found:
        return "schema_change"
    if any(row.status == "alarm" and row.pages for row in rows):
        return "drifted"
    if found & {"alarm", "warn"}:
        return "warn"
    # An unchanged basket does not mean unchanged features.
    blind = any(row.name == WITH_FEATURES and row.status == "insufficient_data" for row in rows)
    return "insufficient_data" if blind else "ok"


def _reason(status: Status, rows: Sequence[ColumnDrift]) -> str:
    if status == "insufficient_data":
        few = [row.note for row in rows if row.status == "insufficient_data"]
        return ("no feature could be compared: " if len(few) < len(rows) else "") + (
            few[0] if few else "there is no column to compare"
        )
    said = [_sentence(row) for row in rows if row.status in ("schema_change", "alarm", "warn")]
    if not said:
        return f"none of {len(rows)} columns is past its line"
    more = f"; and {len(said) - MOVED} more" if len(said) > MOVED else ""
    return "; ".join(said[:MOVED]) + more


def _sentence(row: ColumnDrift) -> str:
    if row.note:
        return f"{row.name}: {row.note}"
    line = f"alarm line {row.alarm_at:.3f}" if row.status == "alarm" else f"warning line {row.warn_at:.3f}"
    shown = "" if row.pages else ", shown only"
    moved = "".join(f": share of '{m.label}' {m.reference:.2%} -> {m.current:.2%}" for m in row.moved[:1])
    return f"{row.name} PSI {row.psi:.3f} ({line}, noise {row.noise_floor:.3f}{shown}){moved}"
