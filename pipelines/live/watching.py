"""A home that serves -> drift and KPIs, looked at again and again, as gauges and as retraining."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.errors import CHECK_FAILED, CONFLICT, RecoError
from feature_repo.events import read_dataset
from feature_repo.stream.archive import EVENTS
from monitoring.drift import bundles_alike, drift_of_events, drift_of_log
from monitoring.gauges import WatchGauges
from monitoring.jumps import SMALL, WINDOWS, Jump, find_jumps
from monitoring.kpi import KPI_HOURS, concept_drift
from monitoring.verdict import DriftVerdict
from monitoring.windows import DAY, WEEK, Window, known_until
from pipelines.inspect.earnings import Earnings, read_earnings, read_purchases
from pipelines.run.launch import dataset_of
from serving.metrics import shown
from serving.prediction_log import read_log
from serving.release.champion import read_champion
from serving.settings import Settings

REST = WEEK  # between two retrainings: until then a window holds older answers, too
NAMED = 5  # items of a line
# Starts a retraining for a verdict, and returns what became of it.
Retrain = Callable[[DriftVerdict], dict[str, Any]]
# Takes since when retraining fails, if it does. Returns whether the last one, or a later training, went well;
# None: it works, or no run was started.
Result = Callable[[datetime | None], bool | None]


def watch_home(
    settings: Settings,
    every_s: float,
    address: tuple[str, int],
    retrain: Retrain | None,
    stop: threading.Event,
    say: Callable[[str], None],
    result: Result | None = None,
) -> int:
    """Look at once, then each `every_s` seconds until `stop`; return the number of looks.

    Args:
        settings: of the endpoint whose log it is.
        every_s: between the beginnings of two looks.
        address: host and port of `/metrics`.
        retrain: called with a verdict that found drift; None only reports.
        stop: ends the watch.
        say: takes a line for people.
        result: asked in each look how the last retraining ended, or a later training of a person.
    """

    def unless_stopped(verdict: DriftVerdict) -> dict[str, Any]:
        assert retrain
        return {"started": False, "said": "not started: stopped"} if stop.is_set() else retrain(verdict)

    gauges, looks = WatchGauges(), 0
    with shown(f"{address[0]}:{address[1]}", gauges.registry):
        while not stop.is_set():
            began = time.monotonic()
            for line in look(settings, gauges, retrain and unless_stopped, result):
                say(line)
            looks += 1
            stop.wait(max(0.0, every_s - (time.monotonic() - began)))
    return looks


def look(
    settings: Settings, gauges: WatchGauges, retrain: Retrain | None, result: Result | None = None
) -> list[str]:
    """Look at drift, at items that jump, and at KPIs once; return a line about each.

    A look that fails is a line, too, and its gauges keep their age: the alert on
    `reco_watch_success_timestamp_seconds` says so.
    """
    lines: list[str] = []
    verdicts: list[DriftVerdict] = []
    if result is not None:
        with _or_a_line(lines, "retraining: its result is not known"):
            went_well = result(gauges.failed_at)
            if went_well is not None:  # else it works still, and the one before counts
                gauges.show_retraining(went_well)
    for name, measure in (("answers", _answers), ("purchases", _purchases)):
        with _or_a_line(lines, f"{name}: not looked at"):
            verdict = measure(settings)
            verdicts.append(verdict)
            lines += _act(name, verdict, gauges, retrain)
    for name, find in (("answers", _answered_jumps), ("purchases", _purchased_jumps)):
        with _or_a_line(lines, f"jumps of {name}: not looked at"):
            jumps = find(settings)
            gauges.raised.labels(name).set(len(jumps or ()))
            gauges.success.labels(f"jumps of {name}").set(time.time())
            lines.append(f"jumps of {name}: {_named(jumps)}")
    began = min((verdict.since for verdict in verdicts if verdict.since is not None), default=None)
    with _or_a_line(lines, "kpi: not looked at"):
        lines += _earned(read_earnings(settings, None, KPI_HOURS, began), gauges, retrain)
    return lines


@contextlib.contextmanager
def _or_a_line(lines: list[str], about: str) -> Iterator[None]:
    """Add a line about a look that fails."""
    try:
        yield
    except (RecoError, OSError, ValueError) as error:
        lines.append(f"{about}: {error}")


def _earned(earnings: Earnings, gauges: WatchGauges, retrain: Retrain | None) -> list[str]:
    """Show the KPIs, and start a retraining if they say that shoppers take other items; return lines."""
    gauges.show_kpi(earnings.cuts["rung"], earnings.at_risk, earnings.drops)
    dropped = [drop.figure for drop in earnings.drops if drop.dropped]
    lines = [f"kpi: {earnings.total.sessions:,} sessions; dropped: {', '.join(dropped) or 'none'}"]
    until = earnings.until.to_pydatetime()
    concept = concept_drift(earnings.drops, Window(until - timedelta(hours=KPI_HOURS), until))
    if concept is None:
        gauges.show_drift("labels", None)
    else:
        lines += _act("labels", concept, gauges, retrain)
    if earnings.drift_cost is not None:
        lines.append(f"drift costs {earnings.drift_cost:.2f} an hour, against full answers before it began")
    return lines


def _act(name: str, verdict: DriftVerdict, gauges: WatchGauges, retrain: Retrain | None) -> list[str]:
    """Show a verdict, and start a retraining if it found drift; return lines about both."""
    gauges.show_drift(name, verdict)
    lines = [f"{name}: {verdict.status}: {verdict.reason}"]
    if retrain is not None and verdict.status == "drifted":
        try:
            outcome = retrain(verdict)
        except (RecoError, OSError, ValueError) as error:
            outcome = {"said": f"not started: {error}"}
            if getattr(error, "exit_code", CHECK_FAILED) != CONFLICT:  # else a training works already
                outcome["promoted"] = False
        if "promoted" in outcome:  # else the last one's result stays
            gauges.show_retraining(outcome["promoted"] and "failed" not in outcome)
        lines.append(f"retraining: {outcome['said']}")
    return lines


def _answers(settings: Settings) -> DriftVerdict:
    bundle = read_champion(settings.home).bundle(settings.home)
    now = datetime.now(UTC)
    window = Window(now - WEEK, now)
    return drift_of_log(bundle, settings.prediction_log_dir, window)


def _purchases(settings: Settings) -> DriftVerdict:
    bundle = read_champion(settings.home).bundle(settings.home)
    archive = settings.home / "offline_store"
    if not (archive / EVENTS).is_dir():
        raise FileNotFoundError(f"{archive / EVENTS} is not there yet: start `reco stream`")
    until = known_until(read_purchases(settings.home, None)["at"]).to_pydatetime()
    data = read_dataset(dataset_of(settings.home, str(archive)))
    return drift_of_events(data, Window(until - WEEK, until), bundle)


def _answered_jumps(settings: Settings) -> list[Jump] | None:
    """Compare the items of a day's lists with the days before; another ranker shows other items."""
    now, alike = datetime.now(UTC), bundles_alike(read_champion(settings.home).bundle(settings.home))
    answers = read_log(settings.prediction_log_dir, now - (WINDOWS + 1) * DAY, features=False)
    answers = answers.filter(pc.is_in(answers["bundle_id"], pa.array(sorted(alike))))
    row = pc.list_parent_indices(answers["item_ids"])
    items, at = pc.list_flatten(answers["item_ids"]).dictionary_encode(), answers["answered_at"].take(row)
    return find_jumps(pa.table({"unit": row, "item_id": items, "at": at}).to_pandas(), now, DAY)


def _purchased_jumps(settings: Settings) -> list[Jump] | None:
    """Compare the items of a week's small baskets with the weeks before."""
    bought = read_purchases(settings.home, None).rename(columns={"basket_id": "unit"})
    return find_jumps(bought, known_until(bought["at"]), WEEK, SMALL)


def _named(jumps: list[Jump] | None) -> str:
    if jumps is None:
        return "too few baskets or lists to know"
    more = f" and {len(jumps) - NAMED} more" if len(jumps) > NAMED else ""
    return (", ".join(map(str, jumps[:NAMED])) + more) or "none"
