"""A signed folder -> accepted as it was; refused when a file, the key or the envelope is another one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from components.release.signing import SignatureInvalid, sign, verify


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    private = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    files = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    files[0].write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    files[1].write_bytes(public)
    return files


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    bundle = tmp_path / "bundle"
    (bundle / "statistics").mkdir(parents=True)
    for name in ("manifest.json", "ranker.onnx", "statistics/price.npy"):
        (bundle / name).write_text(name)
    return bundle


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "ours")


@pytest.fixture
def signature(bundle: Path, keys: tuple[Path, Path], tmp_path: Path) -> Path:
    file = tmp_path / "bundle.sig"
    file.write_text(sign(bundle, keys[0]))
    return file


def test_the_key_that_signed_is_named(
    bundle: Path, keys: tuple[Path, Path], signature: Path, tmp_path: Path
) -> None:
    _, other = write_keys(tmp_path, "other")
    assert verify(bundle, signature, [other, keys[1]]) == keys[1]
    with pytest.raises(SignatureInvalid, match=r"by no trusted key \(other.pub.pem\)"):
        verify(bundle, signature, [other])
    with pytest.raises(SignatureInvalid, match="none is configured"):
        verify(bundle, signature, [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b: (b / "ranker.onnx").write_text("changed"), "ranker.onnx differ"),
        (lambda b: (b / "statistics" / "price.npy").unlink(), "statistics/price.npy differ"),
        (lambda b: (b / "extra").write_text("more"), "extra differ"),
        (lambda b: (b / "link").symlink_to(b / "ranker.onnx"), "link is no regular file"),
    ],
    ids=["changed", "missing", "extra", "link"],
)
def test_another_file_is_named(
    bundle: Path, keys: tuple[Path, Path], signature: Path, change: Callable[[Path], object], named: str
) -> None:
    change(bundle)
    with pytest.raises(SignatureInvalid, match=named):
        verify(bundle, signature, [keys[1]])


def test_a_changed_statement_is_not_signed(bundle: Path, keys: tuple[Path, Path], signature: Path) -> None:
    document = json.loads(signature.read_text())
    envelope = document["dsseEnvelope"]
    envelope["payload"] = envelope["payload"][:-8] + "AAAAAAA="
    signature.write_text(json.dumps(document))
    with pytest.raises(SignatureInvalid, match="by no trusted key"):
        verify(bundle, signature, [keys[1]])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"dsseEnvelope": {"payload": "?", "signatures": []}}']
)
def test_what_is_no_signature_is_refused(
    bundle: Path, keys: tuple[Path, Path], tmp_path: Path, text: str
) -> None:
    (tmp_path / "torn.sig").write_text(text)
    for file in ("torn.sig", "missing.sig"):
        with pytest.raises(SignatureInvalid, match="is no signature"):
            verify(bundle, tmp_path / file, [keys[1]])


def test_a_key_of_another_kind_is_refused(bundle: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    other = tmp_path / "ed25519.pem"
    pem, raw = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = ed25519.Ed25519PrivateKey.generate()
    other.write_bytes(private.private_bytes(pem, raw, serialization.NoEncryption()))
    for file in (other, keys[1], tmp_path / "missing.pem"):
        with pytest.raises(SignatureInvalid, match="is no private key to sign with"):
            sign(bundle, file)
