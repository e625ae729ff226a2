"""What a person asked for -> the checked, complete arguments of a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from feature_repo.errors import USAGE, RecoError
from feature_repo.ids import closest
from pipelines.run.graph import Spec

_KINDS: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (float, int),
    "BOOLEAN": (bool,),
    "STRUCT": (dict,),
    "LIST": (list,),
}
_DEEPEST = 16  # groups within groups; Python's own functions end with an error at some hundreds


# User and password of a URL that a step gets as an argument -> the variables in which they travel instead.
LOGINS = {
    "online_store": ("", "RECO_STORE_PASSWORD"),  # the URL keeps its user
    "tracking_uri": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
}
_LOGIN = re.compile(r"(?:https?|rediss?)(?:\+\w+)?://(([^/:?#]*):([^/?#]*)@)")


class ArgumentsInvalid(RecoError):
    """An argument that the pipeline does not have, or of another kind."""

    exit_code = USAGE


def without_passwords(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments without the passwords in their URLs, and the environment that brings these.

    Each user of a machine can read the arguments of a process, and a step's log holds them.
    """
    given, environment = dict(arguments), dict[str, str]()
    for name, (user, password) in LOGINS.items():
        if found := _LOGIN.search(str(given.get(name, ""))):
            login, own_user, own_password = found.groups()
            environment |= {user: unquote(own_user)} if user else {}
            environment[password] = unquote(own_password)
            given[name] = given[name].replace(login, "" if user or not own_user else f"{own_user}@", 1)
    return given, environment


def parse_params(texts: Iterable[str], option: str = "--param") -> dict[str, Any]:
    """Return NAME=VALUE and NAME.KEY=VALUE as arguments, to any depth; a value that is JSON is read as JSON.

    Raises:
        ArgumentsInvalid: a text without `=`, or one that is nested deeper than any parameter.
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
        try:
            place[key] = _read(value)
            is_deep = _is_deep(given)
        except RecursionError:
            is_deep = True
        if is_deep:
            raise ArgumentsInvalid(f"{option} {text:.40}…: nested too deep, no parameter has so many groups")
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
    return complete


def check_hyper_parameters(given: Mapping[str, Any]) -> None:
    """Refuse a wrong hyper-parameter now, not in its step after hours; PyTorch and KFP are not loaded.

    Raises:
        ArgumentsInvalid: a group has no such hyper-parameter, or the value cannot be meant.
    """
    from components.hyper_parameters import GROUPS, read_ranker_params
    from components.parameters import read_params

    for name in sorted(GROUPS.keys() & given.keys()):
        if not isinstance(given[name], Mapping):
            raise ArgumentsInvalid(
                f"{name} is {given[name]!r}: give its parameters, e.g. --param {name}.NAME=VALUE"
            )
        try:
            if name == "ranker_params":  # a group for each ranker
                read_ranker_params(given[name])
            else:
                read_params(GROUPS[name], given[name])
        except TypeError as error:
            raise ArgumentsInvalid(f"{name}: {error}") from error


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_deep(value: Any) -> bool:
    layer = [value]
    for _ in range(_DEEPEST):
        groups = [one for one in layer if isinstance(one, dict | list)]
        layer = [inner for one in groups for inner in (one.values() if isinstance(one, dict) else one)]
    return bool(layer)
