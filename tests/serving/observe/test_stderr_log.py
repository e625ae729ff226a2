"""Lines reach stderr in order, without holding up the code that logs, and without an error's message."""

import io
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from serving.errors import RankerUnavailable
from serving.observe import stderr_log
from serving.observe.stderr_log import (
    MAX_ERRORS,
    BackgroundHandler,
    OncePerSecond,
    log_to,
    traceback_without_messages,
    write_whole,
)
from serving.schemas import TRACEPARENT, read_call
from serving.stores.circuit_breaker import FAILURES, CircuitBreaker
from tests.chaos.stuck import Stuck
from tests.serving.conftest import metric


def dropped() -> float:
    return metric("reco_request_log_dropped_total")


def warn(handler: BackgroundHandler, text: str, *args: object) -> None:
    handler.handle(logging.LogRecord("serving", logging.WARNING, "file.py", 7, text, args, None))


def test_lines_come_whole_and_in_order() -> None:
    stream = io.BytesIO()
    handler = BackgroundHandler(stream)
    for number in range(100):
        warn(handler, "store %s \ud800", number)
    handler.close()
    assert stream.getvalue().decode().splitlines() == [f"store {n} \\ud800" for n in range(100)]


def test_lines_that_are_not_read_are_dropped_and_counted_without_waiting() -> None:
    before, read = dropped(), threading.Event()
    stream = Stuck(read)
    handler = BackgroundHandler(stream)
    for number in range(10_000):  # no call returns here if one of them waits
        warn(handler, "line %s", number)
    lost = dropped() - before
    assert 10_000 - stderr_log.QUEUE_LINES - lost in (0, 1)  # the thread holds one line
    read.set()
    handler.close()
    assert len(stream.getvalue().splitlines()) == 10_000 - lost
    assert stream.getvalue().startswith(b"line 0\nline 1\n")


def test_logging_to_a_closed_pipe_raises_nothing() -> None:
    before, stream = dropped(), io.BytesIO()
    stream.close()
    handler = BackgroundHandler(stream)
    warn(handler, "gone")
    warn(handler, "gone")
    handler.close()
    assert dropped() - before == 2


def test_a_pipe_that_does_not_block_gets_whole_lines() -> None:
    line, (reading, writing) = b"x" * 200_000 + b"\n", os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb") as reader, open(writing, "wb", buffering=0) as stream:
        thread = threading.Thread(target=write_whole, args=(stream, line))
        thread.start()
        assert reader.read(len(line)) == line
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_ends_though_its_stderr_is_not_read(
    monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    begin = "import logging, sys\nfrom serving.observe.stderr_log import log_to\nlog_to(sys.stderr.buffer)\n"
    many = "logging.warning('x' * 4_096)\n" * (2 * stderr_log.QUEUE_LINES)  # each is raised in another place
    with subprocess.Popen([sys.executable, "-c", begin + many], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    command = [sys.executable, "-c", begin + "logging.warning('bye')"]
    line = json.loads(subprocess.run(command, capture_output=True, check=True).stderr)
    del line["timestamp"]
    assert line == {"event": "log", "severity": "WARN", "logger": "root", "message": "bye"}


def test_a_repeated_line_appears_once_a_second_with_the_number_held_back() -> None:
    once = OncePerSecond(every_s=1.0)

    def written(second: float) -> str | None:
        record = logging.LogRecord("serving", logging.WARNING, "file.py", 7, "store %s", ("gone",), None)
        record.created = second
        return record.getMessage() if once.filter(record) else None

    assert [written(s) for s in (10.0, 10.1, 10.9)] == ["store gone", None, None]
    assert written(11.5) == "store gone (and 2 more like it before)"
    assert written(13.0) == "store gone"
    assert written(3.0) == "store gone", "a clock that was set back silences nothing"


def test_two_dependencies_that_fail_at_once_are_both_named() -> None:
    stream = io.BytesIO()
    handler = BackgroundHandler(stream)
    handler.addFilter(OncePerSecond(every_s=3_600.0))
    parent = logging.getLogger("serving.stores.circuit_breaker")
    parent.addHandler(handler)
    try:
        for name in ("online_store", "ranker"):
            breaker = CircuitBreaker(name, lambda: False)
            for _ in range(FAILURES):
                breaker.failed("down")
            breaker.close()
    finally:
        parent.removeHandler(handler)
        handler.close()
    lines = stream.getvalue().decode().splitlines()
    assert [line.split()[0] for line in lines] == ["online_store", "ranker"]


# ----------------------------------------------------------------------------------- tracebacks

CANARY = "CANARY-SHOPPER"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def raised(error: Exception, context: Exception | None = None) -> Exception:
    """Return an error that was raised, while another one was handled if it is given."""
    try:
        try:
            raise context or error
        except KeyError:
            raise error  # noqa: B904 - the context is set without `from`
    except type(error) as caught:
        return caught


def test_a_traceback_has_places_and_types_and_no_value() -> None:
    text = traceback_without_messages(raised(ValueError(CANARY), KeyError(CANARY)))
    assert CANARY not in text
    assert text.count("in raised") == 2
    assert text.splitlines()[-1] == "KeyError"
    assert "\nValueError\nwhich came after:\n" in text


def test_messages_of_our_own_errors_and_of_the_system_s_stay() -> None:
    ours, system = RankerUnavailable("no route"), OSError(28, "No space left on device")
    assert traceback_without_messages(raised(ours)).endswith("\nRankerUnavailable: no route")
    assert "No space left" in traceback_without_messages(raised(system, KeyError(CANARY)))


def test_a_cycle_of_error_causes_is_cut_off() -> None:
    error = raised(KeyError(CANARY))
    error.__cause__ = ValueError(CANARY)
    error.__cause__.__cause__ = error
    assert traceback_without_messages(error).count("which came after") == MAX_ERRORS - 1


def test_the_endpoint_s_log_has_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    written, root = io.BytesIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    levels = root.level, logging.getLogger("kserve").level
    try:
        log_to(written)
        read_call({"traceparent": f"00-{TRACE}-{SPAN}-01"}, "gRPC", 1.0)
        logging.getLogger("serving").error("predict failed", exc_info=raised(KeyError(CANARY)))
        root.handlers[0].close()
    finally:
        TRACEPARENT.set(None)
        root.setLevel(levels[0])
        logging.getLogger("kserve").setLevel(levels[1])
    text = written.getvalue().decode()
    line = json.loads(text)
    assert (line["message"], line["severity"]) == ("predict failed", "ERROR")
    assert (line["trace_id"], line["span_id"]) == (TRACE, SPAN)
    assert line["exception.type"] == "KeyError"
    assert line["exception.stacktrace"].endswith("\nKeyError")
    assert CANARY not in text
