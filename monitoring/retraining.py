"""A drift verdict -> whether the training pipeline may start for it: once, and with a cool-down.

`<home>/retrain.json` holds the last start. It is read and written under a lock: if two checks find the same
drift at the same moment, only one starts a run. The start is recorded before it is made; if it then fails,
the caller takes the record back (`release_retrain`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from feature_repo.atomic_files import read_json, write_file
from monitoring.verdict import DriftVerdict

COOL_DOWN = timedelta(hours=6)
STATE = "retrain.json"


@dataclass(frozen=True)
class RetrainDecision:
    """Whether to start the training pipeline now; `reason` says why not."""

    allowed: bool
    reason: str = ""
    noted: str = ""  # the text of the record
    before: str = ""  # the text before it; empty without a file


def claim_retrain(
    verdict: DriftVerdict, home: Path, now: datetime, cool_down: timedelta = COOL_DOWN
) -> RetrainDecision:
    """Decide whether to start a run for a verdict, and record the start if so.

    A window never starts a second run, and no run is started during the cool-down after another one.
    """
    if verdict.status != "drifted":
        return RetrainDecision(False, _REFUSED[verdict.status])
    key, file = _key(verdict, now), home / STATE
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home):
        if refusal := _refusal(_read(file), key, now, cool_down):
            return RetrainDecision(False, refusal)
        before = file.read_text() if file.exists() else ""
        if before:
            # If the new run cannot start, this record comes back. Without its run, the old result does not
            # count as the new one's, see `started_run`.
            earlier = {name: value for name, value in json.loads(before).items() if name != "run_id"}
            before = json.dumps(earlier, indent=1)
        noted = json.dumps({"started_at": now.isoformat(), "key": key, "reason": verdict.reason}, indent=1)
        write_file(file, noted.encode())
    return RetrainDecision(True, noted=noted, before=before)


def _refusal(last: dict[str, Any] | None, key: str, now: datetime, cool_down: timedelta) -> str:
    """Return why no run may start after the last one, or an empty text."""
    if last is None:
        return ""
    started: datetime = last["started_at"]
    shown = started.isoformat(timespec="minutes")
    if key and key == last["key"]:
        return f"this window has started a run already, at {shown}"
    # A start in the future means that the clock was set back; it must not prevent retraining for long.
    if timedelta(0) <= now - started < cool_down:
        # Rounded up: a start at the named minute is never too early.
        again = started + cool_down + timedelta(minutes=1, microseconds=-1)
        return f"a run was started at {shown}; the next may start at {again.isoformat(timespec='minutes')}"
    return ""


def release_retrain(decision: RetrainDecision, home: Path) -> None:
    """Remove the record of a start that was not made, unless another start was recorded since."""
    file = home / STATE
    with _locked(home):
        if not decision.noted or not file.exists() or file.read_text() != decision.noted:
            return
        if decision.before:
            write_file(file, decision.before.encode())
        else:
            file.unlink()


def note_run(decision: RetrainDecision, home: Path, run_id: str) -> None:
    """Add the run that was started to the record, unless another start was recorded since."""
    file = home / STATE
    with _locked(home):
        if file.exists() and file.read_text() == decision.noted:
            noted = {**json.loads(decision.noted), "run_id": run_id}
            write_file(file, json.dumps(noted, indent=1).encode())


def started_run(home: Path) -> str:
    """Return the run of the last start; empty without a start or a noted run."""
    last = _read(home / STATE)
    return last["run_id"] if last else ""


def newest_result(
    trainings: Iterable[tuple[str, datetime, bool | None]], run_id: str, failed_at: datetime | None
) -> bool | None:
    """Return whether the newest training that ended since a start went well; None: not known.

    A person may have trained again by hand meanwhile. Nothing is known, too, if the run was deleted: any
    training may be older.

    Args:
        trainings: newest first. Of each the run, when it was created or worked last, and whether it went
            well; None: it works, or was stopped.
        run_id: of the start; empty if the start was refused.
        failed_at: when a start was refused; only later trainings count.
    """
    newest = None
    for name, at, went_well in trainings:
        if not run_id and (failed_at is None or at < failed_at):
            return newest
        newest = went_well if newest is None else newest
        if name == run_id:
            return newest
    return None if run_id else newest


def _key(verdict: DriftVerdict, now: datetime) -> str:
    """Name a window that is over; a window that still grows changes with each check and has no name."""
    until = verdict.window.until
    if until is None or until > now:
        return ""
    kind = verdict.compared.partition(" ")[0]  # without the bundle: a training makes another one
    return json.dumps([kind, verdict.window.to_dict()])


_REFUSED = {
    "ok": "nothing has drifted",
    "warn": "nothing that retraining is started for has passed its alarm line",
    "insufficient_data": "there is too little data to tell: take a longer window",
    "schema_change": "columns changed: mend the data first, a model trained on it would be worse",
}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        last = read_json(path.read_text())
        started_at = datetime.fromisoformat(last["started_at"]).astimezone(UTC)
        return {"started_at": started_at, "key": str(last["key"]), "run_id": str(last.get("run_id", ""))}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what `reco drift --retrain` writes ({error}): remove it") from error


def _locked(home: Path) -> FileLock:
    return FileLock(home / f"{STATE}.lock", preserve_lock_file=True)
