"""Waiting ends in time; an act is repeated beside a block, and its failure is the block's."""

import threading
import time

import pytest

from pipelines.bench.load.waiting import NotReached, repeating, wait_for


def test_waiting_for_an_event_has_a_timeout() -> None:
    with pytest.raises(NotReached, match="in vain: pigs fly"):
        wait_for(lambda: False, "pigs fly", wait_s=0.01)
    assert wait_for(lambda: True, "nothing") >= 0.0


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


def test_a_block_that_fails_names_the_act_that_failed_before_it() -> None:
    failed = threading.Event()

    def act() -> None:
        failed.set()
        raise ConnectionError("the store is away")

    with pytest.raises(NotReached) as caught, repeating(act, 0.001):
        wait_for(lambda: failed.wait(60) and False, "pigs fly", wait_s=0.01)
    assert str(caught.value.__cause__) == "the store is away"
