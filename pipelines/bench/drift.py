"""A data set -> the drift of each of its weeks against its first ones: table, picture, result file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from components.measurement import machine_state
from feature_repo.events import Dataset, read_dataset
from monitoring.drift import compare
from monitoring.verdict import judge
from monitoring.windows import Embeddings, EventFrames, Window, event_tables, purchases
from pipelines.bench.injected_drift import (
    SIGMAS,
    WEEKS,
    concept_drift,
    detection_delays,
    draw_delays,
    prediction_drift,
    share_power,
)
from pipelines.bench.report import fixed, percent, picture, table, write_report
from serving.release.manifest import read_manifest

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
)
FIELDS = ("psi", "noise_floor", "warn_at", "alarm_at", "status")
_LINES = (
    ("alarm_at", "-", "alarm line"),
    ("warn_at", "--", "warning line"),
    ("noise_floor", ":", "noise floor"),
)


def bench_drift(bundle: Path, dataset: Path, out_dir: Path) -> dict[str, Any]:
    """Measure every week; write `drift.json`, `drift.md` and two pictures; return the content of the JSON.

    The data set holds the weeks after the bundle's cut. Each is compared with the first nine whole ones.
    """
    before, data = machine_state(), read_dataset(dataset)
    reference = first_weeks(data)
    weeks = drift_by_week(data, reference, embeddings=Embeddings.of(bundle))
    category = weeks[weeks["column"] == "category"]
    draw_weeks(category, out_dir / "drift.png", f"Category mix of {data.manifest['name']}, week by week")
    concept, scores = concept_drift(bundle, data)
    delays = detection_delays(data, reference)
    draw_delays(delays, out_dir / "drift-delay.png")
    figures = {
        "bundle_id": read_manifest(bundle)["bundle_id"],
        "delays": delays,
        "power": share_power(data, reference),
        "predictions": prediction_drift(scores),
        "concept": concept,
        "dataset": data.manifest["name"],
        "data_hash": data.manifest["data_hash"],
        "reference": reference.to_dict(),
        "weeks": weeks.astype(object).where(weeks.notna(), None).to_dict("records"),
    }
    return write_report(out_dir, "drift", figures, drift_table, before)


def drift_by_week(
    data: Dataset,
    reference: Window,
    columns: Sequence[str] = COLUMNS,
    embeddings: Embeddings | None = None,
) -> pd.DataFrame:
    """Return one row for each local week (Monday to Sunday) and column: week, column and FIELDS."""
    timezone, before = str(data.manifest["timezone"]), purchases(data, reference)
    if embeddings is not None:
        embeddings = embeddings.with_regions(before["item_id"], before["basket_id"])
        columns = [*columns, "basket_region"]
    expected = EventFrames.of(before, timezone, embeddings)
    first, last = (pd.Timestamp(data.manifest[end]).tz_convert(timezone) for end in ("first_at", "last_at"))
    rows = []
    monday = first.normalize() - pd.DateOffset(days=first.dayofweek)
    while monday <= last:
        window = _week(monday, 1)
        tables = event_tables(EventFrames.of(purchases(data, window), timezone, embeddings), expected)
        verdict = judge(compare([table.only(columns) for table in tables]))
        for name in columns:
            column = asdict(verdict.column(name))
            rows.append([monday.date().isoformat(), name, *(column[key] for key in FIELDS)])
        log.info("week of %s: %s", monday.date(), verdict.status)
        monday += pd.DateOffset(days=7)
    return pd.DataFrame(rows, columns=["week", "column", *FIELDS])


def draw_weeks(weeks: pd.DataFrame, file: Path, title: str) -> None:
    """Draw the rows of one column of `drift_by_week` as a PNG."""
    week, psi = pd.to_datetime(weeks["week"]), weeks["psi"]
    alarms = (weeks["status"] == "alarm").to_numpy()
    with picture(file, (9, 3.6)) as (_, axes):
        axis = axes[0, 0]
        axis.plot(week, psi, color="#33576b", linewidth=1.2, marker="o", markersize=3, label="PSI")
        axis.plot(week[alarms], psi[alarms], "o", color="#b3261e", markersize=6, label="alarm")
        for name, style, label in _LINES:
            axis.plot(week, weeks[name], style, color="grey", linewidth=1, label=label)
        axis.set(ylabel="PSI", title=title, ylim=(0, None))
        axis.legend(frameon=False, fontsize=8, ncols=5, loc="upper left")


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
        *table(["week of", *names], _cells(weeks)),
        *injected_lines(result),
    ]
    return "\n".join(lines) + "\n"


def injected_lines(result: dict[str, Any]) -> list[str]:
    """Return the response of the checks to changes of known size."""
    delays, predictions, concept = (result[name] for name in ("delays", "predictions", "concept"))
    return [
        "",
        "Injected: a share of all lines turns into lines of the most common category. Each day a check "
        "compares the last seven days.",
        "",
        *table(
            ["share of lines", "days until the alarm", "PSI then", "alarm line"],
            [[percent(r["share"]), _delay(r), fixed(r["psi"], 3), fixed(r["alarm_at"], 3)] for r in delays],
        ),
        *power_lines(result["power"]),
        "",
        "Injected: later probabilities are lowered by a share, against earlier ones in the same bins.",
        "",
        *table(
            ["lowered by", "PSI", "KL divergence"],
            [[percent(r["share"]), fixed(r["psi"], 4), fixed(r["kl"], 4)] for r in predictions],
        ),
        "",
        "Injected: a share of purchases turns into any item, while requests and probabilities stay. No PSI "
        f"moves. Hits fall; detected: {SIGMAS:g} standard deviations below those of the earlier half. Where "
        "0%, the control, has a number, a share that needs about as many baskets proves nothing.",
        "",
        *table(
            ["share of purchases", "hit ratio before", "after", "baskets until detected"],
            [
                [
                    percent(r["share"]),
                    fixed(r["before"], 3),
                    fixed(r["hit_ratio_at_10"], 3),
                    r["baskets"] or "never",
                ]
                for r in concept
            ],
        ),
    ]


def power_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often a share that grew by a factor is seen in one week."""
    lines: list[str] = []
    for column in dict.fromkeys(row["column"] for row in rows):
        own = pd.DataFrame([row for row in rows if row["column"] == column])
        seen = own.pivot_table("seen", ["level", "share"], "factor").sort_index(
            level="share", ascending=False
        )
        lines += [
            "",
            f"Injected: the share of one {column} grows. In how many of {WEEKS} weeks it is seen; x 1: false "
            "alarms.",
            "",
            *table(
                [column, "share of rows", *(f"x {factor:g}" for factor in seen.columns)],
                [
                    [name, percent(share, 1), *map(percent, row)]
                    for (name, share), row in zip(seen.index, seen.to_numpy(), strict=True)
                ],
            ),
        ]
    return lines


def _delay(row: dict[str, Any]) -> int | str:
    return row["days"] or ("too few baskets" if row["psi"] is None else "never")


def _cells(weeks: pd.DataFrame) -> Iterator[list[str]]:
    for week, rows in weeks.groupby("week", sort=False):
        values = [(row.status, None if pd.isna(row.psi) else float(row.psi)) for row in rows.itertuples()]
        yield [str(week), *(_MARKS.get(status, "{}").format(fixed(psi, 3)) for status, psi in values)]


_MARKS = {"alarm": "**{}**", "warn": "*{}*"}


def _week(monday: pd.Timestamp, count: int) -> Window:
    return Window(monday.to_pydatetime(), (monday + pd.DateOffset(days=7 * count)).to_pydatetime())
