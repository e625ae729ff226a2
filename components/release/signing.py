"""A bundle and a key -> a signature in the form of OpenSSF model-signing; and whether a trusted key made one.

The form is a DSSE envelope in a Sigstore bundle: an in-toto statement with one SHA-256 for each file. The
signature lies beside the bundle, which holds no file that its manifest does not name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from feature_repo.atomic_files import read_regular
from feature_repo.errors import RecoError

PAYLOAD = "application/vnd.in-toto+json"
SIGNATURE = "https://model_signing/signature/v1.0"
MEDIA = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BYTES = 1 << 20
ALGORITHM = ec.ECDSA(hashes.SHA256())


class SignatureInvalid(RecoError):
    """A bundle is not signed by a trusted key, or differs from the signed one."""


def sign(bundle: Path, key: Path) -> str:
    """Return the signature of a bundle as JSON.

    Raises:
        SignatureInvalid: the file holds no P-256 private key without a password.
    """
    try:
        private = serialization.load_pem_private_key(read_regular(key, MAX_BYTES), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.curve.name != "secp256r1":
            raise ValueError("not of the curve P-256")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SignatureInvalid(f"{key} is no private key to sign with ({error})") from error
    payload = json.dumps(_statement(bundle)).encode()
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = private.sign(_encoded(payload), ALGORITHM)
    return json.dumps(
        {
            "mediaType": MEDIA,
            "verificationMaterial": {
                "publicKey": {"hint": hashlib.sha256(public).hexdigest()},
                "tlogEntries": [],
            },
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD,
                "signatures": [{"sig": base64.b64encode(signed).decode(), "keyid": ""}],
            },
        }
    )


def verify(bundle: Path, signature: Path, keys: Sequence[Path]) -> Path:
    """Return the public key that signed a bundle.

    Raises:
        SignatureInvalid: none of the keys did, or a file is not the signed one.
    """
    try:
        envelope = json.loads(read_regular(signature, MAX_BYTES))["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signed = [base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]]
        if envelope["payloadType"] != PAYLOAD:
            raise ValueError(f"payload type {str(envelope['payloadType'])!r:.60}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SignatureInvalid(f"{signature} is no signature ({error}): sign the bundle again") from error
    signer = next((key for key in keys if any(_is_signed(key, payload, one) for one in signed)), None)
    if signer is None:
        names = ", ".join(key.name for key in keys) or "none is configured"
        raise SignatureInvalid(f"{signature} was made by no trusted key ({names}): sign with one of them")
    statement = json.loads(payload)
    if statement.get("predicateType") != SIGNATURE:
        raise SignatureInvalid(f"{signature} signs {str(statement.get('predicateType'))!r:.80}, no bundle")
    found, expected = (
        _digests(bundle),
        {one["name"]: one["digest"] for one in statement["predicate"]["resources"]},
    )
    if found != expected:
        changed = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        raise SignatureInvalid(f"{bundle} is not the signed bundle: {', '.join(changed[:5])} differ")
    return signer


def _statement(bundle: Path) -> dict[str, Any]:
    digests = _digests(bundle)
    whole = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests.values())).hexdigest()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": bundle.resolve().name, "digest": {"sha256": whole}}],
        "predicateType": SIGNATURE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": [
                {"algorithm": "sha256", "digest": digest, "name": name} for name, digest in digests.items()
            ],
        },
    }


def _digests(bundle: Path) -> dict[str, str]:
    names = sorted(file.relative_to(bundle).as_posix() for file in bundle.rglob("*") if not file.is_dir())
    digests = {}
    for name in names:
        if (bundle / name).is_symlink() or not (bundle / name).is_file():
            raise SignatureInvalid(f"{bundle / name} is no regular file: no bundle holds it")
        with (bundle / name).open("rb") as stream:
            digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _encoded(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding."""
    return f"DSSEv1 {len(PAYLOAD)} {PAYLOAD} {len(payload)} ".encode() + payload


def _is_signed(key: Path, payload: bytes, signature: bytes) -> bool:
    try:
        public = serialization.load_pem_public_key(read_regular(key, MAX_BYTES))
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, _encoded(payload), ALGORITHM)
    except (OSError, ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True
