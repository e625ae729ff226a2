"""A log on disk, the archive of a stream, the shop's costs -> the figures of a home."""

import json
import sqlite3
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from feature_repo.events import EVENT_SCHEMA
from feature_repo.facts import Fact, parse_fact
from feature_repo.stream.archive import EVENTS, read_archive, write_segment
from monitoring.kpi import CONCEPT
from pipelines.inspect.earnings import NothingToJoin, read_costs, read_earnings
from serving.prediction_log import STAMP
from serving.settings import Settings
from serving.shop.fact_store import PAGE, open_fact_store
from tests.monitoring.shop_visits import PRICE, START, TAKES, shop_visits, write_visits


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.mark.slow
def test_the_figures_of_a_home_are_those_of_its_shop(settings: Settings) -> None:
    write_visits(settings, 20_000)
    earnings = read_earnings(settings, None, 24, START + pd.Timedelta(weeks=2))
    by_rung = earnings.cuts["rung"]
    assert {rung: kpi.conversion for rung, kpi in by_rung.items()} == pytest.approx(TAKES, rel=0.1)
    assert earnings.total.completeness > 0.99
    # Two items in every answer, two sold, one of them never shown.
    assert earnings.exposure == {"coverage": pytest.approx(2 / 3), "top_tenth": 0.5}
    assert earnings.at_risk.degraded > 0
    assert earnings.drift_cost is not None
    whole_value = 20_000 / (4 * 168) * TAKES["full"] * PRICE
    assert earnings.drift_cost < whole_value / 4, "nothing drifted"
    assert earnings.total.margin_per_session is None
    assert earnings.drops == [], "four weeks are too few"
    assert json.loads(json.dumps(earnings.to_dict()))["total"]["sessions"] > 19_000


def test_of_a_long_log_the_last_ten_weeks_are_read(settings: Settings) -> None:
    """A log may grow for years, and all of it fits no memory."""
    write_visits(settings, 200)
    folder = settings.prediction_log_dir
    (folder / "1-000000.parquet").rename(folder / f"{START:{STAMP}}-a.parquet")
    (folder / f"{START - timedelta(weeks=11):{STAMP}}-a.parquet").write_bytes(b"not read")
    assert read_earnings(settings, None, 24).total.sessions > 100


def test_a_segment_of_a_clock_that_was_ahead_hides_no_other_answer(settings: Settings) -> None:
    write_visits(settings, 200)
    folder = settings.prediction_log_dir
    file = (folder / "1-000000.parquet").rename(folder / f"{START:{STAMP}}-a.parquet")
    usual = read_earnings(settings, None, 24)
    log = pq.read_table(file)
    ahead = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(weeks=20)
    far = log.slice(0, 1).to_pandas().assign(answered_at=ahead, at=ahead, request_id="ahead")
    odd = pa.Table.from_pandas(far, log.schema, preserve_index=False)
    pq.write_table(odd, folder / f"{ahead:{STAMP}}-a.parquet")
    found = read_earnings(settings, None, 24)
    assert (found.total, found.at_risk) == (usual.total, usual.at_risk)
    assert found.total.sessions > 100


@pytest.mark.slow
def test_how_well_lists_fit_is_compared_within_one_bundle(settings: Settings) -> None:
    """On the last of 70 days shoppers take half as much: with the old bundle, and after a release."""
    worse = {rung: chance / 2 for rung, chance in TAKES.items()}
    write_visits(settings, 42_000, 10.0, takes=worse, since=69 / 7, degraded=0.2)
    dropped = {drop.figure for drop in read_earnings(settings, None, 24).drops if drop.dropped}
    assert {"conversion", *CONCEPT} <= dropped
    file = settings.prediction_log_dir / "1-000000.parquet"
    log = pq.read_table(file)
    is_last = pc.greater(log["at"], pa.scalar(START + pd.Timedelta(days=69), log["at"].type))
    names = pc.if_else(is_last, "new", log["bundle_id"].cast(pa.string()))
    place = log.schema.get_field_index("bundle_id")
    pq.write_table(log.set_column(place, "bundle_id", names.cast(log["bundle_id"].type)), file)
    released = read_earnings(settings, None, 24).drops
    assert "conversion" in {drop.figure for drop in released if drop.dropped}
    assert not set(CONCEPT) & {drop.figure for drop in released}


@pytest.mark.slow
def test_costs_of_the_shops_facts_give_the_margin(settings: Settings) -> None:
    write_visits(settings, 2_000)
    store = open_fact_store(settings.fact_store_url)
    line = '{"fact_id": "f1", "fact": "cost", "item_id": "shown", "value": 1.0, "at": "2024-01-01T00:00:00Z"}'
    store.write([parse_fact(line.encode())])
    store.close()
    total = read_earnings(settings, None, 24).total
    assert total.margin_per_session == pytest.approx((total.revenue_per_session or 0) * (PRICE - 1) / PRICE)


def test_a_corrupt_fact_hides_no_later_cost(settings: Settings) -> None:
    store = open_fact_store(settings.fact_store_url)
    store.write([Fact(f"f{n}", "cost", f"i{n}", 1.0, at=1.7e9) for n in range(PAGE + 1)])
    store.close()
    with sqlite3.connect(settings.home / "facts.db") as file:
        file.execute(
            "UPDATE facts SET ranked = ? WHERE sequence = (SELECT min(sequence) FROM facts)", (b"0",)
        )
    file.close()
    costs = read_costs(settings)
    assert costs is not None
    assert len(costs) == PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", ["9999-12-31T23:00:00Z", "0001-01-01T00:00:00Z", str(START + pd.Timedelta(weeks=4, hours=9))]
)
def test_one_till_with_a_wrong_clock_changes_no_figure(settings: Settings, at: str) -> None:
    write_visits(settings, 20_000)
    usual = read_earnings(settings, None, 24)
    file = settings.prediction_log_dir / "1-000000.parquet"
    answers = pq.read_table(file)
    last, column = answers.slice(len(answers) - 1), answers.schema.get_field_index("at")
    far = pa.array([pd.Timestamp(at).as_unit("us")], answers.schema.field("at").type)
    odd = last.set_column(column, answers.schema.field("at"), far)
    pq.write_table(pa.concat_tables([answers, odd]), file)
    found = read_earnings(settings, None, 24)
    assert found.since == usual.since
    assert found.total.sessions - usual.total.sessions <= 1
    assert found.at_risk.degraded == pytest.approx(usual.at_risk.degraded, rel=0.2)


@pytest.mark.slow
def test_answers_of_the_last_hour_are_not_those_of_a_clock_that_is_ahead(settings: Settings) -> None:
    write_visits(settings, 5_000)
    usual = read_earnings(settings, None, 24).at_risk
    file = settings.prediction_log_dir / "1-000000.parquet"
    log = pq.read_table(file).to_pandas()
    ahead = pd.Timedelta(hours=20)
    log["at"] = log["at"].where(log["at"] < log["at"].max() - ahead, log["at"] + ahead)
    pq.write_table(pa.Table.from_pandas(log, pq.read_schema(file), preserve_index=False), file)
    found = read_earnings(settings, None, 24).at_risk
    assert (found.degraded, found.waiting) == pytest.approx((usual.degraded, usual.waiting), rel=0.2)


def test_a_purchase_of_a_till_whose_clock_is_ahead_completes_no_session(settings: Settings) -> None:
    """The last shoppers may still pay."""
    write_visits(settings, 200)
    usual = read_earnings(settings, None, 24)
    archive = settings.home / "offline_store" / EVENTS
    ahead = read_archive(archive).to_pandas().head(1).assign(event_id="ahead", basket_id="ahead")
    ahead["at"] = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(hours=20)
    events = pa.Table.from_pandas(ahead, preserve_index=False).select(EVENT_SCHEMA.names)
    write_segment(archive, events.cast(EVENT_SCHEMA), "ahead.parquet")
    found = read_earnings(settings, None, 24)
    assert (found.until, found.total) == (usual.until, usual.total)


def test_without_answers_or_purchases_it_says_what_to_start(settings: Settings) -> None:
    with pytest.raises(NothingToJoin, match="holds no answer: start"):
        read_earnings(settings, None, 24)
    answers, _ = shop_visits(10)
    settings.prediction_log_dir.mkdir(parents=True)
    pq.write_table(answers, settings.prediction_log_dir / "1-000000.parquet")
    with pytest.raises(NothingToJoin, match="there is no purchase"):
        read_earnings(settings, None, 24)
