"""What the last look found, as Prometheus reads it."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from monitoring.gauges import WatchGauges
from monitoring.kpi import AtRisk, Drop, summarise_by
from monitoring.sessions import make_sessions
from monitoring.verdict import ColumnDrift, DriftVerdict
from monitoring.windows import Window
from tests.monitoring.shop_visits import START, shop_visits

PRICE = ColumnDrift("item_price", "alarm", True, "", 300, 900, 0.0, 0.0, 0.3, 0.01, 0.06, 0.1)
HOUR = replace(PRICE, name="hour", pages=False)
VERDICT = DriftVerdict("drifted", "item_price", "purchases", Window(), Window(), (PRICE, HOUR))


@pytest.fixture
def gauges() -> WatchGauges:
    return WatchGauges()


def _value(gauges: WatchGauges, name: str, **labels: str) -> float | None:
    return gauges.registry.get_sample_value(f"reco_{name}", labels)


def test_a_drifted_column_is_shown_in_units_of_its_alarm_line(gauges: WatchGauges) -> None:
    gauges.show_drift("purchases", VERDICT)
    assert _value(gauges, "drift_found", look="purchases") == 1
    assert _value(gauges, "drift_psi_ratio", look="purchases", column="item_price") == pytest.approx(3)
    assert _value(gauges, "drift_psi_ratio", look="purchases", column="hour") is None, "it never pages"
    gauges.show_drift("purchases", replace(VERDICT, status="ok"))
    assert _value(gauges, "drift_found", look="purchases") == 0
    # A new bundle has too few answers.
    unknown = replace(PRICE, status="insufficient_data", psi=None, alarm_at=None)
    gauges.show_drift("purchases", replace(VERDICT, status="insufficient_data", columns=(unknown,)))
    assert _value(gauges, "drift_psi_ratio", look="purchases", column="item_price") is None, (
        "as with a new bundle"
    )
    gauges.show_drift("labels", VERDICT)
    gauges.show_drift("purchases", VERDICT)
    gauges.show_drift("labels", None)
    assert _value(gauges, "drift_psi_ratio", look="labels", column="item_price") is None
    assert _value(gauges, "drift_psi_ratio", look="purchases", column="item_price") == pytest.approx(3)
    gauges.show_drift("purchases", replace(VERDICT, columns=(HOUR,)))
    assert _value(gauges, "drift_psi_ratio", look="purchases", column="item_price") is None, (
        "compared no more"
    )
    assert _value(gauges, "drift_found", look="labels") == 0, "too little data to know: no old verdict stays"


def test_a_retraining_that_fails_again_fails_since_the_first_time(gauges: WatchGauges) -> None:
    gauges.show_retraining(went_well=False)
    since = gauges.failed_at
    gauges.show_retraining(went_well=False)
    assert (_value(gauges, "retraining_failed"), gauges.failed_at) == (1, since)
    gauges.show_retraining(went_well=True)
    assert (_value(gauges, "retraining_failed"), gauges.failed_at) == (0, None)


def test_kpis_are_shown_by_rung_and_a_figure_without_data_goes(gauges: WatchGauges) -> None:
    sessions = make_sessions(*shop_visits(2_000), START.replace(year=2025))
    by_rung = summarise_by(sessions, "rung")
    risk = AtRisk(1.0, 2.0, {"popular": 0.5}, ())
    drop = Drop("conversion", 0.1, 0.2, -0.5, 0.1, dropped=True)
    gauges.show_kpi(by_rung, risk, [drop])
    assert _value(gauges, "kpi_loss_per_answer", rung="popular") == 0.5
    assert _value(gauges, "kpi_dropped", figure="conversion") == 1
    assert _value(gauges, "kpi_conversion_ratio", rung="full") == by_rung["full"].conversion
    gauges.show_kpi({}, risk, [])
    assert _value(gauges, "kpi_dropped", figure="conversion") is None
    assert b"reco_watch_success_timestamp_seconds" in generate_latest(gauges.registry)
