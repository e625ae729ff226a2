"""Who has waited too long is not begun. Each request has 100 seconds; its turn comes at `now`."""

import contextlib
from collections.abc import Iterator

import pytest

from serving.checkout.admission import CALM_S, PATIENT, PREFETCH, STANDING_S, STRICT, Admission
from serving.checkout.call_headers import Call


def waited(seconds: float, now: float, priority: str = "checkout", given_s: float = 100.0) -> Call:
    arrived = now - seconds
    return Call(arrived, arrived + given_s, "r", priority=priority)


def overloaded(until: float) -> Admission:
    """Return one that has refused without a pause for longer than a burst takes."""
    admission, now = Admission(100.0), until - 2 * STANDING_S
    while now < until:
        assert not admission.admits(waited(99.0, now), now)
        now += CALM_S / 2
    return admission


@contextlib.contextmanager
def computing(admission: Admission, answers: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(answers):
            stack.enter_context(admission.computing())
        yield


@pytest.mark.parametrize(("priority", "limit"), [("checkout", 100 * PATIENT), ("prefetch", 100 * PREFETCH)])
def test_a_burst_may_use_most_of_the_deadline(priority: str, limit: float) -> None:
    assert Admission(100.0).admits(waited(limit - 1, 1e3, priority), 1e3)
    assert not Admission(100.0).admits(waited(limit + 1, 1e3, priority), 1e3)


def test_one_refusal_makes_nothing_strict() -> None:
    admission = Admission(100.0)
    assert not admission.admits(waited(99, 1e3), 1e3)
    assert admission.admits(waited(100 * PATIENT - 1, 1e3), 1e3)


def test_a_queue_that_stands_is_kept_short_and_prefetches_out_of_it() -> None:
    admission = overloaded(until=1e3)
    assert admission.admits(waited(100 * STRICT - 1, 1e3), 1e3)
    assert not admission.admits(waited(100 * STRICT + 1, 1e3), 1e3)
    assert not admission.admits(waited(1, 1e3, "prefetch"), 1e3)


def test_a_wait_that_is_still_to_come_counts_and_makes_no_pause() -> None:
    admission = overloaded(until=1e3)
    assert not admission.admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=2 * CALM_S)
    assert Admission(100.0).admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=100 * PREFETCH - 2)
    assert not Admission(100.0).admits(waited(1, 1e3, "prefetch"), 1e3, ahead_s=100 * PREFETCH)


def test_after_a_pause_it_is_patient_again() -> None:
    admission, now = overloaded(until=1e3), 1e3 + 2 * CALM_S
    assert admission.admits(waited(100 * PATIENT - 1, now), now)
    assert admission.admits(waited(100 * PREFETCH - 1, now, "prefetch"), now)


def test_prefetches_that_are_refused_make_nothing_strict() -> None:
    admission, now = overloaded(until=1e3), 1e3
    while now < 1e3 + 4 * STANDING_S:
        admission.admits(waited(1, now, "prefetch"), now)
        now += CALM_S / 4
    assert admission.admits(waited(1, now, "prefetch"), now)
    assert admission.admits(waited(100 * PATIENT - 1, now), now)


def test_a_caller_in_a_hurry_makes_nothing_strict() -> None:
    admission, now = Admission(100.0), 1e3
    while now < 1e3 + 4 * STANDING_S:
        assert not admission.admits(waited(1, now, given_s=1.0), now)
        now += CALM_S / 4
    assert admission.admits(waited(100 * PATIENT - 1, now), now)


def test_refusals_apart_from_each_other_are_bursts() -> None:
    admission = Admission(100.0)
    for now in range(1_000, 1_100):
        assert not admission.admits(waited(99, now), now)
    assert admission.admits(waited(100 * PATIENT - 1, 1_100), 1_100)


def test_those_who_have_begun_are_in_front() -> None:
    admission = Admission(100.0)
    for second in range(0, 4_000, 4):
        admission.served(second, second + 2)  # each takes two seconds, and two it rests
    now = 5_000
    with computing(admission, 10):
        assert admission.admits(waited(100 * PATIENT - 21, now), now)
        assert not admission.admits(waited(100 * PATIENT - 19, now), now)
    assert admission.admits(waited(100 * PATIENT - 1, now + 1), now + 1)


def test_answers_that_were_made_together_share_their_time() -> None:
    admission = Admission(100.0)
    for second in range(0, 4_000, 4):
        admission.served(second, second + 2)
        admission.served(second, second + 2)  # joined: the second of them cost nothing more
    now = 5_000
    with computing(admission, 10):
        assert admission.admits(waited(100 * PATIENT - 11, now), now)
        assert not admission.admits(waited(100 * PATIENT - 9, now), now)
