"""A window of the prediction log or of events, and a reference -> the verdict of their comparison."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.errors import RecoError
from feature_repo.events import Dataset, read_dataset
from monitoring.psi import Draws, encode, is_number, missing_share, psi
from monitoring.reports import evidently_psi, show_numbers, write_report
from monitoring.shares import ShareChange, changed_shares
from monitoring.verdict import FAILED, RULES, ColumnDrift, ColumnRule, Comparison, DriftVerdict, judge
from monitoring.windows import (
    DAY,
    LEAST_UNITS,
    REFERENCE_EVENTS,
    REFERENCE_LOG,
    WEEK,
    Embeddings,
    EventFrames,
    TablePair,
    Window,
    basket_lines,
    bundle_categories,
    bundle_reference,
    event_tables,
    known_until,
    log_tables,
    purchases,
)
from serving.errors import BundleInvalid
from serving.prediction_log import join_segments, read_segments
from serving.release.champion import read_champion
from serving.release.manifest import read_manifest
from serving.schemas import DEFAULT_PROFILE

log = logging.getLogger(__name__)
SAMPLE = 50_000  # answers of a window that are compared at most: a week of a large shop fits no memory

VERDICT, REPORT = "verdict.json", "report.html"
LOOK_BACK = 28  # spans of seven days, a day apart, in which a verdict looks for the beginning of a drift
PLACES = ("department", "store_id")
# A window -> its tables beside those of the reference, and on how many days it has baskets or requests.
TablesOf = Callable[[Window], tuple[list[TablePair], int]]
LEAST_DAYS = 6  # with baskets or requests: a whole week, less a closed day; weekdays differ by themselves


class DriftFound(RecoError):
    """A watched window has drifted or its columns changed; the message names them and the distance."""


def drift_of_events(
    data: Dataset,
    window: Window,
    reference: Window | Path,
    report: Path | None = None,
) -> DriftVerdict:
    """Compare the purchases of a window with those of another window, or with a bundle's training data.

    Args:
        data: the data set that holds the window.
        window: the stretch of time under test.
        reference: another stretch of the same data set, or the directory of a bundle.
        report: where to write the HTML report, if at all; its PSI is Evidently's, and agrees with ours.
    """
    if isinstance(reference, Window):
        expected, compared = purchases(data, reference), "purchases with those of another window"
        embeddings = None
    else:
        expected = bundle_reference(reference, REFERENCE_EVENTS).to_pandas()
        compared = f"purchases with those before the cut of bundle {read_manifest(reference)['bundle_id']}"
        embeddings = Embeddings.of(reference).with_regions(expected["item_id"], expected["basket_id"])
        reference = _span(expected["at"])
    timezone = str(data.manifest["timezone"])
    before = EventFrames.of(expected, timezone, embeddings)

    def tables_of(window: Window) -> tuple[list[TablePair], int]:
        found = EventFrames.of(purchases(data, window), timezone, embeddings)
        return event_tables(found, before), found.baskets["date"].nunique()

    end = window.until or known_until(data.events["at"]).to_pydatetime()
    empty = "there is no purchase in the window: take an earlier or a longer one"
    return _check(tables_of, compared, (window, reference), end, report, empty)


def drift_of_log(
    bundle: Path,
    log_dir: Path,
    window: Window,
    reference: Window | None = None,
    report: Path | None = None,
) -> DriftVerdict:
    """Compare the answers that a bundle gave in a window with those of its evaluation, or of another window.

    Args:
        bundle: the directory of the bundle; answers of bundles with another ranker are left out.
        log_dir: the prediction log.
        window: the stretch of time under test.
        reference: another stretch of the log; by default the records of the bundle's evaluation, which asks
            with the usual profile alone, so answers with another are left out.
        report: where to write the HTML report, if at all; its PSI is Evidently's, and agrees with ours.
    """
    bundle_id, alike = str(read_manifest(bundle)["bundle_id"]), bundles_alike(bundle)
    profile, left_out = "", "other bundles"
    if reference is None:
        profile, left_out = DEFAULT_PROFILE, "other bundles or profiles"
        expected = bundle_reference(bundle, REFERENCE_LOG)
        compared = f"answers of bundle {bundle_id} with its evaluation"
        reference = _span(expected["answered_at"].to_pandas())
    else:
        expected, _ = _answers_of(alike, log_dir, reference)
        compared = f"answers of bundle {bundle_id} with those of an earlier window"
    read = lru_cache(maxsize=1)(partial(_answers_of, alike, log_dir, profile=profile))
    others, categories = read(window)[1], bundle_categories(bundle)
    embeddings = Embeddings.of(bundle).with_regions(*basket_lines(expected))
    compared += f" ({others} answers of {left_out} left out)" if others else ""

    def tables_of(window: Window) -> tuple[list[TablePair], int]:
        found, _ = read(window)
        # Counted back from the last answer: a shop's evening or night may lie on two dates of UTC.
        at = found["answered_at"].to_pandas()
        return log_tables(found, expected, categories, embeddings), ((at.max() - at) // DAY).nunique()

    empty = f"{log_dir} holds no answer in the window: start `reco serve` or `reco up`, and ask it"
    if others:
        empty = f"all {others} answers in the window are of {left_out}: wait until this bundle has answered"
        empty += f" with the profile `{profile}`" if profile else ""
    return _check(tables_of, compared, (window, reference), window.until or datetime.now(UTC), report, empty)


def measure_drift(
    bundle: Path, dataset: Path, since: str, until: str, drift: Path, numbers: Any, page: Path
) -> dict[str, Any]:
    """Compare a window of a data set's purchases with a bundle's, for a pipeline.

    Args:
        bundle: the directory of the bundle, or a home: its champion.
        dataset: the data set that holds the window.
        since: where the window begins; a date is local midnight, "" is a week before its end.
        until: where it ends; "" is the end of the data.
        drift: the directory to write: VERDICT and REPORT.
        numbers: KFP's artifact `Metrics`, gets the PSI of each column.
        page: gets a copy of the report.

    Returns:
        The verdict's status and reason.
    """
    data = read_dataset(dataset)
    window = Window.parse(since, until, str(data.manifest["timezone"]))
    if window.since is None:
        end = window.until or known_until(data.events["at"]).to_pydatetime()
        window = replace(window, since=end - WEEK)
    drift.mkdir(parents=True, exist_ok=True)
    verdict = drift_of_events(data, window, served_bundle(bundle), drift / REPORT)
    (drift / VERDICT).write_text(json.dumps(verdict.to_dict(), indent=1))
    shutil.copyfile(drift / REPORT, page)
    show_numbers({f"psi.{one.name}": one.psi for one in verdict.columns if one.psi is not None}, numbers)
    return {"status": verdict.status, "reason": verdict.reason}


def raise_alert(*verdicts: Mapping[str, Any]) -> str:
    """Return the reasons of verdicts that need no action.

    Raises:
        DriftFound: one is `drifted` or `schema_change`.
    """
    said = "; ".join(f"{verdict['status']}: {verdict['reason']}" for verdict in verdicts)
    if any(verdict["status"] in FAILED for verdict in verdicts):
        raise DriftFound(said)
    return said


def compare(tables: Sequence[TablePair], too_short: str = "") -> list[Comparison]:
    """Bring every column of the tables into bins; `too_short` says why none of this window can be."""
    return [comparison for table in tables for comparison in _compare_table(table, too_short)]


def _check(
    tables_of: TablesOf,
    compared: str,
    windows: tuple[Window, Window],
    end: datetime,
    report: Path | None,
    empty: str,
) -> DriftVerdict:
    """Judge a window against its reference.

    `end` is that of the window, also of one that is open. `empty` is the reason where it holds no row.
    """
    began = time.perf_counter()
    tables, days = tables_of(windows[0])
    too_short = f"the window has baskets or requests on {days} days, a whole week ({LEAST_DAYS} such days) "
    too_short += "is needed: weekdays differ from each other; take a longer window"
    if days == 0:
        too_short = empty
    comparisons = compare(tables, too_short=too_short if days < LEAST_DAYS else "")
    histograms = [c.histogram for c in comparisons if c.histogram is not None]
    measured = evidently_psi(histograms) if report and histograms else None
    verdict = judge(comparisons, measured.psi if measured else None)
    verdict = replace(verdict, compared=compared, window=windows[0], reference=windows[1])
    if verdict.status == "drifted":
        verdict = _located(verdict, tables, tables_of, end)
    if report is not None:
        write_report(report, verdict.to_dict(), measured.charts if measured else "")
    log.info("%s: %s (%.1f s)", compared, verdict.status, time.perf_counter() - began)
    return verdict


def _located(
    verdict: DriftVerdict, tables: Sequence[TablePair], tables_of: TablesOf, end: datetime
) -> DriftVerdict:
    """Return a verdict that says where its first column moved most, and since when.

    That is the first day whose last seven days passed a line. Days are counted back from the window's end, so
    one may lie on two dates; the first is named. Where data or the reference end the search, it began before.
    """
    name, since, until, when = verdict.columns[0].name, None, end, "before"
    for _ in range(LOOK_BACK):
        if verdict.reference.until is None or until - WEEK < verdict.reference.until:
            break
        week, days = tables_of(Window(until - WEEK, until))
        if days < LEAST_DAYS:
            break
        column_tables = [table.only([name]) for table in week if name in table.reference]
        if judge(compare(column_tables)).column(name).status not in ("warn", "alarm"):
            when = "about"
            break
        until = since = until - DAY
    place = moved_most(name, tables)
    reason = verdict.reason + (f"; most in {place}" if place else "")
    reason += f"; since {when} {since:%Y-%m-%d}" if since else ""
    return replace(verdict, place=place, since=since, reason=reason)


def moved_most(name: str, tables: Sequence[TablePair]) -> str:
    """Return the department or store in which a column moved most; "" if none moved twice as far as others.

    The distance is PSI less the part of chance: each bin but one adds a row's share of both windows.
    """
    for table, place in itertools.product(tables, PLACES):
        if not {name, place} <= {*table.reference, *table.current} or name in (place, "category"):
            continue
        code, level = (encode(table.current[column], table.reference[column]) for column in (name, place))
        bins, levels = len(code.labels), len(level.labels)
        if levels == 1:
            continue
        current, reference = (
            np.bincount((y * bins + x)[(x >= 0) & (y >= 0)], minlength=bins * levels).reshape(levels, bins)
            for x, y in ((code.current, level.current), (code.reference, level.reference))
        )
        rows = np.minimum(current.sum(1), reference.sum(1))
        far = psi(current, reference) - 2 * (bins - 1) / np.maximum(rows, 1)
        far = np.where(rows >= LEAST_UNITS, far, -np.inf)
        first, second = np.argsort(-far)[:2]
        if rows[second] >= LEAST_UNITS and far[first] > 2 * max(far[second], 0):
            return f"{place} '{level.labels[first]}'"
    return ""


def _compare_table(table: TablePair, too_short: str) -> list[Comparison]:
    names = [
        str(name)
        for name in dict.fromkeys([*table.reference, *table.current])
        if name not in (table.unit, table.week)
    ]
    units = [_units(frame, table.unit) for frame in (table.current, table.reference)]
    sizes = [int(unit.max(initial=-1)) + 1 for unit in units]
    # A text in place of the draws says why nothing can be compared.
    draws: Draws | str = too_short or (
        f"{sizes[0]:,} baskets or requests in the window, {sizes[1]:,} in the reference; "
        f"{LEAST_UNITS} are needed in each: take a longer window"
    )
    if not too_short and min(sizes) >= LEAST_UNITS:
        draws = Draws.of(units[1], sizes[0])
    return [_compare_column(name, table, draws, sizes[0]) for name in names]


def _units(frame: pd.DataFrame, unit: str) -> np.ndarray:
    if unit in frame:
        return np.asarray(pd.factorize(frame[unit])[0])
    return np.arange(len(frame))


def _compare_column(name: str, table: TablePair, draws: Draws | str, units: int) -> Comparison:
    rule = RULES.get(name, ColumnRule())
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


def served_bundle(place: Path) -> Path:
    """Return a bundle's directory as it is, and that of a home's champion."""
    return place if (place / "manifest.json").is_file() else read_champion(place).bundle(place)


def bundles_alike(bundle: Path) -> set[str]:
    """Return the ids of the bundles beside one that have its ranker, its own among them.

    A nightly refresh makes another bundle, whose lists and scores can be compared with those of before.
    """
    own = read_manifest(bundle)
    alike, ranker = {str(own["bundle_id"])}, own["files"].get("ranker.onnx")
    for other in bundle.parent.iterdir() if ranker else ():
        with contextlib.suppress(BundleInvalid):  # another folder, or a bundle that nothing can open
            manifest = read_manifest(other)
            if manifest["files"].get("ranker.onnx") == ranker:
                alike.add(str(manifest["bundle_id"]))
    return alike


def _answers_of(
    bundle_ids: set[str], log_dir: Path, window: Window, profile: str = ""
) -> tuple[pa.Table, int]:
    """Return a sample of the records of some bundles and one profile, and the number of all others.

    Without a profile it is a sample of all profiles.
    """
    wanted, others = pa.array(sorted(bundle_ids)), 0

    def own() -> Iterator[pa.Table]:
        nonlocal others
        for segment in read_segments(log_dir, window.since, window.until):
            found = segment.filter(pc.is_in(segment["bundle_id"], wanted))
            if profile:
                found = found.filter(pc.equal(pc.fill_null(found["profile"], DEFAULT_PROFILE), profile))
            others += len(segment) - len(found)
            yield found

    return join_segments(_sample(own(), SAMPLE)), others


def _sample(segments: Iterable[pa.Table], most: int) -> list[pa.Table]:
    """Return each segment's share of a sample of at most `most` records, and usually of a half or more.

    A shopper's records of a day are drawn together: of a checkout, only the last one is compared. Fewer are
    left where one id has many. Each n-th may be of the same store or the same process.
    """
    share, kept = 1.0, list[pa.Table]()

    def drawn(table: pa.Table) -> pa.Table:
        asker = pc.coalesce(table["user_id"], table["request_id"])
        day = pc.floor_temporal(table["answered_at"], unit="day")
        place = pd.util.hash_pandas_object(pa.table([asker, day], ["asker", "day"]).to_pandas(), index=False)
        return table.filter(pa.array(place.to_numpy() <= share * 2.0**64))

    for segment in segments:
        kept.append(drawn(segment) if share < 1 else segment)
        while sum(map(len, kept)) > most:
            share /= 2
            kept = [drawn(table) for table in kept]
    return kept


def _span(at: pd.Series) -> Window:
    return Window(at.min().to_pydatetime(), at.max().to_pydatetime()) if len(at) else Window()
