"""CONTRACT the history of promotions: numbered lines, each with the SHA-256 of the line before it.

A line that was changed, dropped or moved breaks the chain, and `read_history` names it. No line follows the
last one: a home keeps the hash of the last line that it wrote, and the alias must name its version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from components.home import default_tracking_uri, write_json
from feature_repo.atomic_files import read_json
from feature_repo.errors import RecoError, without_password

HEAD_FILE = "history.json"
PROMOTION_TAG = "promotion."
INTENT_TAG = "intent"  # the line of a promotion that has begun


class HistoryBroken(RecoError):
    """A line of the history is not as it was written."""


@dataclass(frozen=True)
class Promotion:
    """One line of the history: which version became champion, after which, and how."""

    number: int
    action: str  # promote | rollback | restore
    version: str
    bundle_id: str
    previous: str  # version; empty for the first, and for one after all others were deleted
    at: str
    before: str = ""  # SHA-256 of the line before; empty for the first

    @property
    def hash(self) -> str:
        """The SHA-256 that the next line holds."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def line_tag(line: Promotion) -> str:
    """Return the tag that holds a line."""
    return f"{PROMOTION_TAG}{line.number:06d}"


def next_line(
    history: Sequence[Promotion], action: str, version: str, bundle_id: str, previous: str, at: str
) -> Promotion:
    """Return the line that follows a history."""
    before = history[-1].hash if history else ""
    return Promotion(len(history) + 1, action, version, bundle_id, previous, at, before)


def read_line(text: str) -> Promotion:
    """Return a line.

    Raises:
        HistoryBroken: the text is no line.
    """
    try:
        return Promotion(**read_json(text))
    except (ValueError, TypeError) as error:
        raise HistoryBroken(f"{text[:80]!r} is no line of the history ({error})") from error


def read_history(tags: Mapping[str, str], alias: str | None) -> list[Promotion]:
    """Return all lines, oldest first.

    A promotion that was stopped after its alias moved counts, though its line is still an intent.

    Args:
        tags: of the registered model.
        alias: the version that the alias champion names.

    Raises:
        HistoryBroken: naming the line that was changed, dropped or moved.
    """
    numbers = {key: key.removeprefix(PROMOTION_TAG) for key in tags if key.startswith(PROMOTION_TAG)}
    history = _read_chain({int(number): tags[key] for key, number in numbers.items() if number.isdecimal()})
    if INTENT_TAG in tags:
        intent = read_line(tags[INTENT_TAG])
        if (intent.version, intent.number) == (alias, len(history) + 1):
            history.append(intent)
    return history


def _read_chain(texts: Mapping[int, str]) -> list[Promotion]:
    history: list[Promotion] = []
    for place, number in enumerate(sorted(texts), 1):
        if number != place:
            raise _broken(place, "is missing")
        try:
            line = read_line(texts[number])
        except HistoryBroken as error:
            raise _broken(number, f"cannot be read: {error}") from error
        if line.number != number:
            raise _broken(number, f"holds line {line.number}: lines were moved")
        history.append(line)
    for earlier, line in pairwise(history):
        if line.before != earlier.hash:
            raise _broken(earlier.number, f"or line {line.number} was changed: their hashes do not agree")
    return history


def model_of(home: Path, tracking_uri: str, name: str) -> str:
    """Return a model's name, with its registry unless that is the home's own, which moves with the home."""
    own = tracking_uri == default_tracking_uri(home)
    return name if own else f"{name} at {without_password(tracking_uri).rstrip('/')}"


def check_head(home: Path, model: str, history: Sequence[Promotion]) -> None:
    """Compare a history with the last line that this home wrote for a model of a registry.

    Raises:
        HistoryBroken: that line was changed or dropped.
    """
    if (head := _read_heads(home).get(model)) is None:
        return  # this home wrote no line
    number, expected = head
    if number > len(history):
        raise _broken(number, "is missing")
    if history[number - 1].hash != expected:
        raise _broken(number, "was changed")


def write_head(home: Path, model: str, line: Promotion) -> None:
    """Remember the last line that this home wrote for a model; the caller holds the lock of promotions."""
    write_json(home / HEAD_FILE, _read_heads(home) | {model: (line.number, line.hash)})


def is_head(home: Path, model: str, line: Promotion) -> bool:
    """Say whether a line is the last one that this home wrote for a model."""
    return _read_heads(home).get(model) == (line.number, line.hash)


def _read_heads(home: Path) -> dict[str, tuple[int, str]]:
    """Return number and hash of the last line of each model."""
    file = home / HEAD_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[int, str]])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HistoryBroken(
            f"{file} holds no last lines ({error}); nothing was changed: restore it from a backup, or remove "
            "it if `reco history` then shows the promotions that you expect"
        ) from error


def stack(history: Sequence[Promotion]) -> list[str]:
    """Return the versions that one can go back through, the champion last.

    Raises:
        HistoryBroken: a line goes back before the first.
    """
    versions: list[str] = []
    for line in history:
        if line.action == "rollback":
            if not versions:
                raise _broken(line.number, "goes back before the first promotion")
            versions.pop()
            while line.version in versions and versions[-1] != line.version:
                versions.pop()  # it was deleted, and passed over
        elif line.action == "promote":
            versions.append(line.version)
    return versions


def _broken(number: int, fault: str) -> HistoryBroken:
    return HistoryBroken(
        f"line {number} of the history {fault}; nothing was changed: find out who writes to the registry, "
        "and restore it from its backup"
    )
