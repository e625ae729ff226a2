"""A bundle and a private key -> its two signatures; see `serving.release.signatures` for who reads them."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from feature_repo.atomic_files import read_regular, write_file
from serving.release.bundle import PROVENANCE_FILE, SIGNATURE_FILE, SIGNATURE_FILES
from serving.release.manifest import read_manifest
from serving.release.signatures import (
    ALGORITHM,
    MAX_BYTES,
    PAYLOAD,
    PROVENANCE,
    SIGNATURE,
    SignatureInvalid,
    file_digests,
    to_sign,
    whole_digest,
)

MEDIA = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUILD_TYPE = "urn:reco:train-ranker:v1"


def sign(bundle: Path, key: Path, image: str = "", at: datetime | None = None) -> None:
    """Write the signatures of a bundle into its folder.

    Args:
        bundle: the folder.
        key: the private key, PEM of the curve P-256.
        image: digest of the image that trained it.
        at: the time in the provenance; None: now.

    Raises:
        SignatureInvalid: the file holds no P-256 private key without a password.
        BundleInvalid: the folder holds no bundle.
    """
    try:
        private = serialization.load_pem_private_key(read_regular(key, MAX_BYTES), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.curve.name != "secp256r1":
            raise ValueError("not of the curve P-256")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SignatureInvalid(f"{key} is no private key to sign with ({error})") from error
    manifest, digests = read_manifest(bundle), file_digests(bundle)
    made = _provenance(manifest, image, at or datetime.now(UTC))
    for name, kind, predicate in (
        (SIGNATURE_FILE, SIGNATURE, _resources(digests)),
        (PROVENANCE_FILE, PROVENANCE, made),
    ):
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": manifest["bundle_id"], "digest": {"sha256": whole_digest(digests)}}],
            "predicateType": kind,
            "predicate": predicate,
        }
        write_file(bundle / name, _envelope(json.dumps(statement).encode(), private))


def _resources(digests: dict[str, str]) -> dict[str, Any]:
    return {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": list(SIGNATURE_FILES),
        },
        "resources": [
            {"algorithm": "sha256", "digest": digest, "name": name} for name, digest in digests.items()
        ],
    }


def _provenance(manifest: dict[str, Any], image: str, at: datetime) -> dict[str, Any]:
    made = manifest["made_from"]
    sources = {"purchases": "data_hash", "bundle": "parent"}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"cut": manifest["cut"], "params": made.get("params", {})},
            "resolvedDependencies": [
                {"name": "code", "digest": {"gitCommit": str(made.get("commit", ""))}},
                *([{"name": "image", "digest": {"sha256": image.removeprefix("sha256:")}}] if image else []),
                {"name": "ranker", "annotations": made.get("ranker", {})},
                *({"name": name, "annotations": {key: made.get(key, "")}} for name, key in sources.items()),
            ],
        },
        "runDetails": {
            "builder": {"id": BUILD_TYPE},
            "metadata": {"invocationId": manifest["bundle_id"], "finishedOn": at.isoformat()},
        },
    }


def _envelope(payload: bytes, private: ec.EllipticCurvePrivateKey) -> str:
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signature = private.sign(to_sign(payload), ALGORITHM)
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
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
    )
