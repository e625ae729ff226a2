import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from feature_repo.events import read_dataset
from monitoring.windows import Window
from pipelines.bench.drift import (
    COLUMNS,
    bench_drift,
    draw_weeks,
    drift_by_week,
    drift_table,
    first_weeks,
    power_lines,
)

NEW_YORK = "America/New_York"
Events = Callable[..., pd.DataFrame]
MIX = 1 / np.arange(5, 45)
PIES = np.where(np.arange(40) == 30, 6 * MIX, MIX)


def test_each_week_has_its_row(
    events: Events, dataset: Callable[..., Path], day: Callable[[int], datetime]
) -> None:
    data = read_dataset(dataset(events(28), events(7, first_day=28, mix=PIES)))
    weeks = drift_by_week(data, Window(day(0), day(28)), ["category", "hour"])
    category = weeks[weeks["column"] == "category"]
    mondays = [f"2024-01-{number:02d}" for number in (1, 8, 15, 22, 29)]
    assert category["week"].tolist() == mondays
    assert category["status"].tolist() == [*["ok"] * 4, "alarm"]


def test_the_reference_begins_with_the_first_whole_week(
    events: Events, dataset: Callable[..., Path], day: Callable[[int], datetime]
) -> None:
    assert first_weeks(read_dataset(dataset(events(3)))) == Window(day(0), day(63))
    assert first_weeks(read_dataset(dataset(events(1).assign(at=day(-1))))) == Window(day(0), day(63))
    assert first_weeks(read_dataset(dataset(events(3, first_day=1)))) == Window(day(7), day(70))


@pytest.mark.slow
def test_weeks_are_drawn(tmp_path: Path) -> None:
    weeks = pd.DataFrame(
        {
            "week": ["2024-01-01", "2024-01-08"],
            "column": "category",
            "psi": [0.02, 0.2],
            "noise_floor": 0.01,
            "warn_at": 0.06,
            "alarm_at": 0.1,
            "status": ["ok", "alarm"],
        }
    )
    draw_weeks(weeks, tmp_path / "pictures" / "weeks.png", "PSI")
    assert (tmp_path / "pictures" / "weeks.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_the_cause_of_each_alarm() -> None:
    found = {"noise_floor": 0.01, "warn_at": 0.06, "alarm_at": 0.1}
    rows = [
        {"week": "2024-01-01", "column": "category", "psi": 0.2, "status": "alarm", **found},
        {"week": "2024-01-01", "column": "hour", "psi": None, "status": "insufficient_data", **found},
        {"week": "2024-01-08", "column": "category", "psi": 0.07, "status": "warn", **found},
        {"week": "2024-01-08", "column": "hour", "psi": 0.02, "status": "ok", **found},
    ]
    reference = {"since": "2023-01-02T00:00:00+00:00", "until": "2023-03-06T00:00:00+00:00"}
    result = {"dataset": "shop", "commit": "abc", "measured_at": "now", "reference": reference, "weeks": rows}
    delays: list[dict[str, float | None]] = [{"share": 0.2, "days": 3, "psi": 0.2, "alarm_at": 0.1}]
    delays += [{"share": 0.1, "days": None, "psi": psi, "alarm_at": psi} for psi in (0.05, None)]
    concept = [{"share": 0.2, "hit_ratio_at_10": 0.3, "before": 0.4, "baskets": None}]
    predictions = [{"share": 0.2, "psi": 0.05, "kl": 0.025}]
    result |= {"delays": delays, "predictions": predictions, "concept": concept, "power": []}
    table = drift_table(result).splitlines()
    assert {"| 20% | 3 | 0.200 | 0.100 |", "| 20% | 0.0500 | 0.0250 |"} < set(table)
    assert {"| 10% | never | 0.050 | 0.050 |", "| 10% | too few baskets | – | – |"} < set(table)
    assert "| 20% | 0.400 | 0.300 | never |" in table
    seen = [{"column": "store_id", "level": "s1", "share": 0.5, "factor": x, "seen": x - 1} for x in (1, 1.5)]
    lines = power_lines(seen)
    assert lines[1].endswith(" grows. In how many of 6 weeks it is seen; x 1: false alarms.")
    assert lines[-1] == "| s1 | 50.0% | 0% | 50% |"
    assert table[4:8] == [
        "| week of | category | hour |",
        "|---|---|---|",
        "| 2024-01-01 | **0.200** | – |",
        "| 2024-01-08 | *0.070* | 0.020 |",
    ]


@pytest.mark.slow
def test_the_result_is_written(toy_line: Path, tmp_path: Path) -> None:
    result = bench_drift(toy_line / "evaluated", toy_line / "dataset", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "drift.json").read_bytes())
    assert written["weeks"] == result["weeks"]
    assert len(written["weeks"]) == 28 * (len(COLUMNS) + 1)
    assert {(row["psi"], row["status"]) for row in written["weeks"]} == {(None, "insufficient_data")}
    pictures = {"drift.png", "drift-delay.png"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"drift.json", "drift.md", *pictures}


@pytest.mark.slow
def test_the_real_year_alarms_in_its_known_weeks_only(tmp_path: Path) -> None:
    """Easter, Memorial Day, Thanksgiving and Christmas alarm; quiet weeks and spikes do not."""
    from components.data.complete_journey import read_complete_journey
    from feature_repo.events import complete_columns, write_dataset

    raw = read_complete_journey()
    week = (raw.events["at"].dt.tz_convert(NEW_YORK).dt.dayofyear - 2) // 7 + 2
    events = raw.events[week.isin([*range(1, 17), 22, 26, 27, 28, 39, 48, 52])]
    write_dataset(tmp_path / "dataset", replace(raw, events=complete_columns(events)))
    data = read_dataset(tmp_path / "dataset")
    reference = first_weeks(data)  # weeks 2 to 10 of the data set's own count
    assert reference.since is not None
    assert reference.until is not None
    assert (reference.since.date().isoformat(), (reference.until - timedelta(days=1)).date().isoformat()) == (
        "2017-01-02",
        "2017-03-05",
    )
    weeks = drift_by_week(data, reference, ["category", "item_price"])
    weeks["number"] = (pd.to_datetime(weeks["week"]) - pd.Timestamp("2017-01-02")).dt.days // 7 + 2
    table = weeks.pivot(index="number", columns="column")
    category, alarms = table["psi"]["category"], table["status"]["category"] == "alarm"
    measured_before = {16: 0.127, 22: 0.127, 27: 0.142, 28: 0.118, 48: 0.178, 52: 0.169}
    for number, psi in measured_before.items():
        assert category[number] == pytest.approx(psi, rel=0.1), number
    quiet = list(range(3, 16))
    assert alarms[[16, 22, 48, 52]].all()
    assert (table["status"]["category"][quiet] == "ok").all()
    assert category[quiet].max() < 0.045
    # One-week price spikes are no alarms.
    assert (table["status"]["item_price"][[9, 13, 26, 39]] == "ok").all()
