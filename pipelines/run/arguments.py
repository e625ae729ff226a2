"""What a person asked for -> the checked, complete arguments of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from feature_repo.errors import USAGE, RecoError
from feature_repo.spelling import closest
from pipelines.run.graph import Spec

# The dataclass behind each JSON parameter, or what reads it: checked before hours of work, not after.
PARAMS = {
    "example_params": "components.data.build_examples:ExampleParams",
    "retriever_params": "components.retriever.train_retriever:RetrieverParams",
    "ranker_params": "components.ranker.train_ranker:read_ranker_params",
    "student_params": "components.ranker.distill_ranker:StudentParams",
    "prune_params": "components.compression.prune_ranker:PruneParams",
    "quantize_params": "components.compression.quantize_ranker:QuantizeParams",
    "index_params": "components.retriever.choose_index:IndexParams",
    "compile_params": "components.compression.compile_ranker:CompileParams",
    "bundle_params": "components.release.assemble_bundle:BundleParams",
    "gate_params": "components.release.gate:GateParams",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (float, int),
    "BOOLEAN": (bool,),
    "STRUCT": (dict,),
    "LIST": (list,),
}


class ArgumentsInvalid(RecoError):
    """An argument that the pipeline does not have, or of another kind."""

    exit_code = USAGE


def parse_params(texts: Iterable[str], option: str = "--param") -> dict[str, Any]:
    """Return NAME=VALUE and NAME.KEY=VALUE as arguments, to any depth; a value that is JSON is read as JSON.

    Raises:
        ArgumentsInvalid: a text without `=`.
    """
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentsInvalid(
                f"{option} {text!r}: expected NAME=VALUE, for example "
                + ("over_blend=1.1" if option == "--gate" else "student_params.epochs=2")
            )
        *outer, key = name.split(".")
        place = given
        for step in outer:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):
                raise ArgumentsInvalid(f"{option} {text!r}: {step} was given as a value before")
        place[key] = _read(value)
    return given


def complete_arguments(spec: Spec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a pipeline: the given ones, and defaults for the rest.

    Raises:
        ArgumentsInvalid: with the argument, its value and the expected type.
    """
    known = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in given.items():
        if name not in known:
            raise ArgumentsInvalid(f"the pipeline has no parameter {name!r}: {closest(name, sorted(known))}")
        kind = known[name]["parameterType"]
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
            raise ArgumentsInvalid(f"parameter {name} is {value!r}, expected {_KINDS[kind][0].__name__}")
    complete = {}
    for name, definition in known.items():
        if name in given:
            complete[name] = given[name]
        elif "defaultValue" in definition:
            complete[name] = definition["defaultValue"]
        else:
            raise ArgumentsInvalid(f"parameter {name} is missing: give --param {name}=VALUE")
    for name in sorted(PARAMS.keys() & complete.keys()):
        if complete[name]:
            _check_fields(name, complete[name])
    return complete


def _check_fields(name: str, given: Mapping[str, Any]) -> None:
    from components.parameters import read_params

    module, kind = PARAMS[name].split(":")
    try:
        behind = getattr(import_module(module), kind)
        read_params(behind, given) if isinstance(behind, type) else behind(given)
    except TypeError as error:
        raise ArgumentsInvalid(f"{name}: {error}") from error


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
