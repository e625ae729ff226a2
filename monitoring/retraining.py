"""A drift verdict -> whether the training pipeline may start for it: once, and with a cool-down.

`<home>/retrain.json` holds the last start. It is read and written under a lock: if two checks find the same
drift at the same moment, only one starts a run. The start is recorded before it is made; if it then fails,
the caller removes the record (`release_retrain`), and the next try is free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from feature_repo.atomic_files import write_file
from monitoring.verdict import DriftVerdict

COOL_DOWN = timedelta(hours=6)
STATE = "retrain.json"


@dataclass(frozen=True)
class RetrainDecision:
    """Whether to start the training pipeline now, and why."""

    allowed: bool
    reason: str


def claim_retrain(
    verdict: DriftVerdict, home: Path, now: datetime, cool_down: timedelta = COOL_DOWN
) -> RetrainDecision:
    """Decide whether to start a run for a verdict, and record the start if so.

    Args:
        verdict: the same window of one never starts a second run.
        home: the state folder.
        now: the time, with its time zone.
        cool_down: how long after a start no other start is allowed.
    """
    if verdict.status != "drifted":
        return RetrainDecision(False, _REFUSED[verdict.status])
    key = _key(verdict, now)
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{STATE}.lock", preserve_lock_file=True):
        decision = _decide(_last(home), key, now, cool_down)
        if decision.allowed:
            _note(home, {"started_at": now.isoformat(), "key": key, "reason": verdict.reason})
    return decision


def _decide(last: dict[str, Any], key: str, now: datetime, cool_down: timedelta) -> RetrainDecision:
    if not last:
        return RetrainDecision(True, "no run was started for drift before")
    started = datetime.fromisoformat(last["started_at"])
    if key and key == last["key"]:
        return RetrainDecision(False, f"this window has started a run already, at {last['started_at']}")
    # A start in the future means that the clock was set back; it must not prevent retraining for long.
    if timedelta(0) <= now - started < cool_down:
        again = (started + cool_down).isoformat(timespec="minutes")
        return RetrainDecision(
            False, f"a run was started at {last['started_at']}; the next may start at {again}"
        )
    return RetrainDecision(True, f"the last run was started at {last['started_at']}")


def release_retrain(home: Path) -> None:
    """Remove the record of a start that was not made."""
    (home / STATE).unlink(missing_ok=True)


def note_run(home: Path, run_id: str) -> None:
    """Add the run that was started to the record."""
    _note(home, {**_last(home), "run_id": run_id})


def started_run(home: Path) -> str:
    """Return the run of the last start; empty without a start or a noted run."""
    return str(_last(home).get("run_id", ""))


def _key(verdict: DriftVerdict, now: datetime) -> str:
    """Name a window that is over; a window that still grows changes with each check and has no name."""
    until = verdict.window.until
    if until is None or until > now:
        return ""
    return json.dumps([verdict.compared, verdict.window.to_dict()])


_REFUSED = {
    "ok": "nothing has drifted",
    "warn": "nothing that retraining is started for has passed its alarm line",
    "insufficient_data": "there is too little data to tell: take a longer window",
    "schema_change": "columns changed: mend the data first, a model trained on it would be worse",
}


def _last(home: Path) -> dict[str, Any]:
    """Return the record of the last start; empty without one."""
    return dict(json.loads((home / STATE).read_bytes())) if (home / STATE).exists() else {}


def _note(home: Path, record: dict[str, Any]) -> None:
    write_file(home / STATE, json.dumps(record, indent=1))
