"""A window of the prediction log or of events, and a reference -> the verdict of their comparison."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.errors import RecoError
from feature_repo.events import Dataset, read_dataset
from monitoring.psi import Draws, encode, is_number, missing_share
from monitoring.reports import evidently_psi, write_report
from monitoring.shares import ShareChange, changed_shares
from monitoring.verdict import FAILED, RULES, ColumnDrift, ColumnRule, Comparison, DriftVerdict, judge
from monitoring.windows import (
    WEEK,
    EventFrames,
    TablePair,
    Window,
    bundle_categories,
    bundle_log,
    bundle_purchases,
    event_tables,
    log_tables,
    purchases,
)
from serving.prediction_log import read_log
from serving.release.bundle import read_manifest
from serving.release.champion import read_champion

log = logging.getLogger(__name__)

VERDICT, REPORT = "verdict.json", "report.html"
LEAST_UNITS = 200  # baskets or requests on each side; with fewer, chance alone looks like drift
LEAST_DAYS = 6  # with baskets or requests: a whole week, less a closed day; weekdays differ by themselves


class DriftFound(RecoError):
    """A watched window has drifted or its columns changed; the message names them and the distance."""


def drift_of_events(
    dataset: Path,
    window: Window,
    reference: Window | Path,
    report: Path | None = None,
    quick: bool = False,
) -> DriftVerdict:
    """Compare the purchases of a window with those of another window, or with a bundle's training data.

    Args:
        dataset: the data set that holds the window.
        window: the stretch of time under test.
        reference: another stretch of the same data set, or the directory of a bundle.
        report: where to write the HTML report, if at all.
        quick: compute PSI here instead of through Evidently; the numbers agree, a report has no charts.
    """
    return _drift_of_purchases(read_dataset(dataset), window, reference, report, quick)


def _drift_of_purchases(
    data: Dataset, window: Window, reference: Window | Path, report: Path | None, quick: bool
) -> DriftVerdict:
    if isinstance(reference, Window):
        expected, compared = purchases(data, reference), "purchases with those of another window"
    else:
        expected = bundle_purchases(reference)
        compared = f"purchases with those before the cut of bundle {read_manifest(reference)['bundle_id']}"
        reference = _span(expected["at"])
    timezone = str(data.manifest["timezone"])
    found = EventFrames.of(purchases(data, window), timezone)
    tables = event_tables(found, EventFrames.of(expected, timezone))
    return _check(tables, found.baskets["date"].nunique(), compared, (window, reference), report, quick)


def drift_of_log(
    bundle: Path,
    log_dir: Path,
    window: Window,
    reference: Window | None = None,
    report: Path | None = None,
    quick: bool = False,
) -> DriftVerdict:
    """Compare the answers that a bundle gave in a window with those of its evaluation, or of another window.

    Args:
        bundle: the directory of the bundle; answers of other bundles are left out.
        log_dir: the prediction log.
        window: the stretch of time under test.
        reference: another stretch of the log; by default the records that the bundle holds.
        report: where to write the HTML report, if at all.
        quick: compute PSI here instead of through Evidently; the numbers agree, a report has no charts.
    """
    bundle_id = str(read_manifest(bundle)["bundle_id"])
    found, others = _answers_of(bundle_id, log_dir, window)
    if reference is None:
        expected, compared = bundle_log(bundle), f"answers of bundle {bundle_id} with its evaluation"
        reference = _span(expected["answered_at"].to_pandas())
    else:
        expected, _ = _answers_of(bundle_id, log_dir, reference)
        compared = f"answers of bundle {bundle_id} with those of an earlier window"
    compared += f" ({others} answers of other bundles left out)" if others else ""
    tables = log_tables(found, expected, bundle_categories(bundle))
    days = found["at"].to_pandas().dt.normalize().nunique()
    return _check(tables, days, compared, (window, reference), report, quick)


def measure_drift(bundle: Path, dataset: Path, since: str, until: str, drift: Path) -> dict[str, Any]:
    """Compare a window of a data set's purchases with a bundle's, for a pipeline.

    Args:
        bundle: the directory of the bundle, or a home: its champion.
        dataset: the data set that holds the window.
        since: where the window begins; a date is local midnight, "" is a week before its end.
        until: where it ends; "" is the end of the data.
        drift: the directory to write: VERDICT and REPORT.

    Returns:
        The verdict's status and reason.
    """
    data = read_dataset(dataset)
    window = Window.parse(since, until, str(data.manifest["timezone"]))
    if window.since is None:
        window = replace(window, since=(window.until or data.events["at"].max().to_pydatetime()) - WEEK)
    if not (bundle / "manifest.json").is_file():
        bundle = read_champion(bundle).bundle(bundle)
    drift.mkdir(parents=True, exist_ok=True)
    verdict = _drift_of_purchases(data, window, bundle, drift / REPORT, quick=False)
    (drift / VERDICT).write_text(json.dumps(verdict.to_dict(), indent=1))
    return {"status": verdict.status, "reason": verdict.reason}


def show(report: dict[str, Any], drift: Path, numbers: Any, page: Any) -> dict[str, Any]:
    """Show the PSI of each column and the page in Kubeflow; return the report.

    Args:
        report: result of `measure_drift`.
        drift: the directory that it wrote.
        numbers: KFP's artifact `Metrics`.
        page: KFP's artifact `HTML`.
    """
    columns = json.loads((drift / VERDICT).read_bytes())["columns"]
    measured = {f"psi.{one['name']}": one["psi"] for one in columns if one["psi"] is not None}
    for name, value in measured.items():
        numbers.log_metric(name, value)
    Path(numbers.path).write_text(json.dumps(measured, indent=1), encoding="utf-8")
    shutil.copyfile(drift / REPORT, page.path)
    return report


def raise_alert(verdict: Mapping[str, Any]) -> str:
    """Return the reason of a verdict that needs no action.

    Raises:
        DriftFound: the verdict is `drifted` or `schema_change`.
    """
    if verdict["status"] in FAILED:
        raise DriftFound(f"{verdict['status']}: {verdict['reason']}")
    return str(verdict["reason"])


def compare(
    tables: Sequence[TablePair], rules: Mapping[str, ColumnRule] = RULES, too_short: str = ""
) -> list[Comparison]:
    """Bring every column of the tables into bins, after checking that it can be compared.

    Args:
        tables: of both windows.
        rules: by column.
        too_short: why no column of this window can be compared.
    """
    return [comparison for table in tables for comparison in _compare_table(table, rules, too_short)]


def _check(
    tables: list[TablePair],
    days: int,
    compared: str,
    windows: tuple[Window, Window],
    report: Path | None,
    quick: bool,
) -> DriftVerdict:
    began = time.perf_counter()
    too_short = f"the window has baskets or requests on {days} days, a whole week ({LEAST_DAYS} such days) "
    too_short += "is needed: weekdays differ from each other; take a longer window"
    comparisons = compare(tables, too_short=too_short if days < LEAST_DAYS else "")
    histograms = [c.histogram for c in comparisons if c.histogram is not None]
    measured = None if quick or not histograms else evidently_psi(histograms)
    verdict = judge(comparisons, measured.psi if measured else None)
    verdict = replace(verdict, compared=compared, window=windows[0], reference=windows[1])
    if report is not None:
        write_report(report, verdict.to_dict(), measured.charts if measured else "")
    log.info("%s: %s (%.1f s)", compared, verdict.status, time.perf_counter() - began)
    return verdict


def _compare_table(table: TablePair, rules: Mapping[str, ColumnRule], too_short: str) -> list[Comparison]:
    names = [
        str(name)
        for name in dict.fromkeys([*table.reference, *table.current])
        if name not in (table.unit, table.week)
    ]
    units = [_units(frame, table.unit) for frame in (table.current, table.reference)]
    sizes = [int(unit.max(initial=-1)) + 1 for unit in units]
    draws: Draws | str = too_short or (
        f"{sizes[0]:,} baskets or requests in the window, {sizes[1]:,} in the reference; "
        f"{LEAST_UNITS} are needed in each: take a longer window"
    )
    if not too_short and min(sizes) >= LEAST_UNITS:
        draws = Draws.of(units[1], sizes[0])
    return [_compare_column(name, table, draws, rules.get(name, ColumnRule()), sizes[0]) for name in names]


def _units(frame: pd.DataFrame, unit: str) -> np.ndarray:
    if unit in frame:
        return np.asarray(pd.factorize(frame[unit])[0])
    return np.arange(len(frame))


def _compare_column(
    name: str, table: TablePair, draws: Draws | str, rule: ColumnRule, units: int
) -> Comparison:
    current, reference = table.current.get(name), table.reference.get(name)
    like = reference if reference is not None else current
    assert like is not None
    # The model has learnt nothing from a number that never changed (fit_scale masks it): a shop that begins
    # to send clicks or impressions does no harm to its scores.
    constant = reference is not None and is_number(reference) and reference.nunique(dropna=False) == 1
    row = ColumnDrift(
        name=name,
        status="ok",
        pages=rule.pages and not constant,
        note="",
        n_current=len(table.current),
        n_reference=len(table.reference),
        missing_current=1.0 if current is None else round(missing_share(current, like), 4),
        missing_reference=1.0 if reference is None else round(missing_share(reference, like), 4),
    )
    if isinstance(draws, str):
        return Comparison(replace(row, status="insufficient_data", note=draws))
    if other := _schema_change(row, current, reference):
        return Comparison(replace(row, status="schema_change", note=other))
    if row.missing_reference == 1 or current is None or reference is None:
        return Comparison(replace(row, note="no values in either window"))
    codes = encode(current, reference)
    noise = draws.noise(codes.reference, len(codes.labels))
    changed: tuple[ShareChange, ...] = ()
    if rule.shares and table.week:
        changed = changed_shares(codes, draws.unit, table.reference[table.week].to_numpy(np.int64), units)
    return Comparison(row, codes.histogram(name), noise, rule, changed)


def _schema_change(row: ColumnDrift, current: pd.Series | None, reference: pd.Series | None) -> str:
    if current is None:
        return "the column is gone"
    if reference is None:
        return "the column is new: the reference does not hold it"
    if row.missing_current == 1 and row.missing_reference < 1:
        retyped = is_number(reference) and not is_number(current) and current.notna().any()
        return f"was a number, is {current.dtype} now" if retyped else "no row has a value any more"
    if row.missing_reference == 1 and row.missing_current < 1:
        return "has values now, the reference has none"
    return ""


def _answers_of(bundle_id: str, log_dir: Path, window: Window) -> tuple[pa.Table, int]:
    """Return the records of one bundle, and the number of records of other bundles."""
    records = read_log(log_dir, window.since, window.until)
    own = records.filter(pc.equal(records["bundle_id"], bundle_id))
    return own, len(records) - len(own)


def _span(at: pd.Series) -> Window:
    return Window(at.min().to_pydatetime(), at.max().to_pydatetime()) if len(at) else Window()
