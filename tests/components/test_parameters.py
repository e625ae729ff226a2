from dataclasses import dataclass, field
from typing import Any

import pytest

from components.parameters import overlay, read_arguments, read_params


@dataclass(frozen=True)
class Shape:
    layers: tuple[int, ...] = (64, 32)
    epochs: int = 3
    rate: float = 0.1
    calibrated: bool = True
    loss: str = "listwise"


def test_nothing_given_is_the_defaults() -> None:
    assert read_params(Shape, {}) == Shape()


def test_whole_floats_become_ints_in_integer_fields() -> None:
    """A JSON parameter's numbers travel as protobuf numbers, which are floats."""
    params = read_params(Shape, {"epochs": 5.0, "rate": 1.0, "layers": [8, 4]})
    assert params == Shape(layers=(8, 4), epochs=5, rate=1.0)
    assert isinstance(params.epochs, int)
    assert isinstance(params.rate, float)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"epoch": 3}, "Shape has no parameter 'epoch': did you mean 'epochs'"),
        ({"xyz": 3}, "it has layers, epochs, rate"),
        ({"epochs": 2.5}, r"Shape.epochs is 2.5, expected int like 3"),
        ({"epochs": True}, "expected int"),
        ({"rate": "fast"}, "Shape.rate is 'fast', expected float"),
        ({"calibrated": 1}, "expected bool"),
        ({"loss": 3}, "expected str"),
    ],
)
def test_an_unknown_or_mistyped_key_is_named(given: dict, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        read_params(Shape, given)


@dataclass(frozen=True)
class Sized:
    size: dict[str, Any] = field(default_factory=dict)
    ratios: tuple[float, ...] = (0.3, 0.5)


def test_a_field_with_a_factory_has_a_default_and_takes_a_value() -> None:
    assert read_params(Sized, {}) == Sized(size={})
    assert read_params(Sized, {"size": {"hidden": 64}, "ratios": [0.4]}) == Sized({"hidden": 64}, (0.4,))
    first, second = read_params(Sized, {}), read_params(Sized, {})
    assert first.size is not second.size


def test_a_field_with_a_factory_is_checked_too() -> None:
    with pytest.raises(TypeError, match=r"Sized.size is 64, expected dict like \{\}"):
        read_params(Sized, {"size": 64})


def test_given_values_replace_defaults_at_every_depth() -> None:
    usual = {"size": {"items": True, "dim": 16}, "epochs": 2}
    assert overlay(usual, {"size": {"dim": 8}}) == {"size": {"items": True, "dim": 8}, "epochs": 2}
    assert usual["size"] == {"items": True, "dim": 16}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(TypeError, match="expected a finite number like"):
        read_params(Shape, {"rate": value})


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
        ({"hidden": "wide"}, "Model.hidden is 'wide', expected int"),
        ({"hidden": 0}, "Model.hidden is 0, expected 1 or more"),
        ({"dropout": 1.5}, "Model.dropout is 1.5, expected a share below 1"),
    ],
)
def test_an_argument_that_a_class_has_not_is_named(given: dict, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        read_arguments(Model, given)
