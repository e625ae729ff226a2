"""A watched file: read when it changes, never trusted blindly."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from feature_repo.atomic_files import read_regular
from serving.shop.watched_file import WatchedFile


def read(file: Path) -> int:
    return int(file.read_text())


def str_of(file: Path) -> str:
    return file.read_text()


def two_looks(watched: WatchedFile[Any]) -> list[Any]:
    return [watched.changed(), watched.changed()]


def test_the_last_value_is_kept_while_the_file_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "number"
    watched = WatchedFile(file, read, 0)
    assert two_looks(watched) == [None, None]
    file.write_text("7")
    assert two_looks(watched) == [None, 7]
    file.write_text("seven")
    with caplog.at_level(logging.ERROR):
        assert two_looks(watched) + two_looks(watched) == [None] * 4
    assert len(caplog.records) == 1
    assert "what was last read stays in force" in caplog.text
    assert "seven" in watched.broken
    file.write_text("8")
    assert (two_looks(watched), watched.broken) == ([None, 8], "")
    file.unlink()
    assert two_looks(watched) + two_looks(watched) == [None, 0, None, None]


def test_a_file_being_written_is_used_once_it_stays_the_same(tmp_path: Path) -> None:
    """A save without a rename: the file is empty, then partial; or it is removed and created again."""
    file = tmp_path / "number"
    file.write_text("700")
    watched = WatchedFile(file, str_of, "nothing")
    assert (two_looks(watched), watched.settled) == ([None, "700"], True)
    for half in ("", "80", "800"):
        file.write_text(half)
        assert (watched.changed(), watched.settled) == (None, False)
    assert watched.changed() == "800"
    file.unlink()
    assert watched.changed() is None
    file.write_text("9000")
    assert two_looks(watched) == [None, "9000"]


def test_a_file_of_a_configmap_is_a_link_and_changes_with_its_folder(tmp_path: Path) -> None:
    file, data = tmp_path / "rules.yaml", tmp_path / "..data"
    watched = WatchedFile(file, lambda place: read_regular(place, 10).decode(), "nothing")
    file.symlink_to("..data/rules.yaml")
    for version in ("1", "2"):
        folder = tmp_path / f"..version-{version}"
        folder.mkdir()
        (folder / "rules.yaml").write_text(version)
        (tmp_path / "next").symlink_to(folder.name)
        (tmp_path / "next").rename(data)  # as the kubelet does
        os.utime(folder / "rules.yaml", ns=(0, int(version)))
        assert two_looks(watched) == [None, version]


def test_a_file_changed_during_a_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("1")
    more = iter(["22", "333"])

    def slowly(place: Path) -> str:
        found = place.read_text()
        if text := next(more, ""):
            place.write_text(text)
        return found

    watched = WatchedFile(file, slowly, "nothing")
    assert [watched.changed() for _ in range(4)] == [None, None, None, "333"]


def test_content_that_comes_back_with_its_old_time_ends_the_fault(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("7")
    watched = WatchedFile(file, read, 0)
    assert (two_looks(watched), watched.broken) == ([None, 7], "")
    good = file.stat().st_mtime_ns
    file.write_text("x")
    assert two_looks(watched) == [None, None]
    assert watched.broken
    file.write_text("7")
    os.utime(file, ns=(good, good))
    assert (two_looks(watched), watched.broken) == ([None, 7], "")


def test_a_file_in_the_place_of_another_of_the_same_time_and_length_is_read(tmp_path: Path) -> None:
    file, other = tmp_path / "number", tmp_path / "other"
    watched = WatchedFile(file, read, 0)
    for number, path in ((7, file), (8, other)):
        path.write_text(str(number))
        os.utime(path, ns=(1, 1))
        path.replace(file)
        assert two_looks(watched) == [None, number]


def test_a_file_is_read_again_after_a_failed_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "number"
    file.write_text("7")
    failures = [OSError(errno.ESTALE, "stale file handle")] * 2

    def read_stale(place: Path) -> int:
        if failures:
            raise failures.pop()
        return read(place)

    watched = WatchedFile(file, read_stale, 0)
    assert [watched.changed() for _ in range(3)] == [None] * 3
    assert watched.broken
    assert len(caplog.records) == 1
    assert (watched.changed(), watched.broken) == (7, "")


def test_a_file_that_is_not_regular_is_never_opened(tmp_path: Path) -> None:
    """Opening a pipe waits for its other end: the watching thread would block."""
    file = tmp_path / "number"
    os.mkfifo(file)
    watched = WatchedFile(file, lambda place: int(read_regular(place, 10)), 0)
    assert two_looks(watched) == [None, None]
    assert "expected a regular file" in watched.broken
