"""A step's JSON parameters -> its frozen dataclass; an unknown or mistyped key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from feature_repo.ids import closest

Params = TypeVar("Params")

# What a field may hold, beside plain types: the annotation is the check.
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
AtLeast0 = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Part = Annotated[float, Meta(gt=0, le=1)]
Inside = Annotated[float, Meta(gt=0, lt=1)]
Dropout = Annotated[float, Meta(ge=0, lt=1)]


def read_params(kind: type[Params], given: Mapping[str, Any]) -> Params:
    """Return a dataclass built from `given`, with its defaults for missing keys.

    Numbers in a JSON parameter reach a local step as floats (they travel as protobuf numbers): a whole
    one becomes an int again where the field is an int.

    Raises:
        TypeError: naming the key, the value found and the value expected.
    """
    return kind(**_read(kind.__name__, get_type_hints(kind, include_extras=True), given))


def read_arguments(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of a class's optional arguments, read like parameters.

    Whole numbers are sizes: 1 or more.

    Raises:
        TypeError: naming the key, the value found and the value expected.
    """
    hints = {
        name: Count if one.annotation is int else one.annotation
        for name, one in signature(kind, eval_str=True).parameters.items()
        if one.default is not one.empty
    }
    if "dropout" in hints:
        hints["dropout"] = Dropout
    return _read(kind.__name__, hints, given)


def _read(owner: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    read = {}
    for name, value in given.items():
        if name not in hints:
            raise TypeError(f"{owner} has no parameter {name!r}: {closest(name, hints, 'it has')}")
        try:
            read[name] = msgspec.convert(_whole(value), hints[name])
        except msgspec.ValidationError as error:
            expected = str(error).replace("Expected", "expected", 1)
            raise TypeError(f"{owner}.{name} is {value!r}, {expected}") from error
    return read


def _whole(value: Any) -> Any:
    """Return a JSON value with whole numbers as ints, at every depth: a step gets them as floats."""
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("Expected a finite number")
    if isinstance(value, Mapping):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def overlay(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usual` with the given values in their place, also in nested mappings."""
    merged = dict(usual)
    for name, value in given.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = overlay(below, value)
        merged[name] = value
    return merged
