"""CONTRACT the champion of a home: the one pointer that endpoint and commands follow, `champion.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from feature_repo.atomic_files import read_json, read_regular, write_file
from feature_repo.ids import is_path
from serving.errors import BundleInvalid, NoChampion
from serving.release.manifest import read_manifest

FILE = "champion.json"
MAX_BYTES = 65_536


@dataclass(frozen=True)
class Champion:
    """The bundle that was promoted, and where it lies."""

    bundle_id: str
    version: str
    model_name: str
    path: str  # of the bundle, relative to home so that the folder can move
    cut: str
    promoted_at: str

    def bundle(self, home: Path) -> Path:
        """Return where the bundle lies.

        Raises:
            BundleInvalid: another bundle lies there, or none.
        """
        path = home / self.path
        if not path.exists():
            raise BundleInvalid(f"the champion's {path} is gone: fetch it with `reco promote champion`")
        if (found := read_manifest(path)["bundle_id"]) != self.bundle_id:
            raise BundleInvalid(f"{path} is bundle {found}, expected {self.bundle_id}: promote it again")
        return path


def read_champion(home: Path) -> Champion:
    """Return the champion of a home.

    `bundle_id` and `path` are required; further fields of later versions are passed over.

    Raises:
        NoChampion: no pointer exists, or it names no bundle under home; with the way to get one.
    """
    file = home / FILE
    try:
        if file.is_symlink():
            raise ValueError("expected a file, found a link")
        content = read_json(read_regular(file, MAX_BYTES))
        # As texts: later code compares times and cuts them.
        given = {field.name: str(content.get(field.name, "")) for field in fields(Champion)}
        path = content["path"]
        champion = Champion(**given | {"bundle_id": str(content["bundle_id"])})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoChampion(
            f"{home} has no champion: train one with `reco run`, or point --home at one"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fault = f"{error.__class__.__name__}: {error}"
        if isinstance(error, json.JSONDecodeError):  # its own words speak of columns and chars
            fault = "it is no JSON"
        raise NoChampion(
            f"{file} is not a champion pointer ({fault}): write it again with `reco promote champion`"
        ) from error
    if not is_path(path):
        raise NoChampion(f"{file} names {str(path)!r:.200}, expected a directory under {home}: promote again")
    return champion


def write_champion(home: Path, champion: Champion) -> None:
    """Point at another bundle, atomically: a reader sees the old pointer or the new one."""
    write_file(home / FILE, json.dumps(asdict(champion), indent=1) + "\n", durable=True)
