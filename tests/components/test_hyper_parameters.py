import subprocess
import sys
from dataclasses import field, replace
from typing import Any

import pytest

from components.hyper_parameters import (
    GROUPS,
    BundleParams,
    CompileParams,
    GateParams,
    IndexParams,
    PruneParams,
    RankerParams,
    StudentParams,
    _comments,
    describe,
)
from components.parameters import read_params
from serving.stages.retrieval import Quotas


class Commented:
    """Doc."""

    plain: int
    beside: int = 1_000  # in bytes
    # Two lines
    # of reasons.
    above: str = "x"
    made: dict[str, int] = field(default_factory=dict)  # a map


def test_fields_carry_the_comment_beside_or_above_them() -> None:
    expected = {"plain": "", "beside": "in bytes", "above": "Two lines of reasons.", "made": "a map"}
    assert _comments(Commented) == expected


@pytest.mark.parametrize("group", GROUPS)
def test_every_hyper_parameter_has_a_default_and_a_meaning(group: str) -> None:
    described = describe(group)
    assert [row.name for row in described] == [f"{group}.{name}" for name in GROUPS[group].__annotations__]
    assert [row.name for row in described if len(row.meaning) < 5] == []


def test_a_ranker_is_described_with_its_own_defaults_and_the_arguments_of_its_class() -> None:
    rows = {row.name: row.default for row in describe("ranker_params.dlrm")}
    assert rows["ranker_params.dlrm.epochs"] == 1
    assert rows["ranker_params.dlrm.size.dim"] == 16, "ours, not the default of the class"
    assert rows["ranker_params.dlrm.size.hidden"] == 128
    assert "ranker_params.gradient_boosting.epochs" not in [
        row.name for row in describe("ranker_params.gradient_boosting")
    ]


@pytest.mark.slow
def test_a_wrong_name_is_refused_before_slow_libraries_load() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pipelines.cli"]
    command += ["run", "--data", "toy", "--param", "student_params.epoch=2"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2
    assert "StudentParams has no parameter 'epoch': did you mean 'epochs'" in said.stderr
    loaded = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert "components.hyper_parameters" in loaded
    assert not loaded & {"torch", "kfp", "mlflow", "lightgbm", "faiss"}


@pytest.mark.parametrize(
    ("group", "given", "told"),
    [
        (BundleParams, {"history": -1}, "quota history is '-1'"),
        (BundleParams, {"history": -1, "profiles": {}}, "quota history is '-1'"),
        (BundleParams, {"candidates": 0}, "candidates is 0"),
        (BundleParams, {"candidates": 200_000}, "quota total is '200000'"),
        (BundleParams, {"profiles": {"lunch": {"quotas": {"total": "x"}}}}, "'lunch': quota total is 'x'"),
        (BundleParams, {"profiles": {"lunch": {"quotas": 3}}}, "'lunch': "),
        (BundleParams, {"type_penalty": 0.0}, "type_penalty is 0.0"),
        (BundleParams, {"novelty": -0.1}, "novelty is -0.1"),
        (BundleParams, {"novel_slots": [0]}, r"novel_slots is \[0\]"),
        (BundleParams, {"profiles": {"lunch": {"quotas": {"tower": 3.5}}}}, "'lunch': quota tower is '3.5'"),
        (
            BundleParams,
            {"profiles": {"lunch": {"items": {"column": "colour", "above_quantile": 0.5}}}},
            "colour",
        ),
        (BundleParams, {"profiles": {"x": {"search": {"nprobe": "x"}}}}, "'x': search nprobe is 'x'"),
        (StudentParams, {"dropout": 1.0}, "dropout is 1"),
        (StudentParams, {"pointwise_weight": -3.0}, "pointwise_weight is -3"),
        (StudentParams, {"soft_weight": 1.5}, "soft_weight is 1.5"),
        (StudentParams, {"seed": -1}, "seed is -1"),
        (RankerParams, {"batch_size": 0}, "batch_size is 0"),
        (PruneParams, {"ratios": [0.5, 1.0]}, r"ratios is \[0.5, 1.0\]"),
        (PruneParams, {"ratios": [0.0]}, "ratios is"),
        (CompileParams, {"candidates": 77}, r"candidates is 77, expected one of \(1, 100, 500, 1000\)"),
        (IndexParams, {"target": 0.0}, "target is 0"),
        (GateParams, {"over_blend": float("nan")}, "over_blend is nan"),
        (GateParams, {"over_blend": -0.1}, "over_blend is -0.1"),
    ],
)
def test_a_value_that_a_later_step_would_refuse_is_refused_at_once(
    group: type, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        read_params(group, given)


def test_fewer_candidates_leave_each_source_its_share() -> None:
    """Of 300: if all 300 of the history came first, a shopper with many purchases would see nothing new."""
    assert BundleParams(candidates=300).quotas == Quotas(180, 108, 36, 0, 24, 300)
    assert BundleParams(candidates=1_000).quotas == Quotas(600, 360, 120, 0, 80, 1_000)
    assert BundleParams(candidates=1).quotas == Quotas(1, 1, 1, 0, 1, 1)  # rounded up; none stays none
    given = BundleParams(history=10, tower=60, candidates=300)
    assert given.quotas == Quotas(10, 108, 36, 60, 24, 300), "a given quota is taken as it stands"
    assert given.read_profiles({})["premium"].quotas == Quotas(10, 108, 36, 300, 24, 300)
    as_default = read_params(BundleParams, {"history": 300.0, "candidates": 200})
    assert as_default.quotas == Quotas(300, 72, 24, 0, 16, 200), "also one that equals its default"
    assert replace(as_default, candidates=100).quotas == Quotas(300, 36, 12, 0, 8, 100)
    small = BundleParams(profiles={"small": {"quotas": {"total": 100}}}).read_profiles({})["small"]
    assert small.quotas == Quotas(60, 36, 12, 0, 8, 100)


def test_whole_numbers_in_a_profile_may_have_come_as_floats() -> None:
    given = {"x": {"quotas": {"tower": 300.0}, "search": {"nprobe": 8.0}}}
    [profile] = read_params(BundleParams, {"profiles": given}).read_profiles({}).values()
    assert (profile.quotas.tower, profile.search) == (300, {"nprobe": 8})
