"""A long step says how far it is."""

import logging
from collections.abc import Iterator

import pytest

from components import progress
from components.progress import with_progress


def test_lines_come_at_most_every_ten_seconds_and_name_the_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("components.progress.time.monotonic", lambda: clock[0])

    def parts() -> Iterator[str]:
        for name in "abcde":
            clock[0] += 6
            yield name

    with caplog.at_level(logging.INFO, logger=progress.__name__):
        assert list(with_progress(parts(), 5, "shares")) == list("abcde")
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 5 shares, about 18 s to go",
        "4 of 5 shares, about 6 s to go",
    ]


def test_a_quick_step_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        assert list(with_progress(range(3), 3, "shares")) == [0, 1, 2]
    assert not caplog.records
