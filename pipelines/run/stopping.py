"""Signals that ask a command to end -> a call of its own way to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a terminal that closes call `stop` until the block ends.

    Under `nohup` a terminal may close. In another than the main thread nothing changes: its owner stops it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
