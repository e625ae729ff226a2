"""A bundle and trusted public keys -> whether it may answer: signed, unchanged, not revoked, not older.

    bundle.sig       the SHA-256 of each file, in the form of OpenSSF model-signing
    provenance.sig   the sources of the bundle and the time of signing, as SLSA provenance v1

Both lie in the bundle's folder. Each is a DSSE envelope in a Sigstore bundle. The trusted keys are a folder:
a PEM file each, and, if there is one, `revoked.txt`. Its lines are ids of bundles and `before TIME`, which
refuses earlier signatures.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from feature_repo.atomic_files import is_part, read_json, read_regular, sha256_of
from serving.errors import BundleInvalid
from serving.release.bundle import PROVENANCE_FILE, SIGNATURE_FILE, SIGNATURE_FILES
from serving.release.manifest import read_manifest

PAYLOAD = "application/vnd.in-toto+json"
SIGNATURE, PROVENANCE = "https://model_signing/signature/v1.0", "https://slsa.dev/provenance/v1"
REVOKED_FILE = "revoked.txt"
BUNDLE_ID = re.compile("[0-9a-f]{16}")
MAX_BYTES = 1 << 20
ALGORITHM = ec.ECDSA(hashes.SHA256())


class SignatureInvalid(BundleInvalid):
    """A bundle is not signed by a trusted key, differs from the signed one, or was signed too early."""


@dataclass(frozen=True)
class Signed:
    """The key that signed a bundle, and the time."""

    key: Path
    bundle_id: str
    at: datetime


@dataclass(frozen=True)
class _Trust:
    keys: tuple[Path, ...]
    revoked: frozenset[str]  # bundle ids
    since: datetime  # earlier signatures are refused


def check_signed(bundle: Path, trusted: Path, after: Path | None = None) -> Signed:
    """Return who signed a bundle and when.

    A bundle that was signed before `after`, which answers now, must not follow it.

    Raises:
        SignatureInvalid: naming the fault and how to mend it.
    """
    trust = _read_trust(trusted)
    signed = _read_signed(bundle, trust)
    if signed.bundle_id in trust.revoked:
        raise SignatureInvalid(
            f"{signed.bundle_id} is revoked by {trusted / REVOKED_FILE}: promote another one"
        )
    if signed.at < trust.since:
        raise SignatureInvalid(
            f"{bundle} was signed at {signed.at:%FT%TZ}, {trusted / REVOKED_FILE} refuses what was signed "
            f"before {trust.since:%FT%TZ}: sign it again if it may answer"
        )
    if after is not None:
        _check_order(signed, after, trust)
    return signed


def _check_order(signed: Signed, after: Path, trust: _Trust) -> None:
    try:
        now = _read_signed(after, trust)
    except SignatureInvalid:  # the bundle that answers is not trusted: there is no order to keep
        return
    if signed.at < now.at:
        raise SignatureInvalid(
            f"{signed.bundle_id} was signed at {signed.at:%FT%TZ}, before {now.bundle_id}, which answers: "
            "going back needs a signature, too (`reco rollback --key KEY`), any other version a newer one "
            "(`reco sign VERSION --key KEY`)"
        )


def _read_signed(bundle: Path, trust: _Trust) -> Signed:
    statement, key = _read_statement(bundle / SIGNATURE_FILE, SIGNATURE, trust)
    found = file_digests(bundle)
    try:
        expected = {one["name"]: one["digest"] for one in statement["predicate"]["resources"]}
        made, _ = _read_statement(bundle / PROVENANCE_FILE, PROVENANCE, trust)
        subject = made["subject"][0]["digest"]["sha256"]
        at = datetime.fromisoformat(made["predicate"]["runDetails"]["metadata"]["finishedOn"]).astimezone(UTC)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SignatureInvalid(f"the signatures of {bundle} lack {error}: sign the bundle again") from error
    if found != expected:
        changed = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        raise SignatureInvalid(f"{bundle} is not the signed bundle: {', '.join(changed[:5])} differ")
    if subject != whole_digest(found):
        raise SignatureInvalid(f"{bundle / PROVENANCE_FILE} tells of another bundle: sign the bundle again")
    return Signed(key, str(read_manifest(bundle)["bundle_id"]), at)


def _read_statement(file: Path, predicate: str, trust: _Trust) -> tuple[dict[str, Any], Path]:
    """Return a signed statement and the key that signed it."""
    try:
        envelope = read_json(read_regular(file, MAX_BYTES))["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]]
        if envelope["payloadType"] != PAYLOAD:
            raise ValueError(f"payload type {str(envelope['payloadType'])!r:.60}")
    except FileNotFoundError as error:
        raise SignatureInvalid(f"{file} is missing: sign the bundle (`reco sign`)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SignatureInvalid(f"{file} is no signature ({error}): sign the bundle again") from error
    key = next((key for key in trust.keys if any(_is_signed(key, payload, one) for one in signatures)), None)
    if key is None:
        names = ", ".join(key.name for key in trust.keys)
        raise SignatureInvalid(f"{file} was made by no trusted key ({names}): sign with one of them")
    statement: dict[str, Any] = json.loads(payload)
    if statement.get("predicateType") != predicate:
        raise SignatureInvalid(f"{file} signs {str(statement.get('predicateType'))!r:.80}, not {predicate}")
    return statement, key


def _read_trust(folder: Path) -> _Trust:
    keys = tuple(sorted(folder.glob("*.pem")))
    if not keys:
        raise SignatureInvalid(f"{folder} holds no public key: put one there, NAME.pem")
    revoked, since, file = set(), datetime.min.replace(tzinfo=UTC), folder / REVOKED_FILE
    try:
        text = read_regular(file, MAX_BYTES).decode()
    except FileNotFoundError:
        return _Trust(keys, frozenset(), since)
    except (OSError, ValueError) as error:
        raise SignatureInvalid(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        match line.partition("#")[0].split():
            case []:
                pass
            case ["before", time]:
                try:
                    given = datetime.fromisoformat(time)
                    since = max(since, given if given.tzinfo else given.replace(tzinfo=UTC))
                except ValueError as error:
                    raise SignatureInvalid(f"{file}, line {number}: {time!r:.40} is no time") from error
            case [bundle_id] if BUNDLE_ID.fullmatch(bundle_id):
                revoked.add(bundle_id)
            case _:
                raise SignatureInvalid(f"{file}, line {number}: expected the id of a bundle, or before TIME")
    return _Trust(keys, frozenset(revoked), since)


def file_digests(bundle: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a bundle but its signatures, by name, in the order of the names.

    Raises:
        SignatureInvalid: it holds a link or a pipe.
    """
    held = (file for file in bundle.rglob("*") if not file.is_dir() and not is_part(file))
    names = sorted(file.relative_to(bundle).as_posix() for file in held)
    digests = {}
    for name in names:
        if (bundle / name).is_symlink() or not (bundle / name).is_file():
            raise SignatureInvalid(f"{bundle / name} is no regular file: no bundle holds it")
        if name not in SIGNATURE_FILES:
            digests[name] = sha256_of(bundle / name)
    return digests


def whole_digest(digests: dict[str, str]) -> str:
    """Return the one SHA-256 that stands for all files."""
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests.values())).hexdigest()


def to_sign(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding."""
    return f"DSSEv1 {len(PAYLOAD)} {PAYLOAD} {len(payload)} ".encode() + payload


def _is_signed(key: Path, payload: bytes, signature: bytes) -> bool:
    try:
        public = serialization.load_pem_public_key(read_regular(key, MAX_BYTES))
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, to_sign(payload), ALGORITHM)
    except (OSError, ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True
