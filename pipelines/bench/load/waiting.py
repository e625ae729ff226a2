"""An act and a pause -> the act again and again, beside a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def repeating(act: Callable[[], None], every_s: float) -> Iterator[None]:
    """Act in a thread after each pause until the block ends; an act that failed fails the block then."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            act()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield
        finally:
            over.set()
        running.result()
