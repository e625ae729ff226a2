"""Rules, runbooks and dashboards: as written, of metrics that exist, and firing when they must."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.alerting import ROOT, main, metrics_in, read_slo, rules, seconds

FOLDER = ROOT / "infra" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
DASHBOARDS = [json.loads(file.read_text()) for file in sorted((FOLDER / "dashboards").glob("*.json"))]
FOREIGN = {"up"}  # Prometheus' own
GOOD, FAULTY = "0+600x500", "0+60x500"  # a minute


def known_metrics() -> set[str]:
    """Return the names in the product's exposition, by its reference page, which a test compares."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| `reco_")]
    names = set()
    for _, name, kind, *_ in lines:
        plain = name.strip().strip("`")
        suffixes = ("_bucket", "_sum", "_count") if kind.strip() == "histogram" else ("",)
        names |= {f"{plain}{suffix}" for suffix in suffixes}
    return names


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_the_files_are_as_the_objectives_say() -> None:
    assert main(["--check"]) == 0


def test_every_metric_of_a_rule_or_a_panel_exists() -> None:
    expressions = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    expressions += [
        target["expr"] for board in DASHBOARDS for p in board["panels"] for target in p["targets"]
    ]
    used = set().union(*map(metrics_in, expressions))
    assert len(used) > 15
    assert used <= known_metrics()
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    asked = {word for expr in expressions for word in expr.split() if word.startswith(("reco:", "(reco:"))}
    assert {word.strip("()") for word in asked} <= recorded


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    pages = {file.stem for file in (ROOT / "docs" / "runbooks").glob("*.md")} - {"index"}
    assert pages == {alert["alert"] for alert in ALERTS}
    nav = (ROOT / "mkdocs.yml").read_text()
    assert all(f"runbooks/{page}.md" in nav for page in pages)
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["labels"]["owner"]
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook_url"].endswith(f"/{alert['alert']}/")


def test_a_burn_needs_the_long_and_the_short_window() -> None:
    slo = {
        "window": "30d",
        "selector": "",
        "runbooks": "https://x/",
        "burn": [{"long": "1h", "short": "5m", "factor": 10, "severity": "page"}],
        "objectives": [
            {
                "name": "A",
                "goal": 0.99,
                "bad": "b[W]",
                "all": "a[W]",
                "says": "s",
                "owner": "o",
                "shopper": "p",
            }
        ],
        "alerts": [],
    }
    recording, alerting = rules(slo)["groups"]
    assert [rule["record"] for rule in recording["rules"]][:2] == ["reco:A:bad5m", "reco:A:bad1h"]
    assert recording["rules"][1]["expr"] == "(b[1h]) / (a[1h])"
    assert alerting["rules"][0]["expr"] == "(reco:A:bad1h > 0.1 and reco:A:bad5m > 0.1)"
    assert alerting["rules"][0]["annotations"]["description"].startswith(
        "The error budget of 1.0% burns 10 x"
    )
    assert [seconds(window) for window in ("30s", "5m", "2h", "1d")] == [30, 300, 7_200, 86_400]


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    assert len({board["uid"] for board in DASHBOARDS}) == len(DASHBOARDS) == 5
    goals = {one["name"]: one["goal"] for one in read_slo()["objectives"]}
    for board in DASHBOARDS:
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
            apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        for panel in panels:
            assert panel["fieldConfig"]["defaults"]["unit"]
            for link in panel["links"]:
                goal = goals[link["url"].split("/")[-2]]
                steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
                assert steps[-1]["value"] == pytest.approx(1 - goal)


def test_a_changed_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {tmp_path / "rules.yml": "new"}
    monkeypatch.setattr("monitoring.alerting.written", lambda slo: files)
    monkeypatch.setattr("monitoring.alerting.ROOT", tmp_path)
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert (tmp_path / "rules.yml").read_text() == "new"
    assert main(["--check"]) == 0


# ------------------------------------------------------------------------- with the tools of Prometheus

QUIET = {
    'up{job="checkout"}': "1x500",
    'reco_responses_total{job="checkout",rung="full",degraded_reason=""}': GOOD,
    'reco_faults_total{job="checkout",protocol="http"}': "0x500",
    'reco_answer_seconds_count{job="checkout"}': GOOD,
    'reco_answer_seconds_bucket{job="checkout",le="0.05"}': GOOD,
    'reco_features_age_seconds{job="checkout"}': "5x500",
    'reco_champion_served{job="checkout"}': "1x500",
    'reco_rules_broken{job="checkout"}': "0x500",
    'reco_breaker_open{job="checkout",dependency="online_store"}': "0x500",
    'reco_process_deaths_total{job="checkout"}': "0x500",
    'reco_log_records_total{job="checkout",outcome="dropped"}': "0x500",
    'reco_rejected_total{job="checkout",reason="caller"}': "0x500",
}
FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "quiet": ({}, ""),
    "faults": ({'reco_faults_total{job="checkout",protocol="http"}': FAULTY}, "CheckoutUnavailable"),
    "slow": ({'reco_answer_seconds_bucket{job="checkout",le="0.05"}': "0+400x500"}, "CheckoutSlow"),
    "degraded": (
        {'reco_responses_total{job="checkout",rung="popular",degraded_reason="x"}': "0+6000x500"},
        "CheckoutDegraded",
    ),
    "gone": ({'up{job="checkout"}': "1x2 0x500"}, "CheckoutGone"),
    "stale": ({'reco_features_age_seconds{job="checkout"}': "200x500"}, "FeaturesStale"),
    "facts": ({'reco_facts_read_timestamp_seconds{job="checkout"}': "1x500"}, "FactsStale"),
    "champion": ({'reco_champion_served{job="checkout"}': "0x500"}, "ChampionNotServed"),
    "pointer": ({'reco_champion_read_timestamp_seconds{job="checkout"}': "1x500"}, "ChampionUnread"),
    "old": ({'reco_bundle_cut_timestamp_seconds{job="checkout"}': "-3999999x500"}, "BundleOld"),
    "rules": ({'reco_rules_broken{job="checkout"}': "1x500"}, "RulesBroken"),
    "breaker": (
        {'reco_breaker_open{job="checkout",dependency="online_store"}': "1x500"},
        "DependencySkipped",
    ),
    "deaths": ({'reco_process_deaths_total{job="checkout"}': "0+1x500"}, "ProcessesDie"),
    "log": ({'reco_log_records_total{job="checkout",outcome="dropped"}': "0+9x500"}, "LogLoses"),
    "lag": (
        {
            'reco_loop_lag_seconds_bucket{job="checkout",le="0.02"}': "0+1x500",
            'reco_loop_lag_seconds_bucket{job="checkout",le="0.1"}': "0+600x500",
            'reco_loop_lag_seconds_bucket{job="checkout",le="+Inf"}': "0+600x500",
        },
        "CheckoutSaturated",
    ),
    "release": (
        {'kube_job_failed{condition="true",job_name="release-42-1"}': "1x500"},
        "ReleaseFailed",
    ),
    "guard": (
        {'kube_job_failed{condition="true",job_name="release-guard-1"}': "1x500"},
        "ReleaseStuck",
    ),
    "rejected": ({'reco_rejected_total{job="checkout",reason="caller"}': "0+100x500"}, "RequestsRejected"),
}


def test_every_alert_is_fired_once() -> None:
    assert {alert for _, alert in FAULTS.values()} - {""} == {alert["alert"] for alert in ALERTS}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_alert_fires_and_no_other(fault: str, tmp_path: Path) -> None:
    changed, alert = FAULTS[fault]
    severity = {one["alert"]: one["labels"]["severity"] for one in reversed(ALERTS)}
    names = sorted({one["alert"] for one in ALERTS})
    at = "2h"
    tests = []
    for name in names:
        firing = [one for one in ALERTS if one["alert"] == name]
        expected: list[dict[str, Any]] = []
        if name == alert:
            extra = {"dependency": "online_store"} if name == "DependencySkipped" else {}
            extra |= {"job": "checkout"} if name == "ProcessesDie" else {}
            one = next(one for one in firing if one["labels"]["severity"] == severity[name])
            expected = [{"exp_labels": one["labels"] | extra, "exp_annotations": one["annotations"]}]
            # What pages burns fast enough for the ticket, too: Alertmanager holds it back.
            expected += [
                {"exp_labels": other["labels"], "exp_annotations": other["annotations"]}
                for other in firing
                if other is not one
            ]
        tests.append({"eval_time": at, "alertname": name, "exp_alerts": expected})
    series = [{"series": name, "values": values} for name, values in (QUIET | changed).items()]
    document = {
        "rule_files": [str(FOLDER / "rules.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": tests}],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    done = subprocess.run([tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["severity=page", "owner=on-call"], "on-call"),
        (["severity=ticket", "owner=ml-team"], "ml-team"),
        (["severity=ticket", "owner=merchandising"], "merchandising"),
        (["severity=ticket", "owner=on-call"], "tickets"),
    ],
)
def test_an_alert_reaches_its_receiver(labels: list[str], receiver: str) -> None:
    file = str(FOLDER / "alertmanager.yml")
    command = [tool("amtool"), "config", "routes", "test", f"--config.file={file}", *labels]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == receiver
