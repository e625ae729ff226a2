"""Who has kept us waiting too long, and who goes when there are too many; without a server."""

import resource

import pytest

from serving.api.connections import SPARE_FILES, Waits, room_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_those_whose_time_is_over_are_named_and_no_others() -> None:
    clock = Clock()
    waits = Waits[str](10, clock)
    waits.expect("idle", 5.0)
    waits.expect("slow", 1.0)
    waits.expect("asked", 1.0)
    waits.end("asked")
    assert waits.overdue() == []
    clock.now += 2.0
    assert waits.overdue() == ["slow"]
    waits.expect("slow", 1.0)  # it went on, and has its time anew
    assert waits.overdue() == []
    clock.now += 4.0
    assert waits.overdue() == ["idle", "slow"]


def test_the_one_we_have_waited_for_longest_makes_room() -> None:
    waits = Waits[str](3)
    assert waits.longest() is None
    for one in ("first", "second", "third"):
        waits.expect(one, 60.0)
    assert waits.longest() == "first"
    waits.expect("first", 1.0)  # it asked again: how long it may take now says nothing of that
    assert waits.longest() == "second"
    waits.end("second")
    waits.end("second")
    assert (waits.longest(), len(waits)) == ("third", 2)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    now = {"files": (1_024, 4_096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.update(files=pair))
    return now


def test_a_low_limit_of_open_files_is_raised_as_far_as_it_may_be(limits: dict[str, tuple[int, int]]) -> None:
    assert room_for(200) == 200
    assert limits["files"] == (1_024, 4_096), "there was room already"
    assert room_for(1_000) == 1_000
    assert limits["files"] == (2 * 1_000 + SPARE_FILES, 4_096)
    assert room_for(100_000) == (4_096 - SPARE_FILES) // 2
    assert limits["files"] == (4_096, 4_096)


def test_without_a_limit_there_is_room(limits: dict[str, tuple[int, int]]) -> None:
    limits["files"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert room_for(100_000) == 100_000
