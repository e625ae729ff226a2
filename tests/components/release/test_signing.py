"""A key that can sign; the sources in the provenance."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from components.release.signing import sign
from serving.errors import BundleInvalid
from serving.release.signatures import SignatureInvalid
from tests.serving.signed import sealed, write_keys


def statement(file: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(file.read_text())["dsseEnvelope"]["payload"]))


def test_the_provenance_says_what_the_bundle_was_made_from(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, "ours")
    bundle = sealed(tmp_path / "bundle", commit="abc1234", data_hash="d1", params={"epochs": 2}, parent="b0")
    sign(bundle, private, image="sha256:77")
    build = statement(bundle / "provenance.sig")["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"cut": "2017-11-27T05:00:00Z", "params": {"epochs": 2}}
    found = {one["name"]: one.get("digest") or one["annotations"] for one in build["resolvedDependencies"]}
    assert found == {
        "code": {"gitCommit": "abc1234"},
        "image": {"sha256": "77"},
        "ranker": {},
        "purchases": {"data_hash": "d1"},
        "bundle": {"parent": "b0"},
    }


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    _, public = write_keys(tmp_path, "ours")
    other = tmp_path / "ed25519.pem"
    pem, raw = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = ed25519.Ed25519PrivateKey.generate()
    other.write_bytes(private.private_bytes(pem, raw, serialization.NoEncryption()))
    bundle = sealed(tmp_path / "bundle")
    for file in (other, public, tmp_path / "missing.pem"):
        with pytest.raises(SignatureInvalid, match="is no private key to sign with"):
            sign(bundle, file)


def test_what_is_no_bundle_is_not_signed(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, "ours")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BundleInvalid, match=r"has no manifest\.json"):
        sign(tmp_path / "folder", private)
