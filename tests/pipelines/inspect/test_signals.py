"""Two readings of an endpoint's metrics name the alert whose line they cross, and no other."""

import re

import pytest

from monitoring.alerting import read_slo
from pipelines.inspect.signals import NO_FAULT, OUR_OWN, Samples, crossed, read_samples

NOW = 10_000.0
HEALTHY: Samples = {
    "reco_responses_total": [({"rung": "full", "degraded_reason": "none"}, 1_000.0)],
    "reco_faults_total": [({"protocol": "http"}, 0.0)],
    "reco_answer_seconds_count": [({}, 1_000.0)],
    "reco_answer_seconds_bucket": [({"le": "0.05"}, 1_000.0), ({"le": "+Inf"}, 1_000.0)],
    "reco_loop_lag_seconds_count": [({}, 1_000.0)],
    "reco_loop_lag_seconds_bucket": [({"le": "0.02"}, 1_000.0), ({"le": "+Inf"}, 1_000.0)],
    "reco_rejected_total": [({"reason": "overloaded"}, 900.0)],
    "reco_log_records_total": [({"outcome": "dropped"}, 0.0)],
    "reco_features_age_seconds": [({}, 2.0)],
    "reco_facts_read_timestamp_seconds": [({}, NOW - 2)],
    "reco_facts_complete_timestamp_seconds": [({}, NOW - 2)],
    "reco_champion_read_timestamp_seconds": [({}, NOW - 2)],
    "reco_champion_served": [({}, 1.0)],
    "reco_process_deaths_total": [({}, 0.0)],
    "reco_rules_broken": [({}, 0.0)],
    "reco_breaker_open": [({"dependency": "online_store"}, 0.0)],
}
CASES: dict[str, Samples] = {
    "CheckoutUnavailable": {"reco_faults_total": [({"protocol": "http"}, 2.0)]},
    "CheckoutSlow": {"reco_answer_seconds_bucket": [({"le": "0.05"}, 980.0)]},
    "CheckoutSaturated": {"reco_loop_lag_seconds_bucket": [({"le": "0.02"}, 980.0)]},
    "CheckoutDegraded": {
        "reco_responses_total": [({"rung": "full", "degraded_reason": "features_unavailable"}, 1_000.0)]
    },
    "RequestsRejected": {"reco_rejected_total": [({"reason": "caller"}, 100.0)]},
    "LogLoses": {"reco_log_records_total": [({"outcome": "dropped"}, 1.0)]},
    "FeaturesStale": {"reco_features_age_seconds": [({}, 121.0)]},
    "FeaturesStale: answers": {
        "reco_responses_total": [({"rung": "full", "degraded_reason": "stale_features"}, 1_000.0)]
    },
    "FactsStale": {"reco_facts_read_timestamp_seconds": [({}, NOW - 61)]},
    "FactsStale: unwritten": {"reco_facts_complete_timestamp_seconds": [({}, NOW - 61)]},
    "ChampionUnread": {"reco_champion_read_timestamp_seconds": [({}, NOW - 121)]},
    "ChampionNotServed": {"reco_champion_served": [({}, 0.0)]},
    "ProcessesDie": {"reco_process_deaths_total": [({}, 3.0)]},
    "RulesBroken": {"reco_rules_broken": [({}, 1.0)]},
    "DependencySkipped": {"reco_breaker_open": [({"dependency": "online_store"}, 1.0)]},
    "DependencySkipped: no heartbeat is read": {
        "reco_breaker_open": [({"dependency": "online_store"}, 1.0)],
        "reco_features_age_seconds": [({}, 9_999.0)],
    },
}


def test_a_healthy_endpoint_crosses_no_line() -> None:
    assert list(crossed({}, HEALTHY, NOW)) == []
    assert list(crossed(HEALTHY, HEALTHY, NOW)) == []  # and neither does one without requests


@pytest.mark.parametrize("alert", CASES)
def test_each_line_names_its_alert(alert: str) -> None:
    found = list(crossed({}, HEALTHY | CASES[alert], NOW))
    assert [name for name, _ in found] == [alert.split(":")[0]]
    assert found[0][1]


def test_old_counts_are_no_signal() -> None:
    bad = HEALTHY | CASES["CheckoutDegraded"] | CASES["CheckoutUnavailable"]
    assert list(crossed(bad, bad, NOW)) == []


def test_an_endpoint_that_follows_no_champion_or_has_no_facts_crosses_no_line() -> None:
    apart: Samples = {
        "reco_champion_served": [({}, 0.0)],
        "reco_champion_read_timestamp_seconds": [({}, 0.0)],
        "reco_facts_read_timestamp_seconds": [({}, 0.0)],
        "reco_facts_complete_timestamp_seconds": [({}, 0.0)],
    }
    assert list(crossed({}, HEALTHY | apart, NOW)) == []


def test_the_lines_are_those_of_the_alerts() -> None:
    slo = read_slo()
    assert [round(1 - one["goal"], 6) for one in slo["objectives"]] == [0.001, 0.01, 0.05]
    expressions = {one["name"]: one["expr"] for one in slo["alerts"]}
    assert re.search(r"> 0\.02$", expressions["CheckoutSaturated"])
    assert re.search(r"> 0\.05$", expressions["RequestsRejected"])
    assert "|".join(OUR_OWN) in expressions["RequestsRejected"]
    assert "|".join(NO_FAULT) in slo["objectives"][2]["bad"]
    for name, line in (("FactsStale", "> 60"), ("ChampionUnread", "> 120"), ("FeaturesStale", "> 120")):
        assert line in expressions[name]
    share, age = expressions["FeaturesStale"].split(" or ")
    assert re.search(r"stale_features.* > 0\.2\s*$", share)
    assert 'unless max(reco_breaker_open{dependency="online_store"}) == 1' in age


def test_a_page_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        read_samples("http://127.0.0.1:9/metrics")
