"""The file of excluded items: read, read again, and never trusted blindly."""

import errno
import os
from pathlib import Path

import pytest

from serving.shop.availability import AvailabilityFile
from tests.serving.shop.test_watched_file import two_looks


def test_no_file_excludes_nothing(tmp_path: Path) -> None:
    assert two_looks(AvailabilityFile(tmp_path / "none.json")) == [None, None]


def test_a_changed_file_is_read_and_a_removed_one_excludes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "availability.json"
    availability = AvailabilityFile(file)
    file.write_text('{"out_of_stock": ["a"], "banned": ["zzz"]}')
    assert two_looks(availability) == [None, ["a", "zzz"]]
    assert availability.changed() is None
    file.unlink()
    assert two_looks(availability) == [None, []]
    assert availability.changed() is None


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"banned": [3]}',
        '{"banned": "b"}',
        '{"banned": ["b"]}x',
        "[" * 100_000,
        '{"out_of_stok": ["b"]}',
        "\xff",
    ],
)
def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "availability.json"
    file.write_text(content)
    availability = AvailabilityFile(file)
    assert two_looks(availability) + two_looks(availability) == [None] * 4
    assert len(caplog.records) == 1
    assert "what was last read stays in force" in caplog.text


def test_the_file_reports_whether_it_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "availability.json"
    availability = AvailabilityFile(file)
    file.write_text('{"banned": ["a"]}')
    assert (two_looks(availability), availability.broken) == ([None, ["a"]], "")
    good = file.stat().st_mtime_ns
    file.write_text('{"banned": [a]}!')
    assert two_looks(availability) == [None, None]
    assert availability.broken
    file.write_text('{"banned": ["a"]}')
    os.utime(file, ns=(good, good))  # the good file is back: nothing changed, and nothing is broken
    assert (two_looks(availability), availability.broken) == ([None, None], "")
    file.write_text("{")
    assert two_looks(availability) == [None, None]
    file.unlink()
    assert (two_looks(availability), availability.broken) == ([None, []], "")


def test_a_file_is_read_again_after_a_failed_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "availability.json"
    file.write_text('{"banned": ["a"]}')
    availability = AvailabilityFile(file)

    def stale(path: Path, max_bytes: int) -> bytes:
        raise OSError(errno.ESTALE, "stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("serving.shop.availability.read_regular", stale)
        assert [availability.changed() for _ in range(3)] == [None] * 3
        assert availability.broken
        assert len(caplog.records) == 1
    assert (availability.changed(), availability.broken) == (["a"], "")


def test_a_file_that_is_not_regular_is_never_opened(tmp_path: Path) -> None:
    """Opening a pipe waits for its other end: the watching thread would block."""
    file = tmp_path / "availability.json"
    os.mkfifo(file)
    assert two_looks(AvailabilityFile(file)) == [None, None]
