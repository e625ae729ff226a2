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

    A signal that is ignored stays so: under `nohup` a terminal may close. In another thread than the main one
    nothing changes: its owner stops it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
