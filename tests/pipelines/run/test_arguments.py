import pytest

from pipelines.run.arguments import (
    ArgumentsInvalid,
    check_hyper_parameters,
    complete_arguments,
    parse_params,
    without_passwords,
)
from pipelines.run.graph import Spec


def test_params_are_read_as_json_if_valid() -> None:
    given = parse_params(
        ["count=3", "name=toy", "times.times=2", "times.rate=0.5", 'list=["a"]', "when=2017-11-27"]
    )
    assert given == {
        "count": 3,
        "name": "toy",
        "times": {"times": 2, "rate": 0.5},
        "list": ["a"],
        "when": "2017-11-27",
    }


@pytest.mark.parametrize("text", ["count", "=3", ""])
def test_a_param_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ArgumentsInvalid, match="expected NAME=VALUE"):
        parse_params([text])


@pytest.mark.parametrize(
    "text",
    [f"a={'[' * 10_000}", f"a={'[' * 500}{']' * 500}", f"a={'[' * 20}{']' * 20}", f"{'a.' * 10_000}a=1"],
)
def test_a_param_that_is_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(ArgumentsInvalid, match=r"^--param .{40}…: nested too deep") as raised:
        parse_params(["b=1", text])
    assert len(str(raised.value)) < 200


def test_passwords_travel_in_the_environment() -> None:
    given, environment = without_passwords(
        {
            "online_store": "rediss://shop:p%40ss@a:1/0",
            "tracking_uri": "https://ann:w%2Fd@b:5000",
            "data": "toy",
        }
    )
    assert given == {"online_store": "rediss://shop@a:1/0", "tracking_uri": "https://b:5000", "data": "toy"}
    assert environment == {
        "RECO_STORE_PASSWORD": "p@ss",
        "MLFLOW_TRACKING_USERNAME": "ann",
        "MLFLOW_TRACKING_PASSWORD": "w/d",
    }
    assert without_passwords({"online_store": "redis+cluster://:word@a:1,b:2"}) == (
        {"online_store": "redis+cluster://a:1,b:2"},
        {"RECO_STORE_PASSWORD": "word"},
    )
    assert without_passwords({"online_store": "redis://s@hop:p@s:s@a:1/0"}) == (
        {"online_store": "redis://s@hop@a:1/0"},
        {"RECO_STORE_PASSWORD": "p@s:s"},
    )
    plain = {"online_store": "redis://a:1/0", "tracking_uri": "sqlite:////home/x@y:z/mlflow.db"}
    assert without_passwords(plain) == (plain, {})


def test_an_absent_argument_gets_the_default(spec: Spec) -> None:
    arguments = complete_arguments(spec, {"count": 7})
    assert arguments == {"count": 7, "times": {}, "fail_while": "", "wait_s": 0.0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cuont": 3}, "no parameter 'cuont': did you mean 'count'"),
        ({"count": "3"}, "parameter count is '3', expected int"),
        ({"count": True}, "parameter count is True, expected int"),
        ({"times": [1]}, r"parameter times is \[1\], expected dict"),
    ],
)
def test_an_unknown_or_mistyped_argument_is_named(spec: Spec, given: dict, told: str) -> None:
    with pytest.raises(ArgumentsInvalid, match=told):
        complete_arguments(spec, given)


def test_a_missing_argument_is_named() -> None:
    spec = {"root": {"inputDefinitions": {"parameters": {"home": {"parameterType": "STRING"}}}}}
    with pytest.raises(ArgumentsInvalid, match="home is missing: give --param home=VALUE"):
        complete_arguments(spec, {})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gate_params": {"over_blnd": 1.0}}, "gate_params: GateParams has no parameter 'over_blnd'"),
        ({"student_params": {"epochs": 0}}, "StudentParams.epochs is 0, expected `int` >= 1"),
        ({"ranker_params": {"dlmr": {}}}, "no ranker 'dlmr'"),
        ({"prune_params": 3}, "prune_params is 3: give its parameters"),
    ],
)
def test_hyper_parameters_are_checked_before_anything_runs(given: dict, told: str) -> None:
    check_hyper_parameters({"gate_params": {"over_blend": 1.0}})
    with pytest.raises(ArgumentsInvalid, match=told):
        check_hyper_parameters(given)
