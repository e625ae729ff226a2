"""`reco check` on a folder: counts, refused rows and errors, without a run."""

import json
from pathlib import Path

import pytest

from pipelines.inspect.check_data import inspect_data
from tests.pipelines.cli.conftest import reco

HEADER = "user_id,basket_id,item_id,at,quantity"
DAYS = [f"u{day % 3},b{day},i{day % 5},2024-{1 + day // 28:02d}-{1 + day % 28:02d},1" for day in range(84)]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    return folder


def write(shop: Path, *lines: str) -> None:
    (shop / "events.csv").write_text("\n".join([HEADER, *lines]) + "\n")


def test_a_good_folder_is_counted_and_nothing_is_written(shop: Path, tmp_path: Path) -> None:
    write(shop, *DAYS)
    done = reco(tmp_path / "home", "check", str(shop))
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        f"{shop}: 84 valid rows, 3 users, 84 baskets, 5 items",
        "from 2024-01-01T00:00:00Z to 2024-03-28T00:00:00Z (time zone UTC)",
        "training sees what is before 2024-02-23T00:00:00Z, the evaluation the rest",
        "no row is refused",
    ]
    assert not (tmp_path / "home").exists()
    assert sorted(path.name for path in shop.parent.iterdir()) == ["shop"]


def test_refused_rows_have_the_number_of_their_line(shop: Path, tmp_path: Path) -> None:
    write(shop, DAYS[0], "u1,b,i,2024-01-02,-3", "u1,b", *DAYS[1:])
    done = reco(tmp_path, "check", str(shop))
    assert done.exit_code == 1
    assert "2 rows refused, 2.3% of all; a run allows 1.0%" in done.output
    assert [line.split()[:2] for line in done.output.splitlines()[5:8]] == [
        ["row", "reason"],
        ["3", "quantity"],
        ["4", "the"],
    ]
    assert "--param max_quarantine_ratio=0.05" in done.output
    refused = json.loads(reco(tmp_path, "check", str(shop), "--output", "json").stdout)["refused"]
    assert [row["row"] for row in refused] == [3, 4]
    line = (shop / "events.csv").read_text().splitlines()[refused[0]["row"] - 1]
    assert line == "u1,b,i,2024-01-02,-3"


def test_empty_lines_do_not_count_in_the_number_of_a_row(shop: Path) -> None:
    write(shop, "", DAYS[0], "u1,b", "u1,b,i,2024-01-02,-1", "u1,b", *DAYS[1:])
    assert [row["row"] for row in inspect_data(str(shop))["refused"]] == [3, 4, 5]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_refused_row_may_hold_a_character_that_breaks_lines(shop: Path, mark: str) -> None:
    write(shop, *DAYS, f"u1,b,mi{mark}lk,2024-01-02,1")
    [row] = inspect_data(str(shop))["refused"]
    assert (row["row"], row["item_id"]) == (86, f"mi{mark}lk")


def test_a_folder_without_a_valid_row_is_reported_like_any_other(shop: Path, tmp_path: Path) -> None:
    write(shop, "u1,b,i,2024-01-02,-3")
    done = reco(tmp_path, "check", str(shop))
    assert (done.exit_code, "0 valid rows" in done.output) == (1, True)
    assert "1 rows refused, 100.0% of all" in done.output


def test_what_cannot_be_read_is_an_error_that_says_why(shop: Path, tmp_path: Path) -> None:
    write(shop, *DAYS[:9])
    done = reco(tmp_path, "check", str(shop))
    assert done.exit_code != 0
    assert "bring more than five weeks" in done.output
