"""An act is repeated beside a block, and its failure is the block's."""

import threading
import time

import pytest

from pipelines.bench.load.waiting import repeating


def test_an_act_is_repeated_until_the_end() -> None:
    done = threading.Event()
    counts: list[int] = []

    def act() -> None:
        counts.append(1)
        if len(counts) == 3:
            done.set()

    with repeating(act, 0.001):
        assert done.wait(60)
    seen = len(counts)
    time.sleep(0.02)
    assert len(counts) == seen


def test_an_act_that_failed_fails_the_block() -> None:
    tried = threading.Event()

    def act() -> None:
        tried.set()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), repeating(act, 0.001):
        assert tried.wait(60)
