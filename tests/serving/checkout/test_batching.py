"""The batcher on a virtual clock: time passes while a model call is in flight, and while the loop waits."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.checkout import batching
from serving.checkout.batching import Batcher
from serving.errors import RankerUnavailable, RowsRefused
from serving.release.bundle import open_session
from serving.schemas import PRIORITIES
from serving.stages.ranking import rank
from tests.serving.checkout.joined_ranker import Inputs, rank_rows
from tests.serving.checkout.virtual_time import VirtualLoop
from tests.serving.conftest import metric


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_now", lambda: asyncio.get_running_loop().time())


class Shop:
    """A batcher before a remote model that names its rows, and requests that arrive at given times."""

    def __init__(
        self, cost_ms: Callable[[int], float] = lambda rows: 1.0, max_wait_ms: float = 3.0, **options: Any
    ) -> None:
        self.loop = VirtualLoop()
        self.calls: list[tuple[str, list[Any]]] = []
        self.began: list[float] = []
        self.deadlines: list[float] = []
        self._cost_ms = cost_ms
        self.batcher = Batcher(self._run, max_wait_ms=max_wait_ms, **{"max_rows": 8_192, **options})

    async def _run(self, bundle_id: str, works: Sequence[list[Any]], deadline: float) -> list[list[Any]]:
        self.calls.append((bundle_id, list(works)))
        self.began.append(self.loop.now)
        self.deadlines.append(deadline)
        await asyncio.sleep(self._cost_ms(sum(map(len, works))) / 1e3)
        for word, error in {"refused": RowsRefused("not these"), "gone": RankerUnavailable("gone")}.items():
            if any(word in work for work in works):
                raise error
        return [[f"{bundle_id}:{row}" for row in work] for work in works]

    async def ask(self, work: list[Any], at: float = 0.0, bundle_id: str = "a", **options: Any) -> list[Any]:
        await asyncio.sleep(at - self.loop.now)
        options = {"rows": len(work), "bundle_id": bundle_id, "deadline": 1.0, **options}
        rows: list[Any] = await self.batcher.ask(work, **options)
        return rows

    def all(self, *asks: Awaitable[Any]) -> list[Any]:
        """Return the result or the error of each."""

        async def gather() -> list[Any]:
            return await asyncio.gather(*asks, return_exceptions=True)

        try:
            return self.loop.run_until_complete(gather())
        finally:
            self.loop.close()

    def expect_many(self) -> None:
        """Let the batcher expect more requests than any test sends."""
        self.batcher._call_s, self.batcher._gap_s = 1.0, 0.001

    @property
    def works(self) -> list[list[Any]]:
        return [works for _, works in self.calls]


def test_requests_of_one_turn_of_the_loop_share_a_call() -> None:
    shop = Shop()
    assert shop.all(shop.ask([1, 2]), shop.ask([3]), shop.ask([4, 5, 6])) == [
        ["a:1", "a:2"],
        ["a:3"],
        ["a:4", "a:5", "a:6"],
    ]
    assert shop.calls == [("a", [[1, 2], [3], [4, 5, 6]])]


def test_a_request_does_not_wait_while_no_call_is_in_flight() -> None:
    shop = Shop(lambda rows: 0.5)
    shop.all(*(shop.ask([number], at=number / 1e3) for number in range(5)))
    assert shop.works == [[[number]] for number in range(5)]
    assert shop.began == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])


def test_requests_that_come_during_a_call_share_the_next() -> None:
    shop = Shop(lambda rows: 2.0)
    shop.expect_many()
    shop.all(*(shop.ask([number], at=number * 4e-4) for number in range(5)))
    assert shop.works == [[[0]], [[1], [2], [3], [4]]]
    assert shop.began[1] == pytest.approx(0.002), "with the end of the call before"


def test_no_request_waits_longer_than_the_limit() -> None:
    shop = Shop(lambda rows: 100.0)
    shop.expect_many()
    shop.all(shop.ask([0]), shop.ask([1], at=0.001), shop.ask([2], at=0.002), shop.ask([3], at=0.0045))
    assert shop.works == [[[0]], [[1], [2]], [[3]]]
    assert shop.began == pytest.approx([0.0, 0.004, 0.0075])


def test_no_request_waits_for_a_companion_that_would_have_no_room() -> None:
    """As with 500 candidates each, where a call may have 800."""
    shop = Shop(lambda rows: 100.0, max_rows=8)
    shop.expect_many()
    shop.all(*(shop.ask([number] * 5, at=number / 1e3) for number in range(4)))
    assert shop.began == pytest.approx([0.0, 0.001, 0.002, 0.003])


def test_the_size_of_a_batch_follows_the_arrival_rate() -> None:
    """The formula: expected arrivals during one call = rate x time of a call."""

    def mean_size(per_s: float, call_ms: float) -> float:
        shop = Shop(lambda rows: call_ms, max_wait_ms=10.0)
        shop.all(*(shop.ask([number], at=number / per_s) for number in range(400)))
        assert shop.batcher.expected == max(round(per_s * call_ms / 1e3), 1)
        return 200 / len([works for _, works in shop.calls if works[0][0] >= 200])

    assert mean_size(100.0, 5.0) == 1, "seldom two at a time"
    assert mean_size(1_000.0, 5.0) == pytest.approx(5, rel=0.25)
    assert mean_size(2_000.0, 5.0) == pytest.approx(10, rel=0.25)


def test_checkouts_come_before_prefetches_each_in_the_order_of_arrival() -> None:
    shop = Shop(max_rows=2)
    priorities = [PRIORITIES[number] for number in (1, 0, 1, 0, 0)]
    shop.all(*(shop.ask([n], priority=priority) for n, priority in enumerate(priorities)))
    assert shop.works == [[[1], [3]], [[4], [0]], [[2]]]


def test_the_call_gets_the_latest_deadline_of_its_requests() -> None:
    shop = Shop()
    shop.all(*(shop.ask([n], deadline=n) for n in (1, 3, 2)))
    assert shop.deadlines == [3]


def test_a_cancelled_request_does_not_reach_the_model() -> None:
    shop = Shop(lambda rows: 10.0)

    async def give_up(at: float) -> None:
        await asyncio.sleep(at)
        async with asyncio.timeout(0.001):
            await shop.ask(["cancelled"], at=at)

    shop.expect_many()
    answers = shop.all(shop.ask([1]), give_up(0.001), shop.ask([2], at=0.0015))
    assert isinstance(answers[1], TimeoutError)
    assert [answers[0], answers[2]] == [["a:1"], ["a:2"]]
    assert shop.works == [[[1]], [[2]]]


def test_rows_that_break_a_joined_call_fail_alone() -> None:
    shop = Shop()
    answers = shop.all(shop.ask([1]), shop.ask(["refused"]), shop.ask([2]))
    assert [answers[0], answers[2]] == [["a:1"], ["a:2"]]
    assert isinstance(answers[1], RowsRefused)
    assert shop.calls[1:] == [("a", [[1]]), ("a", [["refused"]]), ("a", [[2]])]


def test_an_unavailable_ranker_is_called_once_for_all_requests() -> None:
    shop = Shop()
    answers = shop.all(shop.ask([1]), shop.ask(["gone"]), shop.ask([2]))
    assert all(isinstance(answer, RankerUnavailable) for answer in answers)
    assert len(shop.calls) == 1


def test_calls_and_waits_are_counted() -> None:
    names = [
        *("reco_batch_rows_sum", "reco_batch_requests_sum", "reco_batch_requests_count"),
        *("reco_batch_queue_seconds_count", "reco_batch_queue_seconds_sum"),
    ]
    before = [metric(name) for name in names]
    shop = Shop(lambda rows: 10.0)
    shop.expect_many()
    shop.all(shop.ask([1, 2]), shop.ask([3], at=0.001))
    differences = [metric(name) - was for name, was in zip(names, before, strict=True)]
    assert differences == pytest.approx([3, 2, 2, 2, 0.003])


@settings(deadline=None, max_examples=60)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 40),  # quarters of a millisecond
            st.integers(1, 9),
            st.sampled_from("ab"),
            st.sampled_from(PRIORITIES),
            st.none() | st.floats(0.1, 20.0),
        ),
        max_size=30,
    ),
    max_wait_ms=st.sampled_from([0.0, 0.5, 3.0]),
    max_rows=st.integers(1, 40),
    expected=st.integers(1, 20),
)
def test_each_request_gets_its_own_rows_once(
    asks: list[tuple[int, int, str, str, float | None]], max_wait_ms: float, max_rows: int, expected: int
) -> None:
    shop = Shop(lambda rows: 0.3 + rows / 50, max_wait_ms, max_rows=max_rows)
    shop.batcher._call_s, shop.batcher._gap_s = expected / 1e3, 1e-3

    async def ask(number: int) -> list[Any]:
        quarter, rows, bundle_id, priority, patience_ms = asks[number]
        at = quarter / 4e3
        work = [(number, row) for row in range(rows)]
        async with asyncio.timeout_at(None if patience_ms is None else at + patience_ms / 1e3):
            return await shop.ask(work, at, bundle_id, priority=priority)

    *answers, _ = shop.all(*(ask(number) for number in range(len(asks))), asyncio.sleep(1.0))
    sent = [row for _, works in shop.calls for work in works for row in work]
    assert len(sent) == len(set(sent)), "no row is sent twice"
    for number, (answer, (_, rows, bundle_id, *_)) in enumerate(zip(answers, asks, strict=True)):
        if isinstance(answer, Exception):
            assert isinstance(answer, TimeoutError)
        else:
            assert answer == [f"{bundle_id}:{(number, row)}" for row in range(rows)]
    for bundle_id, works in shop.calls:
        assert {asks[work[0][0]][2] for work in works} <= {bundle_id}
        assert len(works) == 1 or sum(map(len, works)) <= max_rows
    assert not shop.batcher._waiting


@pytest.mark.slow
def test_a_poisoned_row_moves_no_scores_of_other_requests(toy_line: Path) -> None:
    """The ranker as served, of 8 bits; `tests/components/ranker` holds the same of the others."""
    session, rng = open_session(toy_line / "bundle/ranker.onnx"), np.random.default_rng(1)

    def inputs(rows: int) -> Inputs:
        dense = rng.random((rows, len(DENSE_NAMES)), np.float32)
        return dense, np.ones((rows, len(CATEGORICAL)), np.int64)

    clean = [inputs(rows) for rows in (1, 500, 40, 7)]
    expected = [rank(session, *work) for work in clean]
    for poison in (1e3, 1e6, -1e30, np.nan, np.inf):
        bad = clean[2][0].copy()
        bad[5, 3] = poison
        answers = rank_rows(session, [*clean[:2], (bad, clean[2][1]), clean[3]])
        for number in (0, 1, 3):
            np.testing.assert_allclose(answers[number], expected[number], atol=1e-6, err_msg=f"{poison}")
