"""`reco drift` and `reco doctor` on the toy champion."""

import json
import re
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from components.home import Conflict
from monitoring.verdict import ColumnDrift, DriftVerdict
from monitoring.windows import Window
from pipelines.cli.watch import _kpi_text
from pipelines.inspect.earnings import read_earnings
from serving.settings import Settings
from tests.champions import promote_sealed
from tests.chaos.procs import free_port
from tests.monitoring.shop_visits import write_visits
from tests.pipelines.cli.conftest import PRICE, answered, reco
from tests.pipelines.conftest import VERDICT, promote_run


@pytest.mark.parametrize(
    ("outcome", "code"),
    [({"started": False, "said": "not started: x"}, 1), (Conflict("process 7 is running a pipeline"), 4)],
    ids=["drifted", "conflict"],
)
def test_drift_reports_the_outcome_of_the_retraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any] | Conflict, code: int
) -> None:
    def retrain(home: Path, verdict: DriftVerdict, stream: object, cool_down: object) -> dict[str, Any]:
        assert (home, verdict.status) == (tmp_path, "drifted")
        if isinstance(outcome, Conflict):
            raise outcome
        return outcome

    promote_sealed(tmp_path)
    monkeypatch.setattr("monitoring.drift.drift_of_log", lambda *_: VERDICT)
    monkeypatch.setattr("pipelines.run.launch.retrain", retrain)
    done = reco(tmp_path, "drift", "--quick", "--retrain", "--output", "json")
    assert done.exit_code == code
    if code == 1:
        assert json.loads(done.stdout)["retrain"] == outcome
    text = reco(tmp_path, "drift", "--quick", "--retrain").stdout
    # The verdict comes before the training: it is there, once, also when the training fails.
    assert text == "drifted: category PSI 0.3\n" + ("retraining: not started: x\n" if code == 1 else "")


def test_a_column_that_is_only_shown_is_marked_in_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = ColumnDrift("hour", "alarm", False, "", 300, 900, 0.0, 0.0, 0.3, 0.01, 0.06, 0.1)
    verdict = DriftVerdict("warn", "hour moved", "answers", Window(), Window(), (hour,))
    promote_sealed(tmp_path)
    monkeypatch.setattr("monitoring.drift.drift_of_log", lambda *_: verdict)
    assert "hour    alarm, shown only  0.3" in reco(tmp_path, "drift", "--quick").output


def test_money_has_two_decimals_and_a_margin_needs_costs(tmp_path: Path) -> None:
    write_visits(Settings(home=tmp_path), 200)
    head, total, *_ = reco(tmp_path, "kpi").stdout.splitlines()
    columns = ["by", "value", "sessions", "conversion", "acceptance", "revenue", "basket", "new", "ms"]
    assert head.split() == columns
    assert re.fullmatch(r"all +\d+ +0\.\d{3} +0\.\d{3} +0\.\d\d +\d+\.\d\d +\d\.\d{3} +3\.0", total)
    assert "no fact gives the cost of an item, so there is no margin" in reco(tmp_path, "kpi").stdout
    cost = json.loads(PRICE) | {"fact": "cost", "item_id": "shown"}
    (tmp_path / "facts.jsonl").write_text(json.dumps(cost))
    assert reco(tmp_path, "facts", str(tmp_path / "facts.jsonl")).exit_code == 0
    shown = reco(tmp_path, "kpi").stdout
    assert "revenue  margin  basket" in shown
    assert "\nrevenue and margin are of accepted items" in shown
    earnings = read_earnings(Settings(home=tmp_path), None, 24)
    empty = replace(earnings.total, sessions=0, margin_per_session=None)
    assert "\nrevenue is of accepted items" in _kpi_text(replace(earnings, total=empty))


def test_a_bundle_is_no_data(tmp_path: Path) -> None:
    promote_sealed(tmp_path)
    [bundle] = (tmp_path / "bundles").iterdir()
    done = reco(tmp_path, "drift", "--quick", "--data", str(bundle))
    assert (done.exit_code, "holds a bundle, expected a dataset" in done.output) == (1, True)


@pytest.mark.slow
def test_an_empty_log_is_one_line_not_a_table(home: Path) -> None:
    done = reco(home, "drift", "--quick")
    assert done.exit_code == 2, "neither drifted nor fine"
    assert done.output.startswith(f"insufficient_data: {home / 'prediction_log'} holds no answer")
    assert len(done.output.splitlines()) == 1


@pytest.mark.slow
def test_drift_is_measured_against_another_window_of_the_same_data(home: Path, toy_line: Path) -> None:
    """The toy shop's weeks before the cut are alike; against themselves nothing has moved at all."""
    place = str(toy_line / "dataset")
    stretch = ["2024-03-01", "2024-04-01"]
    same = ["--from", stretch[0], "--until", stretch[1]]
    reference = ["--reference-from", stretch[0], "--reference-until", stretch[1]]
    verdict = answered(reco(home, "drift", "--quick", "--data", place, *same, *reference, "--output", "json"))
    assert verdict["status"] == "ok"
    assert {column["psi"] for column in verdict["columns"]} == {0.0}
    assert verdict["compared"] == "purchases with those of another window"


def test_the_doctor_reports_a_damaged_pointer(tmp_path: Path) -> None:
    (tmp_path / "champion.json").write_text("{")
    done = reco(tmp_path, "doctor", "--output", "json")
    [found] = [finding for finding in json.loads(done.stdout) if finding["name"] == "champion"]
    assert (done.exit_code, found["status"], found["runbook"]) == (1, "fail", "ChampionUnread")
    assert "runbook: docs/runbooks/ChampionUnread.md" in reco(tmp_path, "doctor").output


def test_a_port_of_metrics_in_use_is_reported_with_its_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = reco(tmp_path, "watch", "--port", str(port))
    assert (done.exit_code, "choose another one with --port" in done.output) == (4, True)


@pytest.mark.parametrize(("options", "expected"), [(["--retrain"], True), ([], None)])
def test_a_watch_that_retrains_on_this_machine_reads_how_its_trainings_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: bool | None
) -> None:
    results: list[bool | None] = []

    def watched(*given: Any) -> int:
        result = given[-1]
        results.append(result and result(datetime.now(UTC) - timedelta(hours=1)))
        return 1

    promote_run(tmp_path)
    monkeypatch.setattr("pipelines.live.watching.watch_home", watched)
    assert reco(tmp_path, "watch", "--port", str(free_port()), *options).exit_code == 0
    assert results == [expected]
