"""Steering knows no clock and no model: what it decides follows from the numbers it is told."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.bench.load.virtual_time import VirtualLoop
from serving.checkout.batch_steering import LOOK_EVERY, MAX_WAIT_MS, WAIT_SHARE, CallCost, Steering
from serving.checkout.batching import Batcher

GOAL_MS = 15.0
NOW = 0.0  # where the time of a call does not matter
Cost = Callable[[int], float]


def device(rows: int) -> float:
    """An accelerator: a call costs 1 ms whatever it does, a row a microsecond."""
    return 1.0 + 0.001 * rows


def processor(rows: int) -> float:
    """This processor's ranker: more rows cost a little more each, a call nothing by itself."""
    return 0.0006 * rows * (1 + rows / 64_000)


def learnt(cost: Cost, max_wait_ms: float = MAX_WAIT_MS) -> Steering:
    """Steering that has seen calls of one, one and four requests."""
    steering = Steering(GOAL_MS, max_wait_ms=max_wait_ms)
    for _ in range(40):
        for rows in (400, 500, 2_000):
            steering.ran(NOW, rows, max(rows // 500, 1), cost(rows), queued=True)
    return steering


@pytest.mark.parametrize(("fixed_ms", "row_ms"), [(1.0, 0.001), (0.0, 0.0006), (3.0, 0.0)])
def test_the_cost_of_a_call_is_found(fixed_ms: float, row_ms: float) -> None:
    cost = CallCost()
    for rows in (1, 10, 100, 400, 2_000) * 3:
        cost.add(rows, fixed_ms + row_ms * rows)
    assert cost.line() == pytest.approx((fixed_ms, row_ms))


def test_slow_calls_now_and_then_do_not_move_the_cost() -> None:
    cost = CallCost()
    for number in range(75):
        for rows in (100, 400, 2_000):
            cost.add(rows, 500.0 if number % 4 == 0 else device(rows))
    assert cost.line() == pytest.approx((1.0, 0.001))


def test_one_size_says_nothing_about_what_joining_saves() -> None:
    cost = CallCost()
    assert cost.line() is None
    for rows in (500, 510, 515, 520):
        cost.add(rows, device(rows))
    assert cost.line() is None


def test_a_cost_that_grows_faster_than_its_rows_has_no_fixed_part() -> None:
    cost = CallCost()
    for rows in (500, 2_000, 8_000, 32_000) * 3:
        cost.add(rows, processor(rows))
    line = cost.line()
    assert line is not None
    assert line[0] == 0


def test_where_joining_saves_nothing_requests_are_run_alone() -> None:
    steering = learnt(processor)
    assert steering.alone()
    assert steering.state()["decision"] == "alone"
    assert steering.state()["why"] == "joining saves less than it costs"
    assert steering.window_ms(rush(steering, 5_000, 0.95, 100)) == 0


def test_where_the_fixed_cost_is_most_of_a_call_requests_are_joined() -> None:
    steering = learnt(device)
    assert not any(steering.alone() for _ in range(3 * LOOK_EVERY))
    state = steering.state()
    assert (state["decision"], state["why"]) == ("join", "joining saves the fixed cost")
    assert (state["fixed_ms"], state["row_ms"]) == pytest.approx((1.0, 0.001))


def test_until_it_is_known_what_joining_saves_requests_are_joined() -> None:
    steering = Steering(GOAL_MS)
    assert not steering.alone()
    assert steering.state()["why"] == "not known yet"


def test_where_nobody_comes_to_be_joined_requests_are_run_alone() -> None:
    steering = learnt(device)
    for _ in range(200):
        steering.ran(NOW, 500, 1, device(500), queued=True)
    assert steering.alone()
    assert steering.state()["why"] == "nobody to join"
    for _ in range(3):
        steering.ran(NOW, 2_000, 4, device(2_000), queued=True)
    assert not steering.alone()


def test_who_was_left_waiting_counts_as_somebody_to_join() -> None:
    steering = learnt(device)
    for _ in range(200):
        steering.ran(NOW, 1_000, 1, device(1_000), queued=True, full=True)
    assert not steering.alone()


def test_one_request_in_many_looks_whether_joining_would_pay() -> None:
    steering = learnt(processor)
    looks = [not steering.alone() for _ in range(10 * LOOK_EVERY)]
    assert sum(looks) == 10
    assert not any(looks[: LOOK_EVERY - 1])


def test_a_change_of_the_cost_is_found_out() -> None:
    steering = learnt(processor)
    for _ in range(60):
        for rows in (400, 500):
            steering.ran(NOW, rows, 1, device(rows), queued=False)
        steering.ran(NOW, 2_000, 4, device(2_000), queued=True)
    assert not steering.alone()


def test_a_look_joins_two_and_no_more() -> None:
    steering = learnt(processor)
    steering.limit_rows = 4_000
    for _ in range(200):
        steering.ran(NOW, 500, 1, processor(500), queued=False)
    assert steering.batch_rows() == pytest.approx(1_000, abs=5)
    hopeful = learnt(device)
    hopeful.limit_rows = 4_000
    assert hopeful.batch_rows() == 4_000


def little_fixed(rows: int) -> float:
    """A processor again: 20 microseconds a call, 0.4 ms of a request's 500 rows."""
    return 0.02 + 0.0008 * rows


def waits_ms(steering: Steering, load: float, asks: int = 6_000) -> np.ndarray:
    """Ask a batcher at random times of a virtual clock; what each of the second half waited, in ms."""
    loop = VirtualLoop()
    per_s = load * 1e3 / little_fixed(500)
    times = np.cumsum(np.random.default_rng(0).exponential(1 / per_s, asks)).tolist()
    waited = np.zeros(asks)

    def run(bundle_id: str, works: Sequence[int]) -> list[Exception | None]:
        loop.work(little_fixed(sum(works)))
        return [None] * len(works)

    batcher = Batcher(run, steering, stage="test", clock=loop.time)

    async def ask(number: int, at: float) -> None:
        await asyncio.sleep(at - loop.now)
        await batcher.ask(500, rows=500, bundle_id="")
        waited[number] = (loop.now - at) * 1e3

    async def ask_all() -> None:
        await asyncio.gather(*(ask(number, at) for number, at in enumerate(times)))

    try:
        loop.run_until_complete(ask_all())
    finally:
        loop.close()
    return waited[asks // 2 :]


class OneACall(Steering):
    """Never joins."""

    def alone(self) -> bool:
        return True


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_where_a_call_costs_its_rows_the_tail_is_that_of_one_call_each(load: float) -> None:
    """A share `load` of what one request a call could answer, at random times; no time of this machine."""
    steering = Steering(GOAL_MS, max_wait_ms=5.0)
    steered, alone = (np.percentile(waits_ms(s, load), 99) for s in (steering, OneACall(GOAL_MS)))
    assert steering.state()["decision"] == "alone"
    assert steering.state()["why"] == "joining saves less than it costs"
    assert (steering.state()["fixed_ms"], steering.state()["row_ms"]) == pytest.approx((0.02, 0.0008))
    assert steered <= 1.03 * alone


def rush(steering: Steering, per_s: float, busy_ratio: float, calls: int, since: float = 0.0) -> float:
    """Let calls for two requests each follow one another; return when the last one ended."""
    now = since
    for _ in range(calls):
        now += 2 / per_s
        steering.arrived(now)
        steering.arrived(now)
        steering.ran(now, 1_000, 2, busy_ratio * 2e3 / per_s, queued=True)
    return now


def busy(max_wait_ms: float = MAX_WAIT_MS) -> Steering:
    """Steering before the device, whatever calls take from now on."""
    steering = learnt(device, max_wait_ms)
    steering._cost.add = lambda rows, call_ms: None  # type: ignore[method-assign]
    return steering


@pytest.mark.parametrize(
    ("per_s", "busy_ratio", "window_ms"),
    [
        (100, 0.15, 0.0),
        (1_000, 0.89, 0.0),
        (1_000, 0.95, 3.0),  # a fifth of the goal, though 5 ms were allowed
        (2_000, 1.0, 0.0),  # the rows alone take all the time: no wait would be enough
    ],
)
def test_the_window_opens_only_while_calls_fill_the_time(
    per_s: float, busy_ratio: float, window_ms: float
) -> None:
    steering = busy(max_wait_ms=5.0)
    last = rush(steering, per_s, busy_ratio, 200)
    assert steering.window_ms(last) == pytest.approx(window_ms)
    assert steering.state()["decision"] == ("wait" if window_ms else "join")
    assert steering.state()["busy_ratio"] == pytest.approx(busy_ratio)
    assert steering.state()["requests_per_s"] == pytest.approx(per_s, rel=0.05)


def test_the_window_opens_by_steps_and_halves() -> None:
    steering = busy()
    last = rush(steering, 1_000, 0.95, 40)
    before = steering.window_ms(last)
    last = rush(steering, 1_000, 0.95, 1, last)
    assert steering.window_ms(last) == pytest.approx(min(before + 0.1, 3.0))
    steering.ran(last, 1_000, 2, 0.1, queued=True, full=True)
    assert steering.window_ms(last) == pytest.approx(min(before + 0.1, 3.0) / 2), (
        "full: nobody more could join"
    )


def test_the_window_shuts_when_requests_stop_coming() -> None:
    steering = busy()
    last = rush(steering, 1_000, 0.95, 100)
    assert steering.window_ms(last) > 0
    assert steering.window_ms(last + 1.0) == 0


def test_late_calls_halve_the_limit_and_punctual_full_ones_raise_it_by_a_request() -> None:
    steering = learnt(device)
    steering.limit_rows = 4_000
    steering.ran(NOW, 3_900, 4, GOAL_MS / 2 + 0.1, queued=True)
    assert steering.limit_rows == 4_000, "one late call in a hundred is what a p99 forgives"
    steering.ran(NOW, 3_900, 4, GOAL_MS / 2 + 0.1, queued=True)
    assert steering.limit_rows == 1_950
    assert steering.state()["halved"] == 1
    request_rows = steering.state()["rows_per_request"]
    steering.ran(NOW, 1_900, 4, GOAL_MS / 2 - 0.1, queued=True)
    assert steering.limit_rows == 1_950, "the limit was not reached"
    steering.ran(NOW, 1_900, 4, GOAL_MS / 2 - 0.1, queued=True, full=True)
    assert steering.limit_rows == pytest.approx(1_950 + request_rows, rel=0.05)


def test_one_slow_request_alone_is_not_cut_smaller() -> None:
    steering = learnt(device)
    before = steering.limit_rows
    for _ in range(10):
        steering.ran(NOW, 900, 1, 100.0, queued=True, full=True)
    assert steering.limit_rows == before


def test_requests_bigger_than_the_limit_raise_it() -> None:
    steering = Steering(GOAL_MS)
    steering.limit_rows = 10
    for _ in range(200):
        steering.ran(NOW, 500, 1, 1.5, queued=True, full=True)
    assert steering.limit_rows > 1_000


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"goal_ms": 0.0}, "goal_ms is 0.0"),
        ({"goal_ms": float("nan")}, "goal_ms is nan"),
        ({"max_wait_ms": 10.5}, "expected 0 to 10"),
        ({"max_wait_ms": -1.0}, "expected 0 to 10"),
        ({"max_rows": 0}, "expected at least 1"),
    ],
)
def test_a_limit_out_of_range_is_told(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Steering(**{"goal_ms": GOAL_MS, **limits})  # type: ignore[arg-type]


@settings(deadline=None)  # of wall time: a busy machine takes slices of its own
@given(
    goal_ms=st.floats(0.1, 1_000),
    max_wait_ms=st.floats(0, MAX_WAIT_MS),
    max_rows=st.integers(1, 10_000),
    per_s=st.floats(0.1, 1e5),
    fixed_ms=st.floats(0, 50),
    row_ms=st.floats(0, 0.1),
    calls=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 100), st.booleans()), max_size=60),
)
def test_the_settings_hold_whatever_is_measured(
    goal_ms: float,
    max_wait_ms: float,
    max_rows: int,
    per_s: float,
    fixed_ms: float,
    row_ms: float,
    calls: list[tuple[int, float, bool]],
) -> None:
    steering = Steering(goal_ms, max_wait_ms=max_wait_ms, max_rows=max_rows)
    for rows in (10, 100, 1_000) * 3:
        steering.ran(NOW, rows, 1 + rows // 100, fixed_ms + row_ms * rows, queued=True)
    now = 0.0
    for requests, call_ms, full in calls:
        now += requests / per_s
        for _ in range(requests):
            steering.arrived(now)
        steering.ran(now, requests * 300, requests, call_ms, queued=True, full=full)
        assert 1 <= steering.limit_rows <= max_rows
        assert 0 <= steering.window_ms(now) <= min(max_wait_ms, WAIT_SHARE * goal_ms)
