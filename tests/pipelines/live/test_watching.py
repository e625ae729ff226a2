"""One look at a home: a failed look is a line, drift starts a retraining, gauges are served."""

import re
import shutil
import threading
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.events import EVENT_SCHEMA
from feature_repo.stream.archive import BASE, EVENTS, write_segment
from feature_repo.toy_shop import toy_dataset
from monitoring.gauges import WatchGauges
from monitoring.verdict import DriftVerdict
from pipelines.cli.options import read_token
from pipelines.live.ports import claim_port
from pipelines.live.watching import _act, look, watch_home
from pipelines.run.submit import ApiUnreachable, NoTraining, NotRepeated
from serving.prediction_log import RECORD_SCHEMA
from serving.settings import Settings
from tests.champions import promote_sealed
from tests.monitoring.shop_visits import PRICE, TAKES, write_visits
from tests.pipelines.conftest import VERDICT


def test_a_home_with_nothing_is_five_lines_and_no_verdict(tmp_path: Path) -> None:
    gauges = WatchGauges()
    lines = look(Settings(home=tmp_path), gauges, None)
    (tmp_path / "token").write_text("half of\na token")
    [head, *rest] = look(
        Settings(home=tmp_path), gauges, None, lambda _: bool(read_token(tmp_path / "token"))
    )
    assert head.startswith(f"retraining: its result is not known: {tmp_path}/token holds no token")
    assert rest == lines
    names = ["answers", "purchases", "jumps of answers", "jumps of purchases", "kpi"]
    assert [line.split(": ")[0] for line in lines] == names
    assert lines[3] == "jumps of purchases: too few baskets or lists to know"
    assert gauges.registry.get_sample_value("reco_items_raised", {"look": "purchases"}) == 0
    success = "reco_watch_success_timestamp_seconds"
    for failed in ("kpi", "jumps of answers"):
        assert gauges.registry.get_sample_value(success, {"look": failed}) is None


def test_an_item_that_jumps_in_the_purchases_is_named_and_counted(tmp_path: Path) -> None:
    events = toy_dataset(users=200, items=400, weeks=10).events
    end = events["at"].max()
    names = [f"pushed-{n}" for n in range(12)]
    more = {"event_id": names, "basket_id": names, "user_id": names, "at": end, "item_id": "item-400"}
    # One till's clock is ahead of now.
    ahead = events.head(1).assign(event_id="ahead", basket_id="ahead")
    ahead["at"] = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(hours=20)
    pushed = pd.concat([events.head(12).assign(**more), ahead])
    gauges = WatchGauges()
    for number, frame in enumerate((events, pushed)):
        table = pa.Table.from_pandas(frame, preserve_index=False).select(EVENT_SCHEMA.names)
        write_segment(tmp_path / "offline_store" / EVENTS, table.cast(EVENT_SCHEMA), f"{number}.parquet")
        lines = look(Settings(home=tmp_path), gauges, None)
        assert gauges.registry.get_sample_value("reco_items_raised", {"look": "purchases"}) == number
        assert gauges.registry.get_sample_value(
            "reco_watch_success_timestamp_seconds", {"look": "jumps of purchases"}
        )
    assert any(line.startswith("jumps of purchases: item-400 0.00% -> ") for line in lines), lines


def test_an_item_that_jumps_in_the_champion_s_lists_is_counted(tmp_path: Path) -> None:
    settings, rng, count = Settings(home=tmp_path), np.random.default_rng(0), 1_800
    own = promote_sealed(tmp_path).bundle_id
    lists = [[f"item-{n}" for n in rng.choice(60, 3, replace=False)] for _ in range(count)]
    at = datetime.now(UTC) - pd.to_timedelta(np.linspace(8.999, 0, count), unit="D")
    lists = [shown[:2] + ["item-pushed"] * (n > count - 40) for n, shown in enumerate(lists)]
    log = {field.name: pa.nulls(count, field.type) for field in RECORD_SCHEMA}
    log |= {"item_ids": lists, "answered_at": at.as_unit("us")}
    settings.prediction_log_dir.mkdir()
    gauges = WatchGauges()
    assert "jumps of answers: too few baskets or lists to know" in look(settings, gauges, None), (
        "an empty log"
    )
    for bundle_id, jumped in (("another", 0), (own, 1)):
        table = pa.table({**log, "bundle_id": [bundle_id] * count}, schema=RECORD_SCHEMA)
        pq.write_table(table, settings.prediction_log_dir / f"{bundle_id}.parquet")
        lines = look(settings, gauges, None)
        assert gauges.registry.get_sample_value("reco_items_raised", {"look": "answers"}) == jumped, lines
    assert any(line.startswith("jumps of answers: item-pushed 0.00% -> ") for line in lines), lines


@pytest.mark.slow
def test_drift_of_the_stream_starts_a_retraining_and_a_failed_one_is_a_gauge(
    home: Path, toy_line: Path
) -> None:
    path = toy_line / "dataset" / "events.parquet"
    events = pq.read_table(path).to_pandas()
    # Two shops in one: a week of one alone has fewer baskets than a verdict needs.
    other = events.assign(**{name: "2-" + events[name] for name in ("event_id", "user_id", "basket_id")})
    events = pd.concat([events, other])
    last = events["at"] > events["at"].max() - pd.Timedelta(days=8)
    events["price"] = np.where(last, events["price"] * 3, events["price"])
    ahead = events.head(1).assign(event_id="ahead", basket_id="ahead")
    ahead["at"] = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(hours=20)  # one till's clock
    events = pd.concat([events, ahead])
    table = pa.Table.from_pandas(events, preserve_index=False).cast(pq.read_schema(path).remove_metadata())
    write_segment(home / "offline_store" / EVENTS, table, BASE)
    shutil.copy(toy_line / "dataset" / "items.parquet", home / "offline_store" / "items.parquet")
    verdicts: list[DriftVerdict] = []

    def retrain(verdict: DriftVerdict) -> dict[str, Any]:
        verdicts.append(verdict)
        said = "version 2 is champion, but a later step failed"
        return {"started": True, "promoted": True, "failed": "publish-features", "said": said}

    gauges = WatchGauges()
    lines = look(Settings(home=home), gauges, retrain)
    value = gauges.registry.get_sample_value
    assert value("reco_drift_found", {"look": "purchases"}) == 1, lines
    assert (value("reco_drift_psi_ratio", {"look": "purchases", "column": "item_price"}) or 0) > 1
    assert value("reco_retraining_failed") == 1
    assert [verdict.status for verdict in verdicts] == ["drifted"]
    assert "retraining: version 2 is champion, but a later step failed" in lines


@pytest.mark.slow
def test_shoppers_that_take_other_items_are_drift_with_its_cost(tmp_path: Path) -> None:
    """In the last day of ten weeks, shoppers take half as many of the shown items."""
    settings, verdicts = Settings(home=tmp_path), list[DriftVerdict]()
    worse = {rung: chance / 2 for rung, chance in TAKES.items()}
    write_visits(settings, 42_000, 10.0, takes=worse, since=69 / 7, degraded=0.2)

    def retrain(verdict: DriftVerdict) -> dict[str, Any]:
        verdicts.append(verdict)
        return {"started": True, "promoted": True, "said": "version 2 is champion"}

    gauges = WatchGauges()
    lines = look(settings, gauges, retrain)
    assert gauges.registry.get_sample_value("reco_drift_found", {"look": "labels"}) == 1, lines
    (verdict,) = verdicts
    assert verdict.reason.startswith("ndcg 0.")
    assert lines[-2] == "retraining: version 2 is champion"
    (cost,) = re.findall(r"^drift costs ([0-9.]+) an hour", lines[-1])
    truth = 42_000 / 70 / 24 * 0.8 * TAKES["full"] / 2 * PRICE
    assert float(cost) == pytest.approx(truth, rel=0.5), "of the answers of one hour"

    failed = gauges.registry.get_sample_value
    for error, value in (
        (NotRepeated("run r5 trains already"), 0),
        (ApiUnreachable("nothing answers"), 1),
        (NotRepeated("run r5 trains already"), 1),
    ):

        def refuse(verdict: DriftVerdict, error: Exception = error) -> dict[str, Any]:
            raise error

        assert f"retraining: not started: {error}" in look(settings, gauges, refuse)
        assert failed("reco_retraining_failed") == value, "a run that works is no failure, and ends none"


@pytest.mark.parametrize(("error", "failed"), [(NotRepeated, 0), (NoTraining, 1)])
def test_a_training_that_can_never_start_has_failed(error: type[Exception], failed: int) -> None:
    def refuse(verdict: DriftVerdict) -> dict[str, Any]:
        raise error("why")

    gauges = WatchGauges()
    assert _act("answers", VERDICT, gauges, refuse)[1] == "retraining: not started: why"
    assert gauges.registry.get_sample_value("reco_retraining_failed") == failed


def test_each_look_asks_how_a_retraining_ended_and_says_since_when_it_fails(tmp_path: Path) -> None:
    gauges = WatchGauges()
    results, times = iter((None, False, None, True)), list[datetime | None]()

    def result(failed_at: datetime | None) -> bool | None:
        times.append(failed_at)
        return next(results)

    def refuse(verdict: DriftVerdict) -> dict[str, Any]:
        raise ApiUnreachable("nothing answers")

    for value in (0, 1, 1, 0):
        look(Settings(home=tmp_path), gauges, None, result)
        assert gauges.registry.get_sample_value("reco_retraining_failed") == value
        if value:
            _act("answers", VERDICT, gauges, refuse)  # it fails longer, but not since now
    assert times[:2] == [None, None]
    assert times[2] is not None
    assert times[3] == times[2]
    assert gauges.failed_at is None, "it ended well"

    def away(failed_at: datetime | None) -> bool | None:
        raise ApiUnreachable("nothing answers")

    lines = look(Settings(home=tmp_path), gauges, None, away)
    assert lines[0] == "retraining: its result is not known: nothing answers"


@pytest.mark.slow
def test_the_watch_serves_its_gauges_until_it_is_stopped(tmp_path: Path) -> None:
    settings, stop, lines = Settings(home=tmp_path), threading.Event(), []
    write_visits(settings, 2_000)
    address = ("127.0.0.1", claim_port(0, ""))
    pages: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("kpi: "):
            page = urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics").read().decode()
            pages.append(page)
            stop.set()

    assert watch_home(settings, 1.0, address, None, stop, say) == 1
    assert 'reco_kpi_sessions{rung="full"}' in pages[0]


def test_a_watch_that_was_stopped_during_a_look_starts_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, lines = threading.Event(), list[str]()

    def interrupted(settings: Settings, gauges: Any, retrain: Any, result: Any) -> list[str]:
        stop.set()
        return [retrain(VERDICT)["said"]]

    monkeypatch.setattr("pipelines.live.watching.look", interrupted)
    address = ("127.0.0.1", claim_port(0, ""))
    watch_home(Settings(home=tmp_path), 1.0, address, lambda _: pytest.fail("trained"), stop, lines.append)
    assert lines == ["not started: stopped"]
