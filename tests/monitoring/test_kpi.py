"""KPIs of a shop whose truth is known: value of an answer, loss of a lower rung, and drops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from feature_repo.events import write_dataset
from feature_repo.toy_shop import favourite_items, item_name, toy_dataset
from monitoring.kpi import (
    CONCEPT,
    EARNED,
    concept_drift,
    cost_since,
    exposure,
    find_drops,
    fit_drops,
    loss_per_answer,
    measure_labels,
    revenue_at_risk,
    summarise,
    summarise_by,
)
from monitoring.sessions import make_sessions
from monitoring.windows import Window
from serving.prediction_log import RECORD_SCHEMA
from serving.release.champion import Champion, write_champion
from tests.conftest import Numbers
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
    assert set(summarise_by(_sessions(300), "store_id")) == {"store-0", "store-1", "store-2"}
    assert summarise(_sessions(0)).sessions == 0
    unknown = _sessions(4).assign(store_id=["nan", None, None, "store-0"])
    assert {s: kpi.sessions for s, kpi in summarise_by(unknown, "store_id").items()} == {
        "": 2, "nan": 1, "store-0": 1
    }  # fmt: skip


def test_a_drop_is_found_and_the_same_shop_raises_none() -> None:
    until = START + pd.Timedelta(weeks=10)
    assert find_drops(_sessions(5_000, weeks=4.0), START + pd.Timedelta(weeks=4), 24) == [], "too short"
    quiet = [_sessions(20_000, weeks=10.0, degraded=0.0, seed=seed) for seed in range(5)]
    drops = [drop for sessions in quiet for drop in find_drops(sessions, until, 24)]
    assert len(drops) == 5 * len(EARNED)
    assert not any(drop.dropped for drop in drops)
    worse = {"full": 0.15, "popular": 0.1}
    broken = _sessions(50_000, weeks=10.0, degraded=0.0, takes=worse, since=9.0)
    found = {drop.figure: drop.dropped for drop in find_drops(broken, until, 24)}
    assert found["conversion"]
    assert found["revenue_per_session"]
    assert not found["basket_value"]


def test_the_cost_of_a_drift_is_within_5_percent_of_the_truth() -> None:
    worse = {"full": 0.15, "popular": 0.1}
    sessions = _sessions(120_000, weeks=10.0, degraded=0.0, takes=worse, since=5.0)
    began = START + pd.Timedelta(weeks=5)
    truth = 900 * (TAKES["full"] - worse["full"]) * PRICE
    assert cost_since(sessions, began, {"full": 900, "popular": 100}) == pytest.approx(truth, rel=0.05)
    assert cost_since(sessions, began + pd.Timedelta(weeks=5), {"full": 900}) is None, "nothing after it"


def _visits_of(purchases: pd.DataFrame) -> pa.Table:
    """Return the log of a model that knows each taste: a list before each basket of the toy shop."""
    baskets = purchases.drop_duplicates("basket_id").sort_values("at")
    log = {field.name: pa.nulls(len(baskets), field.type) for field in RECORD_SCHEMA}
    lists = [list(map(item_name, favourite_items(int(user[5:]), 80)[1:])) for user in baskets["user_id"]]
    at = (baskets["at"] - pd.Timedelta(minutes=1)).astype("datetime64[us, UTC]")
    log |= {"user_id": baskets["user_id"], "at": at, "answered_at": at, "item_ids": lists}
    log |= {"scores": [[0.9] * 5] * len(lists), "basket": [[]] * len(lists), "stage_ms": [[]] * len(lists)}
    log |= {"rung": ["full"] * len(lists), "bundle_id": at.dt.strftime("%F")}  # a refresh each night
    return pa.table({name: pa.array(column, RECORD_SCHEMA.field(name).type) for name, column in log.items()})


def test_a_change_of_taste_is_found_where_no_column_of_the_log_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Path, bundle_id: str
) -> None:
    """On the last day, shoppers exchange a quarter of their items: same requests, lists and scores."""
    shop = toy_dataset(users=900, items=80, weeks=11)
    purchases = shop.events
    log, end = _visits_of(purchases), START.normalize() + pd.Timedelta(weeks=10)
    nights = set(log["bundle_id"].to_pylist())
    write_champion(tmp_path, Champion(bundle_id, "1", "recommender", bundle.name, "2024-01-01", ""))
    monkeypatch.setattr("monitoring.kpi.bundles_alike", {bundle: nights}.__getitem__)
    purchases = purchases[purchases["at"] < end]
    day = Window((end - pd.Timedelta(days=1)).to_pydatetime(), end.to_pydatetime())
    last = (purchases["at"] >= day.since).to_numpy()
    items = purchases["item_id"].to_numpy(object, copy=True)
    exchanged = np.flatnonzero(last)[::4]
    items[exchanged] = np.roll(items[exchanged], 100)
    found, in_pipeline = {}, {}
    (tmp_path / "log").mkdir()
    pq.write_table(log.cast(RECORD_SCHEMA), tmp_path / "log" / "1-000000.parquet")
    for name, bought in (("same", purchases), ("changed", purchases.assign(item_id=items))):
        bought = bought.drop_duplicates(["basket_id", "item_id"])
        drops = find_drops(make_sessions(log, bought, FOREVER), end, 24, CONCEPT)
        found[name] = concept_drift(drops, day)
        # One till's clock is ahead of now.
        tomorrow = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(hours=20)
        ahead = bought.head(1).assign(event_id="ahead", basket_id="ahead", at=tomorrow)
        write_dataset(tmp_path / name, replace(shop, events=pd.concat([bought, ahead])))
        numbers = Numbers(tmp_path / "numbers.json")
        # A recurring run gives a home.
        verdict = measure_labels(str(tmp_path / "log"), tmp_path / name, tmp_path, numbers)
        in_pipeline[name] = verdict["status"]
        assert set(numbers.logged) == {"change.ndcg", "change.calibration"}
    same, changed = found["same"], found["changed"]
    assert same is not None
    assert changed is not None
    assert (same.status, changed.status) == ("ok", "drifted"), same.reason
    assert changed.reason.startswith("ndcg 0.")
    assert "calibration" in changed.reason
    assert in_pipeline == {"same": "ok", "changed": "drifted"}
    assert concept_drift([], day) is None
    nothing = measure_labels("", tmp_path / "same", bundle, numbers)
    assert nothing == {"status": "insufficient_data", "reason": "labels: no log was named"}
    with pytest.raises(FileNotFoundError, match="holds no segment of a prediction log"):
        measure_labels(str(tmp_path), tmp_path / "same", bundle, numbers)
    write_dataset(tmp_path / "shown", replace(shop, events=shop.events.assign(event_type="impression")))
    unsold = measure_labels(str(tmp_path / "log"), tmp_path / "shown", bundle, numbers)
    assert unsold == {"status": "insufficient_data", "reason": "labels: the data hold no purchase"}
    (tmp_path / "old").mkdir()
    early = pd.Timestamp(day.since) - pd.Timedelta(days=2)
    pq.write_table(log.filter(pc.less(log["at"], early)), tmp_path / "old" / "1-000000.parquet")
    stale = measure_labels(str(tmp_path / "old"), tmp_path / "same", bundle, numbers)
    assert (stale["status"], "the last session began at" in stale["reason"]) == ("insufficient_data", True)


def test_a_day_without_an_accepted_item_is_a_drop_of_everything() -> None:
    nothing = {"full": 0.0, "popular": 0.0}
    sessions = _sessions(50_000, weeks=10.0, degraded=0.0, takes=nothing, since=9.8)
    until = START + pd.Timedelta(weeks=10)
    found = {drop.figure: drop for drop in find_drops(sessions, until, 24, (*EARNED, *CONCEPT))}
    assert {name for name, drop in found.items() if drop.dropped} == {*EARNED, *CONCEPT} - {"basket_value"}
    assert found["conversion"].change == -1.0


def test_answers_to_strangers_alone_are_no_verdict() -> None:
    log, purchases = shop_visits(100)
    strangers = log.set_column(
        log.schema.get_field_index("user_id"), log.schema.field("user_id"), pa.nulls(100, pa.string())
    )
    sessions = make_sessions(strangers, purchases, FOREVER)
    assert (len(sessions), fit_drops(sessions, FOREVER, 24)) == (0, [])


def test_bundles_with_one_ranker_are_compared_with_each_other() -> None:
    """As after a nightly refresh: the newest bundle alone has one night."""
    sessions = _sessions(50_000, weeks=10.0, degraded=0.0)
    until = START + pd.Timedelta(weeks=10)
    days = ((sessions["at"] - START) / pd.Timedelta(days=1)).astype(int)
    nightly = sessions.assign(bundle_id=days.astype(str))
    assert fit_drops(nightly, until, 24) == []
    assert {drop.figure for drop in fit_drops(nightly, until, 24, set(nightly["bundle_id"]))} == {*CONCEPT}


def test_exposure_counts_items_and_places() -> None:
    shown, sold = pd.Series(["a"] * 90 + ["b"] * 10), pd.Series([*"aacdefghij"])
    assert exposure(shown, sold) == {"coverage": 0.2, "top_tenth": 0.9}
    assert exposure(shown[:0], sold) == {"coverage": 0.0, "top_tenth": 0.0}
    assert exposure(shown, sold[:1])["coverage"] == 1.0, "b was never sold"
