"""Every arm of the load report runs on the toy shop, and each figure comes from a real run."""

import inspect
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from pipelines.bench.load.arms import ARMS, Arm, LoadSetup
from pipelines.bench.load.connections import OK
from pipelines.bench.load.generator import Load, LoadGenerator, LoadPlan
from pipelines.bench.load.goals import OURS, UNOPTIMISED
from pipelines.bench.load.measure import (
    QUICK,
    WARM_UP,
    ArmRun,
    LoadBench,
    bench_load,
    find_capacities,
    memory_growth,
    send_first,
)
from pipelines.bench.load.measured_server import MeasuredServer, started
from pipelines.cli.shell import main
from pipelines.inspect.ask import evaluation_requests
from pipelines.run.runs import new_run
from serving.release.champion import Champion
from serving.release.manifest import read_manifest
from serving.settings import Settings
from tests.champions import promote_sealed
from tests.pipelines.bench.load.loads import load_of

LINE = {"user_id": "u", "basket": ["a", "b"], "at": "2024-06-12T10:00:00Z", "k": 5}


class Server:
    """A server that needs no start."""

    ready: ClassVar = {"http": "http://nowhere"}


class Generator:
    """A generator that answers each plan with a load, and keeps the plans."""

    def __init__(self, *loads: Load) -> None:
        self.plans: list[LoadPlan] = []
        self._loads = loads

    def run(self, plan: LoadPlan) -> Load:
        self.plans.append(plan)
        return self._loads[min(len(self.plans), len(self._loads)) - 1]


def run_of(name: str = "some") -> ArmRun:
    arm = Arm(name, "")
    return ArmRun(arm, cast(MeasuredServer, Server()), (), 1.0)


def bench_of(generator: Generator) -> LoadBench:
    setup = LoadSetup(Path("bundle"), Settings())
    return LoadBench(cast(LoadGenerator, generator), [LINE] * 40, (), setup, QUICK, 50.0, Path())


def test_each_run_continues_in_the_list_warm_ups_included() -> None:
    generator, run = Generator(load_of([1.0] * 10)), run_of()
    for _ in range(2):
        bench_of(generator).send(run, 1.0, 10.0)
    # WARM_UP bodies before the first that counts, then ten that do.
    assert [plan.start for plan in generator.plans] == [WARM_UP, 2 * WARM_UP + 10]
    assert all(plan.warm_up == WARM_UP for plan in generator.plans)


def test_the_capacities_of_a_pair_are_searched_in_turns_from_different_rates() -> None:
    class UpTo130(Generator):
        def run(self, plan: LoadPlan) -> Load:
            super().run(plan)
            return load_of([1.0 if plan.rate <= 130 else 99.0] * 200)

    generator = UpTo130(load_of([1.0]))
    runs = [run_of("first"), run_of("second")]
    for run in runs:
        run.rounds.append({"cpu_ms": 4.0})
    seeds: list[set[int]] = []
    for _ in range(4):
        already = len(generator.plans)
        find_capacities(bench_of(generator), runs)
        asked = [plan.rate for plan in generator.plans[already:]]
        assert all(45 < rate < 185 for rate in asked[:2]), "near 100, or near where the earlier ones ended"
        assert asked[2] in (asked[0] / 2, asked[0] * 2)
        assert asked[3] in (asked[1] / 2, asked[1] * 2)
        seeds.append({plan.seed for plan in generator.plans[already:]})
    for run in runs:
        rates = [capacity.rate for capacity in run.capacities]
        assert all(65 <= rate <= 130 for rate in rates), "within a factor of two, as QUICK asks"
        assert len(set(rates)) == 4, "the spread is that of the searches, not of one grid"
    assert len(set.union(*seeds)) == sum(map(len, seeds))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (load_of([7.0]), (7.0, False)),
        (load_of([0.1], degraded=[0]), (0.1, True)),
        (replace(load_of([0.1]), status=np.array([500])), (None, False)),
    ],
)
def test_the_first_request_comes_before_any_warm_up(load: Load, expected: tuple[float | None, bool]) -> None:
    generator, run = Generator(load), run_of()
    send_first(cast(LoadGenerator, generator), run)
    assert (run.first_ms, run.first_degraded) == expected
    plans = [(plan.start, plan.warm_up, plan.requests, plan.rate) for plan in generator.plans]
    assert plans == [(0, 0, 1, 0.0)]
    assert run.position == 1, "the next run continues behind it"


def test_the_command_passes_the_deadline_and_no_other_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def measure(*values: Any, **named: Any) -> dict[str, Any]:
        given.update(inspect.signature(bench_load).bind(*values, **named).arguments)
        given["out_dir"].mkdir()
        (given["out_dir"] / "load.md").write_text("")
        return {}

    monkeypatch.setenv("RECO_ANSWER_CACHE", "memory:")
    monkeypatch.setenv("RECO_PROCESSES", "2")
    monkeypatch.setenv("RECO_DEADLINE_MS", "70")
    promote_sealed(tmp_path)
    monkeypatch.setattr("pipelines.inspect.ask.evaluation_requests", lambda bundle, limit: [LINE])
    monkeypatch.setattr("pipelines.bench.load.measure.bench_load", measure)
    done = CliRunner().invoke(main, ["bench", "load", "--home", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert given["deadline_ms"] == 70.0
    assert not any(isinstance(value, Settings) for value in given.values())


def test_a_bench_without_requests_is_refused(tmp_path: Path) -> None:
    champion = Champion("b", "1", "m", "bundle", "", "")
    with pytest.raises(ValueError, match="no requests"):
        bench_load(tmp_path, champion, [], tmp_path)


class Growing:
    """A server whose memory grows by so many MiB between two looks.

    It swings by 40 MiB as a saw does, and once it needs 500 MiB for a moment.
    """

    def __init__(self, each_mb: float) -> None:
        self._looks: Iterator[float] = (
            300.0 + each_mb * look + 10 * (look % 5) + 500 * (look == 54) for look in range(1_000)
        )

    def memory_mb(self) -> dict[str, float]:
        return {"anonymous": next(self._looks)}


def send(seconds: float, requests: int, **plan: Any) -> Load:
    """Answer all requests but the first."""
    none = np.zeros(requests, bool)
    status = np.full(requests, OK)
    status[0] = 500
    return Load(none * 0.0, none * 1.0, none * 0.0, status, none)


@pytest.mark.parametrize("each_mb", [0.0, 0.05])
def test_the_growth_of_memory_is_that_of_the_medians_of_two_quarters(each_mb: float) -> None:
    found = memory_growth(send, cast(MeasuredServer, Growing(each_mb)), requests=6_000)
    assert (found["requests"], found["failed"]) == (6_000, 60), "one of each hundred"
    assert found["mb_per_1000_requests"] == pytest.approx(each_mb * 10, abs=1e-9)
    assert found["mb_grown"] == pytest.approx(each_mb * 30)


# Each request leaves a piece of memory, pages of a mapped file, or nothing: the argument names it.
LEAVING = """
import http.server, mmap, sys, tempfile
PIECE, left = 1 << 18, []
file = tempfile.TemporaryFile()
file.truncate(1_000 * PIECE)
mapped = mmap.mmap(file.fileno(), 0)

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        left.append(b"x" * PIECE if sys.argv[1] == "memory" else None)
        if sys.argv[1] == "pages":
            sum(mapped[len(left) * PIECE : (len(left) + 1) * PIECE : mmap.PAGESIZE])
        self.send_response(200)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
print('{"event": "ready", "http": "http://127.0.0.1:%d"}' % server.server_port, file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("left", "mb"), [("memory", 250.0), ("pages", 0.0), ("nothing", 0.0)])
def test_a_leak_is_seen_and_mapped_files_are_none(tmp_path: Path, left: str, mb: float) -> None:
    command = [sys.executable, "-c", LEAVING, left]
    with (
        started(command, Settings().to_env(), tmp_path / "server.log") as server,
        httpx.Client(trust_env=False) as client,
    ):

        def ask(seconds: float, requests: int, **plan: Any) -> Load:
            status = [client.get(server.ready["http"]).status_code for _ in range(requests)]
            zeros = np.zeros(requests)
            return Load(zeros, zeros, zeros, np.array(status), zeros > 0)

        found = memory_growth(ask, server, requests=120)
    assert found["failed"] == 0
    assert found["mb_per_1000_requests"] == pytest.approx(mb, abs=25)


@pytest.mark.slow
def test_arms_are_measured_beside_ours_and_written(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECO_ANSWER_CACHE", "memory:")  # of the shell: ours is measured as it ships
    monkeypatch.setenv("RECO_REQUEST_LOG", "off")
    home, bundle = tmp_path / "home", toy_line / "evaluated"
    shutil.copytree(toy_line / "home" / "offline_store", home / "offline_store")
    run = new_run(home, "training", {}, ["evaluate-bundle", "distill-ranker", "prune-ranker"])
    shutil.copytree(bundle, run.artifacts("evaluate-bundle") / "evaluated")
    shutil.copytree(toy_line / "student", run.artifacts("distill-ranker") / "ranker")
    shutil.copytree(toy_line / "pruned", run.artifacts("prune-ranker") / "ranker")
    bundle_id = read_manifest(bundle)["bundle_id"]
    champion = Champion(bundle_id, "1", "m", str(bundle), "", "")
    arms = [arm for arm in ARMS if arm.name in (OURS, UNOPTIMISED)]  # others: test_arm_variants.py
    effort = replace(
        QUICK, alone_s=0.2, probe_s=0.2, half_s=0.2, overload_s=0.2, lengths_s=0.05, endurance=60
    )
    result = bench_load(
        home,
        champion,
        evaluation_requests(bundle, 50),
        tmp_path / "out",
        arms,
        effort,
        goal_ms=200.0,  # so low that the search ends soon; nothing is asserted on it
        endurance=True,
        deadline_ms=60_000.0,
    )
    assert json.loads((tmp_path / "out" / "load.json").read_bytes())["bundle_id"] == bundle_id
    assert (tmp_path / "out" / "load.png").exists()
    assert f"Load report of bundle {bundle_id}" in (tmp_path / "out" / "load.md").read_text()
    assert (set(result["arms"]), result["skipped"]) == ({OURS, UNOPTIMISED}, {})
    for name, arm in result["arms"].items():
        assert len(arm["alone"]["rounds"]) == 1, name
        for alone in arm["alone"]["rounds"]:
            assert alone["answered"] == alone["requests"] > 0, name
            assert alone["cpu_ms"] > 0
        assert arm["first_ms"] > 0
        assert arm["memory_mb"]["rss"] >= arm["memory_mb"]["pss"] > 0
        assert (arm.get("ratio") is None) == (name == OURS)
        stages = arm["stages"]
        parts = sum(row["mean"] for stage, row in stages.items() if stage != "client")
        assert parts == pytest.approx(stages["client"]["mean"], rel=1e-6), "they add up"
        assert {"features", "retrieval", "ranking", "reranking", "unexplained"} <= set(stages)
    assert list(result["basket_length"]["ms"])[:2] == ["1", "2"]
    assert result["endurance"]["requests"] == 60
    assert result["endurance"]["failed"] == 0
