"""Files of any shop: read, checked, refused with the fault and how to correct it."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.data.ingest_events import TooManyRefused, find_cut, ingest_events
from feature_repo.events import EVENT_SCHEMA, Dataset, EventsInvalid, read_dataset
from feature_repo.stream.archive import BASE, EVENTS, read_archive, rows_of, streamed_name, write_segment
from feature_repo.stream.erasure import forget, microseconds
from feature_repo.toy_shop import toy_dataset
from tests.components.conftest import whole_events

CSV = """user_id,basket_id,item_id,at,quantity,price
1228,b1,1041453,2024-01-01T10:00:00Z,1,1.43
1228,b1,995242,2024-01-01T10:00:00Z,2,0.99
0900,b2,1041453,2024-03-15T10:00:00Z,1,1.43
"""
MANY = CSV + "".join(f"u{n},b{n + 10},i{n % 3},2024-02-0{n % 9 + 1}T10:00:00Z,1,1\n" for n in range(300))
BAD = "u1,bad,i1,2024-01-05T10:00:00Z,-3,1\n"
QUANTITY = "quantity is not a whole number from 1 to 1000000"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "events.csv").write_text(CSV)
    return folder


def ingested(source: Path, target: Path, **settings: Any) -> Dataset:
    ingest_events(str(source), target, **settings)
    return read_dataset(target)


def quarantine(dataset: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (dataset / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    ]


# ------------------------------------------------------------------------------------------- good files


def test_a_csv_of_our_columns_is_read(source: Path, tmp_path: Path) -> None:
    cut = ingest_events(str(source), tmp_path / "d")
    data = read_dataset(tmp_path / "d")
    assert cut == "2024-02-10T00:00:00Z"  # 35 days before the midnight after the last event
    assert data.events["user_id"].tolist() == ["1228", "1228", "0900"]
    assert data.events["item_id"].tolist() == ["1041453", "995242", "1041453"]
    assert sorted(data.items["item_id"]) == ["1041453", "995242"]
    assert data.manifest["quarantined_ratio"] == 0
    assert (data.manifest["name"], data.manifest["timezone"]) == ("source", "UTC")


def test_a_single_file_is_enough(source: Path, tmp_path: Path) -> None:
    alone = ingested(source / "events.csv", tmp_path / "alone")
    pd.testing.assert_frame_equal(alone.events, ingested(source, tmp_path / "d").events)


def test_parquet_and_csv_give_the_same_data_set(source: Path, tmp_path: Path) -> None:
    expected = ingested(source, tmp_path / "csv").events
    frame = pd.read_csv(source / "events.csv", dtype={"user_id": str, "item_id": int})
    frame["at"] = pd.to_datetime(frame["at"])
    variants = {
        "times": frame,
        "text": frame.astype({"at": str}),
        "index": frame.set_index(["user_id", "basket_id"]),
        "filtered": pd.concat([frame, frame])[3:],  # pandas keeps the row numbers as __index_level_0__
        "categories": frame.astype({"user_id": "category", "item_id": str}).astype({"item_id": "category"}),
        "floats": frame.astype({"item_id": float, "quantity": float}),
        "decimals": frame.assign(price=frame["price"].map(lambda price: Decimal(f"{price:.2f}"))),
    }
    for name, variant in variants.items():
        folder = tmp_path / f"year=2024-{name}"  # a name that pyarrow could take for a partition
        folder.mkdir()
        variant.to_parquet(folder / "events.parquet")
        pd.testing.assert_frame_equal(ingested(folder, tmp_path / name).events, expected)


def test_a_column_of_dates_is_one_of_midnights(tmp_path: Path) -> None:
    days = [date(2024, 1, 1), date(2024, 3, 15)]
    table = pa.table({"user_id": [1, 2], "basket_id": [1, 2], "item_id": [1, 1], "at": pa.array(days)})
    pq.write_table(table, tmp_path / "events.parquet")
    at = ingested(tmp_path / "events.parquet", tmp_path / "d").events["at"]
    assert at.tolist() == [pd.Timestamp(day, tz="UTC") for day in days]


def test_ids_are_read_as_they_stand(source: Path, tmp_path: Path) -> None:
    """Behind a byte order mark, in quotes, and as words that mean nothing elsewhere."""
    text = CSV.replace("1041453", '"milk, 1 l"').replace("995242", "null").replace("1228", "NA")
    (source / "events.csv").write_text(text, encoding="utf-8-sig")
    events = ingested(source, tmp_path / "d").events
    assert events["user_id"].tolist() == ["NA", "NA", "0900"]
    assert events["item_id"].tolist() == ["milk, 1 l", "null", "milk, 1 l"]


def test_empty_lines_before_the_header_change_nothing(source: Path, tmp_path: Path) -> None:
    expected = ingested(source, tmp_path / "expected").events
    (source / "events.csv").write_text(f"\n\r\n{CSV}", encoding="utf-8")
    pd.testing.assert_frame_equal(ingested(source, tmp_path / "d").events, expected)


def test_items_and_time_zone_beside_the_events(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ingest_events(str(source), tmp_path / "without")
    assert "no table of items was read: the 2 items sold have no names or categories" in caplog.text
    (source / "items.csv").write_text(
        "item_id,category,type,brand\n1041453,bakery,bread,Private\n007,dairy,,\n"
    )
    (source / "dataset.json").write_text('{"timezone": "Europe/Berlin"}')
    cut = ingest_events(str(source), tmp_path / "d")
    assert cut == "2024-02-09T23:00:00Z"
    items = read_dataset(tmp_path / "d").items.set_index("item_id")
    assert items.loc["1041453", ["type", "brand"]].tolist() == ["bread", "private"]
    assert items.loc["007", ["type", "department"]].tolist() == ["", ""]
    assert items.loc["995242"].tolist() == ["", "", "", "", ""]  # sold, but not in the table
    told = "1 of the items sold have no row in the table of items, or an empty one"
    assert caplog.messages.count(told) == 1
    ingest_events(str(tmp_path / "d"), tmp_path / "again")
    assert caplog.messages.count(told) == 2, "its empty row says no more"


def test_a_data_set_of_ours_is_a_directory_like_any_other(source: Path, tmp_path: Path) -> None:
    (source / "dataset.json").write_text('{"timezone": "Europe/Berlin"}')
    first = ingested(source, tmp_path / "first")
    second = ingested(tmp_path / "first", tmp_path / "second")
    pd.testing.assert_frame_equal(first.events, second.events)
    assert second.manifest["timezone"] == "Europe/Berlin"


def test_the_toy_shop_is_one_word_away(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()  # a pipeline run may hand over a directory that exists
    assert ingest_events("toy", tmp_path / "d") == "2024-06-10T00:00:00Z"
    found = read_dataset(tmp_path / "d")
    expected = toy_dataset().events.sort_values(["at", "basket_id", "item_id"], ignore_index=True)
    pd.testing.assert_frame_equal(found.events, expected, check_dtype=False)
    assert found.manifest["dropped"] == {"repeated_events": 0}


# --------------------------------------------------------------------------------------------- bad rows


def test_few_bad_rows_are_quarantined_with_their_reasons(source: Path, tmp_path: Path) -> None:
    (source / "events.csv").write_text(MANY + BAD)
    manifest = ingested(source, tmp_path / "d").manifest
    assert (manifest["quarantined"], manifest["rows"]) == ({QUANTITY: 1}, 303)
    assert manifest["quarantined_ratio"] == round(1 / 304, 6)
    (refused,) = quarantine(tmp_path / "d")
    assert (refused["row"], refused["reason"], refused["basket_id"], refused["quantity"]) == (
        305,
        QUANTITY,
        "bad",
        "-3",
    )


def test_lines_with_too_few_or_too_many_fields_are_quarantined_too(source: Path, tmp_path: Path) -> None:
    header, first, *rest = MANY.splitlines(keepends=True)
    (source / "events.csv").write_text("".join([header, first, "1,2\n", *rest, BAD, "a,b,c,d,e,f,g\n"]))
    manifest = ingested(source, tmp_path / "d", max_quarantine_ratio=0.1).manifest
    found = [(row["row"], row["reason"]) for row in quarantine(tmp_path / "d")]
    assert found == [
        (3, "the line has 2 fields, the header 6"),
        (306, QUANTITY),
        (307, "the line has 7 fields, the header 6"),
    ]
    assert sum(manifest["quarantined"].values()) == 3
    assert quarantine(tmp_path / "d")[0]["text"] == "1,2"


def test_duplicates_are_counted_not_refused(source: Path, tmp_path: Path) -> None:
    text = "event_id,user_id,basket_id,item_id,at\n" + "".join(
        f"{event},u,b{day},milk,2024-0{day}-01\n"
        for event, day in [("e1", 1), ("e1", 1), ("e2", 1), ("", 4), ("", 4)]
    )
    (source / "events.csv").write_text(text)
    data = ingested(source, tmp_path / "d", max_quarantine_ratio=0)
    assert data.manifest["dropped"] == {"repeated_events": 1}
    assert data.events["quantity"].tolist() == [1, 1, 1, 1], "an item scanned twice is two events"


def test_training_on_the_archive_again_and_again_counts_each_event_once(tmp_path: Path) -> None:
    """An item that was scanned twice is in the base as the two events that the stream's segment holds."""
    lines = [
        ("e0", "b0", "milk", 1),
        ("e1", "b1", "tea", 60),
        ("e2", "b1", "tea", 60),
        ("e3", "b2", "jam", 70),
    ]
    events = pd.DataFrame(lines, columns=["event_id", "basket_id", "item_id", "at"])
    events["at"] = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(events["at"], unit="D")
    events = whole_events(events, price=2.0)
    archive = tmp_path / "offline_store" / EVENTS
    streamed = pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False)
    streamed = streamed.append_column("version", pa.array(range(4), pa.int64()))
    write_segment(archive, streamed, streamed_name(0, 0, 3))
    for turn in range(3):
        found = ingested(tmp_path / "offline_store", tmp_path / str(turn), train_until="2024-02-01").events
        assert found["event_id"].tolist() == ["e0", "e1", "e2", "e3"]
        base = pa.Table.from_pandas(found, EVENT_SCHEMA, preserve_index=False)
        write_segment(archive, base, BASE)  # as materialize_features and publish_features do
        [(_, row)] = rows_of(read_archive(archive))
        assert (len(row), row.paid.sum()) == (4, 8.0)


def test_a_streamed_line_takes_no_published_basket_along(tmp_path: Path) -> None:
    """And the next training refuses it again: the basket is still there."""
    lines = [("e0", "b0", "u1", 0), ("e1", "b1", "u1", 60), ("e2", "b1", "u2", 70)]
    events = pd.DataFrame(lines, columns=["event_id", "basket_id", "user_id", "at"]).assign(item_id="tea")
    events["at"] = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(events["at"], unit="D")
    whole = pa.Table.from_pandas(whole_events(events)[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False)
    archive = tmp_path / "offline_store" / EVENTS
    write_segment(archive, whole[:2], BASE)
    write_segment(
        archive, whole[2:].append_column("version", pa.array([0], pa.int64())), streamed_name(0, 0, 0)
    )
    for turn in range(2):
        place = tmp_path / str(turn)
        found = ingested(
            tmp_path / "offline_store", place, train_until="2024-02-01", max_quarantine_ratio=0.5
        )
        assert found.events["event_id"].tolist() == ["e0", "e1"]
        refused = json.loads((place / "quarantine.jsonl").read_text())
        assert (refused["event_id"], refused["reason"]) == ("e2", "its basket names two users")
        write_segment(archive, pa.Table.from_pandas(found.events, EVENT_SCHEMA, preserve_index=False), BASE)


def test_many_bad_rows_stop_the_run_and_leave_their_reasons(source: Path, tmp_path: Path) -> None:
    (source / "events.csv").write_text(CSV + BAD)
    with pytest.raises(
        TooManyRefused,
        match=r"1 of 4 rows \(25.0%\).*at most 1.0% may.*1 x quantity.*--param max_quarantine_ratio=0.25$",
    ) as caught:
        ingest_events(str(source), tmp_path / "d")
    assert str(caught.value.quarantine) in str(caught.value)
    assert json.loads(caught.value.quarantine.read_text())["reason"] == QUANTITY
    assert not (tmp_path / "d").exists()
    assert ingest_events(str(source), tmp_path / "d", max_quarantine_ratio=0.5)
    assert not caught.value.quarantine.exists()  # its contents are out of date


@pytest.mark.parametrize(
    ("row", "says"), [(BAD, "1 x quantity"), ("u,b,i\n", "the line has 3 fields, the header 6")]
)
def test_nothing_but_bad_rows_stop_the_run_whatever_the_ratio(
    source: Path, tmp_path: Path, row: str, says: str
) -> None:
    (source / "events.csv").write_text(CSV.splitlines()[0] + "\n" + row)
    with pytest.raises(TooManyRefused, match=rf"1 of 1 rows \(100\.0%\).*{says}"):
        ingest_events(str(source), tmp_path / "d", max_quarantine_ratio=1)


def test_a_failed_run_leaves_the_data_set_before_it(source: Path, tmp_path: Path) -> None:
    ingest_events(str(source), tmp_path / "d")
    before = read_dataset(tmp_path / "d").manifest
    (source / "events.csv").write_text(CSV + BAD)
    with pytest.raises(TooManyRefused):
        ingest_events(str(source), tmp_path / "d")
    with pytest.raises(EventsInvalid, match="no event on one side"):
        ingest_events("toy", tmp_path / "d", train_until="2030-01-01")
    assert read_dataset(tmp_path / "d").manifest == before


# -------------------------------------------------------------------------------------------- bad files


OPEN_QUOTE = 'user_id,basket_id,item_id,"at\n' + "u,b,i,2024-01-02\n" * 9_000


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("events.csv", CSV.replace("item_id", "itemid", 1), r"'itemid'.*did you mean 'item_id'"),
        ("events.csv", CSV.replace(",", ";"), "separator must be a comma"),
        ("events.csv", "user_id,basket_id,item_id,at\n", "not one row"),
        ("events.csv", "", "can't be read.*Empty CSV"),
        ("events.csv", OPEN_QUOTE, r"events\.csv can't be read"),
        ("events.csv", CSV.replace("1228", "\udcff", 1), "can't be read, expected a CSV file in UTF-8"),
        ("events.csv", CSV.replace("user_id", "us\udcff", 1), "can't be read, expected a CSV file in UTF-8"),
        ("events.csv", CSV.encode("utf-16").decode(errors="surrogateescape"), "expected a CSV file in UTF-8"),
        ("events.parquet", "", r"both events.parquet and events.csv"),
        ("items.csv", "item_id,colour\ni1,red\n", r"unknown column\(s\) 'colour'; an item of items.csv has"),
        ("items.csv", "item_id\n995242\n995242\n", "'995242' more than once"),
        ("items.csv", "item_id,type\n995242,a\n,b\n", "row 3: item_id is empty"),
        ("items.csv", "item_id,type\n995242\n", "row 2: the line has 1 fields, the header 2"),
        ("dataset.json", '{"timezone": "Mars/Base"}', "dataset.json should read"),
        ("dataset.json", '{"timezone": 1}', "dataset.json should read"),
        ("dataset.json", '{"tz": "UTC"}', "dataset.json should read"),
        ("dataset.json", "[]", "dataset.json should read"),
        ("dataset.json", "{", "dataset.json should read"),
    ],
    ids=lambda value: value[:30],
)
def test_a_broken_file_is_reported_with_its_fault(
    source: Path, tmp_path: Path, file: str, content: str, says: str
) -> None:
    (source / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(EventsInvalid, match=says):
        ingest_events(str(source), tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("quotes", [1, 2])
def test_an_open_quote_does_not_swallow_lines_unseen(
    source: Path, tmp_path: Path, quotes: int, ending: str
) -> None:
    header, *rows = MANY.splitlines()
    for row in (150, 250)[:quotes]:
        rows[row] = rows[row].replace(",", ',"' + "long" * 200, 2).replace(',"' + "long" * 200, ",", 1)
    (source / "events.csv").write_bytes(ending.join([header, *rows, ""]).encode())
    with pytest.raises(EventsInvalid, match="a value spans several lines"):
        ingest_events(str(source), tmp_path / "d")


def test_a_file_that_is_not_parquet(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "events.parquet"
    file.write_text(CSV)
    with pytest.raises(
        EventsInvalid, match=r"events.parquet can't be read, expected a Parquet file.*save it again"
    ):
        ingest_events(str(file), tmp_path / "d")
    pd.DataFrame({"user_id": ["u"]}).to_parquet(file)
    file.write_bytes(file.read_bytes()[:-20])  # a copy that was cut short
    with pytest.raises(EventsInvalid, match=r"events.parquet can't be read"):
        ingest_events(str(file), tmp_path / "d")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("complete-jorney", "did you mean 'complete-journey'"),
        ("Toy", "did you mean 'toy'"),
        ("/no/such/path", r"neither complete-journey nor toy nor a file or directory: check the path"),
        ("", "neither"),
    ],
)
def test_names_and_paths_that_lead_nowhere(data: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(EventsInvalid, match=says):
        ingest_events(data, tmp_path / "d")


def test_a_directory_without_events(tmp_path: Path) -> None:
    with pytest.raises(EventsInvalid, match=r"holds nothing, expected events.parquet or events.csv"):
        ingest_events(str(tmp_path), tmp_path / "d")
    (tmp_path / "events.xlsx").write_text("x")
    with pytest.raises(EventsInvalid, match=r"holds events.xlsx, expected"):
        ingest_events(str(tmp_path), tmp_path / "d")
    with pytest.raises(EventsInvalid, match=r"neither .parquet nor .csv"):
        ingest_events(str(tmp_path / "events.xlsx"), tmp_path / "d")


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_no_share(ratio: float, tmp_path: Path) -> None:
    with pytest.raises(EventsInvalid, match="a share from 0 to 1"):
        ingest_events("toy", tmp_path / "d", max_quarantine_ratio=ratio)


def test_the_input_is_never_overwritten(source: Path) -> None:
    with pytest.raises(EventsInvalid, match=r"holds events.csv, which is no data set"):
        ingest_events(str(source), source)
    assert (source / "events.csv").read_text() == CSV


# --------------------------------------------------------------------------------------------- the cut

FIRST, LAST = pd.Timestamp("2017-01-01T11:53:26Z"), pd.Timestamp("2018-01-01T04:01:20Z")


@pytest.mark.parametrize(
    ("train_until", "cut"),
    [
        ("", "2017-11-27T05:00:00Z"),  # Monday of week 49, midnight in New York
        ("2017-11-27", "2017-11-27T05:00:00Z"),
        ("2017-07-01", "2017-07-01T04:00:00Z"),  # daylight saving time
        ("2017-07-01T12:00:00", "2017-07-01T16:00:00Z"),  # without a zone: the shop's
        ("2017-07-01T12:00:00Z", "2017-07-01T12:00:00Z"),
    ],
)
def test_the_cut_is_local_midnight(train_until: str, cut: str) -> None:
    assert find_cut(FIRST, LAST, "America/New_York", train_until) == cut


def test_five_weeks_are_calendar_weeks_when_the_clocks_change() -> None:
    # Clocks went forward on 31 March: midnight is 23:00 UTC before, 22:00 after.
    last = pd.Timestamp("2024-04-14T12:00:00Z")
    assert find_cut(FIRST, last, "Europe/Berlin") == "2024-03-10T23:00:00Z"


@pytest.mark.parametrize(
    ("train_until", "says"),
    [("soon", "not a date"), ("2019-01-01", "no event on one side"), ("2016-01-01", "no event on one side")],
)
def test_a_cut_outside_the_data(train_until: str, says: str) -> None:
    with pytest.raises(EventsInvalid, match=says):
        find_cut(FIRST, LAST, "America/New_York", train_until)


def test_less_than_five_weeks_leave_nothing_to_learn_from() -> None:
    with pytest.raises(EventsInvalid, match="bring more than five weeks"):
        find_cut(LAST - pd.Timedelta(weeks=4), LAST, "UTC")


# --------------------------------------------------------------------------------------- forgotten users


def test_forgotten_users_are_left_out_everywhere_and_counted(tmp_path: Path) -> None:
    """In events, refused rows and unparsed lines; a user who comes back later is new."""
    shop = tmp_path / "shop"
    shop.mkdir()
    header = "user_id,basket_id,item_id,at,quantity"
    rows = [f"u{n % 3},b{n},tea,2024-0{1 + n // 60}-{1 + n % 28:02}T10:00:00Z,1" for n in range(150)]
    rows += ["u1,x1,tea,never,1", "u1,x2,tea,2024-01-01T10:00:00Z,-1", "u1,too,many,2024-01-01,1,2,3"]
    rows += ["u10,x3,tea,2024-01-02T10:00:00Z,-1", "u1,new,tea,2024-06-01T10:00:00Z,1"]
    (shop / "events.csv").write_text("\n".join([header, *rows]))
    forget(tmp_path / "home", "u1", microseconds(datetime(2024, 5, 1, tzinfo=UTC)))
    ingest_events(str(shop), tmp_path / "dataset", 0.1, home=str(tmp_path / "home"))
    data = read_dataset(tmp_path / "dataset")
    assert data.events.loc[data.events["user_id"] == "u1", "basket_id"].tolist() == ["new"]
    assert data.manifest["dropped"]["of forgotten users"] == 52  # a third of 150, and two that were refused
    quarantine = (tmp_path / "dataset" / "quarantine.jsonl").read_text()
    assert "u10" in quarantine
    assert 'u1"' not in quarantine
    assert "u1," not in quarantine


def test_a_data_set_of_forgotten_users_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("user_id,basket_id,item_id,at\nu1,b,tea,2024-01-01\n")
    forget(tmp_path, "u1", microseconds(datetime(2024, 5, 1, tzinfo=UTC)))
    with pytest.raises(EventsInvalid, match="all events are of users who are to be forgotten"):
        ingest_events(str(tmp_path / "events.csv"), tmp_path / "dataset", home=str(tmp_path))
    assert not (tmp_path / "dataset").exists()
