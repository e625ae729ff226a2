"""Rules, runbooks and dashboards: as written, of metrics that exist, and firing when they must."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.special import bdtrc

from monitoring.alerting import RESOURCE, ROOT, main, read_slo, rules, seconds

FOLDER = ROOT / "infra" / "monitoring"
RULES = yaml.safe_load(RESOURCE.read_text())["spec"]
ALERTMANAGER = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
DASHBOARDS = [json.loads(file.read_text()) for file in sorted((FOLDER / "dashboards").glob("*.json"))]
GOOD = "0+150x300"  # each 15 s, for 75 minutes


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


def test_a_page_names_the_job() -> None:
    page = (ROOT / "docs" / "runbooks" / "CheckoutGone.md").read_text()
    assert f"absent(up{{{read_slo()['selector']}}} == 1)" in page


@pytest.mark.parametrize(
    ("name", "fires"),
    [("CheckoutGone", "`, for 20s.\n"), ("CheckoutSlow", "the error budget burns too fast")],
)
def test_a_page_says_when_its_alert_fires(name: str, fires: str) -> None:
    assert fires in (ROOT / "docs" / "runbooks" / f"{name}.md").read_text()


def test_the_page_of_a_drift_looks_at_the_week_that_the_watch_looked_at() -> None:
    page = (ROOT / "docs" / "runbooks" / "DriftFound.md").read_text()
    week = "--from $(date -u -d -7days +%F)"
    assert f"\nreco drift --report drift.html {week}\n" in page
    assert f"\nreco drift {week} --data .reco/offline_store\n" in page, "the look `purchases`"
    assert "\nreco kpi\n" in page, "the look `labels`"


def test_a_training_that_a_page_starts_on_a_cluster_reads_the_shops_data_and_is_released() -> None:
    acts = [
        line
        for alert in read_slo()["alerts"]
        for line in alert["act"]
        if "reco run --data" in line or "reco submit" in line
    ]
    assert len(acts) > 1
    for line in acts:
        assert "`reco submit --release --data DIR`" in line


def test_every_metric_of_a_rule_or_a_panel_exists() -> None:
    expressions = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    expressions += [
        target["expr"] for board in DASHBOARDS for p in board["panels"] for target in p["targets"]
    ]
    used = {name for expr in expressions for name in re.findall(r"\breco_\w+", expr)}
    assert len(used) > 15
    assert used <= known_metrics()
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    asked = {word for expr in expressions for word in expr.split() if word.startswith(("reco:", "(reco:"))}
    assert {word.strip("()") for word in asked} <= recorded


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    pages = {file.stem for file in (ROOT / "docs" / "runbooks").glob("*.md")} - {"index"}
    assert pages == {alert["alert"] for alert in ALERTS}
    site = (ROOT / "mkdocs.yml").read_text()
    assert all(f"runbooks/{page}.md" in site for page in pages)
    assert "\nuse_directory_urls: false" in site, "pages would be folders, and the links end in .html"
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["labels"]["owner"]
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook_url"].endswith(f"/runbooks/{alert['alert']}.html")


def test_a_burn_needs_the_long_and_the_short_window_and_a_page_the_last_minute_too() -> None:
    slo = {
        "window": "30d",
        "selector": "",
        "runbooks": "https://x/",
        "gate": "1m",
        "burn": [
            {"long": "2m", "short": "30s", "share": 0.2, "least": 60, "severity": "page"},
            {"long": "1h", "short": "5m", "factor": 10, "severity": "page"},
            {"long": "3d", "short": "6h", "factor": 1, "severity": "ticket"},
        ],
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
    slow, fast = rules(slo)["groups"]
    names = [rule["record"] for rule in slow["rules"]]
    assert names == ["reco:A:bad1h", "reco:A:bad6h", "reco:A:bad3d"]
    assert slow["rules"][0]["expr"] == "(b[1h]) / (a[1h])"
    names = [rule.get("record", "") for rule in fast["rules"]][:4]
    assert names == ["reco:A:bad30s", "reco:A:bad1m", "reco:A:bad2m", "reco:A:bad5m"]
    page, ticket = fast["rules"][-2:]
    assert page["expr"] == (
        "((reco:A:bad2m > 0.2 and reco:A:bad30s > 0.2 and a[2m] > 0.5) "
        "or (reco:A:bad1h > 0.1 and reco:A:bad5m > 0.1)) and reco:A:bad1m > 0.01"
    )
    assert ticket["expr"] == "(reco:A:bad3d > 0.01 and reco:A:bad6h > 0.01)"
    assert (page["keep_firing_for"], "keep_firing_for" in ticket) == ("2m", False)
    assert "burns with 20% of the requests over 2m or 10 x" in page["annotations"]["description"]
    assert [seconds(window) for window in ("30s", "5m", "2h", "1d")] == [30, 300, 7_200, 86_400]


def test_a_board_has_its_own_id_and_a_panel_the_line_of_its_objective() -> None:
    assert len({board["uid"] for board in DASHBOARDS}) == len(DASHBOARDS) == 5
    goals = {one["name"]: one["goal"] for one in read_slo()["objectives"]}
    for board in DASHBOARDS:
        for panel in board["panels"]:
            assert panel["fieldConfig"]["defaults"]["unit"]
            for link in panel["links"]:
                goal = goals[link["url"].split("/")[-1].removesuffix(".html")]
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

JOB = 'job="checkout"'
RESPONSES = f"reco_responses_total{{{JOB},rung="
FULL = f'{RESPONSES}"full",degraded_reason="none"}}'
STALE = f'{RESPONSES}"full",degraded_reason="stale_features"}}'
WITHOUT_STORE = f'{RESPONSES}"full",degraded_reason="features_unavailable"}}'
FAULTS_OF_OURS = f'reco_faults_total{{{JOB},protocol="http"}}'
IN_TIME = f'reco_answer_seconds_bucket{{{JOB},le="0.05"}}'
AGE = f"reco_features_age_seconds{{{JOB}}}"
BREAKER = f'reco_breaker_open{{{JOB},dependency="online_store"}}'
JOB_FAILED = 'kube_job_failed{condition="true",job_name="release-42-1"'
GUARD = '{namespace="checkout",cronjob="release-guard"}'
RESTARTS = 'kube_pod_container_status_restarts_total{container="kserve-container",namespace'
LIVE_RESTARTS = 'kube_pod_container_status_restarts_total{namespace="checkout",container="reco",pod="stream"}'
REJECTED = f'reco_rejected_total{{{JOB},reason="caller"}}'
QUIET = {
    f"up{{{JOB}}}": "1x300",
    f'up{{{JOB},slot="green"}}': "0x300",  # pods that start
    f'{JOB_FAILED},namespace="marketing"}}': "1x300",
    f"kube_cronjob_created{GUARD}": "0x300",
    f"kube_cronjob_status_last_successful_time{GUARD}": "0+15x300",
    f'{RESTARTS}="checkout",pod="a"}}': "0x300",
    f'{RESTARTS}="marketing",pod="a"}}': "0+1x300",
    FULL: GOOD,
    # A shop where little is left, one greedy shopper and prefetches in a rush: as it must be.
    f'{RESPONSES}"empty",degraded_reason="nothing_left"}}': GOOD,
    f'{RESPONSES}"popular",degraded_reason="user_over_limit"}}': GOOD,
    f'reco_rejected_total{{{JOB},reason="overloaded"}}': GOOD,
    f'reco_rejected_total{{{JOB},reason="client_gone"}}': GOOD,
    FAULTS_OF_OURS: "0x300",
    f"reco_answer_seconds_count{{{JOB}}}": GOOD,
    IN_TIME: GOOD,
    AGE: "5x300",
    f"reco_facts_read_timestamp_seconds{{{JOB}}}": "0+15x300",
    f"reco_facts_complete_timestamp_seconds{{{JOB}}}": "0+15x300",
    f'reco_facts{{{JOB},fact="stock"}}': "90x300",
    f'reco_facts{{{JOB},fact="cost"}}': "0x300",
    f"reco_processes{{{JOB}}}": "2x300",
    f'reco_champion_served{{{JOB},slot=""}}': "1x300",
    f'reco_champion_read_timestamp_seconds{{{JOB},slot=""}}': "0+15x300",
    # A slot answers from its bundle and follows no champion.
    f'reco_champion_served{{{JOB},slot="blue"}}': "0x300",
    f'reco_champion_read_timestamp_seconds{{{JOB},slot="blue"}}': "0x300",
    f"reco_bundle_cut_timestamp_seconds{{{JOB}}}": "0x300",
    f"reco_rules_broken{{{JOB}}}": "0x300",
    BREAKER: "0x300",
    'reco_drift_found{look="answers"}': "0x300",
    'reco_items_raised{look="purchases"}': "0x300",
    'reco_items_raised{look="answers"}': "3x300",
    'reco_kpi_dropped{figure="basket_value"}': "0x300",
    'reco_kpi_dropped{figure="ndcg"}': "1x300",
    'reco_kpi_loss_per_answer{rung="popular"}': "0.5x300",
    'reco_watch_success_timestamp_seconds{look="answers"}': "0+15x300",
    f"reco_process_deaths_total{{{JOB}}}": "0x300",
    f'reco_log_records_total{{{JOB},outcome="dropped"}}': "0x300",
    REJECTED: "0x300",
}
LAG = f"reco_loop_lag_seconds_bucket{{{JOB},le="
# Judged after 70 minutes, at the 280th value.
UNDER_EVERY_LINE = {
    f"up{{{JOB}}}": "1x279 0x20",
    FULL: GOOD,
    WITHOUT_STORE: "0+22x300",  # 4.7 % of 472
    FAULTS_OF_OURS: "0+0.45x300",
    IN_TIME: "0+148.6x300",
    AGE: "119x300",
    f"reco_facts_read_timestamp_seconds{{{JOB}}}": "-59+15x300",
    f"reco_facts_complete_timestamp_seconds{{{JOB}}}": "-59+15x300",
    f'reco_facts{{{JOB},fact="stock"}}': "1x279 0x20",
    f"reco_processes{{{JOB}}}": "1x279 0x20",
    f'reco_champion_served{{{JOB},slot=""}}': "1x264 0x30",
    f'reco_champion_read_timestamp_seconds{{{JOB},slot=""}}': "-119+15x300",
    f"reco_bundle_cut_timestamp_seconds{{{JOB}}}": f"-{64 * 86_400}x300",
    f"reco_rules_broken{{{JOB}}}": "0x277 1x20",
    BREAKER: "0x273 1x20",
    f"reco_process_deaths_total{{{JOB}}}": "0x250 1x10 2x40",
    f'{RESTARTS}="checkout",pod="a"}}': "0x250 1x10 2x40",
    f"kube_cronjob_status_last_successful_time{GUARD}": "-899+15x300",
    f'reco_log_records_total{{{JOB},outcome="dropped"}}': "0x264 9+9x30",
    f'{LAG}"0.02"}}': "0+992x300",
    f'{LAG}"0.1"}}': "0+1000x300",
    f'{LAG}"+Inf"}}': "0+1000x300",
    # Found until 32 minutes ago: a page of a look is kept for 30.
    'reco_drift_found{look="answers"}': "1x150 0x149",
    'reco_kpi_dropped{figure="basket_value"}': "1x150 0x149",
    REJECTED: "0+37x300",  # 4.9 % of 450 answers and 300 + 37 refusals
}
# A request each 30 s, and a minute without the store: two answers are no cliff.
A_BAD_MINUTE_AT_NIGHT = {
    **{name: "0x300" for name in QUIET if name.startswith("reco_responses")},
    FULL: "0+0.5x276 138x20",
    WITHOUT_STORE: "0x276 0.5+0.5x20",
}
# The endpoint starts again after 50 minutes, and its new processes never answer: their answers stay at 0.
NEVER_ANSWERED = {
    **{name: "0+150x200 stale _x99" for name in QUIET if name.startswith("reco_responses")},
    f'{RESPONSES}"full",degraded_reason="none",pod="b"}}': "_x201 0x99",
}
FAULTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "quiet": ({}, set()),
    "under every line": (UNDER_EVERY_LINE, set()),
    "a bad minute at night": (A_BAD_MINUTE_AT_NIGHT, set()),
    "faults": ({FAULTS_OF_OURS: "0+15x300"}, {"CheckoutUnavailable"}),
    "only faults after a restart": (
        NEVER_ANSWERED | {FAULTS_OF_OURS: "0x200 0+15x100"},
        {"CheckoutUnavailable"},
    ),
    "slow": ({IN_TIME: "0+100x300"}, {"CheckoutSlow"}),
    "less": ({f'{RESPONSES}"popular",degraded_reason="x"}}': "0+1500x300"}, {"CheckoutDegraded"}),
    "without a store": (
        {WITHOUT_STORE: "0+1500x300", BREAKER: "1x300", AGE: "9999x300"},
        {"CheckoutDegraded", "DependencySkipped"},
    ),
    "gone": ({f"up{{{JOB}}}": "1x2 0x300"}, {"CheckoutGone"}),
    "a slot gone": (
        {
            f'up{{{JOB},slot="blue",pod="a"}}': "1x250 0x50",
            f'up{{{JOB},slot="green",pod="b"}}': "1x200 _x100",  # parked for 12 minutes, and filled again
            f'up{{{JOB},slot="green",pod="c"}}': "_x250 0x50",
        },
        {"SlotGone"},
    ),
    "a slot whose pods were replaced": (
        {
            f'up{{{JOB},slot="blue",pod="a"}}': "1x264 stale _x34",
            f'up{{{JOB},slot="blue",pod="b"}}': "_x266 0x34",
        },
        {"SlotGone"},
    ),
    "no process": ({f"reco_processes{{{JOB}}}": "2x2 0x300"}, {"CheckoutGone"}),
    "silent stream": ({AGE: "200x300"}, {"FeaturesStale"}),
    # The first of the two holds the other back.
    "old rows": ({STALE: "0+1500x300"}, {"FeaturesStale", "CheckoutDegraded"}),
    "facts": ({f"reco_facts_read_timestamp_seconds{{{JOB}}}": "1x300"}, {"FactsStale"}),
    "facts that are not written": (
        {f"reco_facts_complete_timestamp_seconds{{{JOB}}}": "1x300"},
        {"FactsStale"},
    ),
    "lost facts": ({f'reco_facts{{{JOB},fact="stock"}}': "90x20 0x300"}, {"FactsLost"}),
    "champion": ({f'reco_champion_served{{{JOB},slot=""}}': "0x300"}, {"ChampionNotServed"}),
    "pointer": ({f'reco_champion_read_timestamp_seconds{{{JOB},slot=""}}': "1x300"}, {"ChampionUnread"}),
    "old": ({f"reco_bundle_cut_timestamp_seconds{{{JOB}}}": "-5999999x300"}, {"BundleOld"}),
    "rules": ({f"reco_rules_broken{{{JOB}}}": "1x300"}, {"RulesBroken"}),
    "breaker": ({BREAKER: "1x300"}, {"DependencySkipped"}),
    "deaths": ({f"reco_process_deaths_total{{{JOB}}}": "0x250 1x10 2x10 3x30"}, {"ProcessesDie"}),
    "restarts": ({f'{RESTARTS}="checkout",pod="a"}}': "0x250 1x10 2x10 3x30"}, {"ProcessesDie"}),
    "restarts of the stream": ({LIVE_RESTARTS: "0x250 1x10 2x10 3x30"}, {"ProcessesDie"}),
    "log": ({f'reco_log_records_total{{{JOB},outcome="dropped"}}': "0+9x300"}, {"LogLoses"}),
    "lag": (
        {
            f'{LAG}"0.02"}}': "0+1x300",
            f'{LAG}"0.1"}}': "0+600x300",
            f'{LAG}"+Inf"}}': "0+600x300",
        },
        {"CheckoutSaturated"},
    ),
    "rejected": ({REJECTED: "0+100x300"}, {"RequestsRejected"}),
    "only refusals after a restart": (
        NEVER_ANSWERED | {REJECTED: "0x200 0+100x100"},
        {"RequestsRejected"},
    ),
    "drift": ({'reco_drift_found{look="purchases"}': "1x300"}, {"DriftFound"}),
    # The watch starts again, and its first look takes ten minutes: the page goes on.
    "drift before a restart": ({'reco_drift_found{look="purchases"}': "1x240 stale _x58"}, {"DriftFound"}),
    "jump": ({'reco_items_raised{look="purchases"}': "2x300"}, {"ItemRaised"}),
    "kpi": ({'reco_kpi_dropped{figure="conversion"}': "1x300"}, {"KpiDropped"}),
    "kpi before a restart": ({'reco_kpi_dropped{figure="conversion"}': "1x240 stale _x58"}, {"KpiDropped"}),
    "retraining": ({"reco_retraining_failed": "1x300"}, {"RetrainingFailed"}),
    "watch": ({'reco_watch_success_timestamp_seconds{look="kpi"}': "-9999x300"}, {"WatchSilent"}),
    "watch gone": (
        {'reco_watch_success_timestamp_seconds{look="kpi"}': "-9000+15x20 _x280"},
        {"WatchSilent"},
    ),
    "release": ({f'{JOB_FAILED},namespace="checkout"}}': "1x300"}, {"ReleaseFailed"}),
    "guard": ({f"kube_cronjob_status_last_successful_time{GUARD}": "0+15x200 3000x100"}, {"ReleaseStuck"}),
    "guard that never worked": (
        {f"kube_cronjob_status_last_successful_time{GUARD}": "_x300"},
        {"ReleaseStuck"},
    ),
}
MORE_LABELS = {
    "restarts": {"pod": "a"},
    "restarts of the stream": {"pod": "stream"},
    "DependencySkipped": {"dependency": "online_store"},
    "SlotGone": {"slot": "blue"},
    "DriftFound": {"look": "purchases"},
    "ItemRaised": {"look": "purchases"},
    "KpiDropped": {"figure": "conversion"},
    "WatchSilent": {"look": "kpi"},
    "ReleaseFailed": {"job_name": "release-42-1"},
}


def test_every_alert_is_fired() -> None:
    assert set().union(*(alerts for _, alerts in FAULTS.values())) == {alert["alert"] for alert in ALERTS}


def expected(name: str, severity: str = "", fault: str = "") -> list[dict[str, Any]]:
    """What pages burns fast enough for the ticket, too: Alertmanager holds that one back."""
    return [
        {
            "exp_labels": one["labels"] | (MORE_LABELS.get(fault) or MORE_LABELS.get(name, {})),
            "exp_annotations": one["annotations"],
        }
        for one in ALERTS
        if one["alert"] == name and severity in ("", one["labels"]["severity"])
    ]


def promtool(step: str, folder: Path, tests: dict[str, list[dict[str, Any]]]) -> None:
    """Run tests by how often the rules are evaluated, over series with a value at each `step`."""
    (folder / "rules.yml").write_text(yaml.safe_dump(RULES))
    for every, of_interval in tests.items():
        document = {
            "rule_files": ["rules.yml"],
            "evaluation_interval": every,
            "tests": [{"interval": step, **one} for one in of_interval],
        }
        (folder / f"{every}.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    command = [tool("promtool"), "test", "rules", *(str(folder / f"{every}.yml") for every in tests)]
    # One thread, as the other tests; fewer collections.
    cheap = {**os.environ, "GOMAXPROCS": "1", "GOGC": "400"}
    done = subprocess.run(command, capture_output=True, text=True, env=cheap)
    assert done.returncode == 0, done.stdout + done.stderr


def series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": value} for name, value in values.items()]


@pytest.mark.slow
def test_the_right_alert_fires_and_no_other(tmp_path: Path) -> None:
    """A fault that fires is steady: its rules need no evaluation each half minute, as a silent one."""
    tests: dict[str, list[dict[str, Any]]] = {"30s": [], "2m": []}
    for fault, (changed, alerts) in FAULTS.items():
        judged = [
            {
                "eval_time": "70m",
                "alertname": name,
                "exp_alerts": expected(name, fault=fault) if name in alerts else [],
            }
            for name in sorted({one["alert"] for one in ALERTS})
        ]
        one = {"name": fault, "input_series": series(QUIET | changed), "alert_rule_test": judged}
        tests["2m" if alerts else "30s"].append(one)
    promtool("15s", tmp_path, tests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "alert"),
    [("features_unavailable", "CheckoutDegraded"), ("stale_features", "FeaturesStale")],
)
def test_an_outage_of_a_minute_pages_soon_and_ends_soon(reason: str, alert: str, tmp_path: Path) -> None:
    """Alertmanager adds at most 15 s to both, the interval at which it looks at a group of pages."""
    [route] = [one for one in ALERTMANAGER["route"]["routes"] if one["receiver"] == "on-call"]
    assert route["group_interval"] == "15s"
    values = {
        FULL: "0+50x240 12000x12 12050+50x300",  # each 5 s: 20 minutes, an outage of one, 25 minutes
        f'{RESPONSES}"full",degraded_reason="{reason}"}}': "0x240 50+50x11 600x300",
        f"up{{{JOB}}}": "1x600",
    }
    began, mended = 1_200, 1_260
    tests = [
        {"eval_time": f"{at}s", "alertname": alert, "exp_alerts": expected(alert, "page") if fires else []}
        for at, fires in ((began, False), (began + 40, True), (mended + 120, True), (mended + 235, False))
    ]
    promtool("5s", tmp_path, {"5s": [{"input_series": series(values), "alert_rule_test": tests}]})


def test_the_guide_lets_prometheus_keep_the_longest_window() -> None:
    windows = re.findall(r"\[(\d+[smhd])\]", RESOURCE.read_text())
    [days] = re.findall(r"`retention` to (\d+) days", (ROOT / "docs" / "how-to" / "cluster.md").read_text())
    assert 13 * 86_400 < max(map(seconds, windows)) <= int(days) * 86_400


def test_a_cliff_by_chance_costs_no_page() -> None:
    """As docs/how-to/on-call.md says: 1 page in 46 years where the budget burns all the time."""
    cliff = next(burn for burn in read_slo()["burn"] if "share" in burn)
    windows = 30 * 86_400 / seconds(cliff["long"]) * 4  # overlapping ones are alike
    least, bad = cliff["least"], int(cliff["share"] * cliff["least"])
    a_month = [windows * bdtrc(bad, least, 1 - one["goal"]) for one in read_slo()["objectives"]]
    assert max(a_month) == pytest.approx(0.0018, rel=0.05)
    assert 1 / max(a_month) / 12 == pytest.approx(46, rel=0.05)


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


def test_the_guide_makes_the_files_that_alertmanager_reads() -> None:
    """The Prometheus Operator mounts each Secret of an Alertmanager into a folder of the Secret's name."""
    guide = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    [(secret, keys)] = re.findall(r"create secret generic (paging) (--from-literal=.+)", guide)
    made = {f"/etc/alertmanager/secrets/{secret}/{key}" for key in re.findall(r"literal=(\w+)", keys)}
    assert made == set(re.findall(r"_file: (\S+)", (FOLDER / "alertmanager.yml").read_text()))
    file = r"--from-file=alertmanager\.yaml=infra/monitoring/alertmanager\.yml"
    [routes] = re.findall(rf"create secret generic (\S+) {file}", guide)
    assert f"`secrets: [{secret}]` and `configSecret: {routes}`" in guide
