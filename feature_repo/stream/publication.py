"""CONTRACT the content of the stores of a home: `<home>/online_store.json`; `publish_features` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from feature_repo.atomic_files import read_json, read_regular

FILE = "online_store.json"
MAX_BYTES = 65_536


class PublicationDamaged(ValueError):
    """The note is there, and it cannot be read."""


@dataclass(frozen=True)
class Publication:
    """One filling of the stores; its times are in ISO 8601, with a zone."""

    bundle_id: str
    cut: str  # the items' rows are as of this time
    until: str  # the users' rows are
    created_at: str
    users: int


def read_publication(home: Path) -> Publication | None:
    """Return the content of the stores of a home; None where nothing was published yet.

    Raises:
        PublicationDamaged: the file is no such note.
    """
    file = home / FILE
    try:
        document = read_json(read_regular(file, MAX_BYTES))
        return Publication(
            bundle_id=str(document["bundle_id"]),
            cut=_time(document["cut"]),
            until=_time(document["until"]),
            created_at=_time(document["created_at"]),
            users=int(document["users"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise PublicationDamaged(
            f"{file} does not say what the stores hold ({type(error).__name__}: {error}): "
            "`reco run --data DIR` writes it again"
        ) from error


def _time(given: Any) -> str:
    if datetime.fromisoformat(given).utcoffset() is None:
        raise ValueError(f"{given!r:.40} has no time zone")
    return str(given)
