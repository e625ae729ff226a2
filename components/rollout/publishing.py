"""A verified bundle -> the place that pods load it from; each file is written once, the manifest last.

Signatures alone are written again: a bundle may be signed after its first publication.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from components.home import Conflict
from feature_repo.errors import UNREACHABLE, USAGE, RecoError
from serving.release.bundle import SIGNATURE_FILES
from serving.release.manifest import read_manifest

MANIFEST = "manifest.json"


class PlaceRefused(RecoError, ValueError):
    """Bundles cannot be kept at this place."""

    exit_code = USAGE


class PlaceUnreachable(RecoError):
    """The store of the bundles does not answer."""

    exit_code = UNREACHABLE


def publish_bundle(bundle: Path, place: str) -> None:
    """Copy a bundle to a URI of s3://, gs:// or file://.

    A bundle whose manifest is there is complete. A copy that was stopped is written again.

    Raises:
        Conflict: another bundle lies there.
        PlaceRefused: the URI names no store that is known.
        PlaceUnreachable: the store does not answer.
    """
    from pyarrow import fs

    try:
        store, root = fs.FileSystem.from_uri(place)
    except ValueError as error:
        raise PlaceRefused(f"{place}: {error}; expected s3://BUCKET/FOLDER, gs:// or file://") from error
    except OSError as error:  # S3 is asked for the bucket's region
        if "not found" in str(error):
            raise PlaceRefused(f"{place}: {error}; make the bucket first") from error
        raise PlaceUnreachable(f"{place} does not answer ({str(error)[:200]})") from error
    manifest = (bundle / MANIFEST).read_bytes()
    signatures = [name for name in SIGNATURE_FILES if (bundle / name).is_file()]
    names = [*sorted(read_manifest(bundle)["files"]), *signatures, MANIFEST]
    try:
        info = store.get_file_info(f"{root}/{MANIFEST}")
        if info.type != fs.FileType.NotFound:
            if store.open_input_file(f"{root}/{MANIFEST}").read() != manifest:
                raise Conflict(
                    f"another bundle lies at {place}: bundles are never overwritten; remove neither"
                )
            names = signatures
        for name in names:
            target = f"{root}/{name}"
            folder, _, file = target.rpartition("/")
            store.create_dir(folder, recursive=True)
            # A killed process leaves it behind, and a check of the bundle skips such names: see `is_part`.
            hidden = f"{folder}/.{file}.{uuid.uuid4().hex}.part"
            part = hidden if isinstance(store, fs.LocalFileSystem) else target
            with store.open_output_stream(part) as stream:
                stream.write((bundle / name).read_bytes())
            if part != target:  # an object store shows an object when it is complete
                store.move(part, target)
    except OSError as error:
        raise PlaceUnreachable(f"{place} cannot be written ({str(error)[:200]})") from error
