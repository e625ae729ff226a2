"""A folder of data -> its counts, its time span, and the rows that a run would refuse."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from components.data.ingest_events import QUARANTINE_LIMIT, TooManyRefused, ingest_events
from pipelines.tables import table

SHOWN = 10  # refused rows in the text; the document has all
COUNTS = ("rows", "users", "baskets", "items", "first_at", "last_at", "timezone")


def inspect_data(data: str, train_until: str = "") -> dict[str, Any]:
    """Read a folder as a run does, and write nothing.

    Returns:
        The counts and the span of the valid rows, the cut, and every refused row with its place in the file.

    Raises:
        EventsInvalid: the data can't be found, read or used; the message says why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Path(scratch) / "dataset"
        found: dict[str, Any] = {}
        refused_rows = dataset / "quarantine.jsonl"
        try:
            found["cut"] = ingest_events(data, dataset, 1.0, train_until)
            manifest = json.loads((dataset / "manifest.json").read_bytes())
            found |= {name: manifest[name] for name in COUNTS}
        except TooManyRefused as error:  # no row is valid
            found["rows"], refused_rows = 0, error.quarantine
        with refused_rows.open(encoding="utf-8") as lines:
            refused = [json.loads(line) for line in lines]
    share = len(refused) / (found["rows"] + len(refused))
    return {
        "data": data,
        **found,
        "refused": refused,
        "refused_ratio": round(share, 6),
        "ok": share <= QUARANTINE_LIMIT,
    }


def report(found: dict[str, Any]) -> str:
    """Return the counts and the first refused rows as text."""
    lines = [f"{found['data']}: {found['rows']:,} valid rows"]
    if found["rows"]:
        lines[0] += ", " + ", ".join(f"{found[name]:,} {name}" for name in ("users", "baskets", "items"))
        lines.append(f"from {found['first_at']} to {found['last_at']} (time zone {found['timezone']})")
        lines.append(f"training sees what is before {found['cut']}, the evaluation the rest")
    refused = found["refused"]
    if not refused:
        return "\n".join([*lines, "no row is refused"])
    limit = f"a run allows {QUARANTINE_LIMIT:.1%}"
    lines.append(f"{len(refused):,} rows refused, {found['refused_ratio']:.1%} of all; {limit}")
    lines += ["", table(["row", "reason"], [[row["row"], row["reason"]] for row in refused[:SHOWN]])]
    lines += [f"... and {len(refused) - SHOWN:,} more: --output json has all"] * (len(refused) > SHOWN)
    if not found["ok"]:
        lines += ["", "mend them, or raise the limit of a run: --param max_quarantine_ratio=0.05"]
    return "\n".join(lines)
