"""The batcher under a clock of its own: time goes on while the model runs and while the loop waits."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from pipelines.bench.load.virtual_time import VirtualLoop
from serving.checkout.batch_steering import LOOK_EVERY, Steering
from serving.checkout.batching import AGED_S, Batcher, Priority
from serving.errors import DeadlineExceeded, Overloaded, ScoresInvalid
from serving.release.bundle import load_bundle, open_session
from serving.stages.ranking import Inputs, rank, rank_joined

GOAL_MS = 15.0
CHECKOUT, PREFETCH = Priority


class Shop:
    """A batcher before a model that doubles numbers, and asks that come at given times."""

    def __init__(
        self,
        cost_ms: Callable[[int], float] = lambda rows: 1.0,
        steering: Steering | None = None,
        **options: Any,
    ) -> None:
        self.loop = VirtualLoop()
        self.calls: list[tuple[str, list[Any]]] = []
        self.steering = Steering(GOAL_MS, max_wait_ms=5.0) if steering is None else steering
        self._cost_ms = cost_ms
        self.batcher: Batcher[list[Any], list[Any]] = Batcher(
            self._run, self.steering, stage="test", clock=self.loop.time, **options
        )

    def _run(self, bundle_id: str, works: Sequence[list[Any]]) -> list[list[Any] | Exception]:
        self.calls.append((bundle_id, list(works)))
        self.loop.work(self._cost_ms(sum(map(len, works))))
        if any("poison" in work for work in works):
            raise ArithmeticError("poison")
        return [
            ScoresInvalid("odd") if "odd" in work else [f"{bundle_id}:{row}" for row in work]
            for work in works
        ]

    async def ask(self, work: list[Any], at: float = 0.0, bundle_id: str = "a", **options: Any) -> list[Any]:
        await asyncio.sleep(at - self.loop.now)
        return await self.batcher.ask(work, rows=len(work), bundle_id=bundle_id, **options)

    def all(self, *asks: Awaitable[Any]) -> list[Any]:
        """Return what each of them returned or raised."""

        async def gather() -> list[Any]:
            return await asyncio.gather(*asks, return_exceptions=True)

        try:
            return self.loop.run_until_complete(gather())
        finally:
            self.loop.close()


def linear(rows: int) -> float:
    return 0.01 * rows


def alone(max_rows: int = 8_192) -> Steering:
    """Steering that has found that joining saves nothing."""
    steering = Steering(GOAL_MS, max_rows=max_rows)
    for _ in range(40):
        for rows in (1, 10, 100):
            steering.ran(0.0, rows, 1 + rows // 10, linear(rows), queued=True)
    return steering


def waiting(window_ms: float = 3.0, max_rows: int = 8_192) -> Steering:
    """Steering that waits on purpose, always as long."""
    steering = Steering(GOAL_MS, max_rows=max_rows)
    steering.window_ms = lambda now: window_ms  # type: ignore[method-assign]
    return steering


def test_requests_of_one_turn_of_the_loop_share_a_call() -> None:
    shop = Shop()
    assert shop.all(shop.ask([1, 2]), shop.ask([3]), shop.ask([4, 5, 6])) == [
        ["a:1", "a:2"],
        ["a:3"],
        ["a:4", "a:5", "a:6"],
    ]
    assert shop.calls == [("a", [[1, 2], [3], [4, 5, 6]])]


def test_alone_the_model_is_called_at_once_with_no_event_loop_involved() -> None:
    """Not even a future is made: the coroutine ends without ever being suspended."""
    shop = Shop(linear, alone())
    shop.loop.close()
    for number in range(LOOK_EVERY - 1):
        with pytest.raises(StopIteration) as ended:
            shop.batcher.ask([number], rows=1, bundle_id="a").send(None)
        assert ended.value.value == [f"a:{number}"]
    assert [works for _, works in shop.calls] == [[[number]] for number in range(LOOK_EVERY - 1)]


def test_alone_is_alone_even_when_many_are_ready() -> None:
    shop = Shop(linear, alone())
    shop.all(*(shop.ask([number]) for number in range(LOOK_EVERY - 1)))
    assert {len(works) for _, works in shop.calls} == {1}


def test_what_piles_up_behind_a_look_is_run_one_by_one_where_joining_does_not_pay() -> None:
    shop = Shop(lambda rows: 10.0 * rows, alone(max_rows=4))
    shop.steering._decide = lambda: None  # type: ignore[method-assign]
    shop.steering._until_look = 1
    shop.all(*(shop.ask([number]) for number in range(10)))
    assert [len(works) for _, works in shop.calls] == [4, 1, 1, 1, 1, 1, 1]


def test_a_request_without_rows_is_answered_without_waiting() -> None:
    shop = Shop(steering=waiting())
    assert shop.all(shop.ask([]), shop.ask([1])) == [[], ["a:1"]]
    assert shop.calls == [("a", [[]]), ("a", [[1]])]


def test_bundles_never_share_a_call() -> None:
    shop = Shop()
    answers = shop.all(*(shop.ask([number], bundle_id="ab"[number % 2]) for number in range(6)))
    assert answers == [[f"{'ab'[number % 2]}:{number}"] for number in range(6)]
    assert shop.calls == [("a", [[0], [2], [4]]), ("b", [[1], [3], [5]])]


def test_the_urgent_come_first_then_who_came_first() -> None:
    shop = Shop(steering=Steering(GOAL_MS, max_rows=2))
    priorities = [PREFETCH, CHECKOUT, PREFETCH, CHECKOUT, CHECKOUT]
    shop.all(*(shop.ask([n], priority=priority) for n, priority in enumerate(priorities)))
    assert [works for _, works in shop.calls] == [[[1], [3]], [[4], [0]], [[2]]]


def test_a_checkout_that_comes_during_a_call_goes_before_prefetches_that_waited() -> None:
    shop = Shop(steering=Steering(GOAL_MS, max_rows=1))
    prefetches = [shop.ask([number], priority=PREFETCH) for number in range(8)]
    shop.all(*prefetches, shop.ask(["checkout"], at=0.0005))
    order = [works[0][0] for _, works in shop.calls]
    assert order.index("checkout") <= 3, "the loop needs a turn or two to hear of it"


def test_a_prefetch_that_has_waited_long_is_as_urgent_as_a_checkout() -> None:
    shop = Shop(lambda rows: 10.0, Steering(GOAL_MS, max_rows=1))
    prefetch = shop.ask(["prefetch"], priority=PREFETCH)
    asks = [shop.ask([number], at=max(number - 4, 0) / 200) for number in range(30)]
    answers = shop.all(prefetch, *asks)
    assert answers[0] == ["a:prefetch"]
    order = [works[0][0] for _, works in shop.calls]
    # Its turn comes with the first call that begins after AGED_S; there is more than one checkout a call.
    assert order.index("prefetch") == round(AGED_S / 0.01)


def test_a_batch_holds_no_more_rows_than_the_limit() -> None:
    shop = Shop(steering=Steering(GOAL_MS, max_rows=4))
    shop.all(*(shop.ask([number] * size) for number, size in enumerate([3, 1, 2, 9, 1, 1])))
    assert [[len(work) for work in works] for _, works in shop.calls][:2] == [[3, 1], [2]]
    assert [9] in [[len(work) for work in works] for _, works in shop.calls], (
        "one request alone may have more"
    )


def test_a_request_whose_deadline_passed_while_it_waited_is_not_run() -> None:
    shop = Shop(lambda rows: 10.0, Steering(GOAL_MS, max_rows=1))
    answers = shop.all(shop.ask([1]), shop.ask([2], deadline=0.005), shop.ask([3], deadline=0.015))
    assert answers[0] == ["a:1"]
    assert isinstance(answers[1], DeadlineExceeded)
    assert isinstance(answers[1], TimeoutError)
    assert answers[2] == ["a:3"]
    assert [works for _, works in shop.calls] == [[[1]], [[3]]]


@pytest.mark.parametrize("steering", [alone, waiting])
def test_a_request_that_comes_too_late_is_not_run(steering: Callable[[], Steering]) -> None:
    shop = Shop(steering=steering())
    [answer] = shop.all(shop.ask([1], at=1.0, deadline=0.5))
    assert isinstance(answer, DeadlineExceeded)
    assert "500.0 ms" in str(answer)
    assert not shop.calls


def test_the_wait_on_purpose_is_a_small_share_of_the_time_that_is_left() -> None:
    shop = Shop(steering=waiting(3.0))
    shop.all(shop.ask([1]), shop.ask([2], at=0.001, deadline=0.002), shop.ask([3], at=0.0025))
    assert [works for _, works in shop.calls] == [[[1], [2]], [[3]]]
    assert shop.loop.now == pytest.approx(0.0025 + 0.003 + 0.001)


def test_requests_that_come_during_the_window_share_a_call() -> None:
    shop = Shop(steering=waiting(3.0))
    shop.all(*(shop.ask([number], at=number / 1e3) for number in (0, 1, 2, 4)))
    assert [works for _, works in shop.calls] == [[[0], [1], [2]], [[4]]]


def test_nobody_waits_on_purpose_for_a_batch_that_is_full() -> None:
    shop = Shop(steering=waiting(3.0))
    shop.steering.limit_rows = 2
    shop.all(shop.ask([0]), shop.ask([1], at=0.001))
    assert shop.loop.now == pytest.approx(0.002)


def test_the_rows_of_a_cancelled_request_do_not_reach_the_model() -> None:
    shop = Shop(steering=waiting(3.0))

    async def give_up() -> None:
        async with asyncio.timeout(0.001):
            await shop.ask(["cancelled"])

    answers = shop.all(give_up(), shop.ask([1]))
    assert isinstance(answers[0], TimeoutError)
    assert answers[1] == ["a:1"]
    assert shop.calls == [("a", [[1]])]


def test_all_cancelled_no_call() -> None:
    shop = Shop(steering=waiting(3.0))

    async def give_up() -> None:
        async with asyncio.timeout(0.001):
            await shop.ask(["cancelled"])

    async def later() -> int:
        await asyncio.sleep(0.01)
        return len(shop.calls)

    assert shop.all(give_up(), later())[1] == 0


def test_a_request_that_makes_the_call_fail_fails_alone() -> None:
    shop = Shop()
    answers = shop.all(shop.ask([1]), shop.ask(["poison"]), shop.ask([2]))
    assert [answers[0], answers[2]] == [["a:1"], ["a:2"]]
    assert isinstance(answers[1], ArithmeticError)
    assert shop.calls[1:] == [("a", [[1]]), ("a", [["poison"]]), ("a", [[2]])]


@pytest.mark.parametrize("steering", [alone, waiting])
def test_a_request_that_fails_by_itself_is_run_once(steering: Callable[[], Steering]) -> None:
    shop = Shop(steering=steering())
    [answer] = shop.all(shop.ask(["poison"]))
    assert isinstance(answer, ArithmeticError)
    assert len(shop.calls) == 1


@pytest.mark.parametrize("steering", [alone, waiting])
def test_a_result_that_is_an_error_is_raised_to_its_asker(steering: Callable[[], Steering]) -> None:
    shop = Shop(steering=steering())
    answers = shop.all(shop.ask([1]), shop.ask(["odd"]))
    assert answers[0] == ["a:1"]
    assert isinstance(answers[1], ScoresInvalid)


@pytest.mark.parametrize("error", [StopIteration("model"), KeyError("model")])
def test_whatever_the_model_raises_nobody_hangs(error: Exception) -> None:
    def fail(bundle_id: str, works: Sequence[int]) -> list[int | Exception]:
        raise error

    loop = VirtualLoop()
    batcher = Batcher(fail, Steering(GOAL_MS), stage="test", clock=loop.time)

    async def both() -> list[Any]:
        asks = [batcher.ask(n, rows=1, bundle_id="a") for n in range(2)]
        return await asyncio.gather(*asks, return_exceptions=True)

    answers = loop.run_until_complete(both())
    loop.close()
    assert all("model" in str(answer) or "StopIteration" in str(answer) for answer in answers)


def test_a_model_that_gives_too_few_results_is_told() -> None:
    loop = VirtualLoop()
    batcher: Batcher[int, int] = Batcher(
        lambda bundle_id, works: [], Steering(GOAL_MS), stage="test", clock=loop.time
    )
    with pytest.raises(ValueError, match="0 results for 1 requests"):
        loop.run_until_complete(batcher.ask(1, rows=1, bundle_id="a"))
    loop.close()


def refused(priority: str) -> float:
    return REGISTRY.get_sample_value("reco_batch_refused_total", {"stage": "test", "priority": priority}) or 0


def test_beyond_the_bound_prefetches_are_refused_first_then_checkouts() -> None:
    shop = Shop(steering=waiting(3.0), most_waiting=2)
    before = refused("prefetch"), refused("checkout")
    answers = shop.all(
        shop.ask([0], priority=PREFETCH),
        shop.ask([1], priority=PREFETCH),
        shop.ask([2], priority=PREFETCH),  # refused
        shop.ask([3]),  # in 1's place
        shop.ask([4]),  # in 0's place
        shop.ask([5]),  # refused
    )
    assert [isinstance(answer, Overloaded) for answer in answers] == [True, True, True, False, False, True]
    assert shop.calls == [("a", [[3], [4]])]
    assert (refused("prefetch") - before[0], refused("checkout") - before[1]) == (3, 1)


def test_who_was_cancelled_takes_no_place_in_the_queue() -> None:
    shop = Shop(steering=waiting(3.0), most_waiting=1)

    async def give_up() -> None:
        async with asyncio.timeout(0.001):
            await shop.ask(["cancelled"])

    assert shop.all(give_up(), shop.ask([1], at=0.002))[1] == ["a:1"]


def test_calls_and_waits_are_counted() -> None:
    def value(name: str) -> float:
        return REGISTRY.get_sample_value(name, {"stage": "test"}) or 0.0

    names = [
        *("reco_batch_rows_sum", "reco_batch_requests_sum", "reco_batch_requests_count"),
        *("reco_batch_queue_seconds_count", "reco_batch_queue_seconds_sum", "reco_batch_expired_total"),
    ]
    before = [value(name) for name in names]
    shop = Shop(steering=waiting(3.0))
    shop.all(shop.ask([1, 2]), shop.ask([3], at=0.001), shop.ask([4], at=0.1, deadline=0.05))
    found = [value(name) - was for name, was in zip(names, before, strict=True)]
    assert found == pytest.approx([3, 2, 1, 2, 0.003 + 0.002, 1])
    assert shop.batcher.state()["waiting"] == 0


# ------------------------------------------------------------------------------------ under load


def poisson(shop: Shop, per_s: float, requests: int, rows: int = 500) -> list[float]:
    """Ask at random times; return each one's milliseconds."""
    took: list[float] = []

    async def ask(number: int, at: float) -> None:
        await shop.ask([number] * rows, at=at)
        took.append((shop.loop.now - at) * 1e3)

    gaps = np.random.default_rng(0).exponential(1 / per_s, requests)
    failed = [a for a in shop.all(*(ask(n, at) for n, at in enumerate(np.cumsum(gaps).tolist()))) if a]
    assert not failed
    return took


def device(rows: int) -> float:
    return 1.0 + 0.001 * rows


def test_a_linear_cost_is_steered_to_one_request_a_call() -> None:
    shop = Shop(lambda rows: 0.0006 * rows)
    poisson(shop, 2_000, 2_000)
    assert shop.steering.state()["why"] == "joining saves less than it costs"
    latest = [len(works) for _, works in shop.calls[-500:]]
    assert np.median(latest) == 1
    assert sum(size > 1 for size in latest) < 20, "now and then it looks"


def test_a_fixed_cost_is_steered_to_large_batches_that_keep_the_goal() -> None:
    shop = Shop(device)
    took = poisson(shop, 1_500, 4_000)  # one a call could answer 667 a second
    state = shop.steering.state()
    assert state["decision"] in ("join", "wait")
    latest = [len(works) for _, works in shop.calls[-100:]]
    assert np.mean(latest) > 4
    assert state["limit_rows"] > 2_000
    assert np.percentile(took[1_000:], 99) < 2 * GOAL_MS


def test_at_low_load_nobody_waits() -> None:
    shop = Shop(device)
    took = poisson(shop, 10, 500)
    assert shop.steering.state()["decision"] == "alone"
    assert np.percentile(took, 90) == pytest.approx(device(500))


@pytest.mark.parametrize("per_s", [100, 400, 800])
def test_what_steering_does_is_never_slower_than_one_request_a_call(per_s: float) -> None:
    shop = Shop(device)
    steered = poisson(shop, per_s, 1_000)
    alone_ms, gaps = device(500), np.random.default_rng(0).exponential(1e3 / per_s, 1_000)
    free_at, one_by_one = 0.0, []
    for at in np.cumsum(gaps).tolist():
        free_at = max(free_at, at) + alone_ms
        one_by_one.append(free_at - at)
    assert np.percentile(steered, 99) <= np.percentile(one_by_one, 99) + 0.5
    assert np.percentile(steered, 99) < GOAL_MS


def test_the_window_opens_in_a_rush_and_shuts_after_it() -> None:
    shop = Shop(device)
    windows: list[tuple[float, float]] = []
    choose = shop.steering.window_ms

    def watched(now: float) -> float:
        windows.append((now, choose(now)))
        return windows[-1][1]

    shop.steering.window_ms = watched  # type: ignore[method-assign]
    gaps = [10.0] * 200 + [1.0] * 2_000 + [50.0] * 20
    times = (np.cumsum(gaps) / 1e3).tolist()
    shop.all(*(shop.ask([n] * 500, at=at) for n, at in enumerate(times)))
    rush = [window for at, window in windows if 2.5 < at < 4.0]
    assert max(rush) > 0
    assert max(rush) <= 0.2 * GOAL_MS
    assert all(window == 0 for at, window in windows if at < 2.0 or at > 4.1)


@settings(max_examples=200, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 40),  # when it comes, quarters of a millisecond
            st.integers(0, 12),  # rows
            st.sampled_from(["a", "b"]),
            st.sampled_from(Priority),
            st.sampled_from([None, 2.0, 8.0]),  # ms to its deadline
            st.sampled_from([None, None, None, 0.5, 3.0]),  # ms until its caller gives up
        ),
        max_size=30,
    ),
    window_ms=st.sampled_from([0.0, 0.5, 3.0]),
    max_rows=st.integers(1, 40),
    most_waiting=st.integers(1, 30),
    known=st.booleans(),
)
def test_each_request_gets_its_own_rows_once_whatever_happens(
    asks: list[tuple[int, int, str, Priority, float | None, float | None]],
    window_ms: float,
    max_rows: int,
    most_waiting: int,
    known: bool,
) -> None:
    steering = alone(max_rows) if known else waiting(window_ms, max_rows)
    shop = Shop(lambda rows: 0.3 + rows / 50, steering, most_waiting=most_waiting)

    async def ask(number: int) -> list[Any]:
        quarter, rows, bundle_id, priority, left_ms, patience_ms = asks[number]
        at = quarter / 4e3
        deadline = at + left_ms / 1e3 if left_ms else float("inf")
        work = [(number, row) for row in range(rows)]
        async with asyncio.timeout_at(None if patience_ms is None else at + patience_ms / 1e3):
            return await shop.ask(work, at, bundle_id, priority=priority, deadline=deadline)

    *answers, _ = shop.all(*(ask(number) for number in range(len(asks))), asyncio.sleep(1.0))
    run = [row for _, works in shop.calls for work in works for row in work]
    assert len(run) == len(set(run)), "no row is run twice"
    for number, (answer, (_, rows, bundle_id, *_)) in enumerate(zip(answers, asks, strict=True)):
        if isinstance(answer, Exception):
            assert isinstance(answer, Overloaded | TimeoutError)
        else:
            assert answer == [f"{bundle_id}:{(number, row)}" for row in range(rows)]
    for bundle_id, works in shop.calls:
        numbers = [work[0][0] for work in works if work]
        assert {asks[number][2] for number in numbers} <= {bundle_id}
        assert len(works) == 1 or sum(map(len, works)) <= max_rows
    assert shop.batcher.state()["waiting"] == 0


# ------------------------------------------------------------------------------- with real models


def inputs(rows: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    return rng.random((rows, len(DENSE_NAMES)), np.float32), np.ones((rows, len(CATEGORICAL)), np.int64)


def ask_ranker(session: Any, requests: Sequence[Inputs]) -> list[Any]:
    loop = VirtualLoop()
    calls = []

    def run(bundle_id: str, works: Sequence[Inputs]) -> list[np.ndarray | Exception]:
        calls.append(len(works))
        return rank_joined(session, works)

    batcher = Batcher(run, waiting(), stage="test", clock=loop.time)
    batcher._steering.limit_rows = 100_000

    async def ask_all() -> list[Any]:
        asks = (batcher.ask(work, rows=len(work[0]), bundle_id="a") for work in requests)
        return await asyncio.gather(*asks, return_exceptions=True)

    answers = loop.run_until_complete(ask_all())
    loop.close()
    assert calls == [len(requests)]
    return answers


def check_neighbours_of_poison(session: Any) -> None:
    clean = [inputs(rows, seed) for seed, rows in enumerate((1, 500, 40, 7))]
    expected = [rank(session, *work) for work in clean]
    for poison in (1e3, 1e6, -1e30, np.nan, np.inf):
        bad = clean[2][0].copy()
        bad[5, 3] = poison
        answers = ask_ranker(session, [*clean[:2], (bad, clean[2][1]), clean[3]])
        for number in (0, 1, 3):
            np.testing.assert_allclose(answers[number], expected[number], atol=1e-6, err_msg=f"{poison}")
        if isinstance(answers[2], Exception):
            assert isinstance(answers[2], ScoresInvalid)
        else:
            assert np.isfinite(answers[2]).all()


def test_a_poisoned_row_moves_nobody_elses_scores(toy_bundle: Path) -> None:
    check_neighbours_of_poison(load_bundle(toy_bundle).ranker)


@pytest.mark.slow
@pytest.mark.parametrize("ranker", ["pruned/ranker.onnx", "bundle/ranker.onnx"], ids=["fp32", "as served"])
def test_a_poisoned_row_moves_nobody_elses_scores_of_the_trained_ranker(toy_line: Path, ranker: str) -> None:
    check_neighbours_of_poison(open_session(toy_line / ranker))


def test_scores_of_joined_requests_are_those_of_each_alone(toy_bundle: Path) -> None:
    session = load_bundle(toy_bundle).ranker
    requests = [inputs(rows, seed) for seed, rows in enumerate((1, 1_000, 3, 120))]
    for work, answer in zip(requests, ask_ranker(session, requests), strict=True):
        np.testing.assert_allclose(answer, rank(session, *work), atol=1e-6)


def test_the_query_tower_and_the_index_are_asked_once_for_many(toy_bundle: Path) -> None:
    """The batcher knows nothing of rankers: here a request's work is its tower inputs, its rows are one."""
    bundle = load_bundle(toy_bundle)
    tower = bundle.query_tower
    rng = np.random.default_rng(0)
    shapes = {put.name: (put.shape[-1], put.type) for put in tower.get_inputs()}

    def query() -> dict[str, np.ndarray]:
        return {
            name: rng.integers(0, 50, (1, width)) if "int" in kind else rng.random((1, width), np.float32)
            for name, (width, kind) in shapes.items()
        }

    def search(bundle_id: str, queries: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray | Exception]:
        sizes.append(len(queries))
        joined = {name: np.concatenate([query[name] for query in queries]) for name in queries[0]}
        return list(bundle.index.search(tower.run(["vector"], joined)[0], 10)[1])

    sizes: list[int] = []
    queries = [query() for _ in range(5)]
    expected = [search("a", [query])[0] for query in queries]
    loop = VirtualLoop()
    batcher = Batcher(search, Steering(GOAL_MS), stage="test", clock=loop.time)

    async def ask_all() -> list[np.ndarray]:
        return await asyncio.gather(*(batcher.ask(query, rows=1, bundle_id="a") for query in queries))

    found = loop.run_until_complete(ask_all())
    loop.close()
    assert sizes == [1] * 5 + [5]
    np.testing.assert_array_equal(found, expected)
