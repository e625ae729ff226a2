"""A release's record and an observation -> the next record: the state machine, without any action.

    verify -> publish -> stage -> shadow -> restage -> step (1, 5, 25, 50, 100 %)
        -> seal -> hold -> settle -> done; before `seal`, anything wrong -> abort -> aborted

The record is an annotation of the route and is written before the state acts. Weights and mirror of the
route follow from it, and so does the slot. So each action is idempotent, and a killed release goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from components.rollout.comparison import ABORT, GO, GateVerdict
from feature_repo.errors import RecoError

FULL = 100
RELEASE, ROLLBACK = "release", "rollback"
FINAL = ("done", "aborted")
UNDOABLE = ("verify", "publish", "stage", "shadow", "restage", "step")  # states that an abort can undo
COMPARED = ("shadow", "step")


class RecordInvalid(RecoError, ValueError):
    """The route's annotation holds no record of a release."""


@dataclass(frozen=True)
class Pace:
    """How many answers a state needs and how long it may take."""

    weights: Mapping[int, int] = field(default_factory=lambda: {1: 25, 5: 150, 25: 600, 50: 1_000})
    reveals: float = 0.1  # share below `full`, over the stable slot's, that each state but 1 % finds
    shadow_answers: int = 1_000  # 600 would let 2 % errors pass one look in 12
    mirror_percent: int = 50
    look_s: float = 5.0
    ready_s: float = 1_200.0  # for the pods of a slot: KEDA may look at a new one every 1,000 s only
    longest_s: float = 1_800.0  # for enough answers
    missing_s: float = 60.0  # without a series of the gate
    hold_s: float = 1_800.0
    orphan_s: float = 300.0  # without a beat: the deployer is gone


@dataclass(frozen=True)
class Release:
    """One release, as the route's annotation keeps it."""

    id: str
    kind: str  # release | rollback
    version: str
    bundle_id: str
    source: str  # where the bundle lies
    stable: str  # the slot that has the traffic when it begins
    canary: str
    compared: bool  # there is a stable slot to compare with; else the canary gets all at once
    again: bool = False  # the stable slot has this bundle, too, for example in pods of an older image
    state: str = "verify"
    weight: int = 0  # of the canary
    since: float = 0.0  # when the state began, seconds since the epoch
    beat: float = 0.0  # when its deployer was last alive
    holder: str = ""  # the deployer that wrote it last
    started_by: str = ""  # the deployer that began it
    earlier: tuple[str, ...] = ()  # the deployers that began the releases before it, the last first
    reason: str = ""
    gate: tuple[dict[str, Any], ...] = ()  # the last look of each compared state
    sealed: bool = False  # the alias champion may have moved to it

    @property
    def is_judged(self) -> bool:
        """Whether the gate compares both slots in this state."""
        return self.state in COMPARED and self.weight < FULL

    @property
    def active(self) -> bool:
        """Whether it is not over."""
        return self.state not in FINAL


@dataclass(frozen=True)
class Observed:
    """What a look saw; fields that a state does not need keep their default."""

    done: bool = False  # the action of the state is complete
    fault: str = ""  # something that ends the release
    verdict: GateVerdict | None = None
    missing_s: float = 0.0  # how long a series has been missing
    missing: str = ""


def advance(record: Release, seen: Observed, now: float, pace: Pace) -> Release:
    """Return the next record; one with the same state waits."""
    age = now - record.since
    if record.state in UNDOABLE and (fault := _fault(record, seen, age, pace)):
        return abort(record, fault, now)
    if record.state in COMPARED and seen.verdict:
        record = replace(record, gate=_with_look(record, seen.verdict))
        if seen.verdict.outcome == ABORT:
            return abort(record, f"{name_of(record)}: {seen.verdict.reason}", now)
    if record.state == "hold":
        return _enter(record, "settle", now) if age >= pace.hold_s else record
    if not _is_complete(record, seen):
        return record
    return _next(record, now, pace)


def _fault(record: Release, seen: Observed, age: float, pace: Pace) -> str:
    """Return why a state ends with an abort, whatever the gate says; empty: it does not."""
    if seen.fault:
        return seen.fault
    if seen.missing_s >= pace.missing_s:
        return f"{seen.missing}, for {seen.missing_s:.0f} s"
    longest = pace.longest_s if record.state in COMPARED else pace.ready_s
    if age > longest and not _is_complete(record, seen):
        waited = seen.missing or (seen.verdict.reason if seen.verdict else "the slot is not ready")
        return f"{name_of(record)} after {longest:g} s: {waited}"
    return ""


def _is_complete(record: Release, seen: Observed) -> bool:
    if record.is_judged:
        return seen.verdict is not None and seen.verdict.outcome == GO
    return seen.done


def _next(record: Release, now: float, pace: Pace) -> Release:
    follows = {"verify": "publish", "publish": "stage", "shadow": "restage", "seal": "hold"}
    if record.state in follows:
        return _enter(record, follows[record.state], now)
    if record.state in ("stage", "restage", "step"):
        if record.state == "stage" and record.compared:
            return _enter(record, "shadow", now)
        if record.weight == FULL:
            return _enter(record, "seal", now)
        larger = [weight for weight in sorted(pace.weights) if weight > record.weight]
        weight = larger[0] if larger and record.compared else FULL
        return replace(_enter(record, "step", now), weight=weight)
    return _enter(record, {"settle": "done", "abort": "aborted"}[record.state], now)


def _enter(record: Release, state: str, now: float) -> Release:
    return replace(record, state=state, since=now, sealed=record.sealed or state == "seal")


def abort(record: Release, reason: str, now: float) -> Release:
    """Return the record that gives all traffic back to the stable slot."""
    return replace(record, state="abort", weight=0, since=now, reason=reason)


def name_of(record: Release) -> str:
    """Return a state as people say it."""
    return f"{record.state} {record.weight} %" if record.state == "step" else record.state


def _with_look(record: Release, verdict: GateVerdict) -> tuple[dict[str, Any], ...]:
    name = name_of(record)
    look = {"at": name, "verdict": verdict.outcome, "reason": verdict.reason, "rows": list(verdict.rows)}
    return (*(one for one in record.gate if one["at"] != name), look)


def to_json(record: Release, before: str | None = None) -> str:
    """Return the annotation's text; fields of the same release that only a newer deployer knows stay."""
    held = json.loads(before or "{}")
    return json.dumps((held if held.get("id") == record.id else {}) | asdict(record), sort_keys=True)


def from_json(text: str) -> Release:
    """Return the record of an annotation.

    Raises:
        RecordInvalid: this version of the code cannot read it.
    """
    try:
        return msgspec.json.decode(text, type=Release)
    except msgspec.MsgspecError as error:
        raise RecordInvalid(
            f"the annotation reco.dev/release of the route is no record ({error}): see that no release runs, "
            "then remove it with `kubectl annotate httproute checkout reco.dev/release-`, or start "
            "`reco up --slots` again"
        ) from error
