"""A version of the registry as MLflow loads it: the same answers as the path that is served."""

from pathlib import Path
from typing import Any

import pytest

from components.release.registry import Registry
from serving.answer.recommender import open_recommender
from serving.schemas import parse_request
from serving.stores.online_features import MemoryStore
from tests.serving.conftest import build_bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning"),  # MLflow's of its own types
]
AT = "2017-12-05T18:30:00Z"
LINES: list[dict[str, Any]] = [
    {"basket": ["1000005"], "user_id": "u1", "at": AT, "k": 7, "request_id": "a"},
    {"basket": [], "at": AT, "k": 10, "request_id": "b"},
]


def items(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["item_id"], item["score"]) for item in answer["items"]]


def test_mlflow_loads_the_champion_and_answers_as_it_is_served(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import pandas as pd

    monkeypatch.setenv("RECO_STORE_URL", "memory:")
    bundle = build_bundle(tmp_path / "bundle")
    registry.point("champion", registry.add(bundle, {"bundle_id": "b1"}, {}, {}))
    mlflow.set_tracking_uri(registry.tracking_uri)
    model = mlflow.pyfunc.load_model(f"models:/{registry.model_name}@champion")
    recommender = open_recommender(bundle, MemoryStore())
    expected = [
        recommender.recommend(parse_request(line, now=0.0, default_id="x")).to_dict() for line in LINES
    ]
    answers = model.predict(pd.DataFrame(LINES))
    assert [items(answer) for answer in answers] == [items(answer) for answer in expected]
    assert [len(answer["items"]) for answer in answers] == [7, 10]
    assert answers[0]["bundle_id"] == recommender.bundle.bundle_id
    assert [column.name for column in model.metadata.signature.inputs] == [
        *("basket", "user_id", "store_id", "at", "k", "request_id")
    ]
    example = model.input_example
    assert example["basket"].tolist() == [["item-1", "item-2"]]
    assert len(model.predict(example)[0]["items"]) == 10
    assert not list((registry.download(registry.version("1"), tmp_path / "copy")).glob("MLmodel"))
