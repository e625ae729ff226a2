import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from monitoring.retraining import (
    COOL_DOWN,
    claim_retrain,
    newest_result,
    note_run,
    release_retrain,
    started_run,
)
from monitoring.verdict import DriftVerdict, Status
from monitoring.windows import Window

NOW = datetime(2024, 3, 1, 12, tzinfo=UTC)


def verdict(status: Status = "drifted", day: int = 1) -> DriftVerdict:
    window = Window(datetime(2024, 2, day, tzinfo=UTC), datetime(2024, 2, day + 7, tzinfo=UTC))
    return DriftVerdict(status, "category PSI 0.2", "purchases", window, Window(), ())


def test_drift_starts_one_run_in_six_hours(tmp_path: Path) -> None:
    home, start = tmp_path / "home", NOW + timedelta(seconds=59)
    assert claim_retrain(verdict(), home, start).allowed
    assert json.loads((home / "retrain.json").read_text())["reason"] == "category PSI 0.2"
    for early in (timedelta(0), timedelta(hours=1), COOL_DOWN - timedelta(seconds=30)):
        refused = claim_retrain(verdict(day=2), home, start + early)
        assert not refused.allowed
        assert "the next may start at 2024-03-01T18:01+00:00" in refused.reason
    assert claim_retrain(verdict(day=2), home, start + COOL_DOWN).allowed


def test_one_window_starts_one_run_only(tmp_path: Path) -> None:
    claim_retrain(verdict(), tmp_path, NOW)
    again = claim_retrain(verdict(), tmp_path, NOW + timedelta(days=3))
    assert (again.allowed, "this window" in again.reason) == (False, True)


def test_a_window_starts_no_second_run_when_another_bundle_is_champion(tmp_path: Path) -> None:
    first, second, answers = (
        replace(verdict(), compared=f"{compared} of bundle {bundle}")
        for compared, bundle in (
            ("purchases with those before the cut", "a"),
            ("purchases with those before the cut", "b"),
            ("answers", "b"),
        )
    )
    claim_retrain(first, tmp_path, NOW)
    later = NOW + timedelta(days=3)
    assert "this window" in claim_retrain(second, tmp_path, later).reason
    assert claim_retrain(answers, tmp_path, later).allowed, "the window of another kind"


@pytest.mark.parametrize("started_at", ["2024-03-01T12:00:59.123456+00:00", "2024-03-01T13:00:59+01:00"])
def test_times_of_starts_are_shown_to_the_minute_in_utc(tmp_path: Path, started_at: str) -> None:
    claim_retrain(verdict(), tmp_path, NOW)
    file, later = tmp_path / "retrain.json", NOW + timedelta(hours=1)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started_at": started_at}))
    assert claim_retrain(verdict(), tmp_path, later).reason.endswith("already, at 2024-03-01T12:00+00:00")
    refused = claim_retrain(verdict(day=2), tmp_path, later).reason
    assert refused == (
        "a run was started at 2024-03-01T12:00+00:00; the next may start at 2024-03-01T18:01+00:00"
    )
    named = NOW + COOL_DOWN + timedelta(minutes=1)
    assert claim_retrain(verdict(day=2), tmp_path, named).allowed, "at the time that the message names"


@pytest.mark.parametrize("since", [None, datetime(2024, 2, 1, tzinfo=UTC)])
@pytest.mark.parametrize("until", [None, NOW + timedelta(days=30)])
def test_only_the_cool_down_limits_a_window_that_still_grows(
    tmp_path: Path, since: datetime | None, until: datetime | None
) -> None:
    growing = replace(verdict(), window=Window(since, until))
    assert claim_retrain(growing, tmp_path, NOW).allowed
    assert not claim_retrain(growing, tmp_path, NOW + timedelta(hours=1)).allowed
    assert claim_retrain(growing, tmp_path, NOW + COOL_DOWN).allowed


def test_a_start_that_was_not_made_is_taken_back(tmp_path: Path) -> None:
    first = claim_retrain(verdict(), tmp_path, NOW)
    release_retrain(first, tmp_path)
    assert not (tmp_path / "retrain.json").exists()
    assert claim_retrain(verdict(), tmp_path, NOW).allowed
    before = (tmp_path / "retrain.json").read_text()
    second = claim_retrain(verdict(day=2), tmp_path, NOW + COOL_DOWN)
    release_retrain(second, tmp_path)
    assert (tmp_path / "retrain.json").read_text() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["retrain.json", "retrain.json.lock"]


def test_the_run_of_the_last_start_is_known_once_it_is_noted(tmp_path: Path) -> None:
    assert started_run(tmp_path) == ""
    first = claim_retrain(verdict(), tmp_path, NOW)
    assert started_run(tmp_path) == ""
    note_run(first, tmp_path, "r5")
    assert started_run(tmp_path) == "r5"
    assert not claim_retrain(verdict(day=2), tmp_path, NOW).allowed
    claim_retrain(verdict(day=2), tmp_path, NOW + COOL_DOWN)
    note_run(first, tmp_path, "r5")
    assert started_run(tmp_path) == "", "a newer start has no run yet"


@pytest.mark.parametrize(
    ("run_id", "failed", "expected"),
    [
        ("r3", None, True),
        ("r2", None, True),
        ("r9", None, None),
        ("", None, None),
        ("", NOW + timedelta(hours=4), None),
        ("", NOW + timedelta(hours=3), True),
        ("", NOW, True),
    ],
)
def test_of_trainings_since_a_start_or_a_refusal_the_newest_that_ended_counts(
    run_id: str, failed: datetime | None, expected: bool | None
) -> None:
    results = {"r4": None, "r3": True, "r2": False}
    trainings = [(name, NOW + timedelta(hours=int(name[1:])), well) for name, well in results.items()]
    assert newest_result(trainings, run_id, failed) is expected


def test_a_newer_start_and_a_refusal_are_not_taken_back(tmp_path: Path) -> None:
    first = claim_retrain(verdict(), tmp_path, NOW)
    second = claim_retrain(verdict(day=2), tmp_path, NOW + COOL_DOWN)
    release_retrain(first, tmp_path)
    release_retrain(claim_retrain(verdict(day=3), tmp_path, NOW + COOL_DOWN), tmp_path)
    assert (tmp_path / "retrain.json").read_text() == second.noted


@pytest.mark.parametrize("status", ["ok", "warn", "insufficient_data", "schema_change"])
def test_only_drift_starts_a_run(tmp_path: Path, status: Status) -> None:
    assert not claim_retrain(verdict(status), tmp_path, NOW).allowed
    assert list(tmp_path.iterdir()) == [], "a refusal records nothing"
    assert claim_retrain(verdict(), tmp_path, NOW).allowed


def test_a_clock_that_was_set_back_does_not_forbid_retraining(tmp_path: Path) -> None:
    claim_retrain(verdict(), tmp_path, NOW)
    assert claim_retrain(verdict(day=2), tmp_path, NOW - timedelta(days=1)).allowed


def test_of_many_checks_at_once_one_starts_a_run(tmp_path: Path) -> None:
    decisions = []
    threads = [
        threading.Thread(
            target=lambda day=day: decisions.append(claim_retrain(verdict(day=day), tmp_path, NOW))
        )
        for day in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [decision.allowed for decision in decisions].count(True) == 1


@pytest.mark.parametrize("text", ["", "{}", '{"started_at": "then", "key": ""}', "[]", "[" * 100_000])
def test_a_broken_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "retrain.json").write_text(text)
    with pytest.raises(ValueError, match=r"retrain\.json .* remove it"):
        claim_retrain(verdict(), tmp_path, NOW)
