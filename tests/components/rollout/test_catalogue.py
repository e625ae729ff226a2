"""The registry's part of a release, on a real MLflow database."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from components.release.gate import GateFailed
from components.release.register_bundle import register_bundle
from components.release.registry import Registry
from components.rollout.catalogue import ModelCatalogue
from serving.release.champion import read_champion
from tests.components.conftest import as_planned
from tests.components.rollout.test_plan import RECORD

pytestmark = pytest.mark.slow


@pytest.fixture
def catalogue(home: Path, uri: str, dataset: Path, tmp_path: Path) -> ModelCatalogue:
    store = (tmp_path / "store").as_uri()
    return ModelCatalogue(home, uri, "recommender", [dataset], store, examine=as_planned)


def test_a_version_is_checked_published_sealed_and_undone(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, home: Path, uri: str
) -> None:
    records = []
    for name, quality in (("one", 0.17), ("two", 0.18)):
        register_bundle(evaluated(name, quality), uri, "recommender")
        number, bundle_id = catalogue.find("challenger")
        record = replace(RECORD, version=number, bundle_id=bundle_id, source=catalogue.place(bundle_id))
        records.append(record)
        before = registry.alias("champion")
        catalogue.check(record)
        catalogue.publish(record)
        assert registry.alias("champion") == before, "the alias moves last"
        assert (home.parent / "store" / bundle_id / "manifest.json").is_file()
        for _ in range(2):  # a deployer that was killed does it again
            catalogue.seal(record)
        assert registry.alias("champion") == number
    assert [line.action for line in registry.history()] == ["promote", "promote"]
    assert catalogue.previous() == (records[0].version, records[0].bundle_id)
    for _ in range(2):
        catalogue.undo(records[1])
    assert read_champion(home).version == records[0].version
    assert [line.action for line in registry.history()] == ["promote", "promote", "rollback"]


def test_a_worse_version_is_refused_before_any_pod_loads_it(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, uri: str, home: Path
) -> None:
    register_bundle(evaluated("one", 0.10), uri, "recommender")
    number, bundle_id = catalogue.find("challenger")
    record = replace(RECORD, version=number, bundle_id=bundle_id)
    with pytest.raises(GateFailed):
        catalogue.check(record)
    catalogue.undo(replace(record, reason="verify: NDCG@10 is lower"))
    tags = MlflowClient(uri).get_model_version("recommender", number).tags
    assert tags["refused"] == "verify: NDCG@10 is lower"
    assert registry.alias("challenger") is None, "it is not tried again"
    assert not (home.parent / "store").exists()
