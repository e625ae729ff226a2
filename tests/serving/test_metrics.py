"""Labels are bounded, answers are counted, and the exposition has the accepted format."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from serving import metrics
from serving.api.endpoint import _REFUSALS
from serving.schemas import PRIORITIES, REASONS, RUNGS
from tests.programs import run_python
from tests.serving.conftest import metric

# How the code of `serving` writes the reason of a refusal.
REFUSAL = re.compile(
    r'(?:count_rejected\((?:"\w+" if .+ else )?|(?:_hang_up|_Refused)\(\d+, |_refuse_head, \d+, )"(\w+)"'
)
# Labels whose values the code lists, or that are known by their meaning: the most that each may take.
VALUES = {
    "route": len(metrics.ROUTES),
    "priority": len(PRIORITIES),
    "protocol": 2,
    "dependency": 2,
    "fact": 5,
    "level": 1,
    "outcome": 12,
    "reason": len(metrics.REFUSALS),
    "bundle_id": 150,  # a release a day, and a restart twice a year
    "stage": len(metrics.STAGES),
    "degraded_reason": len(REASONS) + 1,  # or none
    "rung": len(RUNGS),
}


def test_an_answer_is_counted_with_the_time_of_each_stage() -> None:
    answers = metric("reco_responses_total", rung="full", degraded_reason="none")
    stage = metric("reco_stage_seconds_sum", stage="ranking")
    total, took_s = metric("reco_answer_seconds_count"), metric("reco_answer_seconds_sum")
    labels = {"route": "grpc", "priority": "prefetch", "rung": "full"}
    within = metric("reco_request_seconds_bucket", le="0.05", **labels)
    sooner = metric("reco_request_seconds_bucket", le="0.01", **labels)
    metrics.count_response("full", None, {"ranking": 2.0, "total": 3.0}, 0.04, "grpc", "prefetch")
    assert metric("reco_responses_total", rung="full", degraded_reason="none") == answers + 1
    assert metric("reco_stage_seconds_sum", stage="ranking") - stage == pytest.approx(0.002)
    assert metric("reco_answer_seconds_count") == total + 1
    assert metric("reco_answer_seconds_sum") - took_s == pytest.approx(0.04)
    assert not metric("reco_stage_seconds_count", stage="total")
    assert metric("reco_request_seconds_bucket", le="0.05", **labels) == within + 1
    assert metric("reco_request_seconds_bucket", le="0.01", **labels) == sooner


@pytest.mark.slow
def test_answers_are_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that never answered must still page: alerts divide by the sum of answers and faults."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)  # Feast sets it where it was loaded before
    code = "from serving.metrics import exposition; print(exposition()[0].decode())"
    assert 'reco_responses_total{degraded_reason="none",rung="full"} 0.0\n' in run_python("-c", code)


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("reco_faults_total", "protocol", "http grpc"),
        ("reco_bundle_updates_total", "outcome", "done refused"),
        ("reco_log_records_total", "outcome", "taken written dropped recovered"),
    ],
)
def test_a_rare_event_is_counted_from_0(name: str, label: str, words: str) -> None:
    """A rate sees no growth in a series that begins with its only event."""
    for word in words.split():
        assert REGISTRY.get_sample_value(name, {label: word}) is not None, word


def test_each_refusal_has_a_listed_word() -> None:
    words = {reason for _, _, reason in _REFUSALS.values()}
    for path in Path(metrics.__file__).parent.rglob("*.py"):
        words |= set(REFUSAL.findall(path.read_text(encoding="utf-8")))
    assert words == set(metrics.REFUSALS)


def test_no_metric_can_have_more_than_200_series() -> None:
    most = {}
    metric: Any  # the library's protocol of a collector has no `describe`
    for metric in REGISTRY._collector_to_names:
        names = getattr(metric, "_labelnames", ())
        for family in metric.describe() if hasattr(metric, "describe") else ():
            if family.name.startswith("reco_"):
                one = len(metric._kwargs["buckets"]) + 3 if family.type == "histogram" else 1
                for name in names:
                    one *= 2 if name == "stage" and family.name.startswith("reco_batch") else VALUES[name]
                most[family.name] = one
    assert {name: series for name, series in most.items() if series > 200} == {}
    assert metrics.REQUEST_BUCKETS_S[-1] == 0.05  # the deadline, which the latency SLO reads


@pytest.mark.slow
def test_prometheus_own_linter_finds_nothing() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for rung, priority in itertools.product(RUNGS, PRIORITIES):
        metrics.count_response(rung, "overloaded", {"ranking": 1.0}, 0.01, "grpc", priority)
    text, _ = metrics.exposition()
    linted = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    ours = [line for line in linted.stderr.decode().splitlines() if line.startswith(("reco_", "process_"))]
    assert (linted.returncode, ours) == (0, []), linted.stderr.decode()


@pytest.mark.slow
def test_the_metrics_of_several_processes_are_added_up_or_the_worst(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()  # of a process that is no more
    (tmp_path / f"counter_{2**31 - 1}.db").touch()  # of one whose files its parent has not yet removed
    (tmp_path / f"gauge_livesum_{2**31 - 1}.db").touch()
    child = "import sys; sum(range(10**6)); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", child], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has done its work
        for kind in ("counter", "gauge_livesum"):
            (tmp_path / f"{kind}_{process.pid}.db").touch()
        families = metrics.ProcessMetrics(os.getpid(), str(tmp_path)).collect()
        values = {sample.name: sample.value for family in families for sample in family.samples}
        assert process.stdin is not None
        process.stdin.close()
    assert values["reco_processes"] == 1
    assert values["reco_process_deaths_total"] == 2
    assert values["process_cpu_seconds_total"] > 0
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert 3 <= values["process_open_fds"] <= values["process_max_fds"]


def test_the_metrics_are_shown_in_the_accepted_format() -> None:
    text, kind = metrics.exposition()
    assert b"# TYPE reco_answer_seconds histogram" in text
    assert kind.startswith("text/plain")
    text, kind = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert kind.startswith("application/openmetrics-text")
