"""The registry's part of a release, on a real MLflow database."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import components.release.promote_bundle as promote_module
from components.release.gate import GateFailed
from components.release.promote_bundle import NothingToCompare, promote_bundle
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, RegistryRefused
from components.release.signing import sign
from components.rollout.catalogue import ModelCatalogue
from components.rollout.plan import Release
from serving.errors import NoChampion
from serving.release.champion import read_champion
from serving.release.signatures import check_signed
from tests.components.conftest import as_planned, champions
from tests.components.rollout.toy_cluster import RECORD, Killed
from tests.serving.signed import write_keys

pytestmark = pytest.mark.slow


@pytest.fixture
def catalogue(home: Path, uri: str, dataset: Path, tmp_path: Path) -> ModelCatalogue:
    store = (tmp_path / "store").as_uri()
    return ModelCatalogue(home, lambda: uri, "recommender", lambda: [dataset], store, examine=as_planned)


def record_of(catalogue: ModelCatalogue, version: str = "challenger") -> Release:
    """The record of a release of a version."""
    number, bundle_id = catalogue.find(version)
    return replace(RECORD, version=number, bundle_id=bundle_id, source=catalogue.place(bundle_id))


def test_a_version_is_checked_published_sealed_and_undone(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, home: Path, uri: str
) -> None:
    records = []
    for name, quality in (("one", 0.17), ("two", 0.18)):
        register_bundle(evaluated(name, quality), uri, "recommender")
        record = record_of(catalogue)
        records.append(record)
        before = registry.alias("champion")
        catalogue.check(record)
        catalogue.publish(record)
        assert registry.alias("champion") == before, "the alias moves last"
        assert (home.parent / "store" / record.bundle_id / "manifest.json").is_file()
        for _ in range(2):  # a deployer that was killed does it again
            catalogue.seal(record)
        assert registry.alias("champion") == record.version
    assert [line.action for line in registry.history()] == ["promote", "promote"]
    assert catalogue.previous() == (records[0].version, records[0].bundle_id)
    catalogue.undo(replace(records[1], again=True))
    assert registry.alias("champion") == records[1].version, "the old pods have this bundle, too"
    assert "refused" not in MlflowClient(uri, uri).get_model_version("recommender", "2").tags
    for _ in range(2):
        catalogue.undo(replace(records[1], sealed=True))
    assert read_champion(home).version == records[0].version
    assert [line.action for line in registry.history()] == ["promote", "promote", "rollback"]
    MlflowClient(uri, uri).delete_model_version("recommender", records[1].version)
    catalogue.undo(records[1])  # a person deleted the bad version in the middle
    register_bundle(evaluated("three", 0.19), uri, "recommender")
    record = record_of(catalogue)
    catalogue.seal(record)
    MlflowClient(uri, uri).delete_model_version("recommender", records[0].version)
    catalogue.undo(replace(record, sealed=True, reason="rolled back"))  # no version is left to go back to
    assert registry.alias("champion") == record.version
    assert registry.version(record.version).refused == "rolled back"
    catalogue.seal(record)
    assert not registry.version(record.version).refused, "a later release of it went well"


@champions(2)
def test_a_champion_that_the_release_did_not_make_stays_after_its_abort(
    catalogue: ModelCatalogue, registry: Registry, home: Path
) -> None:
    """A training promoted it; the release is aborted before its seal."""
    catalogue.undo(replace(record_of(catalogue, "2"), reason="no traffic"))
    assert (registry.alias("champion"), read_champion(home).version) == ("2", "2")
    assert registry.version("2").refused == "no traffic", "who waits for the release learns its end"


def test_a_data_set_that_came_after_the_start_of_a_watch_is_found(
    evaluated: Callable[..., Path], home: Path, uri: str, dataset: Path, tmp_path: Path
) -> None:
    datasets: list[Path] = []
    where = (home, lambda: uri, "recommender", lambda: datasets, (tmp_path / "store").as_uri())
    catalogue = ModelCatalogue(*where, examine=as_planned)
    register_bundle(evaluated("one"), uri, "recommender")
    record = record_of(catalogue)
    with pytest.raises(NothingToCompare):
        catalogue.check(record)
    datasets.append(dataset)
    catalogue.check(record)


def test_another_registry_than_that_of_the_release_is_not_told_of_its_end(
    catalogue: ModelCatalogue,
    evaluated: Callable[..., Path],
    registry: Registry,
    uri: str,
) -> None:
    """As with a rollback from a laptop whose own registry counts versions, too."""
    register_bundle(evaluated("one", 0.17), uri, "recommender")
    elsewhere = replace(record_of(catalogue), bundle_id="0123456789abcdef")
    with pytest.raises(
        RegistryRefused, match="has no version 1 with the bundle 0123456789abcdef: give --track"
    ):
        catalogue.undo(elsewhere)
    assert "refused" not in MlflowClient(uri, uri).get_model_version("recommender", "1").tags
    assert registry.alias("challenger") == "1"
    register_bundle(evaluated("two", 0.18), uri, "recommender")
    MlflowClient(uri, uri).delete_model_version("recommender", "1")
    catalogue.undo(elsewhere)  # a person deleted it, and the registry has given later numbers
    with pytest.raises(RegistryRefused, match="has no version 3 "):
        catalogue.undo(replace(elsewhere, version="3"))


@pytest.mark.parametrize("stop", ["write_head", "write_champion"])
@pytest.mark.parametrize("is_rollback", [True, False])
@champions(3)
def test_a_way_back_that_was_killed_after_the_alias_moved_is_completed(
    catalogue: ModelCatalogue,
    registry: Registry,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    is_rollback: bool,
) -> None:
    def go_back() -> None:
        if is_rollback:
            catalogue.seal(replace(record_of(catalogue, "2"), kind="rollback"))
        else:
            catalogue.undo(replace(record_of(catalogue, "3"), sealed=True))

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(promote_module, stop, killed)
        with pytest.raises(Killed):
            go_back()
    assert (registry.alias("champion"), read_champion(home).version) == ("2", "3")
    go_back()
    assert (registry.alias("champion"), read_champion(home).version) == ("2", "2")
    assert registry.intent() is None
    assert catalogue.previous()[0] == "1"


def test_an_alias_that_was_moved_by_hand_holds_up_no_abort(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, uri: str
) -> None:
    for name, quality in (("one", 0.16), ("two", 0.17), ("three", 0.18)):
        register_bundle(evaluated(name, quality), uri, "recommender")
    catalogue.seal(record_of(catalogue, "1"))
    registry.point("champion", "2")
    catalogue.undo(replace(record_of(catalogue, "3"), sealed=True))
    assert (registry.alias("champion"), catalogue.challenger()) == ("2", None)


def test_the_champion_of_a_home_follows_a_release_that_another_home_ended(
    catalogue: ModelCatalogue,
    evaluated: Callable[..., Path],
    home: Path,
    uri: str,
    dataset: Path,
    tmp_path: Path,
) -> None:
    where = (lambda: uri, "recommender", lambda: [dataset], (tmp_path / "store").as_uri())
    laptop = ModelCatalogue(tmp_path / "laptop", *where, examine=as_planned)
    records = []
    for name, quality, by in (("one", 0.16, catalogue), ("two", 0.17, laptop)):
        register_bundle(evaluated(name, quality), uri, "recommender")
        records.append(replace(record_of(catalogue), sealed=True, state="done"))
        by.seal(records[-1])
    assert read_champion(home).version == "1"
    catalogue.follow_end(replace(records[1], state="hold"))
    assert read_champion(home).version == "1", "it may be aborted yet"
    catalogue.follow_end(records[1])
    assert read_champion(home).version == "2"
    laptop.undo(records[1])
    catalogue.follow_end(records[1])
    assert read_champion(home).version == "2", "the end of this release does not contradict it"
    catalogue.follow_end(replace(records[1], state="aborted"))
    assert read_champion(home).version == "1"


def test_a_champion_that_is_registered_again_is_released_once_and_no_more(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, uri: str, home: Path
) -> None:
    for _ in range(2):
        register_bundle(evaluated("one", 0.17), uri, "recommender")
        catalogue.seal(record_of(catalogue))
        assert catalogue.challenger() is None


def test_an_alias_that_was_set_by_hand_before_any_promotion_gives_no_way_back(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, uri: str
) -> None:
    registry.point("champion", register_bundle(evaluated("one"), uri, "recommender"))
    with pytest.raises(NoChampion, match="version 1 was never promoted"):
        catalogue.previous()


def test_a_worse_version_is_refused_before_any_pod_loads_it(
    catalogue: ModelCatalogue, evaluated: Callable[..., Path], registry: Registry, uri: str, home: Path
) -> None:
    register_bundle(evaluated("one", 0.10), uri, "recommender")
    record = record_of(catalogue)
    with pytest.raises(GateFailed):
        catalogue.check(record)
    catalogue.undo(replace(record, reason="verify: NDCG@10 is lower"))
    tags = MlflowClient(uri).get_model_version("recommender", record.version).tags
    assert tags["refused"] == "verify: NDCG@10 is lower"
    assert registry.alias("challenger") is None, "it is not tried again"
    assert not (home.parent / "store").exists()


def test_a_champion_of_meanwhile_is_measured_beside_the_version_before_the_seal(
    catalogue: ModelCatalogue,
    evaluated: Callable[..., Path],
    registry: Registry,
    uri: str,
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, quality in (("one", 0.16), ("two", 0.17), ("three", 0.19)):
        register_bundle(evaluated(name, quality), uri, "recommender")
    for version in ("1", "2"):
        record = record_of(catalogue, version)
        catalogue.check(record)
        if version == "1":
            catalogue.seal(record)
    home, promote = str(dataset.parent / "another"), catalogue._promote

    def promote_late(*given: Any) -> Any:
        promote_bundle("3", [dataset], uri, "recommender", home, examine=as_planned)
        return promote(*given)

    monkeypatch.setattr(catalogue, "_promote", promote_late)
    with pytest.raises(GateFailed, match="against champion"):
        catalogue.seal(record)
    assert registry.alias("champion") == "3"


def test_with_trusted_keys_only_signed_versions_reach_pods_and_the_way_back_is_signed(
    evaluated: Callable[..., Path], registry: Registry, home: Path, uri: str, dataset: Path, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    where = (home, lambda: uri, "recommender", lambda: [dataset], (tmp_path / "store").as_uri())
    catalogue = ModelCatalogue(*where, trusted_keys=public.parent, key=key, examine=as_planned)
    for name, quality in (("one", 0.17), ("two", 0.18)):
        bundle = evaluated(name, quality)
        register_bundle(bundle, uri, "recommender")
        record = record_of(catalogue)
        with pytest.raises(GateFailed, match="signature: "):
            catalogue.check(record)
        sign(bundle, key)
        registry.attach(registry.version(record.version), bundle.glob("*.sig"))
        catalogue.check(record)
        catalogue.publish(record)
        assert check_signed(tmp_path / "store" / record.bundle_id, public.parent).key == public
        catalogue.seal(record)
    catalogue.undo(replace(record, sealed=True))
    champion = read_champion(home)
    assert champion.version == "1"
    check_signed(champion.bundle(home), public.parent, home / "bundles" / record.bundle_id)


def test_pods_get_the_newest_signatures_of_the_registry(
    evaluated: Callable[..., Path], registry: Registry, home: Path, uri: str, dataset: Path, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    where = (home, lambda: uri, "recommender", lambda: [dataset], (tmp_path / "store").as_uri())
    catalogue = ModelCatalogue(*where, trusted_keys=public.parent, examine=as_planned)
    bundle = evaluated("one")
    register_bundle(bundle, uri, "recommender")
    record = record_of(catalogue)
    for day in (1, 2):  # the second time it is under home already
        sign(bundle, key, at=datetime(2026, 11, day, tzinfo=UTC))
        registry.attach(registry.version(record.version), bundle.glob("*.sig"))
        catalogue.publish(record)
        assert check_signed(tmp_path / "store" / record.bundle_id, public.parent).at.day == day
