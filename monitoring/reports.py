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
    # Names and levels come from data and end up in a page: they must not contain working HTML.
    names = {_plain(h.name): h.name for h in histograms}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Evidently's own use of pandas and pydantic
        from evidently import DataDefinition, Dataset, Report
        from evidently.metrics import ValueDrift

        definition = DataDefinition(categorical_columns=list(names))
        current, reference = (
            Dataset.from_pandas(_rows(histograms, side), data_definition=definition)
            for side in ("current", "reference")
        )
        report = Report([ValueDrift(column=name, method="psi") for name in names])
        snapshot = report.run(current, reference)
        found = {names[m["config"]["column"]]: float(m["value"]) for m in snapshot.dict()["metrics"]}
        return Measured(found, snapshot.get_html_str(as_iframe=False))


def write_report(path: Path, verdict: dict[str, Any], charts: str = "") -> None:
    """Write the page: status, reason, the columns furthest past their lines, all columns, then the charts.

    `verdict` is the result of `DriftVerdict.to_dict`; our part goes to the top of Evidently's page, `charts`.
    """
    ours = _page(verdict)
    page = charts.replace("<body>", f"<body>{ours}", 1) if "<body>" in charts else _alone(ours)
    write_file(path, page.encode())


def show_numbers(measured: Mapping[str, float], numbers: Any) -> None:
    """Write figures into `numbers`, KFP's artifact `Metrics`, and as JSON into its file."""
    for name, value in measured.items():
        numbers.log_metric(name, value)
    Path(numbers.path).write_text(json.dumps(measured, indent=1), encoding="utf-8")


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


_STYLE = """
<style>
.drift { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 24px auto; color: #1d1d1f; }
.drift table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.drift th, .drift td { text-align: left; padding: 4px 10px; border-bottom: 1px solid #ddd; }
</style>
"""


def _page(verdict: dict[str, Any]) -> str:
    columns = verdict["columns"]
    heading = f"the {TOP} columns nearest to their alarm lines, or past them"
    everything = f"<details><summary>all {len(columns)} columns</summary>{_table(columns)}</details>"
    return (
        f'{_STYLE}<div class="drift"><h1>{_words(verdict["status"])}</h1>'
        f"<p>{escape(verdict['reason'])}</p>"
        f"<p>{escape(verdict['compared'])}<br>window: {_ends(verdict['window'])}<br>"
        f"reference: {_ends(verdict['reference'])}</p>"
        f"<h2>{heading}</h2>{_table(columns[:TOP])}{everything if len(columns) > TOP else ''}"
        "<p>PSI: 0 is no change. Noise: the PSI of two windows of these sizes when nothing changed. "
        "A column that is shown only never makes the verdict “drifted”.</p></div>"
    )


def _words(status: str) -> str:
    return status.replace("_", " ")


def _ends(window: dict[str, str | None]) -> str:
    return escape(f"{window['since'] or 'the beginning'} until {window['until'] or 'now'}")


_FIGURES = {"PSI": "psi", "KL": "kl", "noise": "noise_floor", "warns at": "warn_at", "alarms at": "alarm_at"}


def _table(columns: Sequence[dict[str, Any]]) -> str:
    with pd.option_context("display.max_colwidth", None):
        return pd.DataFrame(map(_row, columns)).to_html(index=False, border=0)


def _row(column: dict[str, Any]) -> dict[str, str]:
    moved = "; ".join(f"{m['label']}: {m['reference']:.2%} → {m['current']:.2%}" for m in column["moved"])
    figures = {title: column[key] for title, key in _FIGURES.items()}
    return {
        "column": column["name"],
        "status": _words(column["status"]) + ("" if column["pages"] else ", shown only"),
        **{title: "–" if value is None else f"{value:.3f}" for title, value in figures.items()},
        "rows": f"{column['n_current']:,}",
        "without value": f"{column['missing_current']:.1%}",
        "what moved (reference → window)": column["note"] or moved,
    }
