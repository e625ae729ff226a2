import json
from collections.abc import Callable
from pathlib import Path

import pytest

from components.ranker.certificate import ParityFailed
from components.release.register_bundle import read_certificates, register_bundle
from components.release.registry import Registry
from serving.errors import BundleInvalid
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.manifest import read_manifest
from serving.stages.retrieval import Quotas


@pytest.mark.slow
def test_a_bundle_becomes_the_challenger_with_its_metrics(
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


@pytest.mark.slow
def test_its_description_is_the_model_card(
    evaluated: Callable[..., Path], registry: Registry, uri: str
) -> None:
    register_bundle(evaluated("one"), uri, "recommender")
    [found] = registry._client.search_model_versions("name = 'recommender'")
    for told in ("| ndcg_at_10 | 0.1600 |", "| train_ranker |", "core-hour"):
        assert told in str(found.description)


def certify_another_graph(bundle: Path) -> None:
    chain = read_certificates(bundle)
    chain[-1]["id"] = "0" * 16
    (bundle / "certificates.json").write_text(json.dumps(chain))


@pytest.mark.parametrize(
    ("change", "seals", "error", "said"),
    [
        (lambda b: (b / "certificates.json").write_text("[]"), True, ParityFailed, "no certificate at all"),
        (certify_another_graph, True, ParityFailed, "the last certificate is of 0000"),
        (lambda b: (b / "index.faiss").write_text("x"), False, BundleInvalid, "index.faiss has SHA-256"),
        (lambda b: (b / "evaluation.json").unlink(), True, BundleInvalid, "no evaluation.json: run "),
    ],
    ids=["without certificates", "certificates of another graph", "a changed file", "without evaluation"],
)
def test_an_unproven_or_broken_bundle_is_refused(
    evaluated: Callable[..., Path],
    tmp_path: Path,
    change: Callable[[Path], object],
    seals: bool,
    error: type[Exception],
    said: str,
) -> None:
    """Whoever seals such a bundle, forged or half made, does not get it into the registry."""
    bundle = evaluated("one")
    change(bundle)
    if seals:
        seal_bundle(bundle, cut="", settings=RankingSettings(Quotas(), 0.95), made_from={})
    with pytest.raises(error, match=said):
        register_bundle(bundle, f"sqlite:///{tmp_path}/x.db", "recommender")
    assert not (tmp_path / "x.db").exists()
