"""A version and a cluster -> the version has all traffic, or the traffic is as it was before.

`Rollout` carries out what `plan` decides. It writes the record to the route first, then acts, then looks. A
write of the route fails if another deployer wrote it meanwhile: one release at a time, and none that was
aborted goes on.
"""

from __future__ import annotations

import _thread
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from components.home import Busy, Conflict
from components.parameters import overlay
from components.release.registry import RegistryRefused
from components.rollout.catalogue import Versions
from components.rollout.cluster import Cluster, ClusterUnreachable, Document, Stale
from components.rollout.comparison import GO, GateVerdict
from components.rollout.manifests import (
    ANNOTATION,
    ROUTE,
    SLOTS,
    backend,
    floor_changes,
    other,
    service,
    slot_changes,
    source_of,
    weights,
    with_traffic,
)
from components.rollout.observe import Observer
from components.rollout.plan import (
    RELEASE,
    ROLLBACK,
    UNDOABLE,
    Observed,
    Pace,
    Release,
    abort,
    advance,
    from_json,
    name_of,
    to_json,
)
from feature_repo.errors import UNREACHABLE, RecoError

BEAT_S = 15.0  # between two beats of a deployer that waits, or asks the registry
TAKEOVER_S = 60.0  # a record without a beat for so long may be resumed by another deployer
WRITES = 20  # attempts; others write the route's status, too
EARLIER = 20  # deployers that a record remembers


class NoRelease(RecoError):
    """There is no release to go on with, or none to go back to."""


class Aborted(RecoError):
    """The canary was refused, and the stable slot has all traffic."""


class Rollout:
    """Steps one release of one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        observer: Observer,
        catalogue: Versions,
        pace: Pace,
        holder: str,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        say: Callable[[str], None],
    ) -> None:
        """Take the cluster, the observer, the registry and a clock.

        Args:
            cluster: with route and slots.
            observer: looks at slots.
            catalogue: the registry.
            pace: answers and times.
            holder: the name of this deployer; a Job's pods share one, and run one after the other.
            now: the time, seconds since the epoch.
            sleep: waits.
            say: takes a line for people.
        """
        self._cluster, self._observer, self._catalogue, self._pace = cluster, observer, catalogue, pace
        self._holder, self._now, self._sleep, self._say = holder, now, sleep, say
        self._written: str | None = None  # the record as this deployer last read or wrote it
        self._sent = ""  # the record that it last tried to write
        self._bundle = ("", Path())  # id of the release that it was fetched for, and its folder

    # -------------------------------------------------------------------------------------- commands

    def status(self) -> tuple[Release | None, dict[str, int]]:
        """Return the last release, and the weight of each slot."""
        route = self._cluster.get("HTTPRoute", ROUTE)
        text = _annotation(route)
        return (None if text is None else from_json(text)), weights(route)

    def start(self, version: str) -> Release:
        """Release a version, a number or an alias; return its last record.

        One that this deployer left unfinished goes on.

        Raises:
            Conflict: another release runs.
            Aborted: the canary was refused.
        """
        number, bundle_id = self._catalogue.find(version)
        record = self._read()
        if record is not None and record.active and (record.holder, record.version) == (self._holder, number):
            return self._run(self._save(record))
        return self._run(self._claim(RELEASE, number, bundle_id))

    def resume(self, version: str = "") -> Release:
        """Go on with a release whose deployer is gone; one that this deployer began ends as it ended before.

        Args:
            version: the number or alias that must be the unfinished one; empty: any.

        Raises:
            NoRelease: none is unfinished.
            Conflict: its deployer lives, it releases another version, or another release followed this
                deployer's.
            Aborted: the canary is or was refused.
        """
        record = self._read()
        if record is not None and not record.active and record.started_by == self._holder:
            return self._run(record)
        if record is not None and record.started_by != self._holder and self._holder in record.earlier:
            raise Conflict(
                f"the release of {self._holder} is over, and {record.started_by} began one of version "
                f"{record.version} after it ({name_of(record)}); nothing was changed"
            )
        if record is None or not record.active:
            raise NoRelease("no release is unfinished: `reco release VERSION` starts one")
        if version and not self._is_of(record, version):
            raise Conflict(
                f"version {record.version} is unfinished ({name_of(record)}), not {version}: `reco release "
                "--resume` ends that one first, and so does the guard; nothing was changed"
            )
        silent = self._now() - record.beat
        if record.holder != self._holder and silent < TAKEOVER_S:
            raise Conflict(
                f"version {record.version} is being released by {record.holder}, seen {silent:.0f} s ago: "
                "`reco release --status` follows it, `reco rollback` ends it"
            )
        return self._run(self._save(record))  # the guard sees that it lives

    def guard(self) -> Release | None:
        """End the release of a deployer that is silent, see `Pace.orphan_s`; a way back goes on."""
        record = self._read()
        if record is None or not record.active:
            return record
        silent, waited = self._now() - record.beat, self._now() - record.since
        if silent < self._pace.orphan_s or (record.state == "hold" and waited < self._pace.hold_s):
            return record
        if record.state in UNDOABLE and record.kind == RELEASE:
            record = self._save(abort(record, f"its deployer was silent for {silent:.0f} s", self._now()))
        return self._run(record)

    def rollback(self) -> Release:
        """Give the traffic back to the version before: one patch of weights while its slot still runs.

        A way back that another deployer began goes on: asked for twice, it goes back once.

        Raises:
            NoChampion: there was no version before.
            NoRelease: it is the first release, and the other slot has no pods.
        """
        record = self._read()
        if record is not None and record.active and record.kind == ROLLBACK and record.state != "abort":
            return self._run(self._save(record))
        if record is not None and record.active and record.state not in ("settle", "abort"):
            if record.state not in UNDOABLE and not record.compared:
                raise NoRelease(
                    f"no version was served before {record.version}, and slot {record.stable} has no pods; "
                    "nothing was changed: release another version when this release is over"
                )
            back = f"weights back to {record.stable}"
            if record.weight == 0:
                back = f"version {record.version} had no traffic: its release ends, and the traffic stays"
                if record.compared:
                    back += f"; to go back from the version of {record.stable}, roll back again in a minute"
            self._say(back)
            return self._run(self._save(abort(record, "rolled back by hand", self._now())), asked=True)
        if record is not None and record.active:
            was_abort = record.state == "abort"
            record = self._run(record, asked=True)
            if was_abort:
                return record
        return self._run(self._claim(ROLLBACK, *self._catalogue.previous()))

    def patches(self, version: str) -> Iterator[tuple[str, Document]]:
        """Yield each patch of a release that goes well, without writing anything."""
        record, route = self._first(RELEASE, *self._catalogue.find(version))
        slots = {slot: self._cluster.get("InferenceService", service(slot)) for slot in SLOTS}
        ideal = Observed(done=True, verdict=GateVerdict(GO, ""))
        while True:
            rules = with_traffic(route, record, self._pace.mirror_percent)
            yield f"HTTPRoute {ROUTE}", _changes(route, to_json(record), rules)
            route["spec"]["rules"] = rules
            for slot, found in slots.items():
                if changes := slot_changes(found, record, slot):
                    yield f"InferenceService {service(slot)}", changes
                    slots[slot] = overlay(found, changes)
            if not record.active:
                return
            record = advance(record, ideal, record.since + self._pace.hold_s, self._pace)

    # ---------------------------------------------------------------------------------------- inside

    def _is_of(self, record: Release, version: str) -> bool:
        """Say whether a number or an alias names the version of a record."""
        if version == record.version:
            return True
        try:
            return self._catalogue.find(version)[0] == record.version
        except RegistryRefused:  # the seal, or the abort, has taken the alias from it
            return record.state not in UNDOABLE and not version.isdecimal()

    def _first(self, kind: str, version: str, bundle_id: str) -> tuple[Release, Document]:
        route, source = self._cluster.get("HTTPRoute", ROUTE), self._catalogue.place(bundle_id)
        split = weights(route)
        stable = max(SLOTS, key=lambda slot: split[slot])
        served = source_of(self._cluster.get("InferenceService", service(stable)))
        now = self._now()
        record = Release(
            id=uuid.uuid4().hex[:12],
            kind=kind,
            version=version,
            bundle_id=bundle_id,
            source=source,
            stable=stable,
            canary=other(stable),
            compared=bool(served) and kind == RELEASE,
            again=served == source,
            since=now,
            beat=now,
            holder=self._holder,
            started_by=self._holder,
        )
        return record, route

    def _claim(self, kind: str, version: str, bundle_id: str) -> Release:
        running = self._read()
        if running is not None and running.active:
            raise Conflict(
                f"version {running.version} is being released ({name_of(running)}) by {running.holder}: wait "
                "for it, or `reco release --resume` if its deployer is gone; nothing was changed"
            )
        record, _ = self._first(kind, version, bundle_id)
        if running is not None and running.started_by:
            record = replace(record, earlier=(running.started_by, *running.earlier)[:EARLIER])
        return self._save(record)

    def _read(self) -> Release | None:
        self._written = _annotation(self._cluster.get("HTTPRoute", ROUTE))
        return None if self._written is None else from_json(self._written)

    def _save(self, record: Release) -> Release:
        """Write a record, with weights and mirror, in one patch of the route."""
        record = replace(record, beat=self._now(), holder=self._holder)
        for _ in range(WRITES):
            route = self._own()
            rules = with_traffic(route, record, self._pace.mirror_percent)
            self._sent = to_json(record, self._written)
            changes = _changes(route, self._sent, rules)
            try:
                self._cluster.patch("HTTPRoute", ROUTE, changes, route["metadata"]["resourceVersion"])
            except Stale:
                continue
            self._written = self._sent
            return record
        raise Conflict(f"the route {ROUTE} changes all the time: see what else writes it")

    def _own(self) -> Document:
        """Return the route, if its record is still the one that this deployer knows."""
        route = self._cluster.get("HTTPRoute", ROUTE)
        found = _annotation(route)
        # The API may have taken the last patch although its answer was lost.
        if found not in (self._written, self._sent):
            raise Conflict(
                "another deployer has taken over this release, or ended it: see `reco release --status`"
            )
        self._written = found
        return route

    def _run(self, record: Release, asked: bool = False) -> Release:
        """Act, look and advance until the release is over; an abort that was `asked` for is no error."""
        failure: RecoError | None = None
        waits_for = ""
        while record.active:
            try:
                self._act(record)
                following = advance(record, self._look(record), self._now(), self._pace)
            except RecoError as error:
                if isinstance(error, Busy) and record.state in ("verify", "seal"):
                    # A gate in the same home takes minutes, and says nothing of this version.
                    following = record
                    if waits_for != str(error):
                        waits_for = str(error)
                        self._say(f"{name_of(record)} waits: {waits_for}")
                elif _is_resumed_after(error, record):
                    raise  # the record stays
                else:
                    failure, following = error, abort(record, str(error), self._now())
            is_new = (following.state, following.weight) != (record.state, record.weight)
            if is_new:
                self._say(_line(following))
            if is_new or self._now() - record.beat >= BEAT_S:
                following = self._save(following)
            record = following
            if not is_new:
                self._sleep(self._pace.look_s)
        if failure is not None:
            raise failure
        if record.state == "aborted" and not asked:
            raise Aborted(
                f"version {record.version} was refused at {record.reason}; {record.stable} has all traffic"
            )
        return record

    def _act(self, record: Release) -> None:
        catalogue = self._catalogue
        in_registry = {"verify": catalogue.check, "publish": catalogue.publish, "seal": catalogue.seal}
        if record.state in in_registry:
            with self._beating(record):
                in_registry[record.state](record)
            if record.state == "seal":
                self._unseal_if_ended(record)
        else:
            self._own()
            for slot in SLOTS:
                self._change("InferenceService", slot, partial(slot_changes, record=record, slot=slot))
                self._scale(record, slot)
        if record.state == "abort":
            self._undo(record)

    def _unseal_if_ended(self, record: Release) -> None:
        """Take the alias back if a rollback ended the release while it was sealed.

        Raises:
            Conflict: another deployer has it.
        """
        try:
            self._own()
        except Conflict:
            now = self._read()
            if now is not None and now.id == record.id and now.state in ("abort", "aborted"):
                self._catalogue.undo(now)
            raise

    @contextmanager
    def _beating(self, record: Release) -> Iterator[None]:
        """Write a beat now and then while the block runs: the gate may take two hours.

        A gate ends when another deployer has ended the release: it holds the lock that a rollback needs. A
        seal does not: an alias that has moved is taken back after it.

        Raises:
            Conflict: the gate was ended.
        """
        over, lost = threading.Event(), list[Conflict]()

        def beat() -> None:
            while not over.wait(BEAT_S):
                try:
                    self._save(record)
                except Conflict as error:  # another deployer has it by now
                    if record.state == "verify" and not over.is_set():
                        lost.append(error)
                        _thread.interrupt_main(signal.SIGTERM)  # a shell's background job ignores SIGINT
                    return
                except RecoError:
                    continue

        beats = threading.Thread(target=beat, daemon=True)
        beats.start()
        try:
            try:
                yield
            finally:
                over.set()
                beats.join()
        except KeyboardInterrupt:
            if lost:
                raise lost[0] from None
            raise

    def _undo(self, record: Release) -> None:
        """Take the aliases from a version; an alias champion that may have moved cannot wait."""
        try:
            self._catalogue.undo(record)
        except RecoError as error:
            if record.sealed:
                raise  # the record stays in `abort`, and the guard does it later
            self._say(f"version {record.version} keeps its alias challenger: {error}")

    def _scale(self, record: Release, slot: str) -> None:
        """Give a slot as many pods as the other one has, for as long as it may get all traffic at once."""
        if self._cluster.find("ScaledObject", service(slot)) is None:
            return  # slots of `reco up`
        peer = self._cluster.find("Deployment", backend(other(slot))) or {}
        pods = peer.get("status", {}).get("availableReplicas", 0)
        self._change("ScaledObject", slot, partial(floor_changes, record=record, pods=pods))

    def _change(self, kind: str, slot: str, changes_of: Callable[[Document], Document]) -> None:
        """Make an object of a slot as the record wants it."""
        for _ in range(WRITES):
            found = self._cluster.get(kind, service(slot))
            changes = changes_of(found)
            try:
                if changes:
                    self._cluster.patch(kind, service(slot), changes, found["metadata"]["resourceVersion"])
                return
            except Stale:
                self._own()  # its controller wrote the status, or another deployer the slot
        raise Conflict(f"{service(slot)} changes all the time: see what else writes it")

    def _look(self, record: Release) -> Observed:
        if record.state in ("stage", "restage"):
            if self._bundle[0] != record.id:
                self._bundle = (record.id, self._catalogue.bundle(record))
            return self._observer.slot(record, self._bundle[1], golden=record.state == "stage")
        if record.is_judged:
            return self._observer.comparison(record)
        return Observed(done=True)


def _is_resumed_after(error: RecoError, record: Release) -> bool:
    """Say whether a release goes on when the reason of an error is gone; else it is aborted."""
    if record.state in ("verify", "publish", "stage", "restage") and error.exit_code == UNREACHABLE:
        return True  # they ask registry and store of bundles, and have no traffic
    if record.state in ("verify", "publish"):
        return False
    return record.state not in UNDOABLE or isinstance(error, (Conflict, ClusterUnreachable))


def _annotation(route: Document) -> str | None:
    text: str | None = route["metadata"].get("annotations", {}).get(ANNOTATION)
    return text


def _changes(route: Document, text: str, rules: list[Document]) -> Document:
    changes: Document = {"metadata": {"annotations": {ANNOTATION: text}}}
    if rules != route["spec"]["rules"]:
        changes["spec"] = {"rules": rules}
    return changes


def _line(record: Release) -> str:
    line = f"{name_of(record)}: {record.canary} version {record.version} ({record.bundle_id})"
    return f"{line}: {record.reason}" if record.reason else line
