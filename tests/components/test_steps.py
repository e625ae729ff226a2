"""The wrappers as text: does each hand over what its function takes?"""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp.dsl import base_component

from components import steps

ROOT = Path(__file__).parents[2]
SOURCE = ast.parse((ROOT / "components" / "steps.py").read_text())
WRAPPERS = [node for node in SOURCE.body if isinstance(node, ast.FunctionDef)]


def plain(name: str) -> ast.FunctionDef:
    [module] = (ROOT / "components").rglob(f"{name}.py")
    tree = ast.parse(module.read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda node: node.name)
def test_a_step_passes_the_arguments_of_its_function(wrapper: ast.FunctionDef) -> None:
    takes = plain(wrapper.name).args
    calls = [[node.func, *node.args] for node in ast.walk(wrapper) if isinstance(node, ast.Call)]
    calls += [call[1:] for call in calls if ast.unparse(call[0]) == "partial"]  # work that is recorded
    [arguments] = [call[1:] for call in calls if ast.unparse(call[0]) == wrapper.name]
    given = len(arguments)
    most = len(takes.args)
    least = most - len(takes.defaults)
    assert least <= given <= most, f"{wrapper.name} takes {least} to {most} arguments, its step gives {given}"
    named = [argument.id for argument in arguments if isinstance(argument, ast.Name)]
    expected = [argument.arg for argument in takes.args]
    assert [name for name in expected if name in named] == named, "the order differs"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda node: node.name)
def test_a_step_is_a_component_with_our_image_that_installs_nothing(wrapper: ast.FunctionDef) -> None:
    component = getattr(steps, wrapper.name)
    assert isinstance(component, base_component.BaseComponent)
    container = component.component_spec.implementation.container
    assert container.image == steps.IMAGE
    assert "pip install" not in " ".join(container.command)
    assert component.description == inspect.cleandoc(ast.get_docstring(wrapper) or "")


def test_the_first_id_of_a_bundle_is_not_taken_for_the_promoted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation seals a copy with its results, which therefore has another id."""
    place = SimpleNamespace(path=str(tmp_path))
    monkeypatch.setattr("components.release.assemble_bundle.assemble_bundle", lambda *_: "first")
    made = steps.assemble_bundle.python_func(*[place] * 6, "cut", "hash", {}, place)
    assert made == {"bundle_id_before_evaluation": "first"}
