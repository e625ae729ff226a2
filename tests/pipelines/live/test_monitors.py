"""The pages of a fault; and with Alertmanager itself, which alert holds back which."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from monitoring.alerting import ROOT, read_slo
from pipelines.live.monitors import (
    EXEMPT,
    Monitors,
    Notice,
    Programs,
    _receiver,
    _running,
    configure,
    monitor_commands,
    monitor_programs,
    pages_of,
)
from pipelines.live.ports import free_port
from tests.chaos.listening import http_answers
from tests.chaos.procs import eventually


def installed() -> Programs:
    programs = monitor_programs()
    if programs is None:
        pytest.skip("prometheus is not installed")
    return programs


def notice(alert: str, at: float, is_firing: bool = True, severity: str = "page") -> Notice:
    return Notice(alert, severity, is_firing, at)


def test_a_page_counts_from_its_fault_and_its_end_from_the_repair() -> None:
    notices = [
        notice("CheckoutDegraded", 140.0),
        notice("DependencySkipped", 150.0, severity="ticket"),
        notice("CheckoutDegraded", 350.0, is_firing=False),
    ]
    (row,) = pages_of(notices, [("killed", 100.0, 175.0)], {"killed": "CheckoutDegraded"})
    assert row == {
        "fault": "killed",
        "expected": "CheckoutDegraded",
        "paged_s": 40.0,
        "resolved_s": 175.0,
        "wrong": [],
        "tickets": ["DependencySkipped"],
    }


def test_the_end_of_a_ticket_is_not_the_end_of_the_page_of_its_alert() -> None:
    notices = [
        notice("A", 120.0),
        notice("A", 130.0, severity="ticket"),
        notice("A", 200.0, is_firing=False),
        notice("A", 900.0, is_firing=False, severity="ticket"),
    ]
    (row,) = pages_of(notices, [("f", 100.0, 150.0)], {"f": "A"})
    assert row["resolved_s"] == 50.0


def test_a_page_that_comes_again_is_resolved_by_its_last_end() -> None:
    again = [notice("A", 120.0), notice("A", 200.0, is_firing=False), notice("A", 230.0)]
    (still,) = pages_of(again, [("f", 100.0, 150.0)], {"f": "A"})
    assert still["resolved_s"] is None
    (over,) = pages_of([*again, notice("A", 300.0, is_firing=False)], [("f", 100.0, 150.0)], {"f": "A"})
    assert over["resolved_s"] == 150.0


def test_a_series_has_the_name_of_its_labels_and_not_of_its_rule() -> None:
    rows = [
        {"metric": {"__name__": "reco:CheckoutSlow:bad5m"}, "values": [[100.0, "0.5"]]},
        {"metric": {"__name__": "reco_breaker_open", "dependency": "online_store"}, "values": []},
    ]

    with http_answers(lambda path: (200, json.dumps({"data": {"result": rows}}).encode())) as prometheus:
        series = Monitors(prometheus, time.monotonic()).series("up")
    assert set(series) == {"", "online_store"}


def test_a_page_of_another_alert_before_the_fault_or_where_none_is_due_is_wrong() -> None:
    faults = [("first", 100.0, 110.0), ("second", 200.0, 210.0)]
    notices = [
        notice("CheckoutSlow", 50.0),  # nothing is broken yet
        notice("CheckoutSlow", 90.0, is_firing=False),
        notice("CheckoutDegraded", 120.0),
        notice("CheckoutDegraded", 205.0),  # the second must not page
    ]
    first, second = pages_of(notices, faults, {"first": "CheckoutDegraded"})
    assert (first["paged_s"], first["resolved_s"], first["wrong"]) == (20.0, None, ["CheckoutSlow"])
    assert (second["paged_s"], second["wrong"]) == (None, ["CheckoutDegraded"])


def test_an_expected_page_before_its_fault_is_no_page_for_it() -> None:
    (row,) = pages_of([notice("A", 50.0)], [("f", 100.0, 110.0)], {"f": "A"})
    assert row["paged_s"] is None


def test_pages_are_open_until_they_are_resolved() -> None:
    monitors = Monitors("", 0.0, [notice("A", 1.0), notice("B", 2.0), notice("T", 3.0, severity="ticket")])
    assert monitors.open_pages() == {"A", "B"}
    monitors.notices.append(notice("A", 4.0, is_firing=False))
    assert monitors.open_pages() == {"B"}
    assert [one.alert for one in monitors.since(3.0)] == ["T", "A"]


def test_the_shipped_rules_and_routes_are_used_without_the_alert_that_demo_data_always_fire(
    tmp_path: Path,
) -> None:
    configure(tmp_path, "127.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3/")
    written = yaml.safe_load((tmp_path / "rules.yml").read_text())
    alerts = {rule["alert"] for group in written["groups"] for rule in group["rules"] if "alert" in rule}
    slo = read_slo()
    assert alerts == {one["name"] for one in [*slo["objectives"], *slo["alerts"]]} - {EXEMPT}
    routes = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())
    shipped = yaml.safe_load((ROOT / "infra/monitoring/alertmanager.yml").read_text())
    assert (routes["route"], routes["inhibit_rules"]) == (shipped["route"], shipped["inhibit_rules"])
    assert all(one["webhook_configs"][0]["url"] == "http://127.0.0.1:3/" for one in routes["receivers"])


def post(address: str, *names: str) -> None:
    slo = read_slo()
    known = {one["name"]: one for one in [*slo["objectives"], *slo["alerts"]]}
    alerts = [
        {
            "labels": {
                "alertname": name,
                "severity": known[name].get("severity", "page"),
                "owner": known[name]["owner"],
            }
        }
        for name in names
    ]
    request = urllib.request.Request(
        f"http://{address}/api/v2/alerts",
        json.dumps(alerts).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fired", "reaches"),
    [
        (["FeaturesStale", "CheckoutDegraded"], {"FeaturesStale"}),
        (["CheckoutDegraded", "DependencySkipped", "FactsStale"], {"CheckoutDegraded"}),
        (["CheckoutGone", "CheckoutSlow", "CheckoutDegraded"], {"CheckoutGone"}),
        (["CheckoutSlow", "CheckoutDegraded", "CheckoutSaturated"], {"CheckoutSlow"}),
    ],
)
def test_one_fault_reaches_a_person_once(fired: list[str], reaches: set[str], tmp_path: Path) -> None:
    programs, address, notices = installed(), f"127.0.0.1:{free_port()}", list[Notice]()
    with _receiver(notices) as hook:
        configure(tmp_path, "127.0.0.1:9", address, hook)
        command, _ = monitor_commands(programs, tmp_path, "127.0.0.1:9", address)
        with _running(command, address, tmp_path):
            post(address, *fired)
            time.sleep(1)
            post(address, "RulesBroken")  # of another owner: held back by none; its group is the last to wait
            eventually(lambda: "RulesBroken" in {one.alert for one in notices}, 120)
    assert {one.alert for one in notices} == reaches | {"RulesBroken"}


@pytest.mark.slow
def test_a_program_that_ends_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(TimeoutError, match="false does not answer"),
        _running(["false"], "127.0.0.1:9", tmp_path),
    ):
        pass
