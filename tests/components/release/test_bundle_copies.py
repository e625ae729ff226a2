"""Copies of registered bundles under a home, from a real MLflow database; the bundles hold no model."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.release.bundle_copies import fetch_bundle, renew_signatures
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, Version
from components.release.signing import sign
from serving.errors import BundleInvalid
from serving.release.signatures import check_signed
from tests.serving.signed import write_keys

pytestmark = pytest.mark.slow


@pytest.fixture
def version(evaluated: Callable[..., Path], registry: Registry, uri: str) -> Version:
    return registry.version(register_bundle(evaluated("one"), uri, "recommender"))


def test_a_damaged_copy_is_fetched_again(registry: Registry, home: Path, version: Version) -> None:
    copy = fetch_bundle(registry, home, version)
    (copy / "index.faiss").write_text("flipped")
    assert fetch_bundle(registry, home, version) == copy
    assert (copy / "index.faiss").read_text() == "one"


@pytest.mark.parametrize(
    ("bundle_id", "says"), [("../../etc", "its tag bundle_id is no id"), ("f" * 16, "was registered as f")]
)
def test_a_version_whose_tag_was_changed_is_not_copied(
    registry: Registry, home: Path, version: Version, bundle_id: str, says: str
) -> None:
    with pytest.raises(BundleInvalid, match=says):
        fetch_bundle(registry, home, replace(version, bundle_id=bundle_id))
    assert not (home / "bundles" / bundle_id).exists()


def test_the_newest_signatures_of_a_trusted_key_stay(
    evaluated: Callable[..., Path], registry: Registry, home: Path, version: Version, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    (tmp_path / "away").mkdir()
    stranger, _ = write_keys(tmp_path / "away", "theirs")
    copy, bundle = fetch_bundle(registry, home, version), evaluated("one")
    renew_signatures(registry, home, version, public.parent)
    assert not list(copy.glob("*.sig")), "the registry has none"
    for signer, day, newest in ((key, 2, 2), (key, 1, 2), (stranger, 3, 2), (key, 4, 4)):
        sign(bundle, signer, at=datetime(2026, 11, day, tzinfo=UTC))
        registry.attach(version, bundle.glob("*.sig"))
        renew_signatures(registry, home, version, public.parent)
        assert check_signed(copy, public.parent).at.day == newest
