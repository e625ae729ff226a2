"""KPIs of a shop whose truth is known: value of an answer, loss of a lower rung, and drops."""

import pandas as pd
import pytest

from monitoring.kpi import (
    exposure,
    find_drops,
    loss_per_answer,
    revenue_at_risk,
    summarise,
    summarise_by,
    to_document,
)
from monitoring.sessions import make_sessions
from tests.monitoring.shop_visits import PRICE, START, TAKES, shop_visits

FOREVER = START + pd.Timedelta(weeks=100)


def _sessions(visits: int, **given: float | dict[str, float]) -> pd.DataFrame:
    return make_sessions(*shop_visits(visits, **given), FOREVER)  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_shop() -> None:
    kpi = summarise(_sessions(40_000, degraded=0.0))
    assert kpi.completeness == 1.0
    assert kpi.conversion == pytest.approx(TAKES["full"], rel=0.02)
    assert kpi.acceptance == pytest.approx(TAKES["full"] / 2, rel=0.02)  # one of two shown items
    assert kpi.revenue_per_session == pytest.approx(TAKES["full"] * PRICE, abs=3 * (kpi.revenue_error or 0))
    assert kpi.basket_value == pytest.approx(10.5 + TAKES["full"] * PRICE, rel=0.02)
    assert kpi.new_ratio == 1.0
    assert kpi.margin_per_session is None
    assert kpi.wait_ms == 3.0


def test_revenue_at_risk_is_within_5_percent_of_the_truth() -> None:
    sessions = _sessions(60_000)
    risk = revenue_at_risk(sessions, {"full": 900, "popular": 100}, wait_ms=10.0)
    truth = 100 * (TAKES["full"] - TAKES["popular"]) * PRICE
    assert risk.degraded == pytest.approx(truth, rel=0.05)
    assert risk.waiting == pytest.approx(0.001 * TAKES["full"] * PRICE * 1_000, rel=0.05)
    assert risk.at_most == ()


def test_a_rung_that_is_too_rare_to_measure_loses_at_most_the_whole_value() -> None:
    loss, rare = loss_per_answer(_sessions(1_000, degraded=0.0))
    assert loss["empty"] == pytest.approx(TAKES["full"] * PRICE, rel=0.2)
    assert "empty" in rare
    assert "full" not in rare
    assert loss["full"] == 0


def test_without_enough_full_answers_no_loss_is_claimed() -> None:
    sessions = _sessions(100)
    assert loss_per_answer(sessions)[0] == {}
    assert revenue_at_risk(sessions, {"popular": 100}).degraded == 0


def test_figures_are_cut_by_rung_and_store() -> None:
    by_rung = summarise_by(_sessions(40_000), "rung")
    assert {rung: kpi.conversion for rung, kpi in by_rung.items()} == pytest.approx(TAKES, rel=0.05)
    document = to_document(_sessions(300))
    assert set(document["by"]["store_id"]) == {"store-0", "store-1", "store-2"}
    assert to_document(_sessions(0))["all"]["sessions"] == 0


def test_a_drop_is_found_and_the_same_shop_raises_none() -> None:
    until = START + pd.Timedelta(weeks=10)
    quiet = [_sessions(20_000, weeks=10.0, degraded=0.0, seed=seed) for seed in range(10)]
    drops = [drop for sessions in quiet for drop in find_drops(sessions, until, 24)]
    assert len(drops) == 10 * 4
    assert not any(drop.dropped for drop in drops)
    worse = {"full": 0.15, "popular": 0.1}
    broken = _sessions(50_000, weeks=10.0, degraded=0.0, takes=worse, since=9.0)
    found = {drop.figure: drop.dropped for drop in find_drops(broken, until, 24)}
    assert found["conversion"]
    assert found["revenue_per_session"]
    assert not found["basket_value"]


def test_a_short_history_has_no_drops() -> None:
    assert find_drops(_sessions(5_000, weeks=4.0), START + pd.Timedelta(weeks=4), 24) == []


def test_exposure_counts_items_and_places() -> None:
    shown = pd.Series(["a"] * 90 + ["b"] * 10)
    assert exposure(shown, 10) == {"coverage": 0.2, "top_tenth": 0.9}
    assert exposure(shown[:0], 10) == {"coverage": 0.0, "top_tenth": 0.0}
