"""A user's id -> the stores and files of a home without that user, and a report of all removed rows.

The tombstone comes first (`feature_repo.stream.erasure`). From then on no event of the user up to now counts:
a stream, a run or a repeated message brings nothing back. A killed erasure can be repeated. A running stream
may still write rows that it holds in memory, so the rows and the archive are searched until nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.home import UPDATE_LOCK, Conflict, command, dataset_lock, locked, read_running
from components.privacy.erased_files import (
    bundles,
    complete_dataset,
    datasets,
    drop_stale,
    erase_dataset,
    erase_lines,
    erase_rows,
    files,
    is_stale,
    names_user,
)
from components.privacy.erased_stores import erase_coupons, erase_row
from feature_repo.atomic_files import is_damage, read_json
from feature_repo.events import CLOCK_SKEW, EventsInvalid
from feature_repo.ids import MAX_ID_LENGTH, is_id
from feature_repo.snapshots import USER_VIEW
from feature_repo.stream.archive import EVENTS
from feature_repo.stream.erasure import FILE as FORGOTTEN
from feature_repo.stream.erasure import Forgotten, forget, microseconds
from serving.errors import BundleInvalid, FactsUnavailable, NoChampion
from serving.prediction_log import recover_segments
from serving.release.champion import read_champion
from serving.release.manifest import read_manifest
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store

LOOK_S = 2.0  # between two looks, while a stream works: longer than it takes to write a turn's rows
LOOKS = 30
ALIVE_S = 10.0  # a stream that wrote its state so long ago at most is at work
QUEUE_S = 1.5  # a record waits at most so long until it is in the log's open segment
# A home has one of these, also where features and facts lie in Redis.
PARTS = (
    *("champion.json", "runs", "offline_store", "prediction_log"),
    *("online_store.db", "facts.db", "datasets", "store", "stream.json", FORGOTTEN),
)
DONE, UNREACHABLE, IN_USE, REMAINS = "done", "unreachable", "in use", "remains"


@dataclass
class Place:
    """What became of a user's data in one place."""

    place: str
    what: str
    removed: int = 0
    state: str = DONE
    note: str = ""


@dataclass
class Report:
    """Every place, and the time up to which the user is forgotten."""

    until: str
    dry_run: bool
    places: list[Place] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Return 3 when a store could not be reached, 4 when something was in use: to be repeated; else 0."""
        states = {place.state for place in self.places}
        return 3 if UNREACHABLE in states else 4 if IN_USE in states else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it; it does not name the user."""
        return {"kind": "erasure", "removed": sum(place.removed for place in self.places), **asdict(self)}


def forget_user(
    settings: Settings, user_id: str, dry_run: bool = False, say: Callable[[str], None] = lambda _: None
) -> Report:
    """Remove a user from everything under a home and from the stores it names.

    Args:
        settings: of the endpoint: its home, stores and log.
        user_id: who; nothing is written that holds it.
        dry_run: count only.
        say: gets a line when the erasure has to wait.

    Raises:
        ValueError: this is not a user's id, or the folder is no home.
        Conflict: another erasure runs under this home.
    """
    if not is_id(user_id):
        raise ValueError(
            f"the user's id is not 1 to {MAX_ID_LENGTH} printable characters: give the id itself"
        )
    home = settings.home
    if not home.is_dir():
        raise ValueError(f"{home} is no folder of state: point --home at one")
    if not any((home / name).exists() for name in PARTS):
        names = sorted(path.name for path in home.iterdir())[:5]
        raise ValueError(
            f"{home} is no home of reco (found {', '.join(names) or 'nothing'}): point --home at one"
        )
    with locked(home / "forget.lock", "forgetting a user"):
        until = _until(settings, user_id)
        if not dry_run:
            forget(home, user_id, until)
            until = Forgotten.load(home).until(user_id) or until
        named = datetime.fromtimestamp(until / 1e6, UTC).isoformat(timespec="seconds")
        return _Erasure(settings, user_id, until, dry_run, say).run(Report(named, dry_run))


def _until(settings: Settings, user_id: str) -> int:
    """Return now; or the time of the user's latest event, answer or coupon, where a till's clock is ahead.

    By a day at most: what lies further ahead no stream takes. What cannot be read says nothing: the tombstone
    does not wait for it.
    """
    times = [now := datetime.now(UTC)]
    own = pc.field("user_id") == user_id
    archive = settings.home / "offline_store" / EVENTS
    for file in (*archive.glob("*.parquet"), *settings.prediction_log_dir.glob("*.parquet")):
        with contextlib.suppress(pa.ArrowException, OSError):
            latest = pc.max(pq.read_table(file, columns=["at"], filters=own)["at"]).as_py()
            times += [latest] if latest is not None else []
    for url in {settings.fact_store_url, replace(settings, store_url="").fact_store_url}:
        with (
            contextlib.suppress(FactsUnavailable, ValueError),
            contextlib.closing(open_fact_store(url)) as store,
        ):
            coupons = [fact for fact in store.of_user(user_id).values() if fact is not None]
            times += [datetime.fromtimestamp(fact.at, UTC) for fact in coupons]
    return microseconds(min(max(times), now + CLOCK_SKEW))


class _Erasure:
    """One command's work: who, until when, and where."""

    def __init__(
        self, settings: Settings, user_id: str, until: int, dry_run: bool, say: Callable[[str], None]
    ) -> None:
        self.settings, self.home, self.user_id = settings, settings.home, user_id
        self.until, self.dry_run, self.say = until, dry_run, say
        self.damaged: set[Path] = set()  # tables that cannot be read
        # If another store is named, the files under home may hold older rows.
        self.files = replace(settings, store_url="")

    def run(self, report: Report) -> Report:
        watched = [
            (Place("online store", "features of the user's row"), lambda: self.row(self.settings)),
            (Place("archive", "events"), self.archive),
            (Place("offline store", "rows of snapshots"), self.snapshots),
        ]
        if self.settings.store_url:
            held = Place("online store's file", "features of the user's row")
            watched.append((held, lambda: self.row(self.files)))
        for look in range(LOOKS):
            found = 0
            for place, erase in watched:
                if place.state == DONE:
                    found += self.note(place, erase)
            if self.dry_run or not self.streams() or (look and not found):
                break
            self.say("a stream is at work: looking again")
            time.sleep(LOOK_S)
        report.places = [place for place, _ in watched]
        for place, erase in (
            (Place("fact store", "coupons"), lambda: self.coupons(self.settings)),
            *self.fact_file(),
            (Place("prediction log", "answers"), self.prediction_log),
            (Place("runs and data sets", "rows"), self.runs),
        ):
            self.note(place, erase)
            report.places.append(place)
        report.places += [*self.stopped_store(), self.bundles(), *self.unreadable(), *ELSEWHERE]
        return report

    def note(self, place: Place, erase: Callable[[], int]) -> int:
        """Run one erasure and record its outcome."""
        try:
            count = erase()
        except (ConnectionError, FactsUnavailable, sqlite3.Error) as error:
            place.state = UNREACHABLE
            # SQLite's message may repeat the request.
            said = type(error).__name__ if isinstance(error, sqlite3.Error) else str(error)
            place.note = f"{said}: repeat when it is back"
            return 0
        except _InUse as error:
            place.state, place.note, count = IN_USE, str(error), error.removed
        place.removed += count
        return count

    def streams(self) -> bool:
        """Say whether a stream works under this home."""
        try:
            updated_at = float(read_json((self.home / "stream.json").read_bytes())["updated_at"])
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return False  # a running one writes it again each second
        return time.time() - updated_at < ALIVE_S

    def row(self, settings: Settings) -> int:
        return erase_row(settings.online_store_url, self.user_id, self.until, self.dry_run)

    def coupons(self, settings: Settings) -> int:
        return erase_coupons(settings.fact_store_url, self.user_id, self.until, self.dry_run)

    def fact_file(self) -> list[tuple[Place, Callable[[], int]]]:
        """Return the facts under home, if there are any beside those of the store that is named."""
        url = self.files.fact_store_url
        if url == self.settings.fact_store_url or not Path(url.removeprefix("sqlite:///")).is_file():
            return []
        return [(Place("fact store's file", "coupons"), lambda: self.coupons(self.files))]

    def stopped_store(self) -> list[Place]:
        """Say that the store of `reco up` is away unless it is the one that was asked: it keeps its rows."""
        running = read_running(self.home)
        asked = running is not None and running.own_store and running.store_url == self.settings.store_url
        if asked or not (self.home / "store").is_dir():
            return []
        note = (
            f"it is not running and keeps its rows in {self.home / 'store'}: start "
            f"`{command(self.home, 'up')}` and repeat, or delete that folder"
        )
        return [Place("store of `reco up`", "features of the user's row", state=UNREACHABLE, note=note)]

    def archive(self) -> int:
        return self._tables(self.home / "offline_store" / EVENTS)

    def snapshots(self) -> int:
        return self._tables(self.home / "offline_store" / USER_VIEW)

    def _tables(self, folder: Path) -> int:
        if not self.dry_run:
            drop_stale(folder)
        return sum(self._rows(file) for file in files(folder, "*.parquet"))

    def _rows(self, file: Path) -> int:
        try:
            return erase_rows(file, self.user_id, self.until, self.dry_run)
        except (pa.ArrowException, ValueError, OSError) as error:
            if not is_damage(error):
                raise
            self.damaged.add(file)
            return 0

    def prediction_log(self) -> int:
        folder = self.settings.prediction_log_dir
        if not folder.is_dir():
            return 0
        if self.dry_run:
            return self._tables(folder)
        patience_s = self.settings.log_segment_s + 5
        opened = self._closed_segments(folder, patience_s)
        count = self._tables(folder)
        if left := [file for file in opened if file.exists() and not is_stale(file, patience_s)]:
            raise _InUse(f"{len(left)} segments of {folder} are still written: repeat later", count)
        for file in files(folder, ".*.tmp"):
            if is_stale(file, patience_s):
                file.unlink(missing_ok=True)
        return count

    def _closed_segments(self, folder: Path, patience_s: float) -> list[Path]:
        """Wait until endpoints have closed their segments, also a shadow's; return those that were open."""
        folders = [folder, *(inner for inner in folder.rglob("*") if inner.is_dir())]  # also of the shadow
        if any(not is_stale(file, patience_s) for inner in folders for file in inner.iterdir()):
            time.sleep(QUEUE_S)  # an endpoint may be at work
        opened = [file for file in files(folder, ".*.tmp") if not is_stale(file, patience_s)]
        if opened:
            self.say(f"an endpoint writes to {folder}: waiting up to {patience_s:.0f} s for its open segment")
        end = time.monotonic() + patience_s
        while any(file.exists() for file in opened) and time.monotonic() < end:
            time.sleep(0.1)
        for inner in folders:
            recover_segments(inner)
        return opened

    def runs(self) -> int:
        """Erase in all that runs keep, and wherever else under the home a table names users."""
        try:
            with locked(self.home / "run.lock", "forgetting a user"):
                return self._tables_of_runs()
        except Conflict as error:
            raise _InUse(f"{error}; it brings nothing of the user to the stores") from error

    def _tables_of_runs(self) -> int:
        busy = ""
        if not self.dry_run:
            drop_stale(self.home / "runs")
            for left in self.home.glob(".feast-*"):  # of a publication that was killed
                if is_stale(left):
                    shutil.rmtree(left, ignore_errors=True)
            try:
                with locked(self.home / UPDATE_LOCK, "forgetting a user"):
                    for left in self.home.glob(".refresh-*"):  # of a refresh that was killed
                        shutil.rmtree(left, ignore_errors=True)
            except Conflict as error:
                busy = str(error).removesuffix("; nothing was changed") + ": its bundle may hold the user"
            for part in (self.home / "runs").glob("*/artifacts/*/*.part"):
                complete_dataset(part)
        logged = files(self.settings.prediction_log_dir, "*.parquet")  # also of mirrored requests
        count, done = 0, {*bundles(self.home), *(segment.parent for segment in logged)}
        done |= {self.home / "offline_store" / name for name in (EVENTS, USER_VIEW)}
        for folder in [*datasets(self.home)]:
            # A damaged one goes file by file, below.
            with contextlib.suppress(EventsInvalid), self._alone_with(folder):
                count += erase_dataset(folder, self.user_id, self.until, self.dry_run)
                done.add(folder)
        count += sum(self._rows(file) for file in self._loose("*.parquet", done))
        quarantines = self._loose("quarantine.jsonl", done)
        count += sum(erase_lines(file, self.user_id, self.dry_run) for file in quarantines)
        if busy:
            raise _InUse(busy, count)
        return count

    def _alone_with(self, dataset: Path) -> contextlib.AbstractContextManager[Any]:
        """Keep a watch from reading its source into a data set meanwhile."""
        if self.dry_run or dataset.parent != self.home / "datasets":
            return contextlib.nullcontext()
        return dataset_lock(dataset)

    def _loose(self, pattern: str, done: set[Path]) -> Iterator[Path]:
        return (file for file in files(self.home, pattern) if file.parent not in done)

    def bundles(self) -> Place:
        """Say which bundles hold the user: they are sealed, and serve or may be gone back to."""
        try:
            champion = read_champion(self.home).bundle_id
        except NoChampion:
            champion = ""
        counts = {path: self._named_in(path) for path in bundles(self.home)}
        place = Place("bundles", "golden requests and reference answers")
        held = {path: count for path, count in counts.items() if count}
        if not held:
            return place
        place.state = REMAINS
        notes = [
            f"{sum(held.values())} in {len(held)} sealed bundles, none in those that are made from now on"
        ]
        # The champion has copies: of its run, and of the registry.
        others = sorted(str(path.relative_to(self.home)) for path in held if _bundle_id(path) != champion)
        if len(others) < len(held):
            notes.append("the champion is one: it remains until the next promotion")
        if by_hand := [path for path in others if not path.startswith("runs/")]:
            notes.append(f"delete by hand: {', '.join(by_hand)}")
        if len(by_hand) < len(others):
            notes.append(
                "those of runs go when three newer runs have ended; the champion's run keeps its own until a "
                "later training is champion"
            )
        place.note = "; ".join(notes)
        return place

    def _named_in(self, bundle: Path) -> int:
        try:
            return names_user(bundle, self.user_id)
        except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            if not is_damage(error):
                raise
            self.damaged.add(bundle)
            return 0

    def unreadable(self) -> list[Place]:
        """Return the damaged tables: a repaired one may still hold the user."""
        names = ", ".join(sorted(os.path.relpath(path, self.home) for path in self.damaged))
        note = f"they may hold the user and cannot be read: delete them: {names}"
        return [Place("damaged files", "rows", state=REMAINS, note=note)] if names else []


def _bundle_id(bundle: Path) -> str:
    try:
        return str(read_manifest(bundle)["bundle_id"])
    except BundleInvalid:  # half of a copy: of no champion
        return "damaged"


class _InUse(Exception):
    """Another process holds rows that must be erased; `removed` rows were erased all the same."""

    def __init__(self, message: str, removed: int = 0) -> None:
        super().__init__(message)
        self.removed = removed


ELSEWHERE = (
    Place(
        "training examples, weights",
        "numbers without an id",
        state=REMAINS,
        note="cannot be told apart by user; replaced by the next run, gone with the run's artifacts",
    ),
    Place(
        "broker: events, facts, dead letters",
        "messages",
        state=REMAINS,
        note="go with the topics' retention; they count no more",
    ),
    Place(
        "what --data names, other registries, a cluster's bucket of bundles",
        "source files, registered copies, published bundles",
        state=REMAINS,
        note="not this home's: delete them there; ingest_events leaves the user out",
    ),
)
