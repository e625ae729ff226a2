"""The cases of a release -> their figures: each with a cluster of its own, and load through its gateway."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from components.measurement import machine_state
from components.rollout.cluster import ClusterUnreachable
from components.rollout.comparison import read_metrics
from components.rollout.manifests import metrics_url
from feature_repo.errors import RecoError
from pipelines.bench.load.goals import Goal, part_of
from pipelines.bench.load.waiting import repeating, wait_for
from pipelines.bench.report import write_report
from pipelines.drills.bad_endpoint import LIVE
from pipelines.drills.canary import (
    BEFORE_S,
    CASES,
    LOOK_S,
    RATE,
    Case,
    DrillVersions,
    Shop,
)
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.drills.report import draw_release, release_table
from pipelines.drills.system import (
    DrillEffort,
    Testbed,
    open_testbed,
    released,
    sent_streams,
    stream_plans,
)
from pipelines.live.slots import SERVER
from pipelines.live.small_cluster import SmallCluster, small_cluster
from serving.client.client import DEADLINE_MS
from serving.release.manifest import read_manifest
from serving.settings import Settings

log = logging.getLogger(__name__)


def drill_release(
    bundle: Path,
    offline_store: Path,
    requests: Sequence[Mapping[str, Any]],
    out_dir: Path,
    cases: Sequence[Case] = CASES,
    rate: float = RATE,
    deadline_ms: float = DEADLINE_MS,
) -> dict[str, Any]:
    """Carry the cases out; write `release.json`, `.md` and `.png`; return the content of the JSON.

    Args:
        bundle: that is served; the canary is a copy with another id.
        offline_store: of its home.
        requests: request lines with known shoppers.
        out_dir: where the results go.
        cases: ways in which the release can go.
        rate: requests a second.
        deadline_ms: of a call of the client, and of the endpoint.

    Returns:
        The content of the JSON; `broken_off` says why a case has no outcome, as that of `run_drills` does.
    """
    before, outcomes = machine_state(), {}
    broken_off: dict[str, str] = {}
    with open_testbed(bundle, offline_store, requests, DrillEffort(), deadline_ms) as testbed:
        for case in cases:
            log.info("%s: %s", case.name, case.proves)
            try:
                outcomes[case.name] = run_case(case, testbed, rate)
                log.info("  %s", "passed" if outcomes[case.name]["passed"] else "MISSED")
            except (RecoError, OSError, httpx.HTTPError) as error:
                log.error("  BROKEN OFF: %s", error)
                broken_off[case.name] = str(error) or type(error).__name__
    figures = {
        "bundle_id": read_manifest(bundle)["bundle_id"],
        "rate": rate,
        "cases": outcomes,
        "broken_off": broken_off,
        "passed": not broken_off and all(one["passed"] for one in outcomes.values()),
    }
    result = write_report(out_dir, "release", figures, release_table, before)
    draw_release(result, out_dir / "release.png")
    return result


def run_case(case: Case, testbed: Testbed, rate: float) -> dict[str, Any]:
    """Carry one case out; return its outcome, judged."""
    home = testbed.folder / case.name
    champions = [released(testbed.bundle, home, made_for) for made_for in ("", case.name)]
    bundles = {str(number): one.bundle_id for number, one in enumerate(champions, 1)}
    versions = DrillVersions(home, bundles)
    url, deadline_ms = f"redis://{testbed.proxy.address}/0", testbed.deadline_ms
    settings = Settings(home, http_port=0, store_url=url, deadline_ms=deadline_ms, log_segment_s=1.0)

    def launch(served: Path) -> Sequence[str]:
        if not case.fault or served.name != bundles["2"]:
            return SERVER
        slow_s = str(2.0 * _p99_s(cluster))  # so much later, each answer has three times the p99
        return sys.executable, "-P", "-m", "pipelines.drills.bad_endpoint", case.fault, slow_s

    with small_cluster(champions[0].bundle(home), settings, home / "slots", launch=launch) as cluster:
        shop = Shop(cluster, versions, case.pace)
        wait_for(lambda: bool(cluster.objects.list("pods")), "the first slot starts")
        at = cluster.gateway.url
        plans = stream_plans(testbed, at, at, rate / 2, rate / 2, connections=16)
        with _watched(shop) as seen, sent_streams(testbed, plans) as streams:
            time.sleep(BEFORE_S)
            outcome = case.act(shop)
            time.sleep(2.0)
    outcome |= {"proves": case.proves, **_figures(case, seen, streams, bundles["2"])}
    common = (
        Goal("answers that failed at the client", "<=", 0, "", part_of("failed_at_client")),
        Goal(
            "answers other than 200 without the client",
            "<=",
            case.most_failed,
            "",
            part_of("failed_straight"),
        ),
        Goal("largest weight of the canary", "<=", case.most_weight, " %", part_of("largest_weight")),
    )
    outcome["goals"] = [goal.judge(outcome) for goal in (*common, *case.goals)]
    reached = all(goal["reached"] for goal in outcome["goals"])
    outcome["passed"] = reached and outcome["ended"] == case.ends and case.says in outcome["reason"]
    return outcome


def _p99_s(cluster: SmallCluster) -> float:
    """Return the stable slot's p99 so far."""
    [pod] = [one for one in cluster.objects.list("pods") if "blue" in one["metadata"]["name"]]
    counts, _ = read_metrics(httpx.get(metrics_url(pod), trust_env=False).text)
    return counts.p99_s()


@contextlib.contextmanager
def _watched(shop: Shop) -> Iterator[list[tuple[float, str, int]]]:
    """Note each state and weight of the route with its time, until the block ends."""
    seen: list[tuple[float, str, int]] = []

    def look() -> None:
        with contextlib.suppress(ClusterUnreachable):  # the next look sees the same
            now = shop.seen()
            if not seen or seen[-1][1:] != now:
                seen.append((time.monotonic(), *now))

    with repeating(look, LOOK_S):
        yield seen


def _figures(
    case: Case,
    seen: Sequence[tuple[float, str, int]],
    streams: Mapping[str, Sequence[Answer]],
    canary: str,
) -> dict[str, Any]:
    """Return how many requests the canary touched or hurt, and its times."""
    answers = [answer for some in streams.values() for answer in some]
    touched = [one for one in answers if one.document.get("bundle_id") == canary]
    failed = {name: [one for one in some if not one.status_ok] for name, some in streams.items()}
    return {
        "requests": len(answers),
        "failed_at_client": len(failed[CLIENT]),
        "failed_straight": len(failed[RAW]),
        "touched": 100.0 * len(touched) / max(len(answers), 1),
        "hurt": len(failed[RAW]) + sum(not one.whole for one in touched),
        "largest_weight": max((weight for _, _, weight in seen), default=0),
        **_times(case, seen, [one.due for one in touched]),
        "steps": [[round(at - seen[0][0], 1), state, weight] for at, state, weight in seen],
    }


def _times(
    case: Case, seen: Sequence[tuple[float, str, int]], touched: Sequence[float]
) -> dict[str, float | None]:
    """Return the seconds until the canary was ended, until its last request, and until it had all traffic."""
    first = {state: at for at, state, _ in reversed(seen)}
    aborted, shown = first.get("abort"), first.get("step" if case.fault.endswith(LIVE) else "shadow")
    full = next((at for at, _, weight in seen if weight == 100), None)
    began = next((at for at, state, _ in seen if state), None)
    return {
        "detect_s": None if aborted is None or shown is None else aborted - shown,
        "abort_s": None if aborted is None else max(max(touched, default=aborted) - aborted, 0.0),
        "full_s": None if full is None or began is None else full - began,
    }
