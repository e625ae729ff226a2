"""The pages of the steps: every number and every point of a curve can be read there."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components import steps
from components.evaluation.baselines import BASELINES
from components.pages import show
from tests.conftest import Numbers

REPORT = {
    "model": "dlrm",
    "loss": 0.25,
    "rows": 7,
    "fits": True,
    "lost": float("nan"),
    "ndcg": {"all": 0.5, "new | old": 0.125},
    "curve": [{"probes": 1, "recall": {"at_50": 0.75}}, {"probes": 8, "recall": {"at_50": 1.0}, "bytes": 5}],
}
NUMBERS = {"loss": 0.25, "rows": 7.0, "ndcg.all": 0.5, "ndcg.new | old": 0.125}
SHOWS = {  # a line or table that each step's page must have
    "train_retriever": "| epoch | loss |",
    "train_ranker": "| epoch | loss |",
    "distill_ranker": "| epoch | loss |",
    "prune_ranker": "| pruned_ratio |",
    "quantize_ranker": "| variant | ndcg_at_10 | of_parent | bytes | p99_ms | tuned | outside_tolerance |",
    "compile_ranker": "| p50_ms |",
    "export_retriever": "| query_tower_max_difference |",
    "build_index": "| bytes | build_s | recall | p50_ms | p99_ms |",
    "evaluate_bundle": "| baselines.blend.interval.low |",
}
SHOWING = [
    name
    for name, value in vars(steps).items()
    if hasattr(value, "python_func") and "page" in value.python_func.__annotations__
]


def test_a_page_shows_numbers_and_curves(tmp_path: Path) -> None:
    numbers, page = Numbers(tmp_path / "numbers"), tmp_path / "page"
    assert show(REPORT, numbers, SimpleNamespace(path=str(page))) is REPORT
    assert numbers.logged == NUMBERS == json.loads((tmp_path / "numbers").read_text())
    lines = page.read_text().splitlines()
    assert "| loss | 0.25 |" in lines
    assert "| ndcg.new \\| old | 0.125 |" in lines
    assert lines[lines.index("## curve") + 2 :] == [
        "| probes | recall.at_50 | bytes |",
        "| --- | --- | --- |",
        "| 1 | 0.75 |  |",
        "| 8 | 1 | 5 |",
    ]


def test_each_step_that_shows_a_page_is_looked_at() -> None:
    """Promotion needs a registry: the test of the tutorial opens its page."""
    assert set(SHOWING) == {*SHOWS, "promote_bundle"}


@pytest.mark.parametrize("name", SHOWS)
def test_a_step_s_page_opens(
    name: str, toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's own lines show the report that it gave for the toy shop."""
    report = json.loads((toy_line / "reports.json").read_text())[name]
    function = getattr(steps, name).python_func
    [module] = [m for m in function.__code__.co_names if m.startswith("components.") and m.endswith(name)]
    monkeypatch.setattr(import_module(module), name, lambda *_: report)
    numbers, page = Numbers(tmp_path / "numbers"), tmp_path / "page"
    place: Any = SimpleNamespace(path=str(tmp_path))
    given = {argument: place for argument in function.__annotations__ if argument != "return"}
    given |= {
        "params": {},
        "model": "dlrm",
        "tracking_uri": "http://127.0.0.1:9",
        "model_name": "recommender",
    }
    given |= {"numbers": numbers, "page": SimpleNamespace(path=str(page))}
    assert function(**{k: v for k, v in given.items() if k in function.__annotations__}) is report
    assert numbers.logged == json.loads((tmp_path / "numbers").read_text()) != {}
    assert SHOWS[name] in page.read_text()


@pytest.mark.parametrize("name", ["train_retriever", "train_ranker", "distill_ranker"])
def test_a_toy_training_s_curve_goes_down(name: str, toy_line: Path) -> None:
    curve = json.loads((toy_line / "reports.json").read_text())[name]["curve"]
    assert [point["epoch"] for point in curve] == list(range(1, len(curve) + 1))
    assert len(curve) >= 3
    assert curve[-1]["loss"] < curve[0]["loss"]


def test_the_toy_evaluation_has_each_baseline_with_its_interval(toy_line: Path) -> None:
    report = json.loads((toy_line / "reports.json").read_text())["evaluate_bundle"]
    assert set(report["baselines"]) == set(BASELINES)
    for row in (report, *report["baselines"].values()):
        assert 0 <= row["ndcg_at_10"] <= 1
    assert report["interval"]["ndcg_at_10"]["low"] <= report["ndcg_at_10"]
    assert report["ndcg_at_10"] <= report["interval"]["ndcg_at_10"]["high"]
    popularity = report["baselines"]["popularity"]
    times = report["ndcg_at_10"] / popularity["ndcg_at_10"]
    assert popularity["served_is_times"] == pytest.approx(times, rel=1e-3)
