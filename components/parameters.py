"""A step's JSON parameters -> its frozen dataclass; an unknown or mistyped key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any, TypeVar

from feature_repo.ids import closest

Params = TypeVar("Params")


def read_params(kind: type[Params], given: Mapping[str, Any]) -> Params:
    """Return `kind` built from `given`, with its defaults for missing keys.

    Numbers in a JSON parameter reach a local step as floats (they travel as protobuf numbers): a whole
    one becomes an int again where the field is an int.

    Raises:
        TypeError: naming the key, the value found and the value expected.
    """
    known = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)  # type: ignore[arg-type]
    }
    return kind(**{name: _value(kind, known, name, value) for name, value in given.items()})


def read_arguments(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of a class's optional arguments, read like parameters.

    Whole numbers are sizes: 1 or more.

    Raises:
        TypeError: naming the key, the value found and the value expected.
    """
    arguments = signature(kind).parameters
    known = {name: one.default for name, one in arguments.items() if one.default is not one.empty}
    read = {name: _value(kind, known, name, value) for name, value in given.items()}
    for name, value in read.items():
        if type(known[name]) is int and value < 1:
            raise TypeError(f"{kind.__name__}.{name} is {value}, expected 1 or more")
        if name == "dropout" and not 0 <= value < 1:
            raise TypeError(f"{kind.__name__}.dropout is {value}, expected a share below 1")
    return read


def require_positive(settings: Any, *names: str) -> None:
    """Raise TypeError for a field that is 0 or less, naming it."""
    _require(settings, names, lambda value: value > 0, "more than 0")


def require_at_least_0(settings: Any, *names: str) -> None:
    """Raise TypeError for a field that is below 0, naming it."""
    _require(settings, names, lambda value: value >= 0, "0 or more")


def require_share(settings: Any, *names: str) -> None:
    """Raise TypeError for a field that is no share from 0 to 1, naming it."""
    _require(settings, names, lambda value: 0 <= value <= 1, "a share from 0 to 1")


def _require(settings: Any, names: Iterable[str], holds: Callable[[Any], bool], expected: str) -> None:
    for name in names:
        if not holds(value := getattr(settings, name)):
            raise TypeError(f"{type(settings).__name__}.{name} is {value}, expected {expected}")


def overlay(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usual` with the given values in their place, also in nested mappings."""
    merged = dict(usual)
    for name, value in given.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = overlay(below, value)
        merged[name] = value
    return merged


def _value(kind: type, known: dict[str, Any], name: str, value: Any) -> Any:
    if name not in known:
        hint = closest(name, known, "it has")
        raise TypeError(f"{kind.__name__} has no parameter {name!r}: {hint}")
    default = known[name]
    if isinstance(default, bool) or not isinstance(default, int | float):
        expected: tuple[type, ...] = (type(default),)
        value = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
    else:
        expected = (int,) if isinstance(default, int) else (int, float)
    if expected in ((int,), (dict,)):
        value = _whole(value)
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        raise TypeError(
            f"{kind.__name__}.{name} is {value!r}, expected {expected[-1].__name__} like {default!r}"
        )
    _check_range(f"{kind.__name__}.{name}", value, default)
    return value


def _whole(value: Any) -> Any:
    """Return a JSON value with whole numbers as ints, at every depth: a step gets them as floats."""
    if isinstance(value, Mapping):
        return {key: _whole(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_range(name: str, value: Any, default: Any) -> None:
    """Refuse a number that has the right type and still cannot be meant."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{name} is {value!r}, expected a finite number like {default!r}")
    if name.endswith(".seed") and isinstance(value, int) and value < 0:
        raise TypeError(f"{name} is {value}, expected 0 or more")
