from collections.abc import Callable
from pathlib import Path

import pytest

from components.register_bundle import register_bundle
from components.registry import Registry
from serving.bundle import read_manifest
from serving.errors import BundleInvalid

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.mark.slow
def test_a_bundle_becomes_the_challenger_with_what_is_known_of_it(
    evaluated: Callable[..., Path], registry: Registry, uri: str
) -> None:
    bundle = evaluated("one")
    version = register_bundle(bundle, uri, "recommender")
    [found] = registry.versions()
    assert found.version == version
    assert found.bundle_id == read_manifest(bundle)["bundle_id"]
    assert found.aliases == ("challenger",)
    assert found.metrics == {"ndcg_at_10": 0.16, "recall_at_20": 0.29}
    assert found.size_bytes > 500
    run = registry._client.get_run(found.run_id)
    assert run.data.metrics["blend/ndcg_at_10"] == 0.13
    assert run.data.params["quotas.history"] == "300"
    assert run.data.tags["data_hash"] == "d1"


@pytest.mark.slow
def test_registering_again_changes_nothing(
    evaluated: Callable[..., Path], registry: Registry, uri: str
) -> None:
    first = register_bundle(evaluated("one"), uri, "recommender")
    second = register_bundle(evaluated("two"), uri, "recommender")
    assert register_bundle(evaluated("one"), uri, "recommender") == first != second
    assert len(registry.versions()) == 2
    assert registry.alias("challenger") == first


def test_a_broken_bundle_is_refused(evaluated: Callable[..., Path], tmp_path: Path) -> None:
    bundle = evaluated("one")
    (bundle / "index.faiss").write_text("changed")
    with pytest.raises(BundleInvalid, match=r"index.faiss has SHA-256"):
        register_bundle(bundle, f"sqlite:///{tmp_path}/x.db", "recommender")


def test_a_bundle_without_evaluation_is_refused(evaluated: Callable[..., Path], tmp_path: Path) -> None:
    from serving.bundle import RankingSettings, seal_bundle
    from serving.retrieval import Quotas

    bundle = evaluated("one")
    (bundle / "evaluation.json").unlink()
    seal_bundle(bundle, cut="", settings=RankingSettings(Quotas(), 0.95), made_from={})
    with pytest.raises(BundleInvalid, match=r"holds no evaluation.json: run evaluate_bundle"):
        register_bundle(bundle, f"sqlite:///{tmp_path}/x.db", "recommender")
