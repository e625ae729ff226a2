"""A compiled pipeline -> its steps in order, and each step as a pipeline of its own.

The order and the wiring of a local run come from the very IR that a cluster gets. A step alone is that
same IR with everything else removed: each input from an earlier step becomes an importer (artifacts) or a
constant (parameters).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from feature_repo.errors import CONFLICT, RecoError

Spec = dict[str, Any]  # PipelineSpec as JSON


@dataclass(frozen=True)
class Outputs:
    """What a step gave: small values by name, and the places of its artifacts."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Path] = field(default_factory=dict)


class WiringChanged(RecoError):
    """A step needs what no earlier step of this run gave: the pipeline is not the one that was run."""

    exit_code = CONFLICT


def read_spec(pipeline: Any) -> Spec:
    """Return the IR of a pipeline function as JSON."""
    from google.protobuf import json_format

    spec: Spec = json_format.MessageToDict(pipeline.pipeline_spec)
    return spec


def step_names(spec: Spec) -> list[str]:
    """Return the steps in an order in which each comes after those it depends on."""
    tasks = sorted(spec["root"]["dag"]["tasks"].items())
    needs = {name: sorted(task.get("dependentTasks", ())) for name, task in tasks}
    return list(TopologicalSorter(needs).static_order())


def downstream(spec: Spec, step: str) -> set[str]:
    """Return the steps that use what `step` gives, directly or not."""
    tasks = spec["root"]["dag"]["tasks"]
    found: set[str] = set()
    for name in step_names(spec):
        if found & set(needs := tasks[name].get("dependentTasks", ())) or step in needs:
            found.add(name)
    return found


def step_alone(spec: Spec, step: str, arguments: Mapping[str, Any], given: Mapping[str, Outputs]) -> Spec:
    """Return a pipeline that is `step` alone, with its inputs filled in.

    They come from the complete arguments of the pipeline and from what each earlier step has given.

    Raises:
        WiringChanged: an earlier step did not give what this one takes.
    """
    alone = copy.deepcopy(spec)
    task = alone["root"]["dag"]["tasks"][step]
    component = alone["components"][task["componentRef"]["name"]]
    task.pop("dependentTasks", None)
    inputs = task.get("inputs", {})
    for name, source in inputs.get("parameters", {}).items():
        if "runtimeValue" not in source:
            inputs["parameters"][name] = {
                "runtimeValue": {"constant": _value(source, step, arguments, given)}
            }
    tasks = {step: task}
    for name, source in inputs.get("artifacts", {}).items():
        importer = f"{step}-takes-{name.replace('_', '-')}"
        kind = component["inputDefinitions"]["artifacts"][name]["artifactType"]
        place = _given(source["taskOutputArtifact"], "outputArtifactKey", step, given).artifacts
        tasks[importer] = _add_importer(
            alone, importer, kind, place[source["taskOutputArtifact"]["outputArtifactKey"]]
        )
        inputs["artifacts"][name] = {
            "taskOutputArtifact": {"producerTask": importer, "outputArtifactKey": "artifact"}
        }
        task.setdefault("dependentTasks", []).append(importer)
    made = component.get("outputDefinitions", {})
    alone["pipelineInfo"] = {"name": f"only-{step}"}
    alone["root"] = {"dag": {"tasks": tasks, "outputs": _hand_out(step, made)}, "outputDefinitions": made}
    return alone


def _value(
    source: Mapping[str, Any], step: str, arguments: Mapping[str, Any], given: Mapping[str, Outputs]
) -> Any:
    if "componentInputParameter" in source:
        return arguments[source["componentInputParameter"]]
    wanted = source["taskOutputParameter"]
    return _given(wanted, "outputParameterKey", step, given).parameters[wanted["outputParameterKey"]]


def _given(wanted: Mapping[str, str], key: str, step: str, given: Mapping[str, Outputs]) -> Outputs:
    outputs = given.get(wanted["producerTask"], Outputs())
    if wanted[key] not in (outputs.parameters if key == "outputParameterKey" else outputs.artifacts):
        raise WiringChanged(
            f"{step} takes {wanted[key]!r} of {wanted['producerTask']}, which this run does not hold: "
            "--resume without --only makes it again; if the pipeline changed since, start a new run"
        )
    return outputs


def _add_importer(spec: Spec, name: str, kind: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Add a component that hands out an artifact which lies at a known place, and return its task."""
    spec["components"][f"comp-{name}"] = {
        "executorLabel": f"exec-{name}",
        "inputDefinitions": {"parameters": {"uri": {"parameterType": "STRING"}}},
        "outputDefinitions": {"artifacts": {"artifact": {"artifactType": kind}}},
    }
    importer = {"artifactUri": {"constant": str(place)}, "typeSchema": kind}
    spec["deploymentSpec"]["executors"][f"exec-{name}"] = {"importer": importer}
    return {
        "taskInfo": {"name": name},
        "componentRef": {"name": f"comp-{name}"},
        "inputs": {"parameters": {"uri": {"runtimeValue": {"constant": str(place)}}}},
    }


def _hand_out(step: str, made: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parameters": {
            key: {"valueFromParameter": {"producerSubtask": step, "outputParameterKey": key}}
            for key in made.get("parameters", {})
        },
        "artifacts": {
            key: {"artifactSelectors": [{"producerSubtask": step, "outputArtifactKey": key}]}
            for key in made.get("artifacts", {})
        },
    }


def load_component(spec: Spec) -> Any:
    """Return a callable KFP component from an IR."""
    from kfp import components

    return components.load_component_from_text(json.dumps(spec))
