"""The pages of the steps: every number and every point of a curve can be read there."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components import steps
from components.pages import show

REPORT = {
    "model": "dlrm",
    "loss": 0.25,
    "rows": 7,
    "fits": True,
    "lost": float("nan"),
    "ndcg": {"all": 0.5, "new | old": 0.125},
    "curve": [{"probes": 1, "recall": {"at_50": 0.75}}, {"probes": 8, "recall": {"at_50": 1.0}}],
}
NUMBERS = {"loss": 0.25, "rows": 7.0, "ndcg.all": 0.5, "ndcg.new | old": 0.125}
SHOWING = [
    name
    for name, value in vars(steps).items()
    if hasattr(value, "python_func") and "page" in value.python_func.__annotations__
]


class Numbers:
    """KFP's artifact, as far as a step uses it."""

    def __init__(self, path: Path) -> None:
        self.path, self.logged = str(path), dict[str, float]()

    def log_metric(self, name: str, value: float) -> None:
        self.logged[name] = value


def test_a_page_shows_numbers_and_curves(tmp_path: Path) -> None:
    numbers, page = Numbers(tmp_path / "numbers"), tmp_path / "page"
    assert show(REPORT, numbers, SimpleNamespace(path=str(page))) is REPORT
    assert numbers.logged == NUMBERS == json.loads((tmp_path / "numbers").read_text())
    lines = page.read_text().splitlines()
    assert "| loss | 0.25 |" in lines
    assert "| ndcg.new \\| old | 0.125 |" in lines
    assert lines[lines.index("## curve") + 2 :] == [
        "| probes | recall.at_50 |",
        "| --- | --- |",
        "| 1 | 0.75 |",
        "| 8 | 1 |",
    ]


def test_at_least_eight_steps_show_a_page() -> None:
    assert len(SHOWING) >= 8
    for name in SHOWING:
        outputs = getattr(steps, name).component_spec.outputs
        assert outputs["numbers"].type == "system.Metrics@0.0.1"
        assert outputs["page"].type == "system.Markdown@0.0.1"


@pytest.mark.parametrize("name", SHOWING)
def test_a_step_s_page_opens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(steps, name).python_func
    [module] = [m for m in function.__code__.co_names if m.startswith("components.") and m.endswith(name)]
    monkeypatch.setattr(import_module(module), name, lambda *_: REPORT)
    numbers, page = Numbers(tmp_path / "numbers"), tmp_path / "page"
    place: Any = SimpleNamespace(path=str(tmp_path))
    given = {argument: place for argument in function.__annotations__ if argument != "return"}
    assert function(**{**given, "numbers": numbers, "page": SimpleNamespace(path=str(page))}) is REPORT
    assert numbers.logged == NUMBERS
    assert "| model | dlrm |" in page.read_text()
