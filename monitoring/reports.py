"""Histograms -> PSI through Evidently; a verdict -> one HTML page, our table first, Evidently's charts after.

The only module that imports evidently, and only inside its functions: loading it takes about ten seconds.

Evidently gets columns that are already in bins. By default it cuts numbers into equally wide bins over both
windows: one outlier puts all other numbers into one bin. It also counts an empty bin as a millionth of the
smallest share: a single rare level decides the PSI of a column. With our bins its PSI and `monitoring.psi`
agree to rounding (a test checks it).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feature_repo.atomic_files import write_file
from monitoring.psi import Histogram, distinct, smoothed

TOP = 5


@dataclass(frozen=True)
class Measured:
    """Evidently's results: the PSI of each column, and its page."""

    psi: dict[str, float]
    charts: str


def evidently_psi(histograms: Sequence[Histogram]) -> Measured:
    """Return the PSI of each column as Evidently computes it, and Evidently's HTML page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Evidently's own use of pandas and pydantic
        return _measure(histograms)


def write_report(path: Path, verdict: dict[str, Any], charts: str = "") -> None:
    """Write the page: status, reason, the columns furthest past their lines, all columns, then the charts.

    Args:
        path: the HTML file.
        verdict: the result of `DriftVerdict.to_dict`.
        charts: Evidently's page; our part goes to its top.
    """
    ours = _page(verdict)
    page = charts.replace("<body>", f"<body>{ours}", 1) if "<body>" in charts else _alone(ours)
    write_file(path, page.encode())


def show_numbers(measured: Mapping[str, float], numbers: Any) -> None:
    """Write figures into `numbers`, KFP's artifact `Metrics`, and as JSON into its file."""
    for name, value in measured.items():
        numbers.log_metric(name, value)
    Path(numbers.path).write_text(json.dumps(measured, indent=1), encoding="utf-8")


def _measure(histograms: Sequence[Histogram]) -> Measured:
    from evidently import DataDefinition, Dataset, Report
    from evidently.metrics import ValueDrift

    # Names and levels come from data and end up in a page: they must not contain working HTML.
    names = {_plain(h.name): h.name for h in histograms}
    definition = DataDefinition(categorical_columns=list(names))
    current, reference = (
        Dataset.from_pandas(_rows(histograms, side), data_definition=definition)
        for side in ("current", "reference")
    )
    report = Report([ValueDrift(column=name, method="psi") for name in names])
    snapshot = report.run(current, reference)
    found = {m["config"]["column"]: float(m["value"]) for m in snapshot.dict()["metrics"]}
    return Measured(
        {names[name]: value for name, value in found.items()}, snapshot.get_html_str(as_iframe=False)
    )


def _rows(histograms: Sequence[Histogram], side: str) -> pd.DataFrame:
    """Return rows that have these histograms; a column with fewer rows ends in missing values."""
    counts = {h.name: smoothed(getattr(h, side)) for h in histograms}
    length = max(int(rows.sum()) for rows in counts.values())
    columns = {}
    for histogram in histograms:
        rows = counts[histogram.name]
        codes = np.full(length, -1, np.int16)
        codes[: rows.sum()] = np.repeat(np.arange(len(rows), dtype=np.int16), rows)
        labels = [_plain(label) for label in histogram.labels]
        columns[_plain(histogram.name)] = pd.Categorical.from_codes(codes, distinct(labels))
    return pd.DataFrame(columns)


def _plain(text: str) -> str:
    return text.translate(_LOOKALIKES)


_LOOKALIKES = str.maketrans({"<": "‹", ">": "›", "&": "+", '"': "'", "\\": "/"})


def _alone(ours: str) -> str:
    return f'<!DOCTYPE html><html lang="en"><head><meta charset="UTF-8"></head><body>{ours}</body></html>'


_COLOURS = {"ok": "#1b7f3b", "warn": "#a86400", "insufficient_data": "#5a5a5a"}
_RED = "#b3261e"
_STYLE = """
<style>
.drift { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 24px auto; color: #1d1d1f; }
.drift h1 { font-size: 26px; margin: 0 0 8px; } .drift h2 { font-size: 17px; margin: 24px 0 6px; }
.drift table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.drift th, .drift td { text-align: right; padding: 4px 10px; border-bottom: 1px solid #ddd; }
.drift th { font-weight: 600; } .drift .l { text-align: left; }
</style>
"""


def _page(verdict: dict[str, Any]) -> str:
    colour = _COLOURS.get(verdict["status"], _RED)
    status = escape(verdict["status"].replace("_", " "))
    columns = verdict["columns"]
    heading = f"the {TOP} columns nearest to their alarm lines, or past them"
    everything = f"<details><summary>all {len(columns)} columns</summary>{_table(columns)}</details>"
    return (
        f'{_STYLE}<div class="drift"><h1 style="color:{colour}">{status}</h1>'
        f"<p>{escape(verdict['reason'])}</p>"
        f"<p>{escape(verdict['compared'])}<br>window: {_ends(verdict['window'])}<br>"
        f"reference: {_ends(verdict['reference'])}</p>"
        f"<h2>{heading}</h2>{_table(columns[:TOP])}{everything if len(columns) > TOP else ''}"
        "<p>PSI: 0 is no change. Noise: the PSI of two windows of these sizes when nothing changed. "
        "A column that is shown only never makes the verdict “drifted”.</p></div>"
    )


def _ends(window: dict[str, str | None]) -> str:
    return escape(f"{window['since'] or 'the beginning'} until {window['until'] or 'now'}")


_HEAD = (
    '<tr><th class="l">column</th><th class="l">status</th><th>PSI</th><th>KL</th><th>noise</th>'
    "<th>warns at</th><th>alarms at</th><th>rows</th><th>without value</th>"
    '<th class="l">what moved (reference → window)</th></tr>'
)


def _table(columns: Sequence[dict[str, Any]]) -> str:
    return f"<table>{_HEAD}{''.join(_line(column) for column in columns)}</table>"


def _line(column: dict[str, Any]) -> str:
    colour = _COLOURS.get(column["status"], _RED)
    status = column["status"].replace("_", " ") + ("" if column["pages"] else ", shown only")
    moved = "; ".join(f"{m['label']}: {m['reference']:.2%} → {m['current']:.2%}" for m in column["moved"])
    numbers = "".join(
        f"<td>{'–' if column[key] is None else format(column[key], '.3f')}</td>"
        for key in ("psi", "kl", "noise_floor", "warn_at", "alarm_at")
    )
    return (
        f'<tr><td class="l">{escape(column["name"])}</td>'
        f'<td class="l" style="color:{colour}">{escape(status)}</td>'
        f"{numbers}<td>{column['n_current']:,}</td><td>{column['missing_current']:.1%}</td>"
        f'<td class="l">{escape(column["note"] or moved)}</td></tr>'
    )
