"""CONTRACT the event: the definition of a purchase in this project, its check, and the data set on disk.

A data set is a directory: `events.parquet` (each event once), `items.parquet`, the refused rows in
`quarantine.jsonl`, and `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from feature_repo.atomic_files import read_json, sha256_of, write_file
from feature_repo.errors import RecoError
from feature_repo.ids import MAX_ID_LENGTH, did_you_mean, is_id

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
MAX_QUANTITY = 1_000_000
MAX_PRICE = 1e9
FIRST_TIME = pd.Timestamp(0, tz="UTC")
CLOCK_SKEW = timedelta(days=1)  # how far ahead of now an event may lie
_FILES = {"manifest.json", "quarantine.jsonl", "events.parquet", "items.parquet"}
_FORMER_FILES = {"users.parquet", "promotions.parquet", "coupons.parquet"}  # accepted, and read by nothing


class EventsInvalid(RecoError, ValueError):
    """Events that can't be used: the message names the found and the expected value and the remedy."""


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `manifest` names its source and the dropped rows."""

    events: pd.DataFrame
    items: pd.DataFrame
    manifest: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ raw rows -> columns


def complete_columns(raw: pd.DataFrame) -> pd.DataFrame:
    """Return events with all columns of the contract, ids as strings, defaults filled in.

    An absent column and an empty cell mean the same: `event_type` purchase, `quantity` 1, `price` NaN,
    `discount` 0, `store_id` empty, `event_id` a hash of basket, item, time, type and turn. A cell
    that can't be read becomes a value that `check_events` refuses.

    Raises:
        EventsInvalid: no rows, a required column is missing, or a column is not of the contract.
    """
    check_names("an event", raw.columns, EVENT_SCHEMA.names, REQUIRED)
    if len(raw) == 0:
        raise EventsInvalid("no events: found the columns but not one row, expected purchases: bring some")
    given = {name: raw[name] for name in raw.columns}
    blank = pd.Series(None, index=raw.index, dtype=object)
    events = pd.DataFrame({name: as_ids(given[name]) for name in IDS}, index=raw.index)
    store = given.get("store_id", blank)
    # A store that can't be read stays None, which the check refuses; only an empty cell is unknown.
    events["store_id"] = as_ids(store).mask(_empty(store), "")
    events["at"] = as_times(given["at"])
    kind = given.get("event_type", blank).astype(object)
    events["event_type"] = kind.mask(_empty(kind), "purchase")
    for name, default in (("quantity", 1.0), ("price", np.nan), ("discount", 0.0)):
        events[name] = _as_numbers(given[name], default) if name in given else default
    ids = as_ids(given.get("event_id", blank))
    derived = _empty(given.get("event_id", blank)).to_numpy()
    if derived.any():
        ids[derived] = _derived_ids(events[derived])
    events["event_id"] = ids
    return events[EVENT_SCHEMA.names]


def check_names(
    subject: str, found: Collection[Any], known: Collection[str], required: Collection[str]
) -> None:
    """Refuse columns that are unknown, missing or repeated, with the nearest known name.

    Raises:
        EventsInvalid: naming the columns.
    """
    names = [str(name) for name in found]
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known)
        hint = hint and f" ({hint})"
        hint = " (the separator must be a comma)" if any(mark in unknown[0] for mark in ";|\t") else hint
        raise EventsInvalid(
            f"unknown column(s) {', '.join(map(repr, unknown))[:300]}{hint}; "
            f"{subject} has {', '.join(known)}: rename or drop them"
        )
    if missing := [name for name in required if name not in names]:
        raise EventsInvalid(
            f"column(s) {', '.join(missing)} missing; found {', '.join(names)[:300] or 'none'}, "
            f"{subject} needs {', '.join(required)}: add them"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EventsInvalid(f"column {twice!r} is there more than once: keep one")


def _empty(column: pd.Series) -> pd.Series:
    return column.isna() | (column.astype(object) == "")


def as_ids(column: pd.Series) -> pd.Series:
    """Return ids as text: 1041453 is "1041453" even where a missing neighbour made it a float.

    Text is not changed. A value that is neither text nor a whole number becomes None.
    """
    codes, distinct = _factorize(column)
    if column.dtype == np.float32:  # pandas hands its values on as float64
        distinct = np.where(np.abs(distinct) < 2**24, distinct, np.nan)
    # Beyond its mantissa a float has lost digits: two ids may have become one.
    texts = np.array([*map(_id_text, distinct), None], dtype=object)  # code -1, a missing value, is the last
    return pd.Series(texts[codes], index=column.index, dtype=object)


def _id_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        number = float(value)
        return str(int(number)) if abs(number) < 2**53 and number.is_integer() else None
    if isinstance(value, Decimal):
        return str(int(value)) if value.is_finite() and value == value.to_integral_value() else None
    return None


def as_times(column: pd.Series) -> pd.Series:
    """Return times in UTC. A time without a zone is UTC; anything but an ISO 8601 date or time is NaT."""
    if pd.api.types.is_datetime64_any_dtype(column):
        times = column if column.dt.tz is not None else column.dt.tz_localize("UTC")
        return times.dt.tz_convert("UTC").dt.as_unit("us")
    codes, distinct = _factorize(column)
    texts = pd.Series([value if _like_a_time(value) else None for value in distinct], dtype=object)
    parsed = pd.DatetimeIndex(pd.to_datetime(texts, utc=True, errors="coerce", format="ISO8601")).as_unit(
        "us"
    )
    return pd.Series(parsed.take(codes, allow_fill=True, fill_value=pd.NaT), index=column.index)


def _like_a_time(value: Any) -> bool:
    # pandas reads "now" as a time, and a number as nanoseconds; in a file both are mistakes.
    return isinstance(value, date) or (isinstance(value, str) and value.strip()[:1].isdigit())


def _factorize(column: pd.Series) -> tuple[np.ndarray, Any]:
    try:
        return pd.factorize(column)
    except TypeError as error:
        raise EventsInvalid(
            f"column {column.name!r} holds lists or records, expected single values"
        ) from error


def _as_numbers(column: pd.Series, default: float) -> pd.Series:
    empty = _empty(column).to_numpy()
    numbers = pd.to_numeric(column.mask(empty), errors="coerce").to_numpy(
        np.float64, na_value=np.nan, copy=True
    )
    numbers[np.isnan(numbers) & ~empty] = -np.inf  # text that is no number must not pass as unknown
    numbers[empty] = default
    return pd.Series(numbers, index=column.index)


def _derived_ids(events: pd.DataFrame) -> np.ndarray:
    """Return an id for each line; an item scanned twice in a basket is two events."""
    key = events[["basket_id", "item_id", "at", "event_type"]].astype({"at": "int64"})
    turn = key.groupby(list(key), sort=False, dropna=False).cumcount() if key.duplicated().any() else 0
    with np.errstate(over="ignore"):  # hashes wrap around by design
        hashes = pd.util.hash_pandas_object(key.assign(turn=turn), index=False).to_numpy()
    return np.frombuffer(hashes.astype(">u8").tobytes().hex().encode(), "S16").astype("U16").astype(object)


# ------------------------------------------------------------------------------------------------- check


def check_events(
    events: pd.DataFrame, now: datetime | None = None, published: int = 0
) -> tuple[pd.DataFrame, pd.Series]:
    """Split completed events into those that keep the contract and the reasons why the others do not.

    A basket that two users bought, or that was bought at two times, is refused as a whole: the data do not
    show which of its lines are right. A published basket stays, and the lines that contradict it are refused.
    Impressions may share a basket: theirs is the id of a request, which a checkout may give again.

    Args:
        events: with all columns, see `complete_columns`.
        now: the time; no event may be a day later.
        published: so many of the first events are of a published data set.

    Returns:
        The good rows, and for each bad row (by index) the first rule it breaks.
    """
    latest = pd.Timestamp((now or datetime.now(UTC)) + CLOCK_SKEW)
    reasons = np.full(len(events), "", dtype=object)
    fine = np.ones(len(events), bool)

    def refuse(bad: Any, why: str) -> None:
        now_bad = np.asarray(bad, bool) & fine
        reasons[now_bad], fine[now_bad] = why, False

    for name in (*IDS, "event_id", "store_id"):
        codes, distinct = pd.factorize(events[name])
        valid = [not text or is_id(text) for text in distinct]  # an unknown store is empty
        refuse(
            ~np.array([*valid, False])[codes],  # code -1, a missing value, is the last
            f"{name} is neither a text of 1 to {MAX_ID_LENGTH} printable characters nor a whole number",
        )
    at, bought = events["at"], (events["event_type"] == "purchase").to_numpy()
    refuse(at.isna(), "at is not an ISO 8601 time of the years 1970 to 2261")
    refuse(at > latest, "at lies in the future")
    refuse(at < FIRST_TIME, "at lies before 1970")
    refuse(~events["event_type"].isin(EVENT_TYPES), f"event_type is not one of {', '.join(EVENT_TYPES)}")
    quantity = events["quantity"].to_numpy()
    whole = (quantity >= 1) & (quantity <= MAX_QUANTITY)
    whole[whole] = quantity[whole] == quantity[whole].round()
    refuse(~whole, f"quantity is not a whole number from 1 to {MAX_QUANTITY}")
    for name in ("price", "discount"):
        value = events[name]
        refuse((value < 0) | (value > MAX_PRICE), f"{name} is not a number from 0 to {MAX_PRICE:.0f}")
    line = ["basket_id", "item_id", "event_type"]
    bought = bought & fine
    contradicts = partial(_contradicts, events, np.arange(len(events)) < published)
    refuse(contradicts(fine, "event_id", line), "its event_id names different lines")
    refuse(contradicts(bought, "basket_id", ["user_id"]), "its basket names two users")
    refuse(contradicts(bought, "basket_id", ["at"]), "its basket was bought at two times")
    return events[fine], pd.Series(reasons[~fine], index=events.index[~fine], dtype=object)


def _contradicts(
    events: pd.DataFrame, stands: np.ndarray, rows: np.ndarray, group: str, columns: list[str]
) -> np.ndarray:
    """Return which of the rows share a group with a row that differs in one of the columns.

    If the first row of a group stands, only the rows that differ from it are; if one of these stands, too,
    the whole group is.
    """
    codes, distinct = pd.factorize(events.loc[rows, group])
    stands = stands[rows]
    known = np.zeros(len(distinct), bool)
    known[codes[stands]] = True
    wrong, differs = np.zeros(len(distinct), bool), np.zeros(len(codes), bool)
    for column in columns:
        value, _ = pd.factorize(events.loc[rows, column])
        first = np.zeros(len(distinct), value.dtype)
        first[codes[::-1]] = value[::-1]
        differs |= value != first[codes]
    wrong[codes[differs & (stands | ~known[codes])]] = True
    result = np.zeros(len(events), bool)
    result[rows] = wrong[codes] | differs
    return result


def drop_repeated(events: pd.DataFrame) -> pd.DataFrame:
    """Return each event once, sorted by time, basket and item.

    An item that was scanned twice stays two events: the archive must know each that a stream may bring again.
    """
    once = events[~events["event_id"].duplicated()]
    once = once.sort_values(["at", "basket_id", "item_id", "event_type"], kind="stable", ignore_index=True)
    return once.astype({"quantity": "int64"})


def lines_bought(data: Dataset, inside: np.ndarray) -> pd.DataFrame:
    """Return the purchases among some of the events, see `merge_lines`, with category and department."""
    columns = ["at", "item_id", "basket_id", "store_id", "price", "discount", "quantity"]
    events = data.events.loc[inside, [*columns, "event_type"]]
    bought = events.loc[events["event_type"] == "purchase", columns]
    items = data.items.reindex(columns=["item_id", "category", "department"])
    return merge_lines(bought).merge(items, on="item_id", how="left")


def merge_lines(bought: pd.DataFrame) -> pd.DataFrame:
    """Return purchases with one row per basket and item, in their order.

    For code that works on the lines of baskets. Quantities add up, price and discount become the mean per
    unit; a row without a repetition does not change.
    """
    key = ["basket_id", "item_id"]
    again = bought.duplicated(key)
    if not again.any():
        return bought
    twice = bought.duplicated(key, keep=False)
    lines = bought[twice]
    known = lines["quantity"].where(lines["price"].notna(), 0.0)  # the mean skips unknown prices
    totals = lines[key].assign(
        quantity=lines["quantity"],
        known=known,
        paid=(lines["price"] * lines["quantity"]).fillna(0.0),
        off=lines["discount"] * lines["quantity"],
    )
    totals = totals.groupby(key, sort=False).sum()  # in the order of the first lines
    merged, rows = bought[~again].copy(), twice[~again]
    merged.loc[rows, "quantity"] = totals["quantity"].to_numpy()
    merged.loc[rows, "price"] = (totals["paid"] / totals["known"].where(totals["known"] > 0)).to_numpy()
    merged.loc[rows, "discount"] = (totals["off"] / totals["quantity"]).to_numpy()
    return merged


# ------------------------------------------------------------------------------------------------ on disk


def write_dataset(path: Path, dataset: Dataset, quarantine: pd.DataFrame | None = None) -> dict[str, Any]:
    """Write a data set under a temporary name, then move it to `path`; return its manifest.

    Raises:
        EventsInvalid: `path` holds something other than a data set; it is not changed.
    """
    path = path.absolute()
    check_target(path)
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    events = dataset.events
    table = pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False)
    items = pa.Table.from_pandas(dataset.items, preserve_index=False)
    pq.write_table(table, part / "events.parquet", compression="zstd")
    pq.write_table(items, part / "items.parquet", compression="zstd")
    write_quarantine(part, quarantine if quarantine is not None else pd.DataFrame())
    files = {file.name: sha256_of(file) for file in sorted(part.iterdir())}
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
        "baskets": int(events.loc[events["event_type"] == "purchase", "basket_id"].nunique()),
        "first_at": iso(events["at"].min()),
        "last_at": iso(events["at"].max()),
        "files": files,
        "data_hash": hashlib.sha256((files["events.parquet"] + files["items.parquet"]).encode()).hexdigest()[
            :16
        ],
    }
    (part / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)  # removed in place, a kill would leave half of it
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def check_target(path: Path) -> None:
    """Refuse to replace anything but a data set or an empty directory.

    Raises:
        EventsInvalid: naming the foreign files.
    """
    if not path.exists():
        return
    found = {file.name for file in path.iterdir()} if path.is_dir() else {path.name}
    if path.is_dir() and (not found or ("manifest.json" in found and found <= _FILES | _FORMER_FILES)):
        return
    strangers = ", ".join(sorted(found - _FILES - _FORMER_FILES or found)[:3])
    raise EventsInvalid(
        f"{path} holds {strangers}, which is no data set of ours: choose a new or empty directory"
    )


def write_quarantine(path: Path, rows: pd.DataFrame) -> Path:
    """Write refused rows into the directory, one JSON object a line, and return the file.

    Args:
        path: the directory; created if it is missing.
        rows: `row`, `reason` and the original values of the row.
    """
    file = path / "quarantine.jsonl"
    plain = rows.apply(lambda column: column if column.name == "row" else _as_text(column))
    text = plain.to_json(orient="records", lines=True, force_ascii=False) if len(rows) else ""
    write_file(file, text)
    return file


def _as_text(column: pd.Series) -> pd.Series:
    return column.astype(object).map(str, na_action="ignore")  # JSON has no infinity and no time


def read_dataset(path: Path) -> Dataset:
    """Return a data set that `write_dataset` wrote.

    Raises:
        EventsInvalid: there is no data set, or a file differs from its hash in the manifest.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise EventsInvalid(f"{path} holds no data set (no manifest.json): run ingest_events first")
    try:
        manifest = read_json(file.read_text(encoding="utf-8"))
        kind, files = manifest["kind"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise EventsInvalid(f"{file} is no manifest of a data set ({error}): ingest it again") from error
    if kind != "dataset":
        raise EventsInvalid(f"{path} holds a {kind}, expected a dataset: pass the right artefact")
    for name, expected in files.items():
        if not (path / name).is_file() or sha256_of(path / name) != expected:
            raise EventsInvalid(
                f"{path / name} is missing or was changed after it was written: ingest it again"
            )
    events, items = (pd.read_parquet(path / f"{name}.parquet") for name in ("events", "items"))
    return Dataset(events, items, manifest)


def iso(at: pd.Timestamp) -> str:
    """Return a time as ISO 8601 in UTC."""
    return str(at.tz_convert("UTC").isoformat()).replace("+00:00", "Z")
