"""A signed folder -> accepted as it was; refused when a file, key, time or envelope is another one."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.release.signing import sign
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.manifest import read_manifest
from serving.release.signatures import SignatureInvalid, check_signed
from serving.stages.retrieval import Quotas
from tests.serving.signed import sealed, write_keys


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "ours")


@pytest.fixture
def trusted(keys: tuple[Path, Path]) -> Path:
    return keys[1].parent


@pytest.fixture
def bundle(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    bundle = sealed(tmp_path / "bundle")
    sign(bundle, keys[0], at=datetime(2026, 11, 1, tzinfo=UTC))
    return bundle


def test_the_openssf_command_verifies_ours(bundle: Path, keys: tuple[Path, Path]) -> None:
    verifying = pytest.importorskip("model_signing.verifying")
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=keys[1])
    verifier.verify(bundle, bundle / "bundle.sig")
    (bundle / "ranker.onnx").write_text("changed")
    with pytest.raises(ValueError, match=r"ranker\.onnx"):
        verifier.verify(bundle, bundle / "bundle.sig")


def test_what_the_openssf_command_signed_is_accepted(bundle: Path, keys: tuple[Path, Path]) -> None:
    signing = pytest.importorskip("model_signing.signing")
    hashing = pytest.importorskip("model_signing.hashing")
    (bundle / "bundle.sig").unlink()
    ignored = hashing.Config().set_ignored_paths(paths=[bundle / "bundle.sig", bundle / "provenance.sig"])
    signer = signing.Config().use_elliptic_key_signer(private_key=keys[0]).set_hashing_config(ignored)
    signer.sign(bundle, bundle / "bundle.sig")
    assert check_signed(bundle, keys[1].parent).key == keys[1]
    (bundle / "ranker.onnx").write_text("changed")
    with pytest.raises(SignatureInvalid, match=r"ranker\.onnx differ"):
        check_signed(bundle, keys[1].parent)


def test_the_key_that_signed_is_named(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    other, _ = write_keys(tmp_path, "other")
    signed = check_signed(bundle, keys[1].parent)
    assert (signed.key, signed.at) == (keys[1], datetime(2026, 11, 1, tzinfo=UTC))
    keys[1].unlink()
    with pytest.raises(SignatureInvalid, match=r"by no trusted key \(other.pem\)"):
        check_signed(bundle, keys[1].parent)
    (keys[1].parent / "other.pem").unlink()
    with pytest.raises(SignatureInvalid, match="holds no public key"):
        check_signed(bundle, keys[1].parent)
    assert other.is_file()


def change_statement(bundle: Path) -> None:
    file = bundle / "bundle.sig"
    document = json.loads(file.read_text())
    envelope = document["dsseEnvelope"]
    envelope["payload"] = envelope["payload"][:-8] + "AAAAAAA="
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b: (b / "ranker.onnx").write_text("changed"), "ranker.onnx differ"),
        (lambda b: (b / "statistics" / "price.npy").unlink(), "statistics/price.npy differ"),
        (lambda b: (b / "extra").write_text("more"), "extra differ"),
        (lambda b: (b / "link").symlink_to(b / "ranker.onnx"), "link is no regular file"),
        (lambda b: (b / "bundle.sig").unlink(), r"bundle.sig is missing: sign the bundle \(`reco sign`\)"),
        (lambda b: (b / "provenance.sig").unlink(), "provenance.sig is missing"),
        (lambda b: shutil.copy(b / "bundle.sig", b / "provenance.sig"), "signs 'https://model_signing"),
        (change_statement, "by no trusted key"),
    ],
    ids=["changed", "missing", "extra", "link", "unsigned", "no provenance", "swapped", "another statement"],
)
def test_another_file_is_named(
    bundle: Path, trusted: Path, change: Callable[[Path], object], named: str
) -> None:
    change(bundle)
    with pytest.raises(SignatureInvalid, match=named):
        check_signed(bundle, trusted)


def test_the_provenance_of_another_bundle_is_refused(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    other = sealed(tmp_path / "other", commit="another")
    sign(other, keys[0])
    shutil.copy(other / "provenance.sig", bundle / "provenance.sig")
    with pytest.raises(SignatureInvalid, match="tells of another bundle"):
        check_signed(bundle, keys[1].parent)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"dsseEnvelope": {"payload": "?", "signatures": []}}']
)
def test_what_is_no_signature_is_refused(bundle: Path, trusted: Path, text: str) -> None:
    (bundle / "bundle.sig").write_text(text)
    with pytest.raises(SignatureInvalid, match="is no signature"):
        check_signed(bundle, trusted)


def test_an_older_signature_does_not_follow_a_newer_one(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    newer, trusted = sealed(tmp_path / "newer", commit="newer"), keys[1].parent
    sign(newer, keys[0], at=datetime(2026, 11, 2, tzinfo=UTC))
    check_signed(newer, trusted, after=bundle)
    with pytest.raises(
        SignatureInvalid, match=r"2026-11-01T00:00:00Z, before .*going back needs a signature"
    ):
        check_signed(bundle, trusted, after=newer)
    sign(bundle, keys[0])  # now
    check_signed(bundle, trusted, after=newer)
    (newer / "bundle.sig").unlink()  # an unsigned bundle keeps nothing away
    check_signed(bundle, trusted, after=newer)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("# a note\n{id}\n", "is revoked by"),
        ("before 2026-11-01T00:00:01+00:00\n", "refuses what was signed before 2026-11-01T00:00:01Z"),
        ("before yesterday\n", "line 1: 'yesterday' is no time"),
        ("\nthree words here\n", "line 2: expected the id of a bundle"),
        ("before\n", "line 1: expected the id of a bundle, or before TIME"),
        ("339895FBD4BA3E8C\n", "line 1: expected the id of a bundle"),
        ("before 2026-11-01T00:00:01\n", "refuses what was signed before 2026-11-01T00:00:01Z"),
        ("0123456789abcdef\nbefore 2026-10-31T23:00:00Z # fine\n", ""),
    ],
)
def test_revoked_ones_are_refused(bundle: Path, trusted: Path, lines: str, says: str) -> None:
    bundle_id = str(read_manifest(bundle)["bundle_id"])
    (trusted / "revoked.txt").write_text(lines.format(id=bundle_id))
    if not says:
        check_signed(bundle, trusted)
        return
    with pytest.raises(SignatureInvalid, match=says):
        check_signed(bundle, trusted)


def test_a_folder_that_is_sealed_again_loses_its_signatures(bundle: Path) -> None:
    seal_bundle(bundle, cut="2017-11-28T05:00:00Z", settings=RankingSettings(Quotas(), 0.9), made_from={})
    assert not list(bundle.glob("*.sig"))
