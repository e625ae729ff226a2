"""Copies of registered bundles under a home, from a real MLflow database; the bundles hold no model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from components.release.bundle_copies import fetch_bundle
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, Version
from serving.errors import BundleInvalid

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
