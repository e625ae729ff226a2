"""Signals to this process, with the handler that it had before."""

import os
import signal
import threading

import pytest

from pipelines.run.stopping import on_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_calls_the_way_to_end_and_then_its_handler_of_before(number: signal.Signals) -> None:
    heard: list[str] = []
    usual = signal.signal(number, lambda *_: heard.append("before"))
    try:
        with on_stop(lambda: heard.append("stop")):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, usual)
    assert heard == ["stop", "before"]


def test_under_nohup_a_terminal_may_close() -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_stop(lambda: pytest.fail("stopped")):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_another_thread_hears_nothing() -> None:
    found: list[object] = []

    def look() -> None:
        with on_stop(lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
