"""A request and its call -> a response: the path every protocol takes, with deadline and fallback.

    prepare   the user's features are read, candidates are retrieved; or a cached list is found
    rank      the candidates are scored, in this process or elsewhere
    finish    the list is made, or the fallback's is taken; the observers see it

Whatever breaks on the way, the checkout gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from serving import metrics
from serving.admission import Admission
from serving.batch_steering import Steering
from serving.batching import Batcher, Priority
from serving.calls import PRIORITIES, Call
from serving.errors import ClientGone, DeadlineExceeded, Overloaded, RankingFailed
from serving.ranked import Ranked
from serving.ranking import rank_joined
from serving.recommender import NOTHING_HIDDEN, Asked, Known, Prepared, Recommender
from serving.schemas import Request, Response

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """One request on its way; the recommender is the one that was there when it began, to its end."""

    request: Request
    call: Call
    recommender: Recommender
    began: float  # perf_counter; since `call.arrived` it had waited for others
    began_s: float = 0.0  # the same moment in processor time of the thread
    known: Known | None = None
    asked: Asked | None = None
    prepared: Prepared | None = None
    scores: np.ndarray | None = None
    response: Response | None = None  # set early when the cache or a fallback answers
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin and end, perf_counter


Find = Callable[[Turn], Awaitable[np.ndarray]]  # an asked turn -> codes near its query, nearest first
Rank = Callable[[Turn], Awaitable[np.ndarray]]  # a prepared turn -> one score per candidate, (n,) float32
Observer = Callable[[Turn], None]  # sees each answered turn; must be quick


async def find_here(turn: Turn) -> np.ndarray:
    """Find the items near the turn's query by itself."""
    assert turn.asked is not None
    return turn.recommender.near([turn.asked])[0]


async def rank_here(turn: Turn) -> np.ndarray:
    """Score the candidates in this process, with the turn's own bundle."""
    assert turn.prepared is not None
    return turn.recommender.rank(turn.prepared.dense, turn.prepared.categorical)


def find_together(goal_ms: float, max_wait_ms: float, max_rows: int) -> Find:
    """Return what finds items near queries, and joins those of several requests where that pays.

    Args:
        goal_ms: p99 of the time from asking for items to having them.
        max_wait_ms: longest wait for others, see `Steering`.
        max_rows: most queries of a call that requests share.
    """

    def run(_: str, turns: Sequence[Turn]) -> Sequence[np.ndarray]:
        asked = [turn.asked for turn in turns if turn.asked is not None]
        return turns[0].recommender.near(asked)  # they are all of one bundle and one profile

    steering = Steering(goal_ms, max_wait_ms=max_wait_ms, max_rows=max_rows)
    batcher = Batcher[Turn, np.ndarray](run, steering, stage="retrieval")

    async def find(turn: Turn) -> np.ndarray:
        return await _join(batcher, turn, 1, turn.request.profile)

    return find


def rank_together(goal_ms: float, max_wait_ms: float, max_rows: int) -> Rank:
    """Return what scores the candidates in this process, and joins those of several requests where that pays.

    Args:
        goal_ms: p99 of the time from asking for scores to having them.
        max_wait_ms: longest wait for others, see `Steering`.
        max_rows: most rows of a call that requests share.
    """

    def run(_: str, turns: Sequence[Turn]) -> Sequence[np.ndarray | Exception]:
        prepared = [turn.prepared for turn in turns]
        rows = [(one.dense, one.categorical) for one in prepared if one is not None]
        return rank_joined(turns[0].recommender.bundle.ranker, rows)  # they are all of one bundle

    steering = Steering(goal_ms, max_wait_ms=max_wait_ms, max_rows=max_rows)
    batcher = Batcher[Turn, np.ndarray](run, steering, stage="ranking")

    async def rank(turn: Turn) -> np.ndarray:
        assert turn.prepared is not None
        return await _join(batcher, turn, len(turn.prepared.dense))

    return rank


async def _join(batcher: Batcher[Turn, np.ndarray], turn: Turn, rows: int, profile: str = "") -> np.ndarray:
    """Ask a batcher; only turns of one bundle, and of one profile if it is given, share a call."""
    return await batcher.ask(
        turn,
        rows=rows,
        bundle_id=turn.recommender.bundle.bundle_id + profile,
        priority=Priority[turn.call.priority.upper()],
        deadline=turn.call.deadline,
    )


def count(turn: Turn) -> None:
    """Observer: count the answer, its wait and the time of its stages."""
    assert turn.response is not None
    response = turn.response
    metrics.QUEUE_SECONDS.observe(turn.began - turn.call.arrived)
    took_s = turn.stages[-1][2] - turn.began  # a fallback's own time would make deadlines look quick
    metrics.count_response(response.rung, response.degraded_reason, response.stage_ms, took_s)


class Checkout:
    """Answers requests. Whoever sets `recommender` swaps the bundle: requests on their way keep theirs."""

    def __init__(
        self,
        recommender: Recommender,
        deadline_ms: float,
        rank: Rank = rank_here,
        find: Find = find_here,
        observers: Sequence[Observer] = (count,),
    ) -> None:
        self.recommender = recommender
        self.limit_s = deadline_ms / 1e3
        self._rank, self._find = rank, find
        self._observers = observers
        self._admission = Admission(self.limit_s)

    async def answer(self, request: Request, call: Call) -> Response:
        """Answer one request.

        Raises:
            ClientGone: nobody waits for the answer.
            Overloaded: it is a prefetch, and there is no time for it.
        """
        return await self.complete(self.begin(request, call))

    async def complete(self, turn: Turn) -> Response:
        """Answer a turn that has begun.

        Raises:
            ClientGone: nobody waits for the answer.
        """
        await self.prepare(turn)
        await self.rank(turn)
        return self.finish(turn)

    def begin(self, request: Request, call: Call) -> Turn:
        """Return the turn of a request: the bundle of this moment is its own.

        Raises:
            Overloaded: it is a prefetch, and there is no time for it: nobody waits for best sellers either.
        """
        now = time.perf_counter()
        if call.priority != PRIORITIES[0] and not self._admission.admits(call, now):
            raise Overloaded("overloaded: there is no time for a prefetch now, ask later")
        return Turn(request, call, self.recommender, now, time.thread_time())

    async def wait_turn(self, turn: Turn) -> None:
        """Let others have theirs before a later request of one body, which then has its whole time anew."""
        arrived, limit_s = time.perf_counter(), turn.call.deadline - turn.call.arrived
        await asyncio.sleep(0)
        turn.began = time.perf_counter()
        turn.call = replace(turn.call, arrived=arrived, deadline=arrived + limit_s)

    async def prepare(self, turn: Turn) -> None:
        """Read the user's features and retrieve candidates, unless a cached list answers.

        Raises:
            ClientGone: nobody waits for the answer.
        """
        admitted = self._admission.admits(turn.call, turn.began)
        if self._is_late(turn):
            return
        if turn.recommender.answers is not None:
            await self._look(turn, admitted)
            if self._is_late(turn):
                return
        if not admitted:
            turn.response = _fallback(turn, Overloaded.reason)
            return
        began = time.perf_counter()
        try:
            with self._admission.computing():
                turn.prepared = await self._gather(turn)
        except RankingFailed as error:
            _log.warning("answered by the fallback: %s", error)
            turn.response = _fallback(turn, error.reason)
        except Exception:  # noqa: BLE001 - the edge of the process: no fault of ours may become a 500
            _log.exception("preprocess failed; answered by the fallback")
            turn.response = _fallback(turn, "preprocess_error")
        turn.stages.append(("preprocess", began, time.perf_counter()))

    async def rank(self, turn: Turn) -> None:
        """Score the candidates.

        Raises:
            ClientGone: nobody waits for the answer.
        """
        if self._is_late(turn):
            return
        began = time.perf_counter()
        try:
            with self._admission.computing():
                turn.scores = _checked(await self._rank(turn), turn)
        except RankingFailed as error:
            _log.warning("answered by the fallback: %s", error)
            turn.response = _fallback(turn, error.reason)
        except Exception:  # noqa: BLE001 - likewise
            _log.exception("predict failed; answered by the fallback")
            turn.response = _fallback(turn, "predict_error")
        turn.stages.append(("predict", began, time.perf_counter()))

    def finish(self, turn: Turn) -> Response:
        """Make the list, if no fallback has, and show it to the observers."""
        began = time.perf_counter()
        if turn.response is None:
            try:
                assert turn.prepared is not None
                assert turn.scores is not None
                turn.response = turn.recommender.finish(turn.prepared, turn.scores)
                self._admission.served(turn.began_s, time.thread_time())
            except Exception:  # noqa: BLE001 - likewise
                _log.exception("postprocess failed; answered by the fallback")
                turn.response = _fallback(turn, "postprocess_error")
        turn.stages.append(("postprocess", began, time.perf_counter()))
        for observe in self._observers:
            try:
                observe(turn)
            except Exception:  # noqa: BLE001 - likewise
                _log.exception("an observer failed; the answer goes out all the same")
        return turn.response

    @contextlib.contextmanager
    def rehearsing(self, recommender: Recommender) -> Iterator[None]:
        """Answer with this recommender and its ranker, in any time, unobserved, until the block ends."""
        kept = self.recommender, self.limit_s, self._rank, self._find, self._observers, self._admission
        self.recommender, self.limit_s, self._observers = recommender, math.inf, ()
        self._rank, self._find, self._admission = rank_here, find_here, Admission(math.inf)
        try:
            yield
        finally:
            self.recommender, self.limit_s, self._rank, self._find, self._observers, self._admission = kept

    async def _gather(self, turn: Turn, hidden: np.ndarray | None = None) -> Prepared:
        turn.asked = turn.recommender.ask(turn.request, turn.known)
        return turn.recommender.gather(turn.asked, await self._find(turn), hidden)

    async def _look(self, turn: Turn, admitted: bool) -> None:
        """Answer with a list that is cached, or is made now and will be; if that fails, no harm is done."""
        began = time.perf_counter()
        try:
            await self._answer_from_cache(turn, began, admitted)
        except Exception:  # noqa: BLE001 - the edge of the process: no fault of ours may become a 500
            _log.exception("the cache failed; answered without it")
        turn.stages.append(("cache", began, time.perf_counter()))

    async def _answer_from_cache(self, turn: Turn, began: float, admitted: bool) -> None:
        """Set the turn's response, unless the turn is better computed by itself."""
        recommender, request = turn.recommender, turn.request
        assert recommender.answers is not None
        known = turn.known = recommender.read(request)
        read = time.perf_counter()
        key = recommender.key(request, known)
        if key is None:
            return
        own = replace(turn)

        async def make() -> Ranked:
            if not admitted:
                raise Overloaded("there is no time to make a list: only one that is kept can be answered")
            # For all who ask meanwhile: the time that the first of them has, and its priority, are its own.
            now = time.perf_counter()
            own.call = Call(now, now + self.limit_s, turn.call.request_id)
            prepared = await self._gather(own, NOTHING_HIDDEN)
            own.prepared = prepared
            own.scores = _checked(await self._rank(own), own)
            prepared.stage_ms["ranking"] = (time.perf_counter() - prepared.ready_at) * 1e3
            self._admission.served(turn.began_s, time.thread_time())
            return own.recommender.best(prepared, own.scores)

        waits = recommender.answers.is_being_made(key)
        try:
            with contextlib.nullcontext() if waits else self._admission.computing():
                async with asyncio.timeout(max(turn.call.deadline - read, 0.0)) as limit:
                    kept = await recommender.answers.get_or_make(key, make)
        except RankingFailed as error:
            if own.asked is None and isinstance(error, DeadlineExceeded | Overloaded):
                return  # it was another one who came too late; this one may have time left
            _log.warning("answered by the fallback: %s", error)
            turn.response = _fallback(turn, error.reason)
        except TimeoutError:
            if not limit.expired():
                raise
            turn.response = _fallback(turn, DeadlineExceeded.reason)
        else:
            made = own.prepared if own.scores is not None else None
            stage_ms = {} if made is None else dict(made.stage_ms)
            stage_ms["features"] = stage_ms.get("features", 0.0) + (read - began) * 1e3
            stage_ms["cache"] = (time.perf_counter() - began) * 1e3 - sum(stage_ms.values())
            turn.response = recommender.finish_cached(request, known, kept, stage_ms, made)

    def _is_late(self, turn: Turn) -> bool:
        """Say whether there is nothing to do any more: cache or fallback has answered, now or before."""
        if turn.call.gone():
            raise ClientGone
        if turn.response is None and time.perf_counter() > turn.call.deadline:
            turn.response = _fallback(turn, DeadlineExceeded.reason)
        return turn.response is not None


def _checked(scores: np.ndarray, turn: Turn) -> np.ndarray:
    assert turn.prepared is not None
    expected = (len(turn.prepared.dense),)
    # One number that is not finite makes the sum so, and a sum costs half of asking each.
    if scores.shape != expected or not math.isfinite(scores.sum()):
        raise ValueError(f"scores of shape {scores.shape}, expected {expected} finite numbers")
    return scores


def _fallback(turn: Turn, reason: str) -> Response:
    try:
        return turn.recommender.fallback(turn.request, reason, turn.began)
    except Exception:  # noqa: BLE001 - likewise
        _log.exception("the fallback failed; answered with an empty list")
        bundle_id = turn.recommender.bundle.bundle_id
        return Response(
            turn.request.request_id, (), bundle_id, rung="empty", degraded=True, degraded_reason=reason
        )
