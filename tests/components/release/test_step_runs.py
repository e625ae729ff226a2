"""A step's run in a real MLflow: parameters, numbers and curves; failed ones, and a server that is away."""

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from components.release.step_runs import recorded
from tests.conftest import Numbers


def train(report: dict[str, Any]) -> dict[str, Any]:
    return report


def pages(folder: Path) -> tuple[Numbers, Any]:
    return Numbers(folder / "numbers"), SimpleNamespace(path=str(folder / "page"))


def runs(uri: str) -> list[Any]:
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("recommender-steps")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


@pytest.mark.slow
def test_a_step_leaves_its_parameters_numbers_and_curve(uri: str, tmp_path: Path) -> None:
    report = {
        "loss": 2.5,
        "table": {"fp16": 0.99, "as int4/weights": 1},
        "curve": [{"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.5}],
        "model": "dlrm",
        "gap": float("nan"),
    }
    params = {"epochs": 2, "size": {"dim": 8}}
    assert recorded(partial(train, report), params, uri, "recommender", *pages(tmp_path)) is report
    [run] = runs(uri)
    assert (run.info.run_name, run.info.status) == ("train", "FINISHED")
    assert run.data.params == {"epochs": "2", "size.dim": "8"}
    assert run.data.metrics == {
        "loss": 2.5,
        "table.fp16": 0.99,
        "table.as int4/weights": 1.0,
        "curve.epoch": 2.0,
        "curve.loss": 2.5,
    }
    history = MlflowClient(uri, uri).get_metric_history(run.info.run_id, "curve.loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 3.0), (1, 2.5)]


@pytest.mark.slow
def test_a_step_that_fails_is_recorded_as_failed(uri: str, tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        raise ValueError("no list holds a purchase")

    with pytest.raises(ValueError, match="no list"):
        recorded(partial(work), {}, uri, "recommender", *pages(tmp_path))
    [run] = runs(uri)
    assert (run.info.status, run.data.tags["error"]) == ("FAILED", "ValueError: no list holds a purchase")


def test_a_server_that_is_away_costs_the_record_alone(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    numbers, page = pages(tmp_path)
    with caplog.at_level(logging.WARNING):
        report = recorded(partial(train, {"loss": 1}), {}, "http://127.0.0.1:9", "recommender", numbers, page)
    assert report == {"loss": 1}
    assert "train is not recorded in MLflow: no registry at" in caplog.text
    assert json.loads(Path(numbers.path).read_text()) == {"loss": 1}
    assert "loss" in Path(page.path).read_text(), "its page is written all the same"
