"""A registry of its own for each test, and bundles that are sealed but hold no model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.registry import Registry
from serving.bundle import REQUIRED, RankingSettings, seal_bundle
from serving.retrieval import Quotas


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new MLflow database takes seconds of migrations: made once, copied for each test."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    Registry(f"sqlite:///{database}", "recommender").versions()
    return database


@pytest.fixture
def home(migrated: Path, tmp_path: Path) -> Path:
    home = tmp_path / "state"
    home.mkdir()
    shutil.copyfile(migrated, home / "mlflow.db")
    return home


@pytest.fixture
def uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@pytest.fixture
def registry(uri: str) -> Registry:
    return Registry(uri, "recommender")


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., Path]:
    """Make a sealed bundle with an evaluation and empty models."""

    def make(
        name: str,
        ndcg: float = 0.16,
        window: str = "w1",
        cut: str = "2017-11-27T05:00:00Z",
        **evaluation: Any,
    ) -> Path:
        path = tmp_path / "made" / name
        for file in REQUIRED:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(name)
        results = {
            "test_window": {"hash": window, "data_hash": "d1"},
            "baskets": 8_000,
            "served": {"ndcg_at_10": ndcg, "recall_at_20": 0.29, "interval": {"ndcg_at_10": [0.1, 0.2]}},
            "baselines": {"blend": {"ndcg_at_10": 0.13}, "two_tower": {"ndcg_at_10": 0.07}},
            **evaluation,
        }
        (path / "evaluation.json").write_text(json.dumps(results))
        settings = RankingSettings(Quotas(), 0.95)
        seal_bundle(path, cut=cut, settings=settings, made_from={"data_hash": "d1", "params": {}})
        return path

    return make
