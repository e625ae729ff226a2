"""Anyone's files: read, checked, refused with what was found and how to mend it."""

import json
from pathlib import Path

import pandas as pd
import pytest

from components.ingest_events import find_cut, ingest_events
from feature_repo.events import EventsInvalid, read_dataset

CSV = """user_id,basket_id,item_id,at,quantity,price
1228,b1,1041453,2024-01-01T10:00:00Z,1,1.43
1228,b1,995242,2024-01-01T10:00:00Z,2,0.99
0900,b2,1041453,2024-03-15T10:00:00Z,1,1.43
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "events.csv").write_text(CSV)
    return folder


def test_a_csv_of_our_columns_is_read(source: Path, tmp_path: Path) -> None:
    cut = ingest_events(str(source), tmp_path / "d")
    data = read_dataset(tmp_path / "d")
    assert cut == "2024-02-10T00:00:00Z"  # 35 days before the midnight after the last event
    assert data.events["user_id"].tolist() == ["1228", "1228", "0900"]
    assert data.events["item_id"].tolist() == ["1041453", "995242", "1041453"]
    assert sorted(data.items["item_id"]) == ["1041453", "995242"]
    assert data.manifest["quarantined_ratio"] == 0


def test_parquet_and_csv_give_the_same_data_set(source: Path, tmp_path: Path) -> None:
    ingest_events(str(source), tmp_path / "csv")
    other = tmp_path / "other"
    other.mkdir()
    frame = pd.read_csv(source / "events.csv", dtype={"user_id": str, "item_id": int})
    frame.assign(at=pd.to_datetime(frame["at"])).to_parquet(other / "events.parquet")
    ingest_events(str(other), tmp_path / "parquet")
    pd.testing.assert_frame_equal(
        read_dataset(tmp_path / "csv").events, read_dataset(tmp_path / "parquet").events
    )


def test_items_and_time_zone_beside_the_events(source: Path, tmp_path: Path) -> None:
    (source / "items.csv").write_text("item_id,category,type\n1041453,bakery,bread\n995242,dairy,\n")
    (source / "dataset.json").write_text('{"timezone": "Europe/Berlin"}')
    cut = ingest_events(str(source), tmp_path / "d")
    assert cut == "2024-02-09T23:00:00Z"
    items = read_dataset(tmp_path / "d").items.set_index("item_id")
    assert items.loc["1041453", "type"] == "bread"
    assert items.loc["995242", ["type", "department"]].tolist() == ["", ""]


def test_few_bad_rows_are_quarantined_with_their_reasons(source: Path, tmp_path: Path) -> None:
    good = "".join(f"u{n},b{n + 10},i{n % 3},2024-02-0{n % 9 + 1}T10:00:00Z,1,1\n" for n in range(300))
    (source / "events.csv").write_text(CSV + good + "u1,bad,i1,2024-01-05T10:00:00Z,-3,1\n")
    ingest_events(str(source), tmp_path / "d")
    manifest = read_dataset(tmp_path / "d").manifest
    assert manifest["quarantined"] == {"quantity is not a whole number from 1 to 1000000": 1}
    (line,) = (tmp_path / "d" / "quarantine.jsonl").read_text().splitlines()
    refused = json.loads(line)
    assert (refused["row"], refused["event"]["basket_id"]) == (303, "bad")


def test_many_bad_rows_stop_the_run_and_leave_their_reasons(source: Path, tmp_path: Path) -> None:
    (source / "events.csv").write_text(CSV + "u1,bad,i1,2024-01-05T10:00:00Z,-3,1\n")
    with pytest.raises(
        EventsInvalid, match=r"1 of 4 rows \(25.0%\) break the event contract, at most 1.0% may"
    ) as caught:
        ingest_events(str(source), tmp_path / "d")
    file = Path(str(caught.value).rsplit(": ", 1)[1])
    assert json.loads(file.read_text())["reason"].startswith("quantity")
    assert not (tmp_path / "d").exists()
    assert ingest_events(str(source), tmp_path / "d", max_quarantine_ratio=0.5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (CSV.replace("item_id", "itemid", 1), "did you mean 'item_id'"),
        ("user_id,basket_id,item_id,at\n", "not one row"),
        ("", "can't be read as csv"),
        (CSV + "1,2\n", "can't be read as csv"),
        (CSV.replace("1228", "\udcff", 1), "can't be read as csv"),
    ],
)
def test_broken_csv_says_what_is_wrong(source: Path, tmp_path: Path, content: str, says: str) -> None:
    (source / "events.csv").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(EventsInvalid, match=says):
        ingest_events(str(source), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_file_that_is_not_parquet(source: Path, tmp_path: Path) -> None:
    (source / "events.parquet").write_text(CSV)
    with pytest.raises(EventsInvalid, match=r"events.parquet can't be read as parquet"):
        ingest_events(str(source), tmp_path / "d")


def test_names_and_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(EventsInvalid, match="did you mean 'complete-journey'"):
        ingest_events("complete-jorney", tmp_path / "d")
    with pytest.raises(EventsInvalid, match=r"neither events.parquet nor events.csv"):
        ingest_events(str(tmp_path), tmp_path / "d")
    (tmp_path / "events.xlsx").write_text("x")
    with pytest.raises(EventsInvalid, match=r"neither .parquet nor .csv"):
        ingest_events(str(tmp_path / "events.xlsx"), tmp_path / "d")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("item_id,colour\ni1,red\n", "unknown column"),
        ("id\ni1\n", "no column item_id"),
        ("item_id\n995242\n995242\n", "more than once"),
    ],
)
def test_a_broken_item_table(source: Path, tmp_path: Path, content: str, says: str) -> None:
    (source / "items.csv").write_text(content)
    with pytest.raises(EventsInvalid, match=says):
        ingest_events(str(source), tmp_path / "d")


@pytest.mark.parametrize("content", ['{"timezone": "Mars/Base"}', "[]", "{"])
def test_a_broken_time_zone(source: Path, tmp_path: Path, content: str) -> None:
    (source / "dataset.json").write_text(content)
    with pytest.raises(EventsInvalid, match=r"dataset.json should read"):
        ingest_events(str(source), tmp_path / "d")


MANIFEST = {
    "timezone": "America/New_York",
    "first_at": "2017-01-01T11:53:26Z",
    "last_at": "2018-01-01T04:01:20Z",
}


@pytest.mark.parametrize(
    ("train_until", "cut"),
    [
        ("", "2017-11-27T05:00:00Z"),  # Monday of week 49, midnight in New York
        ("2017-11-27", "2017-11-27T05:00:00Z"),
        ("2017-07-01", "2017-07-01T04:00:00Z"),  # daylight saving time
        ("2017-07-01T12:00:00Z", "2017-07-01T12:00:00Z"),
    ],
)
def test_the_cut_is_local_midnight(train_until: str, cut: str) -> None:
    assert find_cut(MANIFEST, train_until) == cut


@pytest.mark.parametrize(
    ("train_until", "says"),
    [("soon", "not a date"), ("2019-01-01", "nothing on one side"), ("2016-01-01", "nothing")],
)
def test_a_cut_outside_the_data(train_until: str, says: str) -> None:
    with pytest.raises(EventsInvalid, match=says):
        find_cut(MANIFEST, train_until)


def test_the_toy_shop_is_one_word_away(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()  # a pipeline run may hand over a directory that exists
    assert ingest_events("toy", tmp_path / "d") == "2024-06-10T00:00:00Z"
