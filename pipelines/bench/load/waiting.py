"""A condition or an act -> waiting until it holds, or the act again and again beside a block."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from feature_repo.errors import UNREACHABLE, RecoError

WAIT_S = 180.0  # for an event that must happen, and may take long on a busy machine
LOOK_S = 0.05  # between two looks: a look takes processor time from the measured system


class NotReached(RecoError, RuntimeError):
    """A part of the system did not start, or an event that an instrument waits for did not happen."""

    exit_code = UNREACHABLE


def wait_for(
    condition: Callable[[], bool], what: str, wait_s: float = WAIT_S, look_s: float = LOOK_S
) -> float:
    """Wait until a condition holds; return the seconds that took.

    Raises:
        NotReached: it did not happen in time.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > wait_s:
            raise NotReached(f"waited {wait_s:g} s in vain: {what}")
        time.sleep(look_s)
    return time.monotonic() - began


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
        except Exception as error:
            over.set()
            if cause := running.exception():
                raise error from cause
            raise
        finally:
            over.set()
        running.result()
