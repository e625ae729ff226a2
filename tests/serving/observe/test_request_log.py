"""One line of JSON an answer, with a hash in place of the shopper, written in the background."""

import io
import json
import re
import threading
from pathlib import Path
from select import PIPE_BUF
from typing import Any

import pytest

from serving.checkout.checkout import Turn
from serving.observe import request_log
from serving.observe.request_log import RequestLog, hash_user
from serving.schemas import Call, Recommendation, Request, Response
from tests.chaos.stuck import Stuck
from tests.serving.conftest import metric

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def turn(user_id: str | None = "u1", request_id: str = "r1") -> Turn:
    """Return a turn that waited 2 ms for other requests."""
    items = (Recommendation("1", 0.5, "history", "bought"), Recommendation("2", 0.25, "popular", "popular"))
    response = Response(request_id, items, "b1", "full", True, "late", {"total": 1.23456})
    call = Call(100.0, 100.05, "given", "/v1/recommendations", "prefetch", f"00-{TRACE}-{SPAN}-01")
    request = Request(("7", "8"), 1e9, user_id, "s1", 10, request_id)
    return Turn(request, call, None, 100.002, response=response)  # type: ignore[arg-type]


def lines(*turns: Turn, key: str = "k") -> list[dict[str, object]]:
    stream = io.BytesIO()
    log = RequestLog(stream, key)
    for one in turns:
        log.observe(one)
    log.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_shows_the_outcome_of_a_request() -> None:
    (line,) = lines(turn())
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("timestamp")))
    assert line == {
        "event": "answered",
        "severity": "INFO",
        "trace_id": TRACE,
        "span_id": SPAN,
        "request_id": "r1",
        "route": "/v1/recommendations",
        "priority": "prefetch",
        "user": hash_user("u1", b"k"),
        "store_id": "s1",
        "basket_lines": 2,
        "k": 10,
        "items": 2,
        "bundle_id": "b1",
        "rung": "full",
        "degraded_reason": "late",
        "queue_ms": 2.0,
        "stage_ms": {"total": 1.235},
    }


def test_the_page_of_the_log_names_each_field() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/request.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Request log\n")
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    (line,) = lines(turn())
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(line)


def test_lines_come_in_order_and_all_of_them() -> None:
    ids = [f"r{number}" for number in range(200)]
    assert [line["request_id"] for line in lines(*(turn(request_id=one) for one in ids))] == ids


def test_a_write_is_no_longer_than_a_pipe_keeps_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the lines of several processes, which share a pipe, get into each other."""
    monkeypatch.setattr(request_log, "POLL_S", 600.0)  # all lines are written at the end
    writes: list[bytes] = []

    class Pipe(io.BytesIO):
        def write(self, data: Any) -> int:
            writes.append(bytes(data))
            return len(data)

    long = "x" * 2 * PIPE_BUF
    log = RequestLog(Pipe(), "k")
    for name in ["r"] * 50 + [long] + ["r"] * 50:
        log.observe(turn(request_id=name))
    log.close()
    counts = [write.count(b"\n") for write in writes]
    assert sum(counts) == 101
    assert all(write.endswith(b"\n") for write in writes)
    assert [count for count, write in zip(counts, writes, strict=True) if len(write) > PIPE_BUF] == [1]
    assert len(writes) < 50, "several lines at once where they fit"


def test_a_shopper_is_a_keyed_hash() -> None:
    first, again, other, anonymous = lines(turn(), turn(), turn("u2"), turn(None))
    assert first["user"] == again["user"] != other["user"]
    assert anonymous["user"] is None
    assert lines(turn(), key="another")[0]["user"] != first["user"]
    assert lines(turn(), key="")[0]["user"] != lines(turn(), key="")[0]["user"]  # each log makes a key
    assert "u1" not in json.dumps(first)


def test_lines_that_are_not_read_are_dropped_and_counted_without_waiting() -> None:
    before, read = metric("reco_request_log_dropped_total"), threading.Event()
    log = RequestLog(Stuck(read), "k")
    for _ in range(2 * request_log.QUEUE_LINES):
        log.observe(turn())
    dropped = metric("reco_request_log_dropped_total") - before
    assert dropped >= request_log.QUEUE_LINES - 64  # the thread may have taken some
    read.set()
    log.close()


def test_logging_to_a_closed_pipe_raises_nothing() -> None:
    stream = io.BytesIO()
    stream.close()
    log = RequestLog(stream, "k")
    log.observe(turn())
    log.close()
