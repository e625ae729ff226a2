"""Every arm of the load report runs on the toy shop, and each figure comes from something that ran."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from components.home import Champion
from pipelines.ask import evaluation_requests
from pipelines.bench_load import QUICK, bench_load, grpc_message, real_baskets, v2_inputs
from pipelines.load_arms import NULL, OURS
from pipelines.runs import new_run
from serving.bundle import read_manifest
from serving.settings import Settings

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


def test_a_replay_keeps_order_and_popularity() -> None:
    def at(hour: int) -> pd.Timestamp:
        return pd.Timestamp(f"2024-06-10T{hour:02}:00:00Z")

    events = pd.DataFrame(
        [
            ("late", "u1", "", at(9), "x"),
            ("old", "u1", "s", pd.Timestamp("2024-06-09T23:00:00Z"), "x"),
            *[("early", "u2", "s", at(8), item) for item in ("a", "b", "c", "d")],
            ("later", "u1", "", at(10), "x"),
        ],
        columns=["basket_id", "user_id", "store_id", "at", "item_id"],
    )
    lines = real_baskets(events, "2024-06-10T00:00:00Z", 10)
    assert lines == [
        {"user_id": "u2", "basket": ["a", "b"], "at": "2024-06-10T08:00:00+00:00", "store_id": "s"},
        {"user_id": "u1", "basket": ["x"], "at": "2024-06-10T09:00:00+00:00"},
        {"user_id": "u1", "basket": ["x"], "at": "2024-06-10T10:00:00+00:00"},
    ]
    assert real_baskets(events, "2024-06-10T00:00:00Z", 1) == lines[:1]


def test_nothing_to_ask_is_told(tmp_path: Path) -> None:
    champion = Champion("b", "1", "m", "bundle", "", "")
    with pytest.raises(ValueError, match="no requests"):
        bench_load(tmp_path, champion, [], tmp_path)
    with pytest.raises(ValueError, match="no arm 'triton'"):
        bench_load(tmp_path, champion, [LINE], tmp_path, ["triton"])


@pytest.mark.slow
def test_all_arms_are_measured_and_written(toy_line: Path, tmp_path: Path) -> None:
    home, bundle = tmp_path / "home", toy_line / "evaluated"
    shutil.copytree(toy_line / "home" / "offline_store", home / "offline_store")
    run = new_run(home, "training", {}, ["evaluate-bundle", "distill-ranker"])
    shutil.copytree(bundle, run.artifacts("evaluate-bundle") / "evaluated")
    shutil.copytree(toy_line / "student", run.artifacts("distill-ranker") / "ranker")
    bundle_id = read_manifest(bundle)["bundle_id"]
    champion = Champion(bundle_id, "1", "m", str(bundle), "", "")
    names = ["fastapi", "unoptimised", NULL, "ours, 2 processes"]
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
        settings=Settings(deadline_ms=60_000.0),
    )
    assert json.loads((tmp_path / "out" / "load.json").read_bytes())["bundle_id"] == bundle_id
    assert (tmp_path / "out" / "load.png").exists()
    assert f"Load report of bundle {bundle_id}" in (tmp_path / "out" / "load.md").read_text()
    measured = set(result["arms"])
    assert measured | set(result["skipped"]) == {OURS, *names}
    assert {OURS, "fastapi", "unoptimised", NULL} <= measured
    for name, arm in result["arms"].items():
        [alone] = arm["alone"]["rounds"]
        assert alone["answered"] == alone["requests"] > 0, name
        assert alone["cpu_ms"] > 0
        assert arm["memory_mb"]["rss"] >= arm["memory_mb"]["pss"] > 0
        assert (arm.get("ratio") is None) == (name == OURS)
        if name == NULL:
            assert arm["stages"] is None
        else:
            stages = arm["stages"]
            parts = sum(row["mean"] for stage, row in stages.items() if stage != "client")
            assert parts == pytest.approx(stages["client"]["mean"], rel=1e-6), "they add up"
            assert {"features", "retrieval", "ranking", "reranking", "unexplained"} <= set(stages)
    assert set(result["payloads"]) == {"REST V1", "REST V2", "gRPC"}
    assert all(row["failed"] == 0 and row["answer_bytes"] > 0 for row in result["payloads"].values())
    assert list(result["basket_length"]["ms"])[:2] == ["1", "2"]
    assert result["endurance"]["requests"] == 40
    assert result["endurance"]["failed"] == 0
    assert result["floor"]["mean_ms"] > 0
