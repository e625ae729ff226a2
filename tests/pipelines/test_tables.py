import sys

import pytest

from pipelines.tables import SHORT, counted, moment, shortened, size, table


def test_numbers_are_aligned_right_and_words_left() -> None:
    assert table(["name", "n"], [["a", 1], ["bbbbb", 200]]) == "name     n\na        1\nbbbbb  200"


def test_a_table_without_rows_is_its_head() -> None:
    assert table(["name", "n"], []) == "name  n"


def test_a_file_gets_long_cells_whole_and_brackets_as_they_are() -> None:
    long = "[red] " + "x" * 500
    assert table(["name"], [[long]]) == f"name\n{long}"


def test_a_terminal_gets_its_width_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = table(["step", "status"], [["a" * 30, "failed"]])
    assert "\x1b[31mfailed" in shown
    assert len(shown.splitlines()) > 2, "the long cell is wrapped"
    assert "\x1b" not in table(["step"], []).replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_sizes_and_times_are_short() -> None:
    assert (size(1_500_000), size(900)) == ("1.5 MB", "0.9 kB")
    assert moment(0) == "1970-01-01 00:00"


def test_one_thing_is_counted_in_the_singular() -> None:
    assert [counted(number, "line") for number in (0, 1, 1_234)] == ["0 lines", "1 line", "1,234 lines"]


def test_on_a_terminal_a_long_text_is_cut_with_an_ellipsis(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortened("x" * (SHORT + 1)) == "x" * (SHORT + 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shortened("x" * SHORT) == "x" * SHORT
    assert shortened("x" * (SHORT + 1)) == "x" * (SHORT - 1) + "…"
