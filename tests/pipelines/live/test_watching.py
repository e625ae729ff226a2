"""One look at a home: a failed look is a line, drift starts a retraining, gauges are served."""

import shutil
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.stream.archive import BASE, EVENTS, write_segment
from monitoring.gauges import WatchGauges
from monitoring.verdict import DriftVerdict
from pipelines.live.ports import claim_port
from pipelines.live.watching import look, watch_home
from serving.settings import Settings
from tests.pipelines.inspect.test_earnings import write_visits


def test_a_home_with_nothing_is_three_lines_and_no_gauge(tmp_path: Path) -> None:
    gauges = WatchGauges()
    lines = look(Settings(home=tmp_path), gauges, None)
    assert [line.split(": not looked at: ")[0] for line in lines] == ["answers", "purchases", "kpi"]
    assert gauges.registry.get_sample_value("reco_watch_success_timestamp_seconds", {"look": "kpi"}) is None


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
    table = pa.Table.from_pandas(events, preserve_index=False).cast(pq.read_schema(path).remove_metadata())
    write_segment(home / "offline_store" / EVENTS, table, BASE)
    shutil.copy(toy_line / "dataset" / "items.parquet", home / "offline_store" / "items.parquet")
    verdicts: list[DriftVerdict] = []

    def retrain(verdict: DriftVerdict) -> dict[str, Any]:
        verdicts.append(verdict)
        return {"started": True, "promoted": False, "said": "the champion stays"}

    gauges = WatchGauges()
    lines = look(Settings(home=home), gauges, retrain)
    value = gauges.registry.get_sample_value
    assert value("reco_drift_found", {"look": "purchases"}) == 1, lines
    assert (value("reco_drift_psi_ratio", {"look": "purchases", "column": "item_price"}) or 0) > 1
    assert value("reco_retraining_failed") == 1
    assert [verdict.status for verdict in verdicts] == ["drifted"]
    assert "retraining: the champion stays" in lines


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
