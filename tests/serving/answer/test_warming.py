"""Requests that are asked before any shopper does."""

from pathlib import Path

import pytest

from serving.answer.warming import Warmed, read_warming, warm
from serving.schemas import Request


def requests(count: int) -> list[Request]:
    return [Request((f"item-{number}",), 0.0) for number in range(count)]


class Asked:
    """Answers in one second of the test's own clock, and remembers what."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.now = 0.0

    def __call__(self, request: Request) -> None:
        self.now += 1.0
        self.items.append(request.basket[0])
        if request.basket[0] == "item-2":
            raise ValueError("cannot be answered")

    def clock(self) -> float:
        return self.now


def test_all_are_asked_in_their_order_and_one_that_fails_stops_nothing() -> None:
    asked = Asked()
    assert warm(requests(5), asked, 100.0, clock=asked.clock) == Warmed(5, 0, 5.0)
    assert asked.items == [f"item-{number}" for number in range(5)]


def test_it_ends_when_its_time_is_over() -> None:
    asked = Asked()
    assert warm(requests(50), asked, 3.0, clock=asked.clock) == Warmed(3, 47, 3.0)
    assert warm(requests(50), asked, 0.0, clock=asked.clock).asked == 0


def test_it_rests_as_long_as_it_is_told() -> None:
    asked, rested = Asked(), list[float]()
    assert warm(requests(2), asked, rest=rested.append, clock=asked.clock).asked == 2
    assert rested == [1.0, 1.0]


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "warming.jsonl"
    assert read_warming(file, 5.0) == []
    file.write_bytes(b'{"basket": ["a", "b"], "store_id": "s"}\n{"basket": []}\n')
    first, second = read_warming(file, 5.0)
    assert (first.basket, first.store_id, first.user_id, first.at) == (("a", "b"), "s", None, 5.0)
    assert second.basket == ()
    for broken in (b"{", b'{"basket": 3}\n', b'{"basket": []}\nnothing\n'):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"line \d of .*warming.jsonl is no request"):
            read_warming(file, 5.0)
