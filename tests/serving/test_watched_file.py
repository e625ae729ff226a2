"""A watched file: read when it changes, never trusted blindly; `test_availability` has the rest."""

import logging
from pathlib import Path

import pytest

from serving.watched_file import WatchedFile


def read(file: Path) -> int:
    return int(file.read_text())


def test_what_was_last_read_stays_while_the_file_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "number"
    watched = WatchedFile(file, read, 0, 10, "number")
    assert watched.changed() is None
    file.write_text("7")
    assert watched.changed() == 7
    file.write_text("seven")
    with caplog.at_level(logging.ERROR):
        assert [watched.changed(), watched.changed()] == [None, None]
    assert len(caplog.records) == 1
    assert "what was last read stays in force" in caplog.text
    assert "seven" in watched.broken
    file.write_text("8")
    assert (watched.changed(), watched.broken) == (8, "")
    file.unlink()
    assert (watched.changed(), watched.changed()) == (0, None)


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("12345678901")
    watched = WatchedFile(file, read, 0, 10, "number")
    assert watched.changed() is None
    assert watched.broken == "expected a regular file of at most 10 bytes"
