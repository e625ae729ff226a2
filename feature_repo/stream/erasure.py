"""CONTRACT the users to be forgotten: `<home>/forgotten.json`, a salted hash of each user and a time.

An event of such a user at or before that time does not count any more, from any source: a data set, the
archive, a broker that delivers it again. A user with later events starts with an empty history. The file
names no user, but its reader can test whether an id is in it: so only its owner may read it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.aggregates import UserEvents, compact
from feature_repo.atomic_files import read_json, write_file
from feature_repo.facts import Fact

FILE = "forgotten.json"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ForgottenInvalid(ValueError):
    """The list cannot be read: without it, forgotten users would come back."""


class Forgotten:
    """The forgotten users and their times, microseconds since the epoch (UTC)."""

    def __init__(self, salt: bytes = b"", until: Mapping[str, int] | None = None) -> None:
        self._salt, self._until = salt, dict(until or {})

    @classmethod
    def load(cls, home: Path | None) -> Forgotten:
        """Return the list of a home; it is empty without a home or a file.

        Raises:
            ForgottenInvalid: the file is not such a list.
        """
        if home is None:
            return cls()
        try:
            document = read_json((home / FILE).read_bytes())
            until = {one: microseconds(datetime.fromisoformat(at)) for one, at in document["until"].items()}
            return cls(bytes.fromhex(document["salt"]), until)
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForgottenInvalid(
                f"{home / FILE} is not a list of forgotten users ({type(error).__name__}): bring it back "
                "from a copy; without it they would return"
            ) from error

    def __len__(self) -> int:
        """Return how many users are forgotten."""
        return len(self._until)

    def until(self, user_id: str) -> int | None:
        """Return the time up to which no event of a user counts; None if the user is not forgotten."""
        return self._until.get(self._hash(user_id)) if self._until else None

    def covers(self, user_id: str, at: int) -> bool:
        """Return whether an event of a user at a time is forgotten."""
        until = self.until(user_id)
        return until is not None and at <= until

    def covered(self, users: pa.Array | pa.ChunkedArray, at: np.ndarray) -> np.ndarray:
        """Return which of the users' events at these times are forgotten, (n,) bool.

        An event without a time, which has the lowest int64 in `at`, is forgotten if its user is.
        """
        if not self._until or not len(users):
            return np.zeros(len(users), bool)
        chunk = users.combine_chunks() if isinstance(users, pa.ChunkedArray) else users
        codes = chunk.dictionary_encode()
        lowest = np.iinfo(np.int64).min
        until = [
            lowest if user is None or (found := self.until(user)) is None else found
            for user in codes.dictionary.to_pylist()
        ]
        code = pc.fill_null(codes.indices, len(until)).to_numpy(zero_copy_only=False)
        ends = np.array([*until, lowest], np.int64)[code]
        return (ends > lowest) & (at <= ends)

    def without(self, events: pa.Table, at: str = "at") -> pa.Table:
        """Return a table with a `user_id` without the forgotten rows; `at` is the column of their times."""
        if not self._until:
            return events
        times = events[at].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
        gone = self.covered(events["user_id"], times)
        return events.filter(pa.array(~gone)) if gone.any() else events

    def cut(self, user_id: str, row: UserEvents) -> UserEvents:
        """Return a user's row without the forgotten events."""
        until = self.until(user_id)
        if until is None or not len(row) or round(float(row.at[0]) * 1e6) > until:
            return row
        return compact(row.where(np.round(row.at * 1e6) > until))

    def facts_that_count(self, facts: Iterable[Fact]) -> list[Fact]:
        """Return the facts without those for users who are forgotten since."""
        return [
            fact
            for fact in facts
            if fact.user_id is None or not self.covers(fact.user_id, round(fact.at * 1e6))
        ]

    def _hash(self, user_id: str) -> str:
        return hashlib.sha256(self._salt + user_id.encode("utf-8", "surrogatepass")).hexdigest()


def forget(home: Path, user_id: str, at: int) -> None:
    """Add a user to the list of a home, atomically; events up to `at` do not count from now on.

    The caller must hold a lock: two concurrent calls would lose a user.
    """
    known = Forgotten.load(home)
    salt = known._salt or secrets.token_bytes(16)
    mine = Forgotten(salt)._hash(user_id)
    until = {**known._until, mine: max(at, known._until.get(mine, at))}
    times = {one: (_EPOCH + timedelta(microseconds=end)).isoformat() for one, end in sorted(until.items())}
    document = {"kind": "forgotten", "salt": salt.hex(), "until": times}
    write_file(home / FILE, json.dumps(document, indent=1), durable=True, private=True)


def fields_of(line: str) -> set[str]:
    """Return all that may be a field of a CSV line that did not parse: its quotes may be unbalanced."""
    fields = line.split(",")
    with suppress(csv.Error):  # a field of more than 128 KiB
        fields += next(csv.reader([line], skipinitialspace=True), [])
    return {field.strip(' "') for field in fields}


def stamp(home: Path, name: str = FILE) -> tuple[int, int] | None:
    """Return a stamp that changes when a file of a home is replaced; None without the file."""
    try:
        stat = (home / name).stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def microseconds(at: datetime) -> int:
    """Return a time with a zone as microseconds since the epoch."""
    return (at - _EPOCH) // timedelta(microseconds=1)
