"""A bundle's manifest -> its content, if it describes itself truly; needs none of the bundle's libraries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from feature_repo.atomic_files import read_regular
from serving.errors import BundleInvalid

MAX_MANIFEST_BYTES = 16 << 20  # one takes 6 KB


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest after checking that it describes itself truly.

    Raises:
        BundleInvalid: no manifest, not JSON, not a bundle, or its id does not match its content.
    """
    file = path / "manifest.json"
    if not path.exists():
        raise BundleInvalid(f"{path} is not there, expected the folder of a bundle")
    if not file.is_file():
        raise BundleInvalid(
            f"{path} has no manifest.json: it is no bundle, or a half-written one; build it again"
        )
    try:
        manifest: dict[str, Any] = json.loads(read_regular(file, MAX_MANIFEST_BYTES))
        body = {
            name: manifest[name] for name in ("kind", "cut", "schema_hash", "settings", "made_from", "files")
        }
        found = bundle_id_of(body)  # a RecursionError if it is nested too deep to be written
        stated = manifest["bundle_id"]
        whole = isinstance(body["settings"], dict) and all(isinstance(v, str) for v in body["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleInvalid(
            f"{file} is not a bundle manifest ({error.__class__.__name__}: {error})"
        ) from error
    if body["kind"] != "bundle" or found != stated or not whole:
        raise BundleInvalid(
            f"{file} says it is {str(body['kind'])!r:.40} {str(stated)!r:.40}, its content is {found}: "
            "fetch the bundle again"
        )
    return manifest


def bundle_id_of(body: dict[str, Any]) -> str:
    """Return the hash over the rest of a manifest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
