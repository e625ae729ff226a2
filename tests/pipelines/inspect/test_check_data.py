"""`reco check` on a folder: counts, refused rows and errors, without a run."""

import json
from pathlib import Path

import pytest

from feature_repo.toy_shop import toy_dataset
from pipelines.inspect.check_data import inspect_data
from tests.pipelines.cli.conftest import reco

HEADER = "user_id,basket_id,item_id,at,quantity"
DAYS = [f"u{day % 3},b{day},i{day % 5},2024-{1 + day // 28:02d}-{1 + day % 28:02d},1" for day in range(84)]


CUT = "2024-03-10"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    return folder


def write(shop: Path, *lines: str) -> None:
    (shop / "events.csv").write_text("\n".join([HEADER, *lines]) + "\n")


def test_a_good_folder_is_counted_and_nothing_is_written(shop: Path, tmp_path: Path) -> None:
    events = toy_dataset().events
    events.drop(columns="event_id").to_csv(shop / "events.csv", index=False)
    done = reco(tmp_path / "home", "check", str(shop))
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"reading {shop} and trying the first steps on it\n")
    first, *_, last = done.stdout.splitlines()
    baskets = events["basket_id"].nunique()
    assert first == f"{shop}: {len(events):,} valid rows, 60 users, {baskets:,} baskets, 80 items"
    assert last == "no row is refused"
    assert not (tmp_path / "home").exists()
    assert sorted(path.name for path in shop.parent.iterdir()) == ["shop"]


@pytest.mark.parametrize(
    ("bought", "tested", "until", "why"),
    [
        (1, 4, CUT, "a basket needs 4 catalogue items or more"),
        (4, 4, "2024-01-20", "span less than two windows of 28 days"),
        (4, 1, CUT, "choose an earlier --train-until, so that some weeks are left to test on"),
    ],
)
def test_a_folder_that_a_later_step_would_refuse_is_told_now(
    shop: Path, tmp_path: Path, bought: int, tested: int, until: str, why: str
) -> None:
    """Three shoppers, a basket each day: so many items are bought before the cut, and so many after it."""
    days = [
        day
        for day in map(str.split, DAYS, "," * len(DAYS))
        for _ in range(tested if day[3] >= CUT else bought)
    ]
    write(shop, *(",".join((*day[:2], f"i{number % 5}", *day[3:])) for number, day in enumerate(days)))
    done = reco(tmp_path, "check", str(shop), "--train-until", until)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"{shop}: {len(days):,} valid rows, 3 users, 84 baskets, 5 items",
        "from 2024-01-01T00:00:00Z to 2024-03-28T00:00:00Z (time zone UTC)",
    ]
    [told] = [line for line in lines if line.startswith("a run would stop: ")]
    assert why in told


def test_refused_rows_have_the_number_of_their_line(shop: Path, tmp_path: Path) -> None:
    write(shop, DAYS[0], "u1,b,i,2024-01-02,-3", "u1,b", *DAYS[1:])
    done = reco(tmp_path, "check", str(shop))
    assert done.exit_code == 1
    assert "2 rows refused, 2.3% of all; a run allows 1.0%" in done.output
    assert [line.split()[:2] for line in done.stdout.splitlines()[6:9]] == [
        ["row", "reason"],
        ["3", "quantity"],
        ["4", "the"],
    ]
    assert "--param max_quarantine_ratio=0.03" in done.output
    refused = json.loads(reco(tmp_path, "check", str(shop), "--output", "json").stdout)["refused"]
    assert [row["row"] for row in refused] == [3, 4]
    line = (shop / "events.csv").read_text().splitlines()[refused[0]["row"] - 1]
    assert line == "u1,b,i,2024-01-02,-3"


def test_a_row_has_its_number_beside_empty_lines_and_characters_that_break_lines(shop: Path) -> None:
    write(shop, "", DAYS[0], "u1,b", "u1,b,mi\u2028lk,2024-01-02,-1", "u1,b", *DAYS[1:])
    refused = inspect_data(str(shop))["refused"]
    assert [row["row"] for row in refused] == [3, 4, 5]
    assert refused[1]["item_id"] == "mi\u2028lk"


def test_a_folder_without_a_valid_row_is_reported_like_any_other(shop: Path, tmp_path: Path) -> None:
    write(shop, "u1,b,i,2024-01-02,-3")
    done = reco(tmp_path, "check", str(shop))
    assert (done.exit_code, "0 valid rows" in done.output) == (1, True)
    assert "1 row refused, 100.0% of all" in done.output
    assert "max_quarantine_ratio" not in done.output, "no limit lets a run begin without a row"


def test_repeated_rows_count_as_they_do_in_a_run(shop: Path) -> None:
    write(shop, *DAYS * 3, "u1,b,i,2024-01-02,-3", "u1,b,i,2024-01-03,-3")
    found = inspect_data(str(shop))
    assert found["refused_ratio"] == round(2 / (3 * len(DAYS) + 2), 6)


def test_a_cut_that_is_impossible_hides_no_refused_row(shop: Path, tmp_path: Path) -> None:
    write(shop, *DAYS[:9], "u1,b,i,2024-01-02,-3")
    done = reco(tmp_path, "check", str(shop))
    lines = done.stdout.splitlines()
    assert (done.exit_code, lines[0]) == (1, f"{shop}: 9 valid rows, 3 users, 9 baskets, 5 items")
    assert lines[2].startswith("a run would stop: the cut 2023-12-06T00:00:00Z leaves no event on one side")
    assert lines[2].endswith("bring more than five weeks")
    assert "1 row refused, 10.0% of all" in lines[3]
    assert "quantity" in done.output
    assert inspect_data(str(shop), "2025-01-01")["stops"].startswith("the cut 2025-01-01T00:00:00Z leaves")


def test_a_typing_error_ends_as_in_a_run_before_anything_is_read(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for arguments, why in (([str(shop / "nope")], "no data"), ([str(shop), "--train-until", "x"], "no date")):
        done = reco(tmp_path, "check", *arguments)
        assert (done.exit_code, why in done.stderr, "reading" in done.stderr) == (2, True, False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    assert inspect_data("toy")["ok"]
    assert "toy is the built-in data set; for the folder here give ./toy" in caplog.messages


def test_what_cannot_be_read_is_an_error_that_says_why(shop: Path, tmp_path: Path) -> None:
    (shop / "events.txt").write_text(HEADER)
    done = reco(tmp_path, "check", str(shop))
    assert (done.exit_code, "holds events.txt, expected events.parquet" in done.output) == (1, True)
