"""A manifest is believed if its id is the hash of the rest."""

import json
import os
from pathlib import Path

import pytest

from serving.errors import BundleInvalid
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.manifest import bundle_id_of, read_manifest
from serving.stages.retrieval import Quotas


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    seal_bundle(tmp_path, cut="2024-01-01", settings=RankingSettings(Quotas(), 1.0), made_from={"a": 1})
    return tmp_path


def test_the_id_is_the_hash_of_the_rest(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.pop("bundle_id") == bundle_id_of(manifest)
    file = bundle / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "cut": "2025-01-01"}))
    with pytest.raises(BundleInvalid, match=r"its content is .*: fetch the bundle again"):
        read_manifest(bundle)


def test_a_manifest_too_long_is_refused_unread(bundle: Path) -> None:
    os.truncate(bundle / "manifest.json", 400 << 20)  # takes no space
    with pytest.raises(BundleInvalid, match="expected a regular file of at most"):
        read_manifest(bundle)
