"""The name of a data set, or anyone's files -> a checked data set, and the cut between training and test."""

from __future__ import annotations

import csv
import logging
import math
import os
import shutil
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from components.data.complete_journey import read_complete_journey
from feature_repo.aggregates import BATCH
from feature_repo.atomic_files import read_json
from feature_repo.events import (
    ITEM_COLUMNS,
    Dataset,
    EventsInvalid,
    as_ids,
    check_events,
    check_names,
    check_target,
    complete_columns,
    drop_repeated,
    iso,
    write_dataset,
    write_quarantine,
)
from feature_repo.ids import did_you_mean
from feature_repo.stream.archive import EVENTS, read_archive
from feature_repo.stream.erasure import Forgotten, fields_of
from feature_repo.toy_shop import toy_dataset

log = logging.getLogger(__name__)

TEST_WINDOW = pd.Timedelta(days=35)
BUILT_IN = {"complete-journey": read_complete_journey, "toy": toy_dataset}
FORMATS = ("parquet", "csv")
QUARANTINE_LIMIT = 0.01  # share of the rows that may break the contract
NO_CUT = "none"  # as `train_until`, for data that nothing is trained on: they may be shorter than five weeks


class TooManyRefused(EventsInvalid):
    """More rows break the contract than may; `quarantine` is the file that holds each with its reason."""

    def __init__(self, found: str, mend: str, quarantine: Path) -> None:
        super().__init__(f"{found}: {mend}")
        self.found, self.quarantine = found, quarantine


def ingest_events(
    data: str,
    dataset: Path,
    max_quarantine_ratio: float = QUARANTINE_LIMIT,
    train_until: str = "",
    home: str = "",
) -> str:
    """Read, check and write a data set.

    Args:
        data: `complete-journey`, `toy`, or a directory (or file) with `events.parquet` or `events.csv` and,
            if there is one, a table of `items`; the offline store of a home is such a directory too, its
            events being the archive.
        dataset: the directory to write.
        max_quarantine_ratio: the run stops when more than this share of rows breaks the contract.
        train_until: the cut as a date (midnight in the shop's time zone) or a time; empty for 35 days
            before the end of the data, NO_CUT for none.
        home: folder of all state: events of the users whom it has forgotten are left out.

    Returns:
        The cut as ISO 8601 in UTC: training sees the events before it, the test those after it. Empty
        without a cut.

    Raises:
        TooManyRefused: the quarantine is written, beside `dataset`, and nothing else.
        EventsInvalid: the data can't be found, read or used; nothing is written.
    """
    if not 0 <= max_quarantine_ratio <= 1:
        raise EventsInvalid(f"the quarantine ratio is {max_quarantine_ratio}, expected a share from 0 to 1")
    dataset = dataset.absolute()
    check_target(dataset)
    beside = dataset.with_name(dataset.name + ".quarantine")
    shutil.rmtree(beside, ignore_errors=True)  # of an earlier attempt
    found, torn, published = _read(data)
    if found.events.empty and len(torn):
        raise _too_many(torn, len(torn), max_quarantine_ratio, write_quarantine(beside, torn))
    complete = complete_columns(found.events)
    forgotten = Forgotten.load(Path(home) if home else None)
    gone = of_forgotten(complete, forgotten)
    if gone.all():
        raise EventsInvalid("all events are of users who are to be forgotten: bring others")
    rows = len(found.events) + len(torn) - int(gone.sum())
    torn = torn[~_torn_of_forgotten(torn, forgotten)]
    good, reasons = check_events(complete[~gone], published=int((~gone[:published]).sum()))
    refused = _refused(found.events, reasons, torn)
    ratio = len(refused) / rows
    log.info("%d rows read from %s, %d refused", rows, data, len(refused))
    if ratio > max_quarantine_ratio or len(good) == 0:
        raise _too_many(refused, rows, max_quarantine_ratio, write_quarantine(beside, refused))
    events = drop_repeated(good)
    cut = find_cut(events["at"].min(), events["at"].max(), str(found.manifest["timezone"]), train_until)
    manifest = {
        **found.manifest,
        "dropped": {
            **found.manifest.get("dropped", {}),
            **({"of forgotten users": int(gone.sum())} if gone.any() else {}),
            "repeated_events": len(good) - len(events),
        },
        "quarantined": _counts(refused),
        "quarantined_ratio": round(ratio, 6),
    }
    items = _with_all_items(found.items, events["item_id"])
    written = write_dataset(dataset, Dataset(events, items, manifest), refused)
    log.info(
        "%d rows, %d users, %d items, %d quarantined; training until %s",
        *(written[name] for name in ("rows", "users", "items")),
        len(refused),
        cut,
    )
    return cut


def of_forgotten(events: pd.DataFrame, forgotten: Forgotten) -> np.ndarray:
    """Return which events do not count because their user is forgotten; without a time none of them does."""
    if not len(forgotten):
        return np.zeros(len(events), bool)
    at = events["at"].dt.as_unit("us").astype("int64").to_numpy()  # NaT is the lowest number
    return forgotten.covered(pa.array(events["user_id"], pa.string()), at)


def _torn_of_forgotten(torn: pd.DataFrame, forgotten: Forgotten) -> np.ndarray:
    """Return which lines that did not parse may be about a forgotten user."""
    names = map(fields_of, torn["text"])
    return np.array([any(forgotten.until(name) is not None for name in line) for line in names], bool)


def _refused(raw: pd.DataFrame, reasons: pd.Series, torn: pd.DataFrame) -> pd.DataFrame:
    """Return the bad rows as they were found, in their order."""
    bad = raw.loc[reasons.index]
    bad.insert(0, "row", bad.index)
    bad.insert(1, "reason", reasons)
    if torn.empty:
        return bad
    return pd.concat([torn.astype(object), bad.astype(object)]).sort_values("row", kind="stable")


def _counts(refused: pd.DataFrame) -> dict[str, int]:
    return {str(why): int(n) for why, n in refused["reason"].value_counts().items()}


def _too_many(refused: pd.DataFrame, rows: int, allowed: float, file: Path) -> TooManyRefused:
    reasons = list(_counts(refused).items())
    named = "; ".join(f"{n} x {why}" for why, n in reasons[:3]) + ("; ..." if len(reasons) > 3 else "")
    share = len(refused) / rows
    return TooManyRefused(
        f"{len(refused)} of {rows} rows ({share:.1%}) break the event contract, at most {allowed:.1%} may "
        f"({named})",
        f"mend the rows listed in {file}{or_raise_the_limit(share)}",
        file,
    )


def or_raise_the_limit(share: float) -> str:
    """Return the end of a hint: the parameter that allows this share of bad rows; none allows all rows."""
    limit = f"--param max_quarantine_ratio={math.ceil(share * 100) / 100:g}"
    return f", or raise the limit of a run: {limit}" if share < 1 else ""


def find_cut(first: pd.Timestamp, last: pd.Timestamp, timezone: str, train_until: str = "") -> str:
    """Return the cut in UTC: `train_until`, or midnight after the last event less five weeks; "" for NO_CUT.

    Raises:
        EventsInvalid: `train_until` is no date, or the cut lies outside the data.
    """
    if train_until == NO_CUT:
        return ""
    zone = ZoneInfo(timezone)
    if train_until:
        try:
            given = datetime.fromisoformat(train_until)
        except ValueError as error:
            raise EventsInvalid(
                f"--train-until {train_until!r} is not a date; expected 2017-11-27 or 2017-11-27T05:00:00Z"
            ) from error
        cut = pd.Timestamp(given if given.tzinfo else given.replace(tzinfo=zone)).tz_convert("UTC")
    else:
        # Through the calendar: with a change of the clocks in between, five weeks are not 35 x 24 hours.
        midnight = last.tz_convert(zone).tz_localize(None).normalize() + pd.Timedelta(days=1) - TEST_WINDOW
        cut = midnight.tz_localize(zone, ambiguous=True, nonexistent="shift_forward").tz_convert("UTC")
    if not first < cut <= last:
        raise EventsInvalid(
            f"the cut {iso(cut)} leaves no event on one side: they run from {iso(first)} to {iso(last)}; "
            "choose --train-until between them, or bring more than five weeks"
        )
    return iso(cut)


# ------------------------------------------------------------------------------------------------ readers


def _torn(lines: list[tuple[int, str, str]]) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=["row", "reason", "text"])


def _read(data: str) -> tuple[Dataset, pd.DataFrame, int]:
    """Return a data set whose events are raw, the lines that did not even parse, and a number of events.

    So many of the first events are of the archive's published data set; 0 for all other data.
    """
    if data in BUILT_IN:
        return BUILT_IN[data](), _torn([]), 0
    path = Path(data)
    if not data or not path.exists():
        hint = did_you_mean(data, BUILT_IN)
        raise EventsInvalid(
            f"--data {data!r} is neither {' nor '.join(BUILT_IN)} nor a file or directory: "
            f"{hint and f'{hint} otherwise '}check the path"
        )
    return _read_files(path)


def _read_files(path: Path) -> tuple[Dataset, pd.DataFrame, int]:
    """Read `events` and the table of items beside it; a single file is the events alone."""
    file = path if path.is_file() else _table_file(path, "events")
    if file is None and (path / EVENTS).is_dir():
        return _read_archive(path)
    if file is None:
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise EventsInvalid(f"{path} holds {held}, expected events.parquet or events.csv: put one there")
    raw, torn = _read_table(file)
    manifest = {"name": path.resolve().name, "timezone": _timezone(file.parent)}
    items = _items(None if path.is_file() else _table_file(path, "items"))
    return Dataset(raw, items, manifest), torn, 0


def _read_archive(offline_store: Path) -> tuple[Dataset, pd.DataFrame, int]:
    """Read a home's offline store: all published events, then all events streamed since."""
    events = read_archive(offline_store / EVENTS).to_pandas()
    published = int((events.pop("version") == BATCH).sum())
    manifest = {"name": "archive", "timezone": _timezone(offline_store)}
    return Dataset(events, _items(_table_file(offline_store, "items")), manifest), _torn([]), published


def _table_file(path: Path, name: str) -> Path | None:
    found = [file for ending in FORMATS if os.path.lexists(file := path / f"{name}.{ending}")]
    if len(found) > 1:
        raise EventsInvalid(
            f"{path} holds both {found[0].name} and {found[1].name}: keep the one that is meant"
        )
    return found[0] if found else None


def _read_table(file: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a file's rows, and those of its lines that have too many or too few fields.

    Both are numbered as people count them: the rows of Parquet from 1, those of a CSV file from 2, behind the
    header. So a CSV file's number is its line, unless an empty line comes before.
    """
    readers = {".parquet": _read_parquet, ".csv": _read_csv}
    if file.suffix not in readers:
        raise EventsInvalid(f"{file} is neither .parquet nor .csv: convert it")
    try:
        return readers[file.suffix](file)
    except (pa.ArrowException, csv.Error, UnicodeDecodeError, LookupError, OSError) as error:
        expected = (
            "a Parquet file" if file.suffix == ".parquet" else "a CSV file in UTF-8 with commas and a header"
        )
        raise EventsInvalid(
            f"{file} can't be read, expected {expected}: {str(error).splitlines()[0][:200]}; "
            "save it again as such"
        ) from error


def _read_parquet(file: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    table = pq.ParquetFile(file).read()
    table = table.select(
        [i for i, name in enumerate(table.column_names) if not name.startswith("__index_level_")]
    )
    for i, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(i, column.name, table.column(i).cast(column.type.value_type))
    # Without pandas' metadata: a column of the file stays a column, even if pandas had it as the index.
    frame = table.to_pandas(ignore_metadata=True, date_as_object=False)
    return frame.set_axis(pd.RangeIndex(1, len(frame) + 1)), _torn([])


def _read_csv(file: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    torn: list[tuple[int, str, str]] = []
    broken: list[int] = []

    def keep(row: pa.csv.InvalidRow) -> str:
        if "\n" in row.text or "\r" in row.text:
            broken.append(row.number)
        why = f"the line has {row.actual_columns} fields, the header {row.expected_columns}"
        torn.append((row.number, why, row.text[:500]))
        return "skip"

    table = pa.csv.read_csv(
        file,
        pa.csv.ReadOptions(use_threads=False),  # with threads a bad line has no number
        pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=keep),
        # All text, so that 007 stays 007 and one bad number is one bad row, not a file that can't be read.
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(_header(file), pa.string()), strings_can_be_null=True, null_values=[""]
        ),
    )
    lines = np.arange(2, len(table) + len(torn) + 2)  # the header is line 1
    numbers = np.setdiff1d(lines, [number for number, _, _ in torn])
    for column in table.columns:
        is_broken = pc.match_substring_regex(column, "[\r\n]")
        broken += numbers[pc.fill_null(is_broken, False).to_numpy()][:1].tolist()
    if broken:
        raise EventsInvalid(
            f"{file}, row {min(broken)}: a value spans several lines, expected one line for each row. "
            "Close its quote, or remove the line break"
        )
    return table.to_pandas().set_axis(numbers), _torn(torn)


def _header(file: Path) -> list[str]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        return next((row for row in csv.reader(stream) if row), [])  # PyArrow skips empty lines, too


def _items(file: Path | None) -> pd.DataFrame:
    """Return the items of a file, empty text where something is not known; no file, no items."""
    if file is None:
        return pd.DataFrame({name: pd.Series(dtype=object) for name in ITEM_COLUMNS})
    raw, torn = _read_table(file)
    if len(torn):
        raise EventsInvalid(f"{file}, row {torn['row'].iloc[0]}: {torn['reason'].iloc[0]}: mend it")
    check_names(f"an item of {file.name}", raw.columns, ITEM_COLUMNS, ("item_id",))
    items = pd.DataFrame({name: as_ids(raw[name]).fillna("") if name in raw else "" for name in ITEM_COLUMNS})
    if (items["item_id"] == "").any():
        row = items.index[items["item_id"] == ""][0]
        raise EventsInvalid(
            f"{file}, row {row}: item_id is empty, or neither text nor a whole number: fill it in"
        )
    if items["item_id"].duplicated().any():
        twice = items.loc[items["item_id"].duplicated(), "item_id"].iloc[0]
        raise EventsInvalid(f"{file} names item {twice!r} more than once: keep one row per item")
    return items.assign(brand=items["brand"].str.lower()).reset_index(drop=True)


def _with_all_items(items: pd.DataFrame, sold: pd.Series) -> pd.DataFrame:
    """Return the items and, with nothing but their id, those that were sold and are not among them."""
    distinct = pd.Series(sold.unique(), dtype=object)
    bare = pd.DataFrame({"item_id": sorted(distinct[~distinct.isin(items["item_id"])])})
    every = pd.concat([items, bare.assign(**dict.fromkeys(ITEM_COLUMNS[1:], ""))], ignore_index=True)
    # The table of a home has bare rows of earlier trainings.
    nameless = every["item_id"].isin(distinct) & (every[list(ITEM_COLUMNS[1:])] == "").all(axis=1)
    if items.empty:
        log.warning("no table of items was read: the %d items sold have no names or categories", len(bare))
    elif nameless.any():
        log.warning("%d of the items sold have no row in the table of items, or an empty one", nameless.sum())
    return every


def _timezone(directory: Path) -> str:
    """Return the time zone from `dataset.json` beside the events, or from the manifest of a data set."""
    names = ("dataset.json", "manifest.json")
    file = next((f for name in names if os.path.lexists(f := directory / name)), None)
    if file is None:
        return "UTC"
    try:
        content = read_json(file.read_text(encoding="utf-8"))
        if file.name == "dataset.json" and (unknown := content.keys() - {"timezone"}):
            raise ValueError(f"unknown key {min(unknown)!r}")
        name = content.get("timezone", "UTC")
        ZoneInfo(name)
    except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        raise EventsInvalid(
            f'{file} should read {{"timezone": "Europe/Berlin"}} with an IANA name ({error})'
        ) from error
    return str(name)
