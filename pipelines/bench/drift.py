"""A data set -> the drift of each of its weeks against its first ones: table, picture, result file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from feature_repo.events import Dataset, read_dataset
from monitoring.drift import compare
from monitoring.reports import draw_weeks
from monitoring.verdict import judge
from monitoring.windows import EventFrames, Window, event_tables, purchases
from serving.measurement import measured_on, write_result

log = logging.getLogger(__name__)

REFERENCE_WEEKS = 9
COLUMNS = (
    "category",
    "department",
    "item_price",
    "basket_size",
    "basket_value",
    "discounted_line_ratio",
    "store_id",
    "hour",
    "weekday",
)
FOUND = ("psi", "noise_floor", "warn_at", "alarm_at", "status")


def bench_drift(dataset: Path, out_dir: Path, reference: Window | None = None) -> dict[str, Any]:
    """Measure every week and write `drift.json`, `drift.md` and `drift.png`; return what the JSON holds.

    Args:
        dataset: the data set.
        out_dir: the folder of the results.
        reference: what each week is compared with; by default the first nine whole weeks.
    """
    data = read_dataset(dataset)
    reference = reference or first_weeks(data)
    weeks = drift_by_week(data, reference)
    result = {
        **measured_on(),
        "dataset": data.manifest["name"],
        "data_hash": data.manifest["data_hash"],
        "reference": reference.to_dict(),
        "weeks": weeks.astype(object).where(weeks.notna(), None).to_dict("records"),
    }
    category = weeks[weeks["column"] == "category"]
    draw_weeks(category, out_dir / "drift.png", f"Category mix of {result['dataset']}, week by week")
    write_result(out_dir / "drift.json", json.dumps(result, indent=1, allow_nan=False).encode())
    write_result(out_dir / "drift.md", drift_table(result).encode())
    return result


def drift_by_week(data: Dataset, reference: Window, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return one row for each local week (Monday to Sunday) and column: week, column and FOUND."""
    timezone = str(data.manifest["timezone"])
    expected = EventFrames.of(purchases(data, reference), timezone)
    first, last = (pd.Timestamp(data.manifest[end]).tz_convert(timezone) for end in ("first_at", "last_at"))
    rows = []
    monday = first.normalize() - pd.DateOffset(days=first.dayofweek)
    while monday <= last:
        window = _week(monday, 1)
        tables = event_tables(EventFrames.of(purchases(data, window), timezone), expected)
        verdict = judge(compare([table.only(columns) for table in tables]))
        for name in columns:
            found = asdict(verdict.column(name))
            rows.append([monday.date().isoformat(), name, *(found[key] for key in FOUND)])
        log.info("week of %s: %s", monday.date(), verdict.status)
        monday += pd.DateOffset(days=7)
    return pd.DataFrame(rows, columns=["week", "column", *FOUND])


def first_weeks(data: Dataset) -> Window:
    """Return the first whole weeks of a data set, REFERENCE_WEEKS of them."""
    first = pd.Timestamp(data.manifest["first_at"]).tz_convert(str(data.manifest["timezone"]))
    return _week(first.normalize() + pd.DateOffset(days=-first.dayofweek % 7), REFERENCE_WEEKS)


def drift_table(result: dict[str, Any]) -> str:
    """Return the result of `bench_drift` as Markdown: PSI by week and column, alarms in bold."""
    weeks = pd.DataFrame(result["weeks"])
    names = list(dict.fromkeys(weeks["column"]))
    since, until = (str(result["reference"][end])[:10] for end in ("since", "until"))
    lines = [
        f"# Drift of {result['dataset']}, week by week",
        "",
        f"PSI against {since} to {until}. Bold: past the alarm line; *slanted*: past the warning line. "
        f"Commit {result['commit']}; {result['measured_at']}.",
        "",
        f"| week of | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for week, rows in weeks.groupby("week", sort=False):
        cells = [_MARKS.get(row.status, "{}").format(_number(row.psi)) for row in rows.itertuples()]
        lines.append(f"| {week} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_MARKS = {"alarm": "**{}**", "warn": "*{}*"}


def _number(psi: float | None) -> str:
    return "–" if psi is None or pd.isna(psi) else f"{psi:.3f}"


def _week(monday: pd.Timestamp, count: int) -> Window:
    return Window(monday.to_pydatetime(), (monday + pd.DateOffset(days=7 * count)).to_pydatetime())
