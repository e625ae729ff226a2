"""Drills and a champion -> the effects on callers: the drills carried out one after the other, and judged.

Two processes send requests at constant rates all the time, as an open loop. `client` goes through the
project's own client, as a checkout does. `raw` goes straight over HTTP, because the client hides failures of
the endpoint. Latencies count from the time a request was due; a call is late if it took longer than its
deadline allows. Drills that need the same system share one: it must be healthy again for the next.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import redis

from components.measurement import machine_state
from pipelines.bench.load.generator import LoadGenerator, LoadPlan
from pipelines.bench.load.waiting import NotReached, wait_for
from pipelines.bench.report import write_report
from pipelines.drills.catalogue import Drill
from pipelines.drills.faults import Notes
from pipelines.drills.outcome import CLIENT, Answer, Fault, answers_of, outcome_of
from pipelines.drills.report import (
    alerts_table,
    draw_dashboards,
    draw_drills,
    drill_table,
    missed_figures,
)
from pipelines.drills.system import (
    DrillEffort,
    System,
    open_testbed,
    running_system,
    sent_streams,
    stream_plans,
)
from pipelines.live.monitors import Monitors, Programs, pages_of, watched
from pipelines.live.slots import SERVER
from serving.client.client import DEADLINE_MS
from serving.release.manifest import read_manifest

log = logging.getLogger(__name__)

REPORT, ALERTS = "drills", "alerts"  # names of the files, without and with alerts
HEALTHY = 10  # whole answers, one after the other: the system is healthy
SETTLING_S = 30.0  # for a system to be healthy after the previous drill


def run_drills(
    drills: Sequence[Drill],
    bundle: Path,
    offline_store: Path,
    requests: Sequence[Mapping[str, Any]],
    out_dir: Path,
    effort: DrillEffort | None = None,
    deadline_ms: float = DEADLINE_MS,
    launch: Sequence[str] = SERVER,
    programs: Programs | None = None,
) -> dict[str, Any]:
    """Carry drills out and write `drills.json`, `drills.md` and `drills.png`; return the content of the JSON.

    With alerts the files are `alerts.json`, `alerts.md` and a picture of each dashboard.

    Args:
        drills: of `choose_drills`.
        bundle: that is served.
        offline_store: of its home: the rows of its users.
        requests: request lines with known shoppers.
        out_dir: where the results go.
        effort: how long.
        deadline_ms: of a call of the client, and of the endpoint.
        launch: starts an endpoint; a test may start a worse one.
        programs: watch it, and the pages are judged, too.

    Returns:
        The content of the JSON; `broken_off` says why a drill has no outcome: a part did not start, or an
        event that a fault waits for did not happen.

    Raises:
        FileNotFoundError: no Redis is installed, or the home has no offline store.
        NotReached: that Redis does not start.
        ValueError: the requests are of too few shoppers.
    """
    effort, before = effort or DrillEffort(), machine_state()
    if programs:
        effort = replace(effort, during_s=effort.watched_s)
    found: dict[str, dict[str, Any]] = {}
    seen: dict[str, Sequence[Answer]] = {}
    broken_off: dict[str, str] = {}
    with open_testbed(bundle, offline_store, requests, effort, deadline_ms, launch) as testbed:
        groups, number = _by_setup(drills), 0
        while groups:
            group, number = groups.pop(0), number + 1
            drill = group[0]
            try:
                with contextlib.ExitStack() as parts:
                    system = parts.enter_context(running_system(testbed, drill.setup, f"system-{number}"))
                    monitors = None
                    if programs:  # they watch the endpoint as its callers reach it
                        watching = watched(programs, system.home / "monitors", system.front.address)
                        monitors = parts.enter_context(watching)
                    for drill in group:
                        found[drill.name], seen[drill.name] = run_drill(drill, system, monitors)
                    if monitors and number == 1:  # the first system has the most drills
                        draw_dashboards(monitors, out_dir)
            except (NotReached, OSError, http.client.HTTPException, redis.RedisError, psutil.Error) as error:
                log.error("  BROKEN OFF: %s", error)
                broken_off[drill.name] = str(error) or type(error).__name__
                if rest := group[group.index(drill) + 1 :]:
                    groups.insert(0, rest)
    figures = {
        "bundle_id": read_manifest(bundle)["bundle_id"],
        "effort": asdict(effort),
        "deadline_ms": deadline_ms,
        "drills": {drill.name: found[drill.name] for drill in drills if drill.name in found},
        "broken_off": broken_off,
        "passed": not broken_off and all(one["passed"] for one in found.values()),
    }
    if programs:
        return write_report(out_dir, ALERTS, figures, alerts_table, before)
    result = write_report(out_dir, REPORT, figures, drill_table, before)
    if seen:
        draw_drills(result, {name: seen[name] for name in result["drills"]}, out_dir / f"{REPORT}.png")
    return result


def _by_setup(drills: Iterable[Drill]) -> list[list[Drill]]:
    """Return drills in groups that can share a system, in the order in which they first appear."""
    groups: dict[int, list[Drill]] = {}
    for drill in drills:
        groups.setdefault(id(drill.setup), []).append(drill)
    return list(groups.values())


def run_drill(drill: Drill, system: System, monitors: Monitors | None) -> tuple[dict[str, Any], list[Answer]]:
    """Carry one drill out; return its outcome, judged, and the client's answers.

    Raises:
        NotReached: an event that a fault waits for did not happen.
    """
    log.info("%s: %s", drill.name, drill.proves)
    effort, testbed, notes = system.effort, system.testbed, Notes()
    faults: list[Fault] = []
    started_at = time.monotonic()
    if drill.prepare:
        drill.prepare(system, notes)
    at = str(system.server.ready["http"])
    client_at = f"http://{system.front.address}" if drill.in_front else at
    plans = stream_plans(testbed, client_at, at, effort.client_rate, effort.raw_rate)
    _await_healthy(testbed.generators[CLIENT], plans[CLIENT])
    with sent_streams(testbed, plans) as streams:
        time.sleep(effort.before_s)
        if monitors:
            time.sleep(max(monitors.began + effort.history_s - time.monotonic(), 0.0))
        counted = {name: count(system) for name, count in drill.counts.items()}
        for name, break_it in drill.breaks.items():
            began = time.monotonic()
            with break_it(system, notes):
                time.sleep(max(effort.during_s, min(drill.during_s, effort.late_s)))
                mending = time.monotonic()
            faults.append(Fault(name, began, mending, time.monotonic()))
            time.sleep(effort.after_s)
            if monitors:
                with contextlib.suppress(NotReached):  # then a page is not resolved in time, and judged so
                    wait_for(lambda: not monitors.open_pages(), "no page is open", effort.over_s, 0.5)
        notes |= {name: count(system) - counted[name] for name, count in drill.counts.items()}
        ended = time.monotonic()
    first = streams[CLIENT][0].due
    outcome = {
        "proves": drill.proves,
        "settings": dict(drill.setup.settings),
        **outcome_of(streams, faults, ended, testbed.deadline_ms, drill.late_ms),
        "notes": notes,
        "marks_s": [[fault.began - first, fault.ended - first] for fault in faults],
    }
    if monitors:
        times = [(fault.name, fault.began, fault.ended) for fault in faults]
        outcome["pages"] = pages_of(monitors.since(started_at), times, dict(drill.pages))
    outcome["goals"] = [goal.judge(outcome) for goal in drill.goals(monitors is not None)]
    outcome["passed"] = all(goal["reached"] for goal in outcome["goals"])
    log.info("  %s", "passed" if outcome["passed"] else f"MISSED: {missed_figures(outcome)}")
    return outcome, streams[CLIENT]


def _await_healthy(generator: LoadGenerator, plan: LoadPlan) -> None:
    """Send requests until all answers are whole, which also warms caches; warn if they never are."""
    until = time.monotonic() + SETTLING_S
    once = replace(plan, seconds=SETTLING_S, rate=0.0, connections=1, warm_up=0, requests=HEALTHY)
    while time.monotonic() < until:
        if all(answer.whole for answer in answers_of(generator.run(once), 1)):
            return
    log.warning("  answers are not whole after %g s: is this machine busy?", SETTLING_S)
