"""The name of a data set, or anyone's files -> a checked data set, and the cut between training and test."""

from __future__ import annotations

import difflib
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from components.complete_journey import read_complete_journey
from feature_repo.events import (
    ITEM_COLUMNS,
    Dataset,
    EventsInvalid,
    check_events,
    complete_columns,
    merge_duplicates,
    write_dataset,
    write_quarantine,
)
from feature_repo.toy_shop import toy_dataset

log = logging.getLogger(__name__)

TEST_WINDOW = pd.Timedelta(days=35)
NAMES = ("complete-journey", "toy")
ID_COLUMNS = ("user_id", "basket_id", "item_id", "store_id", "event_id", "at")


def ingest_events(data: str, dataset: Path, max_quarantine_ratio: float = 0.01, train_until: str = "") -> str:
    """Read, check and write a data set.

    Args:
        data: `complete-journey`, `toy`, or a directory (or file) with `events.parquet` or `events.csv` and,
            if there is one, an `items` table.
        dataset: the directory to write.
        max_quarantine_ratio: the run stops when more than this share of rows breaks the contract.
        train_until: the cut as a date (midnight in the shop's time zone) or a time; empty for 35 days
            before the end of the data.

    Returns:
        The cut as ISO 8601 in UTC: training sees what is before it, the test what is after.

    Raises:
        EventsInvalid: the data can't be found, read or trusted; nothing but the quarantine is written.
    """
    if not 0 <= max_quarantine_ratio <= 1:
        raise EventsInvalid(f"the quarantine ratio is {max_quarantine_ratio}, expected a share from 0 to 1")
    source = _read(data)
    events = complete_columns(source.events)
    good, reasons = check_events(events)
    refused = [
        {"row": int(row), "reason": reasons[row], "event": events.loc[row].to_dict()}
        for row in reasons.index.tolist()
    ]
    ratio = len(refused) / len(events)
    if ratio > max_quarantine_ratio or len(good) == 0:
        file = write_quarantine(dataset.with_name(dataset.name + ".quarantine"), refused)
        counts = ", ".join(f"{n} x {why}" for why, n in reasons.value_counts().head(3).items())
        raise EventsInvalid(
            f"{len(refused)} of {len(events)} rows ({ratio:.1%}) break the event contract, at most "
            f"{max_quarantine_ratio:.1%} may ({counts}); each one and its reason: {file}"
        )
    merged, repeated = merge_duplicates(good)
    merged = merged.astype({"quantity": "int64"})
    manifest = write_dataset(
        dataset,
        Dataset(
            merged,
            source.items,
            {
                **source.manifest,
                "dropped": {**source.manifest.get("dropped", {}), **repeated},
                "quarantined": {str(why): int(n) for why, n in reasons.value_counts().items()},
                "quarantined_ratio": round(ratio, 6),
            },
            source.users,
            source.promotions,
            source.coupons,
        ),
        refused,
    )
    cut = find_cut(manifest, train_until)
    log.info(
        "%d rows, %d users, %d items, %d quarantined; training until %s",
        manifest["rows"],
        manifest["users"],
        manifest["items"],
        len(refused),
        cut,
    )
    return cut


def find_cut(manifest: dict[str, Any], train_until: str = "") -> str:
    """Return the cut in UTC: `train_until`, or midnight after the last event less five weeks.

    Raises:
        EventsInvalid: `train_until` is no date, or lies outside the data.
    """
    zone = ZoneInfo(manifest["timezone"])
    first, last = pd.Timestamp(manifest["first_at"]), pd.Timestamp(manifest["last_at"])
    if train_until:
        try:
            given = datetime.fromisoformat(train_until)
        except ValueError as error:
            raise EventsInvalid(
                f"--train-until {train_until!r} is not a date; expected for example "
                "2017-11-27 or 2017-11-27T05:00:00Z"
            ) from error
        cut = pd.Timestamp(given if given.tzinfo else given.replace(tzinfo=zone))
    else:
        end = last.tz_convert(zone).normalize() + pd.DateOffset(days=1)
        cut = end - pd.DateOffset(days=TEST_WINDOW.days)
    if not first < cut <= last:
        raise EventsInvalid(
            f"the cut {cut.isoformat()} leaves nothing on one side: the events run from "
            f"{first.isoformat()} to {last.isoformat()}; choose --train-until between them"
        )
    return cut.tz_convert("UTC").isoformat().replace("+00:00", "Z")


def _read(data: str) -> Dataset:
    if data == "complete-journey":
        return read_complete_journey()
    if data == "toy":
        return toy_dataset()
    path = Path(data)
    if not path.exists():
        near = difflib.get_close_matches(data, NAMES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise EventsInvalid(
            f"--data {data!r} is neither {' nor '.join(NAMES)} nor a directory: {hint}check the path"
        )
    file = path if path.is_file() else _table_file(path, "events")
    if file is None:
        raise EventsInvalid(f"{path} holds neither events.parquet nor events.csv: put one there")
    raw = _read_table(file)
    items_file = None if path.is_file() else _table_file(path, "items")
    items = _items(_read_table(items_file), items_file) if items_file else _bare_items(raw)
    settings = path / "dataset.json" if path.is_dir() else path.with_name("dataset.json")
    return Dataset(raw, items, {"name": path.name, "timezone": _timezone(settings)})


def _table_file(path: Path, name: str) -> Path | None:
    return next((f for f in (path / f"{name}.parquet", path / f"{name}.csv") if f.is_file()), None)


def _read_table(file: Path) -> pd.DataFrame:
    """Return a Parquet or CSV file as a frame; ids are read as text, so that 007 stays 007."""
    try:
        if file.suffix == ".parquet":
            return pq.read_table(file).to_pandas()
        if file.suffix == ".csv":
            as_text = pa.csv.ConvertOptions(
                column_types=dict.fromkeys(ID_COLUMNS, pa.string()), strings_can_be_null=True
            )
            return pa.csv.read_csv(file, convert_options=as_text).to_pandas()
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        raise EventsInvalid(
            f"{file} can't be read as {file.suffix[1:]}: {str(error).splitlines()[0]}"
        ) from error
    raise EventsInvalid(f"{file} is neither .parquet nor .csv: convert it")


def _items(raw: pd.DataFrame, file: Path) -> pd.DataFrame:
    if "item_id" not in raw.columns:
        raise EventsInvalid(f"{file} has no column item_id; found {', '.join(map(str, raw.columns))}")
    if unknown := sorted(set(map(str, raw.columns)) - set(ITEM_COLUMNS)):
        raise EventsInvalid(
            f"{file} has unknown column(s) {', '.join(unknown)}; an item has {', '.join(ITEM_COLUMNS)}"
        )
    items = raw.assign(item_id=complete_ids(raw["item_id"]))
    if items["item_id"].duplicated().any():
        twice = items.loc[items["item_id"].duplicated(), "item_id"].iloc[0]
        raise EventsInvalid(f"{file} names item {twice!r} more than once: keep one row per item")
    for name in ITEM_COLUMNS[1:]:
        items[name] = items[name].astype(object).fillna("").astype(str) if name in items else ""
    return items[list(ITEM_COLUMNS)]


def complete_ids(column: pd.Series) -> pd.Series:
    """Return item ids as the events have them."""
    return complete_columns(
        pd.DataFrame({"user_id": "u", "basket_id": "b", "item_id": column, "at": pd.Timestamp(0, tz="UTC")})
    )["item_id"]


def _bare_items(raw: pd.DataFrame) -> pd.DataFrame:
    """Return an item table that knows ids only, for data without an items file."""
    if "item_id" not in raw.columns or len(raw) == 0:
        return pd.DataFrame(columns=list(ITEM_COLUMNS), dtype=str)
    items = pd.DataFrame({"item_id": complete_ids(raw["item_id"]).dropna().unique()})
    return items.assign(**dict.fromkeys(ITEM_COLUMNS[1:], ""))


def _timezone(file: Path) -> str:
    """Return the shop's time zone from an optional `dataset.json` beside the events; UTC without one."""
    if not file.is_file():
        return "UTC"
    try:
        name = json.loads(file.read_text()).get("timezone", "UTC")
        ZoneInfo(name)
    except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        raise EventsInvalid(
            f'{file} should read {{"timezone": "Europe/Berlin"}} with an IANA name ({error})'
        ) from error
    return str(name)
