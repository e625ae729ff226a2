import json
from pathlib import Path

import pytest
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from pipelines.run.graph import Outputs, Spec, WiringChanged, downstream, step_alone, step_names

DEFAULTS = {"count": 3, "times": {"times": 2}, "fail_while": "", "wait_s": 0.0}


def test_the_order_follows_the_wiring(spec: Spec) -> None:
    assert step_names(spec) == ["make-numbers", "add-up", "report"]


def test_the_downstream_steps_are_those_that_use_the_output(spec: Spec) -> None:
    assert downstream(spec, "make-numbers") == {"add-up", "report"}
    assert downstream(spec, "add-up") == {"report"}
    assert downstream(spec, "report") == set()


def test_a_step_alone_is_a_valid_pipeline_with_its_inputs_filled_in(spec: Spec) -> None:
    before = json.dumps(spec, sort_keys=True)
    given = {"make-numbers": Outputs({"Output": "2017"}, {"numbers": Path("/tmp/numbers")})}
    alone = step_alone(spec, "add-up", DEFAULTS, given)
    parsed = json_format.ParseDict(alone, pipeline_spec_pb2.PipelineSpec())
    tasks = parsed.root.dag.tasks
    assert set(tasks) == {"add-up", "add-up-takes-numbers"}
    assert tasks["add-up"].inputs.parameters["cut"].runtime_value.constant.string_value == "2017"
    importer = parsed.deployment_spec["executors"]["exec-add-up-takes-numbers"]["importer"]
    assert importer["artifactUri"]["constant"] == "/tmp/numbers"
    assert importer["typeSchema"]["schemaTitle"] == "system.Dataset"
    assert set(parsed.root.output_definitions.parameters) == {"Output"}
    assert json.dumps(spec, sort_keys=True) == before


def test_a_missing_input_of_a_step_is_reported(spec: Spec) -> None:
    given = {"make-numbers": Outputs({"Output": "2017"}, {})}
    with pytest.raises(
        WiringChanged, match="add-up takes 'numbers' of make-numbers, which this run does not hold"
    ):
        step_alone(spec, "add-up", DEFAULTS, given)
    with pytest.raises(WiringChanged, match="add-up takes 'Output' of make-numbers"):
        step_alone(spec, "add-up", DEFAULTS, {})
