"""A folder of data -> its counts, its time span, the rows that a run would refuse, and why it would stop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from components.data.ingest_events import (
    NO_CUT,
    QUARANTINE_LIMIT,
    TooManyRefused,
    find_cut,
    ingest_events,
    or_raise_the_limit,
)
from feature_repo.events import read_dataset
from feature_repo.statistics import read_statistics
from pipelines.run.launch import absolute, check_data, check_train_until
from pipelines.tables import counted, table

SHOWN = 10  # refused rows in the text; the document has all
ENOUGH, ENOUGH_USERS = 100_000, 200  # lines, and shoppers, that give examples here
COUNTS = ("rows", "users", "baskets", "items", "first_at", "last_at", "timezone")


def inspect_data(
    data: str, train_until: str = "", say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Read a folder as a run does, and write nothing; `say` takes a line before the reading.

    Returns:
        The counts and the span of the valid rows, the cut (empty: it leaves nothing on one side), every
        refused row with its place in the file, and why a later step would stop.

    Raises:
        ArgumentsInvalid: there are no such data, or `train_until` is no date.
        EventsInvalid: the data can't be read or used; the message says why.
    """
    check_train_until(train_until)
    check_data(data)
    say(f"reading {data} and trying the first steps on it")
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Path(scratch) / "dataset"
        found: dict[str, Any] = {}
        refused_rows = dataset / "quarantine.jsonl"
        try:
            ingest_events(absolute(data), dataset, 1.0, NO_CUT)
            manifest = json.loads((dataset / "manifest.json").read_bytes())
            found |= {"cut": ""} | {name: manifest[name] for name in (*COUNTS, "quarantined_ratio")}
            found["stops"] = _why_a_step_stops(dataset, found, train_until)
        except TooManyRefused as error:  # no row is valid
            found["rows"], refused_rows = 0, error.quarantine
        with refused_rows.open(encoding="utf-8") as lines:
            refused = [json.loads(line) for line in lines]
    stops = found.setdefault("stops", "")
    share = found.pop("quarantined_ratio", 1.0)
    return {
        "data": data,
        **found,
        "refused": refused,
        "refused_ratio": round(share, 6),
        "ok": share <= QUARANTINE_LIMIT and not stops,
    }


def _why_a_step_stops(dataset: Path, found: dict[str, Any], train_until: str) -> str:
    """Find the cut, fit statistics, build one window's examples and test baskets.

    Returns:
        Why a run would stop, or "". `found` gets the cut if there is one.
    """
    from components.data.build_examples import build_examples
    from components.data.examples import read_training_lists
    from components.data.fit_statistics import fit_statistics, purchases_of
    from components.evaluation.evaluate_bundle import tasks_after

    statistics, examples = dataset.parent / "statistics", dataset.parent / "examples"
    share = max(ENOUGH / found["rows"], ENOUGH_USERS / found["users"])
    params = {"windows": 1, "masks": 1, "user_ratio": min(1.0, share)}
    try:
        first, last = (pd.Timestamp(found[name]) for name in ("first_at", "last_at"))
        found["cut"] = cut = find_cut(first, last, found["timezone"], train_until)
        fit_statistics(dataset, statistics, cut)
        build_examples(dataset, statistics, examples, cut, params)
        read_training_lists(examples)
        purchases = purchases_of(read_dataset(dataset).events)
        tasks_after(purchases, read_statistics(statistics), pd.Timestamp(cut))
    except ValueError as error:
        return str(error)
    return ""


def report(found: dict[str, Any]) -> str:
    """Return the counts and the first refused rows as text."""
    lines = [f"{found['data']}: {counted(found['rows'], 'valid row')}"]
    if found["rows"]:
        lines[0] += ", " + ", ".join(counted(found[f"{noun}s"], noun) for noun in ("user", "basket", "item"))
        lines.append(f"from {found['first_at']} to {found['last_at']} (time zone {found['timezone']})")
    if found.get("cut"):
        lines.append(f"training sees what is before {found['cut']}, the evaluation the rest")
    if found["stops"]:
        lines.append(f"a run would stop: {found['stops']}")
    refused = found["refused"]
    if not refused:
        return "\n".join([*lines, "no row is refused"])
    limit = f"a run allows {QUARANTINE_LIMIT:.1%}"
    lines.append(f"{counted(len(refused), 'row')} refused, {found['refused_ratio']:.1%} of all; {limit}")
    lines += ["", table(["row", "reason"], [[row["row"], row["reason"]] for row in refused[:SHOWN]])]
    lines += [f"... and {len(refused) - SHOWN:,} more: --output json has all"] * (len(refused) > SHOWN)
    if found["refused_ratio"] > QUARANTINE_LIMIT:
        lines += ["", f"mend them{or_raise_the_limit(found['refused_ratio'])}"]
    return "\n".join(lines)
