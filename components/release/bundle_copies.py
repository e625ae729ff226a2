"""A registered version -> its verified copy under a home, and the signatures of that copy."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from components.home import registry_command
from components.release.registry import Registry, Version
from feature_repo.ids import is_name
from serving.errors import BundleInvalid
from serving.release.bundle import SIGNATURE_FILES, verify_files
from serving.release.manifest import read_manifest
from serving.release.signatures import SignatureInvalid, check_signed

log = logging.getLogger(__name__)


def fetch_bundle(registry: Registry, home: Path, version: Version) -> Path:
    """Return the version's bundle under home, copied there and verified if it is not yet.

    Raises:
        BundleInvalid: the registry's files are not those of the registered bundle.
    """
    if not is_name(version.bundle_id):  # the registry is not ours alone, and this becomes a folder
        raise BundleInvalid(
            f"version {version.version} is no bundle's: its tag bundle_id is no id; register it again"
        )
    place = place_under(home, version.bundle_id)
    try:
        _verify(place, version)
        return place
    except BundleInvalid as error:
        if place.exists():
            log.warning("%s; fetching it from the registry again", error)
    incoming = home / "bundles" / f".{version.bundle_id}.part"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    fetched = registry.download(version, incoming)
    _verify(fetched, version)
    shutil.rmtree(place, ignore_errors=True)
    fetched.rename(place)
    shutil.rmtree(incoming, ignore_errors=True)
    return place


def place_under(home: Path, bundle_id: str) -> Path:
    """Return where a home keeps its copy of a bundle."""
    return home / "bundles" / bundle_id


def fetch_signatures(
    registry: Registry, home: Path, version: Version, trusted: Path, after: Path | None = None
) -> None:
    """Copy a version's signatures, which the registry may have got after its files, beside those under home.

    Raises:
        BundleInvalid: as of `fetch_bundle` and `check_signed`; the signatures under home stay as they were.
        RegistryUnreachable: the registry does not give them.
    """
    place = fetch_bundle(registry, home, version)
    if missing := set(SIGNATURE_FILES) - registry.names(version):
        sign = command_of(registry, home, f"sign {version.version} --key KEY")
        raise SignatureInvalid(f"no trusted key signed it, {min(missing)} is missing: `{sign}`")
    with linked(place, home) as copy:
        for name in SIGNATURE_FILES:
            registry.download(version, copy.parent, name).replace(copy / name)
        check_signed(copy, trusted, after)
        take_signatures(copy, place)


def renew_signatures(registry: Registry, home: Path, version: Version, trusted: Path) -> None:
    """Fetch a version's signatures if a trusted key made them, and not before those under home.

    Raises:
        RegistryUnreachable: the registry does not give them.
    """
    with suppress(BundleInvalid):
        fetch_signatures(registry, home, version, trusted, after=place_under(home, version.bundle_id))


@contextmanager
def linked(place: Path, home: Path) -> Iterator[Path]:
    """Yield a copy of a bundle for new signatures, its files hard links; it goes with the block."""
    with TemporaryDirectory(dir=home) as scratch:
        yield Path(shutil.copytree(place, Path(scratch) / place.name, copy_function=os.link))


def take_signatures(copy: Path, place: Path) -> None:
    """Move the signatures of a `linked` copy beside the bundle itself."""
    for name in SIGNATURE_FILES:
        (copy / name).replace(place / name)


def _verify(path: Path, version: Version) -> None:
    manifest = read_manifest(path)
    if manifest["bundle_id"] != version.bundle_id:
        raise BundleInvalid(
            f"{path} is bundle {manifest['bundle_id']}, "
            f"version {version.version} was registered as {version.bundle_id}"
        )
    verify_files(path, manifest)


def command_of(registry: Registry, home: Path, words: str) -> str:
    """Return a `reco` command that acts on this registry, not on the one that the home has by default."""
    return registry_command(home, registry.tracking_uri, registry.model_name, words)
