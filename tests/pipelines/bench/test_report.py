"""Figures -> the tables, numbers and files that every bench and drill writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from components import measurement
from pipelines.bench.report import (
    busy_line,
    fixed,
    machine_line,
    percent,
    percentiles,
    picture,
    short,
    write_report,
)


def test_percentiles_are_values_and_missing_where_they_cannot_be_resolved() -> None:
    values = np.arange(1_001, dtype=float)
    numbers = percentiles(values[:101][::-1])
    assert (numbers["p50"], numbers["p95"], numbers["p99"]) == (50.0, 95.0, 99.0)
    assert (numbers["p99_9"], numbers["mean"], numbers["max"]) == (None, 50.0, 100.0)
    assert percentiles(values[:100])["p99"] is None, "of 100 values it would be the maximum"
    assert (percentiles(values)["p99_9"], percentiles(values[:1_000])["p99_9"]) == (999.0, None)
    assert percentiles([7.0])["p50"] == 7.0
    assert set(percentiles([]).values()) == {None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(1234.567, 1), "1,234.6"),
        (fixed(2.0, 1, "x"), "2.0x"),
        (fixed(None), "–"),
        (short(2.314), "2.31"),
        (short(1234.5), "1,234"),
        (short(None), "–"),
        (percent(0.125, 1), "12.5%"),
        (percent(None), "–"),
    ],
)
def test_numbers_are_short_and_missing_ones_a_dash(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.slow  # starts git
def test_a_report_has_machine_and_commit_in_both_files(tmp_path: Path) -> None:
    before = {"at": 0.0, "load_average": (0.5, 0, 0), "steal_s": 0.0}
    result = write_report(tmp_path, "some", {"bundle_id": "b1", "p50": np.float64(2)}, machine_line, before)
    assert json.loads((tmp_path / "some.json").read_bytes())["p50"] == 2
    page = (tmp_path / "some.md").read_text()
    assert page.startswith("bundle b1, commit ")
    assert f"{result['machine']['cores']} cores, load average 0.50 before and " in page
    assert result["busy"]["after"]["at"] > 0


@pytest.mark.parametrize("commits", [("abc", "def"), ("abc", "abc+"), ("abc+", "abc")])
def test_a_commit_that_changed_meanwhile_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: tuple[str, str]
) -> None:
    now = iter(commits)
    monkeypatch.setattr(measurement, "commit", lambda: next(now, commits[1]))
    before = measurement.machine_state()
    assert write_report(tmp_path, "some", {}, machine_line, before)["commit"] == "abc+"


def test_the_share_of_stolen_time_is_of_all_cores() -> None:
    states = [
        {"at": at, "load_average": (load, 9, 9), "steal_s": steal}
        for at, load, steal in ((100.0, 0.5, 7.0), (120.0, 1.5, 8.0))
    ]
    result = {"machine": {"cores": 2}, "busy": dict(zip(("before", "after"), states, strict=True))}
    assert busy_line(result) == ", load average 0.50 before and 1.50 after, 2.5% of the time stolen"
    assert busy_line({"machine": {"cores": 2}}) == ""


def test_a_picture_is_written_whole_after_its_block(tmp_path: Path) -> None:
    with picture(tmp_path / "some.png", (3, 2), ncols=2) as (_, [[left, right]]):
        left.plot([1, 2])
        right.plot([2, 1])
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["some.png"]
