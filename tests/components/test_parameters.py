from dataclasses import dataclass, field
from typing import Any

import pytest

from components.parameters import Count, Positive, overlay, read_arguments, read_params


@dataclass(frozen=True)
class Shape:
    layers: tuple[Count, ...] = (64, 32)
    epochs: Count = 3
    rate: Positive = 0.1
    calibrated: bool = True
    size: dict[str, Any] = field(default_factory=dict)


def test_nothing_given_is_the_defaults() -> None:
    assert read_params(Shape, {}) == Shape()


def test_whole_floats_become_ints_in_integer_fields() -> None:
    """A JSON parameter's numbers travel as protobuf numbers, which are floats."""
    params = read_params(Shape, {"epochs": 5.0, "rate": 1.0, "layers": [8.0, 4], "size": {"hidden": 64.0}})
    assert params == Shape(layers=(8, 4), epochs=5, rate=1.0, size={"hidden": 64})
    assert isinstance(params.epochs, int)
    assert isinstance(params.rate, float)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"epoch": 3}, "Shape has no parameter 'epoch': did you mean 'epochs'"),
        ({"xyz": 3}, "it has layers, epochs, rate"),
        ({"epochs": 2.5}, r"Shape.epochs is 2.5, expected `int`"),
        ({"epochs": True}, "expected `int`"),
        ({"epochs": 0}, "Shape.epochs is 0, expected `int` >= 1"),
        ({"rate": "fast"}, "Shape.rate is 'fast', expected `float`"),
        ({"rate": float("nan")}, "Shape.rate is nan, expected a finite number"),
        ({"rate": float("inf")}, "Shape.rate is inf, expected a finite number"),
        ({"layers": [8, 0]}, r"expected `int` >= 1 - at `\$\[1\]`"),
        ({"calibrated": 1}, "expected `bool`"),
        ({"size": 64}, "expected `object`"),
    ],
)
def test_an_unknown_or_mistyped_key_is_named(given: dict, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        read_params(Shape, given)


def test_given_values_replace_defaults_at_every_depth() -> None:
    usual = {"size": {"items": True, "dim": 16}, "epochs": 2}
    assert overlay(usual, {"size": {"dim": 8}}) == {"size": {"items": True, "dim": 8}, "epochs": 2}
    assert usual["size"] == {"items": True, "dim": 16}


class Model:
    def __init__(self, shape: int, hidden: int = 64, dropout: float = 0.1, items: bool = False) -> None: ...


def test_arguments_of_a_class_are_read_like_parameters() -> None:
    read = read_arguments(Model, {"hidden": 32.0, "dropout": 0, "items": True})
    assert read == {"hidden": 32, "dropout": 0, "items": True}
    assert isinstance(read["hidden"], int)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hiden": 3}, "Model has no parameter 'hiden': did you mean 'hidden'"),
        ({"shape": 3}, "Model has no parameter 'shape'"),
        ({"hidden": "wide"}, "Model.hidden is 'wide', expected `int`"),
        ({"hidden": 0}, "Model.hidden is 0, expected `int` >= 1"),
        ({"dropout": 1.5}, "Model.dropout is 1.5, expected `float` < 1.0"),
    ],
)
def test_an_argument_that_a_class_has_not_is_named(given: dict, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        read_arguments(Model, given)
