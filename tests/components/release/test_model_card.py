"""The card's arithmetic by hand, and that it names the chain."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.release.model_card import chain_rows, dollars_a_million, model_card, watt_hours


def certificate(step: str, made: str, parents: list[str], **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "id": made,
        "parents": parents,
        "ndcg_at_10": {"child": 0.25, "ratio": 0.998},
        "top_10_overlap": 0.97,
        "bytes": 12_345,
        "latency_ms": {"500": {"p50": 0.36, "p99": 0.5}},
        **more,
    }


def test_estimates_by_hand() -> None:
    assert watt_hours(3_600) == pytest.approx(10.0)  # one core for an hour at 10 W
    assert dollars_a_million(3.6) == pytest.approx(0.05)  # a million times 3.6 ms is a core-hour


def test_the_chain_has_a_line_for_each_certificate() -> None:
    slower = {"500": {"p50": 0.72, "p99": 1.0}}
    rows = chain_rows(
        [
            certificate("train_ranker", "a" * 16, [], model="dcn_v2"),
            certificate("prune_ranker", "b" * 16, ["a" * 16], ratio=0.5, parent_latency_ms=slower),
            certificate("quantize_ranker", "c" * 16, ["b" * 16], variant="int4"),
        ]
    )
    first = ["train_ranker dcn_v2", "aaaaaaaa", "its weights", "0.2500", "0.9980", "0.970"]
    assert rows[0][:6] == first
    assert rows[1][:3] == ["prune_ranker 50%", "bbbbbbbb", "aaaaaaaa"]
    assert rows[1][-1] == "0.36 (parent 0.72)"
    assert rows[2][:3] == ["quantize_ranker int4", "cccccccc", "bbbbbbbb"]


def test_the_card_tells_quality_engines_and_cost(tmp_path: Path) -> None:
    (tmp_path / "ranker.onnx").write_bytes(b"x" * 5_000)
    arm = {
        "variant": "int4",
        "engine": "cpu",
        "is_served": True,
        "latency_ms": {"500": {"p50": 0.4, "p99": 0.6}},
        "outside_tolerance": ["a score moved by 0.4, allowed 0.3"],
    }
    eager = {**arm, "variant": "fp32", "engine": "torch_eager", "is_served": False, "outside_tolerance": []}
    served = {**arm, "variant": "fp16", "outside_tolerance": []}
    engines = {"arms": [arm, eager, served], "skipped": {"cuda": "no GPU here"}}
    (tmp_path / "engines.json").write_text(json.dumps(engines))
    made = {"ranker": {"model": "dlrm", "variant": "int8", "engine": "cpu"}, "cpu_seconds": 720.0}
    card = model_card(
        tmp_path,
        {"bundle_id": "b1", "cut": "2017-11-27", "made_from": made},
        {"baskets": 8_068, "served": {"ndcg_at_10": 0.1784}},
        [certificate("train_ranker", "a" * 16, [])],
    )
    for told in (
        "| ndcg_at_10 | 0.1784 |",
        "Ranker: dlrm, int8 on cpu, 5 kB",
        "Teachers, student, pruning and compiling took 720 CPU-seconds, about 2.0 Wh",
        "0.36 ms of one core: 1.00 Wh and $0.005 a million",
        "| int4 | cpu | 0.40 | 0.60 | no: a score moved by 0.4, allowed 0.3 |",
        "| fp32 | torch_eager | 0.40 | 0.60 | no: for comparison |",
        "| fp16 | cpu | 0.40 | 0.60 | yes |",
        "| | cuda | skipped: no GPU here",
    ):
        assert told in card
