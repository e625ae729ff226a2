import io
import logging
import subprocess
import sys
import threading

import pytest
from prometheus_client import REGISTRY

from serving.observe import stderr_log
from serving.observe.stderr_log import Aside, Seldom
from tests.chaos.stuck import Stuck


def dropped() -> float:
    return REGISTRY.get_sample_value("reco_request_log_dropped_total") or 0.0


def warn(handler: Aside, text: str, *args: object) -> None:
    handler.handle(logging.LogRecord("serving", logging.WARNING, "file.py", 7, text, args, None))


def test_lines_come_whole_and_in_order() -> None:
    stream = io.BytesIO()
    handler = Aside(stream)
    for number in range(100):
        warn(handler, "store %s \ud800", number)
    handler.close()
    assert stream.getvalue().decode().splitlines() == [f"store {n} \\ud800" for n in range(100)]


def test_what_nobody_reads_is_dropped_and_counted_and_holds_up_nobody() -> None:
    before, read = dropped(), threading.Event()
    stream = Stuck(read)
    handler = Aside(stream)
    for number in range(10_000):  # none of them returns if one waits
        warn(handler, "line %s", number)
    lost = dropped() - before
    assert lost in (10_000 - stderr_log.QUEUE_LINES, 10_000 - stderr_log.QUEUE_LINES - 1)  # one is held out
    read.set()
    handler.close()
    assert len(stream.getvalue().splitlines()) == 10_000 - lost
    assert stream.getvalue().startswith(b"line 0\nline 1\n")


def test_a_closed_pipe_ends_nothing() -> None:
    before, stream = dropped(), io.BytesIO()
    stream.close()
    handler = Aside(stream)
    warn(handler, "gone")
    warn(handler, "gone")
    handler.close()
    assert dropped() - before == 2


@pytest.mark.slow
def test_a_process_ends_though_nobody_reads_what_it_says() -> None:
    begin = "import logging, sys\nfrom serving.observe.stderr_log import log_to\nlog_to(sys.stderr.buffer)\n"
    many = "logging.warning('x' * 4_096)\n" * (2 * stderr_log.QUEUE_LINES)  # each is another place
    with subprocess.Popen([sys.executable, "-c", begin + many], stderr=subprocess.PIPE) as deaf:
        assert deaf.wait(60) == 0
    command = [sys.executable, "-c", begin + "logging.warning('bye')"]
    assert subprocess.run(command, capture_output=True, check=True).stderr.endswith(b" WARNING root: bye\n")


def test_a_line_that_repeats_appears_once_a_second_and_tells_how_often() -> None:
    seldom = Seldom(every_s=1.0)

    def said(second: float) -> str | None:
        record = logging.LogRecord("serving", logging.WARNING, "file.py", 7, "store %s", ("gone",), None)
        record.created = second
        return record.getMessage() if seldom.filter(record) else None

    assert [said(s) for s in (10.0, 10.1, 10.9)] == ["store gone", None, None]
    assert said(11.5) == "store gone (and 2 more like it before)"
    assert said(13.0) == "store gone"
