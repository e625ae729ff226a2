"""Requests that warm the cache before the first shopper asks."""

from pathlib import Path

import numpy as np
import pytest

from serving.answer import warming
from serving.answer.warming import frequent_requests, warm
from serving.prediction_log import PredictionLog, Record
from serving.schemas import Request, Response


def requests(count: int) -> list[Request]:
    return [Request((f"item-{number}",), 0.0) for number in range(count)]


class Asked:
    """Answers in one second of the test's own clock, and records the requests."""

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


def test_warm_up_keeps_the_order_and_continues_after_a_failure() -> None:
    asked = Asked()
    warm(requests(5), asked, 100.0, clock=asked.clock)
    assert asked.items == [f"item-{number}" for number in range(5)]


def test_warm_up_ends_at_its_time_limit() -> None:
    asked = Asked()
    warm(requests(50), asked, 3.0, clock=asked.clock)
    warm(requests(50), asked, 0.0, clock=asked.clock)
    assert len(asked.items) == 3


def test_warm_up_rests_between_requests() -> None:
    asked, rested = Asked(), list[float]()
    warm(requests(2), asked, rest=rested.append, clock=asked.clock)
    assert rested == [1.0, 1.0]


def record_of(basket: tuple[str, ...], user_id: str | None = None, store_id: str | None = "s") -> Record:
    response = Response("r", (), "b", "full", degraded=False, degraded_reason=None, stage_ms={})
    return Record(
        Request(basket, 1.0, user_id, store_id, 10, "r"), response, np.empty((0, 1), np.float32), 1.0
    )


def write_log(directory: Path, records: list[Record]) -> None:
    log = PredictionLog(directory, ["feature"], poll_s=0.01)
    for record in records:
        log.append(record)
    log.close()


def baskets_in(directory: Path) -> list[tuple[str, ...]]:
    return [request.basket for request in frequent_requests(directory, 0.0)]


def test_the_most_frequent_requests_of_anonymous_shoppers_come_first(tmp_path: Path) -> None:
    twice, thrice, once = ("a", "b"), ("c",), ("d",)
    baskets = [twice, thrice, once, twice[::-1], thrice, thrice]
    known = [record_of(("k",), user_id="u1")] * 5
    write_log(tmp_path, [*known, *map(record_of, baskets), record_of(thrice, store_id=None)])
    (tmp_path / "9.parquet").symlink_to("gone")  # listed, and deleted before it is opened
    requests = frequent_requests(tmp_path, at=7.0)
    assert [request.basket for request in requests] == [thrice, twice], "in any order; none asked once"
    assert {(request.user_id, request.store_id, request.at) for request in requests} == {(None, "s", 7.0)}


def test_only_a_limited_number_of_newest_records_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, [record_of(("old",))] * 2)
    for path in tmp_path.glob("*.parquet"):
        path.rename(tmp_path / f"2020{path.name}")
    write_log(tmp_path, [*[record_of(("new",))] * 3, *[record_of(("other",))] * 2])
    assert baskets_in(tmp_path) == [("new",), ("other",), ("old",)]
    monkeypatch.setattr(warming, "MOST_RECORDS", 5)
    assert baskets_in(tmp_path) == [("new",), ("other",)]
    monkeypatch.setattr(warming, "MOST_REQUESTS", 1)
    assert baskets_in(tmp_path) == [("new",)]


def test_without_a_log_no_request_is_warmed(tmp_path: Path) -> None:
    assert frequent_requests(tmp_path / "none", 0.0) == []
