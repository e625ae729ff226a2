"""Every arm of the load report runs on the toy shop, and each figure comes from something that ran."""

import inspect
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from components.data.fit_statistics import purchases_of
from components.evaluation.traffic import ANONYMOUS_RATIO, anonymous_users
from components.home import Champion
from feature_repo.toy_shop import toy_dataset
from pipelines.bench.load.arms import NULL, OURS, Arm, Scene
from pipelines.bench.load.generator import OK, Load, LoadGenerator, Plan
from pipelines.bench.load.measure import (
    QUICK,
    WARM_UP,
    Bench,
    Runner,
    bench_load,
    choosing_of,
    first_request,
    grpc_message,
    hits,
    overload,
    replayed_requests,
    stages_of,
    typed_message,
    v2_inputs,
)
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.cli.shell import main
from pipelines.inspect.ask import evaluation_requests
from pipelines.run.runs import new_run
from serving.release.bundle import read_manifest
from serving.settings import Settings


class Server:
    """A server that nobody has to start."""

    ready: ClassVar = {"http": "http://nowhere"}

    def cpu_ms(self) -> float:
        return 0.0


SERVER = Server()
SCENE = Scene(Path("bundle"), Settings(), Path("feast"), None)


def load_of(client_ms: Sequence[float], due_s: Sequence[float] = (), degraded: Sequence[int] = ()) -> Load:
    """What became of so many requests, all answered; some of them degraded."""
    ms = np.array(client_ms, float)
    due = np.array(due_s or np.arange(len(ms)) / 10.0)
    flags = np.isin(np.arange(len(ms)), degraded)
    return Load(due, ms, np.zeros(len(ms)), np.full(len(ms), OK), flags, np.full(len(ms), 9), 0.0)


LINE = {"user_id": "u", "basket": ["a", "b"], "at": "2024-06-12T10:00:00Z", "k": 5}


def test_a_request_is_the_same_as_tensors() -> None:
    assert v2_inputs(LINE) == [
        {"name": "user_id", "shape": [1], "datatype": "BYTES", "data": ["u"]},
        {"name": "basket", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
        {"name": "at", "shape": [1], "datatype": "BYTES", "data": ["2024-06-12T10:00:00Z"]},
        {"name": "k", "shape": [1], "datatype": "INT64", "data": [5]},
    ]


def test_a_request_is_the_same_as_a_message() -> None:
    from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest

    message = ModelInferRequest.FromString(grpc_message(LINE))
    assert message.model_name == "checkout"
    found = {
        i.name: list(i.contents.bytes_contents) or list(i.contents.int64_contents) for i in message.inputs
    }
    assert found == {"user_id": [b"u"], "basket": [b"a", b"b"], "at": [b"2024-06-12T10:00:00Z"], "k": [5]}


def test_a_request_is_the_same_as_a_typed_message() -> None:
    from google.protobuf.json_format import MessageToDict

    from serving.proto.recommendations_pb2 import RecommendRequest

    lines: list[dict[str, Any]] = [LINE, {"basket": []}]
    for line in lines:
        message = RecommendRequest.FromString(typed_message(line))
        assert MessageToDict(message, preserving_proto_field_name=True) == {
            name: value for name, value in line.items() if value != []
        }


def test_a_replay_asks_what_the_baskets_after_the_cut_do_in_their_order() -> None:
    purchases = purchases_of(toy_dataset(users=8, weeks=8).events)
    cut = pd.Timestamp(np.median(purchases.at), unit="s", tz="UTC").isoformat()
    lines = replayed_requests(purchases, cut, 10_000)
    times = [line["at"] for line in lines if "user_id" in line]
    known = {line["user_id"] for line in lines if "user_id" in line}
    anonymous = anonymous_users(len(purchases.user_ids), ANONYMOUS_RATIO)
    assert times == sorted(times)
    assert known == set(purchases.user_ids[~anonymous])
    assert len(times) < len(lines)
    hour_before = pd.Timestamp(cut) - pd.Timedelta(hours=1)  # paid after the cut, begun before
    assert pd.Timestamp(times[0]) >= hour_before
    growing = [len(line["basket"]) for line in lines]
    assert min(growing) == 1
    assert max(growing) > 3
    assert replayed_requests(purchases, cut, 7) == lines[:7]


def test_each_run_goes_on_in_the_list_warm_ups_included() -> None:
    asked: list[Plan] = []

    class Generator:
        def run(self, plan: Plan) -> Load:
            asked.append(plan)
            return load_of([1.0] * 10)

    arm = Arm("some", "", lambda _: [])
    one = Runner(arm, cast(MeasuredServer, SERVER), "bodies", 40, 1.0, 1.0, {})
    bench = Bench(cast(LoadGenerator, Generator()), [one], [LINE] * 40, SCENE, QUICK, 50.0)
    for _ in range(2):
        bench.ask(one, 1.0, 10.0)
    # WARM_UP bodies before the first that counts, then ten that do.
    assert [plan.start for plan in asked] == [WARM_UP, 2 * WARM_UP + 10]
    assert all(plan.warm_up == WARM_UP for plan in asked)
    assert one.laps == (2 * WARM_UP + 2 * 10) / 40


def test_overload_counts_full_answers_in_time_over_the_time_they_were_due() -> None:
    # 30 a second are asked of a server that can do 10: it answers 9 in full and 12 by its fallback.
    due = [number / 30 for number in range(301)]
    kinds = [number % 10 for number in range(301)]  # below 3: in full; below 7: degraded; else late
    ms = [5.0 if kind < 7 else 9_000.0 for kind in kinds]
    degraded = [number for number, kind in enumerate(kinds) if 3 <= kind < 7]
    load = load_of(ms, due, degraded)

    class Generator:
        def run(self, plan: Plan) -> Load:
            return load

    one = Runner(Arm("some", "", lambda _: []), cast(MeasuredServer, SERVER), "bodies", 40, 1.0, 1.0, {})
    one.found["capacity"] = {"rate": 10.0}
    bench = Bench(cast(LoadGenerator, Generator()), [one], [LINE], SCENE, QUICK, 50.0)
    found = overload(bench, one)
    assert found["goodput_ratio"] == pytest.approx(0.9, rel=0.02)
    assert found["degraded_ratio"] == pytest.approx(1.2, rel=0.02)
    load = load_of([5.0] * 5, [0.0, 0.01, 0.02, 0.03, 0.04])
    assert overload(bench, one)["goodput_ratio"] is None, "five requests came together by chance"


def test_stages_are_those_of_all_answers_in_the_order_they_first_appear() -> None:
    one = Runner(Arm("some", "", lambda _: []), cast(MeasuredServer, SERVER), "bodies", 40, 1.0, 1.0, {})
    one.answers = [
        {"client_ms": 1.0, "fallback": 0.5, "total": 0.5},  # the first was late
        *[{"client_ms": 3.0, "features": 1.0, "ranking": 1.0, "total": 2.0}] * 3,
    ]
    rows = stages_of(one)
    assert rows is not None
    assert list(rows) == ["fallback", "features", "ranking", "unexplained", "client"]
    assert [row["mean"] for row in rows.values()] == [0.125, 0.75, 0.75, 0.875, 2.5]
    assert rows["ranking"]["share"] == 0.3
    one.answers = [{"client_ms": 1.0}]
    assert stages_of(one) is None


def test_the_stages_that_choose_are_added_answer_by_answer() -> None:
    one = Runner(Arm("some", "", lambda _: []), cast(MeasuredServer, SERVER), "bodies", 40, 1.0, 1.0, {})
    assert choosing_of(one) is None
    # Their p99s are 9 each, but no answer was slow in more than one of them.
    slow = [{"retrieval": 9.0}, {"ranking": 9.0}, {"reranking": 9.0}]
    stages = {"features": 4.0, "retrieval": 1.0, "ranking": 1.0, "reranking": 1.0, "total": 7.0}
    one.answers = [{"client_ms": 20.0, **stages, **more} for more in (*slow * 2, *[{}] * 94)]
    found = choosing_of(one)
    assert found is not None
    assert (found["p50"], found["p99"]) == (3.0, 11.0)
    one.answers = [{"client_ms": 60.0, "fallback": 0.1, "total": 0.1}] * 100
    found = choosing_of(one)
    assert found is not None
    assert found["p99"] == 60.0, "what was late in a stage does not tell how long that took"


@pytest.mark.parametrize(
    ("name", "load", "expected"),
    [
        ("some", load_of([7.0]), (7.0, False)),
        ("less", load_of([0.1], degraded=[0]), (0.1, True)),
        ("broken", replace(load_of([0.1]), status=np.array([500])), (None, False)),
        (NULL, None, (None, False)),
    ],
)
def test_the_first_request_comes_before_any_warm_up(
    name: str, load: Load | None, expected: tuple[float | None, bool]
) -> None:
    asked: list[Plan] = []

    class Generator:
        def run(self, plan: Plan) -> Load:
            assert load is not None
            asked.append(plan)
            return load

    one = Runner(Arm(name, "", lambda _: []), cast(MeasuredServer, SERVER), "bodies", 40, 1.0, 1.0, {})
    found = first_request(cast(LoadGenerator, Generator()), one)
    assert (found["first_ms"], found["first_degraded"]) == expected
    plans = [] if name == NULL else [(0, 0, 1, 0.0)]
    assert [(plan.start, plan.warm_up, plan.requests, plan.rate) for plan in asked] == plans
    assert one.asked == len(plans), "the next run goes on behind it"


def test_hits_are_those_between_two_readings() -> None:
    before: dict[tuple[str, ...], float] = {("process", "hit"): 5.0, ("process", "miss"): 5.0}
    after: dict[tuple[str, ...], float] = {
        **{("process", "hit"): 55.0, ("process", "miss"): 35.0, ("process", "stale"): 10.0},
        **{("process", "refused"): 10.0, ("redis", "hit"): 15.0, ("redis", "miss"): 15.0},
    }
    found = hits(before, after)
    assert found["lookups"]["process hit"] == 50
    assert found["lookups"]["process miss"] == 30
    assert found["hit_ratio"] == (50 + 10 + 15) / (50 + 30 + 10 + 10)
    assert hits(after, after)["hit_ratio"] is None


def test_the_command_hands_over_the_deadline_and_no_other_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def measure(*values: Any, **named: Any) -> dict[str, Any]:
        given.update(inspect.signature(bench_load).bind(*values, **named).arguments)
        return {}

    monkeypatch.setenv("RECO_ANSWER_CACHE", "memory:")
    monkeypatch.setenv("RECO_PROCESSES", "2")
    monkeypatch.setenv("RECO_DEADLINE_MS", "70")
    monkeypatch.setattr(
        "pipelines.cli.bench.read_champion", lambda home: Champion("b", "1", "m", "bundle", "", "")
    )
    monkeypatch.setattr("pipelines.inspect.ask.evaluation_requests", lambda bundle, limit: [LINE])
    monkeypatch.setattr("pipelines.bench.load.measure.bench_load", measure)
    monkeypatch.setattr("pipelines.bench.load.report.load_table", lambda result: "")
    done = CliRunner().invoke(main, ["bench", "load", "--home", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert given["deadline_ms"] == 70.0
    assert not any(isinstance(value, Settings) for value in given.values())


def test_nothing_to_ask_is_told(tmp_path: Path) -> None:
    champion = Champion("b", "1", "m", "bundle", "", "")
    with pytest.raises(ValueError, match="no requests"):
        bench_load(tmp_path, champion, [], tmp_path)
    with pytest.raises(ValueError, match="no arm 'triton'"):
        bench_load(tmp_path, champion, [LINE], tmp_path, ["triton"])


@pytest.mark.slow
def test_all_arms_are_measured_and_written(
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
    names = [
        "fastapi",
        "onnx-fp32",
        "fastapi-torch",
        "unoptimised",
        NULL,
        "ours, 2 processes",
        "answer-cache",
    ]
    effort = replace(QUICK, endurance=40)
    result = bench_load(
        home,
        champion,
        evaluation_requests(bundle, 50),
        tmp_path / "out",
        names,
        effort,
        goal_ms=60_000.0,  # nobody's: this machine may be busy
        endurance=True,
        deadline_ms=60_000.0,
    )
    assert json.loads((tmp_path / "out" / "load.json").read_bytes())["bundle_id"] == bundle_id
    assert (tmp_path / "out" / "load.png").exists()
    assert f"Load report of bundle {bundle_id}" in (tmp_path / "out" / "load.md").read_text()
    measured = set(result["arms"])
    assert measured | set(result["skipped"]) == {OURS, *names}
    assert {OURS, "fastapi", "fastapi-torch", "onnx-fp32", "unoptimised", NULL} <= measured
    assert "--mixed" in result["skipped"]["answer-cache"]
    places = {"RECO_HOME", "RECO_HTTP_PORT", "RECO_GRPC_PORT", "RECO_STORE_URL"}
    benches = {"RECO_DEADLINE_MS", "RECO_USER_LIMIT_PER_S"}  # patient, and few shoppers asking much
    assert set(result["arms"][OURS]["settings"]) == places | benches
    for name, arm in result["arms"].items():
        assert (arm["laps"] is None) == (name == NULL)
        assert name == NULL or arm["laps"] * 50 > alone_requests(arm)
        [alone] = arm["alone"]["rounds"]
        assert alone["answered"] == alone["requests"] > 0, name
        assert alone["cpu_ms"] > 0
        assert (arm["first_ms"] is None) == (name == NULL)
        assert arm["memory_mb"]["rss"] >= arm["memory_mb"]["pss"] > 0
        assert (arm.get("ratio") is None) == (name == OURS)
        if name == NULL:
            assert arm["stages"] is None
        else:
            stages = arm["stages"]
            parts = sum(row["mean"] for stage, row in stages.items() if stage != "client")
            assert parts == pytest.approx(stages["client"]["mean"], rel=1e-6), "they add up"
            assert {"features", "retrieval", "ranking", "reranking", "unexplained"} <= set(stages)
    ways = {"REST V1", "REST V2", "own REST route", "gRPC", "typed gRPC"}
    assert set(result["payloads"]) == ways
    typed, untyped = (result["payloads"][name]["request_bytes"] for name in ("typed gRPC", "gRPC"))
    assert typed < untyped
    assert all(row["failed"] == 0 and row["answer_bytes"] > 0 for row in result["payloads"].values())
    assert list(result["basket_length"]["ms"])[:2] == ["1", "2"]
    assert result["endurance"]["requests"] == 40
    assert result["endurance"]["failed"] == 0
    assert result["floor"]["mean_ms"] > 0


def alone_requests(arm: dict[str, Any]) -> int:
    return int(sum(one["requests"] for one in arm["alone"]["rounds"]))


@pytest.mark.slow
def test_ours_alone_is_tried_with_prefetches_a_swap_and_a_canary(toy_line: Path, tmp_path: Path) -> None:
    home, bundle = tmp_path / "home", toy_line / "evaluated"
    shutil.copytree(toy_line / "home" / "offline_store", home / "offline_store")
    champion = Champion("b", "1", "m", str(bundle), "", "")
    lines = evaluation_requests(bundle, 50)
    out, late_ms = tmp_path / "out", 60_000.0  # nobody's goal: this machine may be busy
    result = bench_load(home, champion, lines, out, [OURS], QUICK, goal_ms=late_ms, deadline_ms=late_ms)
    capacity = result["arms"][OURS]["capacity"]["rate"]
    found = result["priority"]
    assert found["rate"] == pytest.approx(3 * capacity)
    assert found["checkout"]["requests"] + found["prefetch"]["requests"] == max(int(1.5 * capacity), 1)
    swap, canary = result["swap"], result["canary"]
    assert (swap["rate"], canary["rate"]) == (capacity / 2, capacity / 2)
    assert swap["swap_s"], "the pointer moved"
    assert sum(phase["requests"] for phase in swap["phases"].values()) == swap["requests"]
    assert canary["canary_rate"] == pytest.approx(canary["rate"] / 10)
    assert len(canary["rounds"]) == 1
    written, told = json.loads((out / "load.json").read_bytes()), (out / "load.md").read_text()
    assert {"priority", "swap", "canary"} <= set(written)
    for heading in ("most of it prefetches", "swapped twice", "A canary beside stable"):
        assert heading in told


@pytest.mark.slow
def test_a_mixed_replay_says_how_many_answers_the_cache_had(toy_line: Path, tmp_path: Path) -> None:
    home, bundle = tmp_path / "home", toy_line / "evaluated"
    shutil.copytree(toy_line / "home" / "offline_store", home / "offline_store")
    champion = Champion("b", "1", "m", str(bundle), "", "")
    lines = [{"basket": [f"item-{number % 60:03}"], "at": LINE["at"]} for number in range(100_000)]
    result = bench_load(
        home, champion, lines, tmp_path, ["answer-cache"], QUICK, goal_ms=60_000.0, mixed=True
    )
    cache = result["arms"]["answer-cache"]["cache"]
    assert sum(cache["lookups"].values()) > 0
    assert 0.9 < cache["hit_ratio"] <= 1.0, "sixty baskets are soon known"
    assert 0 < cache["laps"] <= result["arms"]["answer-cache"]["laps"]
    assert "cache" not in result["arms"][OURS]
    assert result["arms"]["answer-cache"]["settings"]["RECO_ANSWER_CACHE"] == "memory:"
    assert (tmp_path / "load-mixed.md").exists()
