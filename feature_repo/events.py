"""CONTRACT the event: what a purchase is in this project, its check, and the data set on disk.

A data set is a directory: `events.parquet` (one row per basket and item), `items.parquet`, optional
`users`, `promotions` and `coupons`, what was refused in `quarantine.jsonl`, and `manifest.json`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

EVENT_SCHEMA = pa.schema(
    [
        ("event_id", pa.string()),
        ("event_type", pa.string()),
        ("user_id", pa.string()),
        ("basket_id", pa.string()),
        ("item_id", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("quantity", pa.int64()),
        ("price", pa.float64()),  # paid per unit, in the shop's currency; NaN where unknown
        ("discount", pa.float64()),  # taken off per unit
        ("store_id", pa.string()),  # empty where unknown
    ]
)
EVENT_TYPES = ("purchase", "impression", "click")
REQUIRED = ("user_id", "basket_id", "item_id", "at")
IDS = ("user_id", "basket_id", "item_id")
ITEM_COLUMNS = ("item_id", "department", "category", "type", "brand", "manufacturer")
MAX_ID_LENGTH = 128
MAX_QUANTITY = 1_000_000
CLOCK_SKEW = timedelta(days=1)  # how far ahead of now an event may lie


class EventsInvalid(ValueError):
    """Events that can't be used: the message says what was found, what was expected and how to mend it."""


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `manifest` says where it came from and what was left out."""

    events: pd.DataFrame
    items: pd.DataFrame
    manifest: dict[str, Any] = field(default_factory=dict)
    users: pd.DataFrame | None = None
    promotions: pd.DataFrame | None = None
    coupons: pd.DataFrame | None = None


def complete_columns(raw: pd.DataFrame) -> pd.DataFrame:
    """Return events with all columns of the contract, ids as strings, defaults filled in.

    Defaults, also for single cells left empty: `event_type` purchase, `quantity` 1, `price` NaN,
    `discount` 0, `store_id` empty, `event_id` a hash of basket, item, time and type.

    Raises:
        EventsInvalid: no rows, a required column is missing, or a column is not of the contract.
    """
    known = EVENT_SCHEMA.names
    if unknown := [str(name) for name in raw.columns if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise EventsInvalid(
            f"unknown column {unknown[0]!r}{hint}; an event has {', '.join(known)}: rename or drop it"
        )
    if missing := [name for name in REQUIRED if name not in raw.columns]:
        raise EventsInvalid(
            f"column(s) {', '.join(missing)} missing; found {', '.join(map(str, raw.columns)) or 'none'}, "
            f"required are {', '.join(REQUIRED)}: add them"
        )
    if len(raw) == 0:
        raise EventsInvalid("no events: the file has its columns but not one row")
    events = pd.DataFrame(index=raw.index)
    for name in (*IDS, "store_id"):
        events[name] = _as_ids(raw[name]) if name in raw else ""
    events["store_id"] = events["store_id"].fillna("")
    events["at"] = _as_times(raw["at"])
    kind = (
        raw["event_type"].astype(object)
        if "event_type" in raw
        else pd.Series(None, index=raw.index, dtype=object)
    )
    events["event_type"] = kind.where(kind.notna(), "purchase")
    for name, default in (("quantity", 1.0), ("price", np.nan), ("discount", 0.0)):
        events[name] = _as_numbers(raw[name], default) if name in raw else default
    given = _as_ids(raw["event_id"]) if "event_id" in raw else pd.Series(None, index=raw.index, dtype=object)
    derived = given.isna() | (given == "")
    if derived.any():
        given = given.where(~derived, _derived_ids(events))
    events["event_id"] = given
    return events[known]


def _as_ids(column: pd.Series) -> pd.Series:
    """Return ids as strings: 1041453 stays "1041453" even where a missing neighbour made it a float."""
    if pd.api.types.is_float_dtype(column):
        whole = column.dropna()
        if len(whole) and np.isfinite(whole).all() and (whole == whole.round()).all():
            return (
                column.astype("Int64")
                .astype(object)
                .where(column.notna(), None)
                .map(lambda value: None if value is None else str(value))
            )
    text = column.astype(object).where(column.notna(), None)
    if pd.api.types.is_integer_dtype(column):
        return column.astype(str).astype(object)
    return text.map(lambda value: None if value is None else str(value).strip())


def _as_numbers(column: pd.Series, default: float) -> pd.Series:
    """Return numbers; an empty cell takes the default, text that is no number becomes -inf and is refused."""
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    return numbers.where(numbers.notna(), np.where(column.notna(), -np.inf, default))


def _as_times(column: pd.Series) -> pd.Series:
    """Return times in UTC; times without a zone are UTC; what can't be read is NaT."""
    if pd.api.types.is_datetime64_any_dtype(column):
        times = column if column.dt.tz is not None else column.dt.tz_localize("UTC")
        return times.dt.tz_convert("UTC").dt.as_unit("us")
    return pd.to_datetime(column, utc=True, errors="coerce", format="ISO8601").dt.as_unit("us")


def _derived_ids(events: pd.DataFrame) -> pd.Series:
    stamp = events["at"].astype("int64").astype(str)
    joined = (
        events["basket_id"].astype(str)
        + "|"
        + events["item_id"].astype(str)
        + "|"
        + stamp
        + "|"
        + events["event_type"].astype(str)
    )
    return pd.util.hash_pandas_object(joined, index=False).map("{:016x}".format).set_axis(events.index)


def check_events(events: pd.DataFrame, now: datetime | None = None) -> tuple[pd.DataFrame, pd.Series]:
    """Split completed events into those that keep the contract and the reasons why the others do not.

    Returns:
        The good rows, and for each bad row (by index) the first rule it breaks.
    """
    latest = pd.Timestamp((now or datetime.now(UTC)) + CLOCK_SKEW)
    reason = pd.Series("", index=events.index, dtype=object)

    def refuse(bad: pd.Series, why: str) -> None:
        reason[(reason == "") & bad] = why

    for name in IDS:
        text = events[name]
        refuse(text.isna() | (text == ""), f"{name} is missing")
        refuse(text.str.len() > MAX_ID_LENGTH, f"{name} is longer than {MAX_ID_LENGTH} characters")
        refuse(
            text.str.contains(r"[\x00-\x1f\x7f]", regex=True, na=False), f"{name} holds control characters"
        )
    refuse(events["at"].isna(), "at is not an ISO 8601 time")
    refuse(events["at"] > latest, "at lies in the future")
    refuse(~events["event_type"].isin(EVENT_TYPES), f"event_type is not one of {', '.join(EVENT_TYPES)}")
    quantity = events["quantity"]
    refuse(
        ~(quantity > 0) | (quantity > MAX_QUANTITY) | (quantity != quantity.round()),
        f"quantity is not a whole number from 1 to {MAX_QUANTITY}",
    )
    price = events["price"]
    refuse((price < 0) | np.isinf(price), "price is negative or infinite")
    refuse((events["discount"] < 0) | np.isinf(events["discount"]), "discount is negative or infinite")
    good = events[reason == ""]
    first = good.groupby("basket_id", sort=False)[["user_id", "at"]].transform("first")
    bought = good["event_type"] == "purchase"
    refuse(
        (good["user_id"] != first["user_id"]).reindex(events.index, fill_value=False),
        "its basket belongs to another user",
    )
    refuse(
        ((good["at"] != first["at"]) & bought).reindex(events.index, fill_value=False),
        "its basket was bought at another time",
    )
    return events[reason == ""], reason[reason != ""]


def merge_duplicates(events: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int]]:
    """Drop events seen twice and add up lines of one basket that name the same item.

    A basket then has one line per item: quantities add up, price and discount become the mean per unit.

    Returns:
        The events, sorted by time, basket and item, and how many rows were repeated and merged.
    """
    once = events.drop_duplicates("event_id")
    key = ["basket_id", "item_id", "event_type"]
    twice = once.duplicated(key, keep=False)
    lines = once[twice].copy()
    lines["price"] *= lines["quantity"]
    lines["discount"] *= lines["quantity"]
    how = {name: "first" for name in EVENT_SCHEMA.names if name not in key}
    sums = (
        lines.groupby(key, sort=False).agg(
            {**how, "quantity": "sum", "price": lambda v: v.sum(skipna=False), "discount": "sum"}
        )
        if len(lines)
        else None
    )
    merged = once[~twice]
    if sums is not None:
        sums = sums.reset_index()
        sums["price"] /= sums["quantity"]
        sums["discount"] /= sums["quantity"]
        merged = pd.concat([merged, sums[EVENT_SCHEMA.names]], ignore_index=True)
    merged = merged.sort_values(
        ["at", "basket_id", "item_id", "event_type"], kind="stable", ignore_index=True
    )
    return merged, {"repeated_events": len(events) - len(once), "merged_lines": len(once) - len(merged)}


def write_dataset(
    path: Path, dataset: Dataset, quarantine: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Write a data set under a temporary name, then move it to `path`; return its manifest."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    events = dataset.events
    pq.write_table(
        pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False),
        part / "events.parquet",
    )
    dataset.items.to_parquet(part / "items.parquet", index=False)
    for name in ("users", "promotions", "coupons"):
        table = getattr(dataset, name)
        if table is not None:
            table.to_parquet(part / f"{name}.parquet", index=False)
    write_quarantine(part, quarantine or [])
    files = {file.name: _sha256(file) for file in sorted(part.iterdir())}
    manifest = {
        "kind": "dataset",
        "timezone": "UTC",
        "dropped": {},
        "quarantined": {},
        "quarantined_ratio": 0.0,
        **dataset.manifest,
        "rows": len(events),
        "users": int(events["user_id"].nunique()),
        "items": int(events["item_id"].nunique()),
        "baskets": int(events["basket_id"].nunique()),
        "first_at": _iso(events["at"].min()),
        "last_at": _iso(events["at"].max()),
        "files": files,
        "data_hash": hashlib.sha256((files["events.parquet"] + files["items.parquet"]).encode()).hexdigest()[
            :16
        ],
    }
    (part / "manifest.json").write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)
    return manifest


def write_quarantine(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write refused rows, one JSON object a line, and return the file."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / "quarantine.jsonl"
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    return file


def read_dataset(path: Path) -> Dataset:
    """Return a data set that `write_dataset` wrote.

    Raises:
        EventsInvalid: there is none, or a file is not what the manifest says.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise EventsInvalid(f"{path} holds no data set (no manifest.json): run ingest_events first")
    manifest = json.loads(file.read_text())
    for name, expected in manifest["files"].items():
        if not (path / name).is_file() or _sha256(path / name) != expected:
            raise EventsInvalid(
                f"{path / name} is missing or was changed after it was written: ingest it again"
            )
    extra = {name: _optional(path / f"{name}.parquet") for name in ("users", "promotions", "coupons")}
    return Dataset(
        pd.read_parquet(path / "events.parquet"), pd.read_parquet(path / "items.parquet"), manifest, **extra
    )


def _optional(file: Path) -> pd.DataFrame | None:
    return pd.read_parquet(file) if file.is_file() else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _iso(at: pd.Timestamp) -> str:
    return at.tz_convert("UTC").isoformat().replace("+00:00", "Z")
