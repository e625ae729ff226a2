"""A request and its call -> a response: the path every protocol takes, with deadline and ladder.

    prepare   the user's features are read, candidates are retrieved; or a cached list is found
    rank      the candidates are scored, in this process or elsewhere
    finish    the list is made, unless a lower rung has answered; the observers see it

Whatever breaks on the way, the checkout gets an answer. It is made of all candidates, or of as many as there
is time for (`serving.checkout.budgets`). Without a ranking it is a list that was kept, the best sellers of
store or chain, or empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from serving import metrics
from serving.answer.recommender import NOTHING_HIDDEN, Known, Prepared, Recommender
from serving.cache.answer_cache import AnswerKey
from serving.checkout.admission import Admission, LoopAdmission, ShopperLimits, prefetch_waits_s
from serving.checkout.budgets import MARGIN_S, Budgets
from serving.errors import (
    DeadlineExceeded,
    DeadlineNear,
    Overloaded,
    RankingFailed,
    UserOverLimit,
)
from serving.schemas import PRIORITIES, Call, Request, Response
from serving.stages.ranking import check_scores
from serving.stages.reranking import POOL, Ranked

FEWEST = 50  # candidates that are worth ranking where k is small: POOL * k of them take part in re-ranking

_ROUTES = {"/v1/recommendations": "recommendations", "gRPC": "grpc"}  # of metrics; others are KServe's
_NO_TIME = "overloaded: there is no time for a prefetch now, ask later"
_cache_refused = metrics.CACHE_LOOKUPS.labels("process", "refused")
_Result = TypeVar("_Result")
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
    read_s: float = 0.0  # that the read of `known` took before `_gather` began
    prepared: Prepared | None = None
    scores: np.ndarray | None = None
    response: Response | None = None  # set early when the cache or a lower rung answers
    is_paid: bool = False  # it counts against its shopper's limit
    # perf_counter when the stage that is waited for must be over, so that later stages are in time
    until: float = math.inf
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # name, begin and end, perf_counter


Rank = Callable[[Turn], Awaitable[np.ndarray]]  # a prepared turn -> one score per candidate, (n,) float32
Observer = Callable[[Turn], None]  # sees each answered turn; must be quick


async def rank_here(turn: Turn) -> np.ndarray:
    """Score the candidates in this process, with the turn's own bundle."""
    assert turn.prepared is not None
    return turn.recommender.rank(turn.prepared.dense, turn.prepared.categorical)


def count(turn: Turn) -> None:
    """Observer: count the answer, its wait and the time of its stages."""
    assert turn.response is not None
    response = turn.response
    call = turn.call
    metrics.QUEUE_SECONDS.observe(turn.began - call.arrived)
    took_s = turn.stages[-1][2] - call.arrived  # a fallback's own time would make deadlines look quick
    route, why = _ROUTES.get(call.route, "kserve"), response.degraded_reason
    metrics.count_response(response.rung, why, response.stage_ms, took_s, route, call.priority)


@dataclass(frozen=True, slots=True)
class Service:
    """The recommender that answers, its parts, and their learnt times; swapped as one value."""

    recommender: Recommender
    limit_s: float  # of a request, from its arrival
    rank: Rank
    observers: Sequence[Observer]
    admission: Admission
    budgets: Budgets
    shoppers: ShopperLimits


class Checkout:
    """Answers requests. Setting `recommender` swaps the bundle: requests in flight keep theirs."""

    def __init__(
        self,
        recommender: Recommender,
        deadline_ms: float,
        rank: Rank = rank_here,
        observers: Sequence[Observer] = (count,),
        user_limit_per_s: float = 0.0,
    ) -> None:
        """Take the champion's recommender and its parts; the deadline counts from a request's arrival."""
        limit_s, shoppers = deadline_ms / 1e3, ShopperLimits(user_limit_per_s)
        admission, budgets = Admission(limit_s), Budgets(0.0 if rank is rank_here else MARGIN_S)
        self.service = Service(recommender, limit_s, rank, observers, admission, budgets, shoppers)
        self._entrance = LoopAdmission()

    @property
    def recommender(self) -> Recommender:
        """The recommender that answers the next request."""
        return self.service.recommender

    @recommender.setter
    def recommender(self, recommender: Recommender) -> None:
        self.service = replace(self.service, recommender=recommender)

    async def answer(self, request: Request, call: Call) -> Response:
        """Answer one request.

        Raises:
            Overloaded: it is a prefetch, and there is no time for it.
        """
        return await self.complete(self.begin(request, call))

    async def answer_each(self, requests: Sequence[Request], call: Call) -> list[Response]:
        """Answer the requests of one body one after the other, each with the whole deadline from its turn on.

        Raises:
            Overloaded: as `answer`.
        """
        # All of them now: a bundle that takes over meanwhile may lack the profiles that were checked.
        turns, responses = [self.begin(request, call) for request in requests], list[Response]()
        for turn in turns:
            if responses:
                await self.wait_turn(turn)
            responses.append(await self.complete(turn))
        return responses

    async def complete(self, turn: Turn) -> Response:
        """Answer a turn that has begun."""
        await self.prepare(turn)
        await self.rank(turn)
        return self.finish(turn)

    async def enter(self, call: Call) -> None:
        """Wait until a call may begin, in a burst for earlier ones.

        Raises:
            Overloaded: it is a prefetch, and there would be no time for it.
        """
        if call.priority != PRIORITIES[0]:
            self._refuse_prefetch(call, time.perf_counter(), self._entrance.wait_s())
        try:
            await self._queue(call, call.arrived)
        except TimeoutError:
            raise Overloaded(_NO_TIME) from None

    async def _queue(self, call: Call, arrived: float) -> None:
        """Wait for the entrance: checkouts as long as it takes.

        Raises:
            TimeoutError: it is a prefetch that would be late.
        """
        urgent = call.priority == PRIORITIES[0]
        if (entry := self._entrance.enter(urgent)) is not None:
            async with _until(math.inf if urgent else arrived + prefetch_waits_s(call)):
                await entry

    def begin(self, request: Request, call: Call) -> Turn:
        """Return the turn of a request: the bundle of this moment is its own.

        Raises:
            Overloaded: it is a prefetch, and there is no time for it; best sellers are of no use to it.
        """
        now = time.perf_counter()
        if call.priority != PRIORITIES[0]:
            self._refuse_prefetch(call, now)
            if not self.service.shoppers.admits(request.user_id, now):
                raise UserOverLimit("user_over_limit: too many requests of this shopper, ask later")
        return Turn(request, call, self.service.recommender, now, time.thread_time())

    async def wait_turn(self, turn: Turn) -> None:
        """Let other requests begin before a later one of the same body, which then has its full deadline."""
        arrived, limit_s = time.perf_counter(), turn.call.deadline - turn.call.arrived
        await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):  # `prepare` refuses a prefetch that is late
            await self._queue(turn.call, arrived)
        turn.began, turn.began_s = time.perf_counter(), time.thread_time()
        turn.call = replace(turn.call, arrived=arrived, deadline=arrived + limit_s)

    async def prepare(self, turn: Turn) -> None:
        """Read the user's features and retrieve candidates, unless a cached list answers."""
        refused = self._refused(turn)
        if self._is_answered(turn):
            return
        if turn.recommender.answers is not None:
            with _stage(turn, "cache", None):
                await self._look(turn, admitted=not refused)
            if self._is_answered(turn):
                return
        if refused:
            turn.response = _step_down(turn, refused)
            return
        with _stage(turn, "preprocess", "preprocess_error"), self.service.admission.computing():
            turn.prepared = await self._gather(turn)

    async def rank(self, turn: Turn) -> None:
        """Score the candidates."""
        if self._is_answered(turn):
            return
        with _stage(turn, "predict", "predict_error"), self.service.admission.computing():
            turn.scores = await self._score(turn)

    def finish(self, turn: Turn) -> Response:
        """Make the list, unless a lower rung has answered, and show it to the observers."""
        with _stage(turn, "postprocess", "postprocess_error"):
            if turn.response is None:
                assert turn.prepared is not None
                assert turn.scores is not None
                began = time.perf_counter()
                turn.response = turn.recommender.finish(turn.prepared, turn.scores)
                self.service.admission.served(turn.began_s, time.thread_time())
                now = time.perf_counter()
                self.service.budgets.reranking.learn(now - began, now)
        assert turn.response is not None
        for observe in self.service.observers:
            try:
                observe(turn)
            except Exception:  # noqa: BLE001 - a log or a metric must not cost the answer
                _log.exception("an observer failed; the answer goes out all the same")
        return turn.response

    @contextlib.contextmanager
    def rehearsing(self, recommender: Recommender) -> Iterator[None]:
        """Answer with this recommender and its own ranker until the block ends.

        Meanwhile there is no deadline, no observer, and nothing is learnt about the service that follows.
        """
        service = self.service
        self.service = Checkout(recommender, math.inf, observers=()).service
        try:
            yield
        finally:
            self.service = service

    def _refuse_prefetch(self, call: Call, now: float, ahead_s: float = 0.0) -> None:
        if not self.service.admission.admits(call, now, ahead_s):
            raise Overloaded(_NO_TIME)

    def _refused(self, turn: Turn) -> str | None:
        """Return why nothing is computed for a turn, None if it may be."""
        if not self.service.admission.admits(turn.call, turn.began):
            return Overloaded.reason
        if not self.service.shoppers.admits(turn.request.user_id, turn.began):
            return UserOverLimit.reason
        return None

    async def _gather(self, turn: Turn, hidden: np.ndarray | None = None, whole: bool = False) -> Prepared:
        """Retrieve as many candidates as there is time to rank, and compute their features.

        `hidden`: see `Recommender.retrieve`. With `whole`, fewer than all candidates are too few.

        Raises:
            DeadlineNear: the time is too short.
        """
        budgets, deadline, fewest = self.service.budgets, turn.call.deadline, _fewest(turn)
        began, is_read = time.perf_counter(), turn.known is not None
        if not budgets.has_room(deadline - began, fewest, is_read):
            budgets.believe_less(began)
            raise DeadlineNear(f"{(deadline - began) * 1e3:.1f} ms are left: too few to begin")
        if not turn.is_paid:  # a request whose list for the cache ended too late begins again, and pays once
            self.service.shoppers.spend(turn.request.user_id, began)
            turn.is_paid = True

        since = began
        if turn.known is None:
            read_by = deadline - budgets.after_features_s(fewest)
            turn.known = await turn.recommender.fetch(turn.request, read_by)
        asked = turn.recommender.ask(turn.request, turn.known, began - turn.read_s)
        if not is_read:
            since = asked.ready_at
            budgets.features.learn(since - began, since)
        retrieved = turn.recommender.retrieve(asked, hidden)
        now, count = retrieved.ended_at, len(retrieved.candidates.codes)
        budgets.retrieval.learn(now - since, now)  # before it may be too late: of a slow one, too
        most = budgets.most(deadline - now, count, count if whole else min(fewest, count), now)
        if count and not most:
            raise DeadlineNear(f"{(deadline - now) * 1e3:.1f} ms are left: too few for {count} candidates")
        return turn.recommender.compose(asked, retrieved, most)

    async def _score(self, turn: Turn) -> np.ndarray:
        """Return one score per candidate, (n,) float32.

        Raises:
            RankingFailed: naming the reason; DeadlineExceeded when re-ranking must begin, whatever the ranker
                does.
        """
        prepared = turn.prepared
        assert prepared is not None
        turn.until = self._rerank_at(turn)
        try:
            scores = await _by(turn.until, "ranking", self.service.rank(turn))
        except DeadlineExceeded:
            self._learn_ranking(prepared)  # that it takes so long at least
            raise
        self._learn_ranking(prepared)
        check_scores(scores, len(prepared.dense))
        return scores

    def _learn_ranking(self, prepared: Prepared) -> None:
        if candidates := len(prepared.dense):
            now = time.perf_counter()
            self.service.budgets.ranking.learn(now - prepared.retrieved_at, now, candidates)

    async def _look(self, turn: Turn, admitted: bool) -> None:
        """Answer with a cached list, or with one that is computed now for the cache.

        A turn that gets no response here is computed on its own.

        Raises:
            RankingFailed: naming the reason.
        """
        began = time.perf_counter()
        recommender, request, deadline = turn.recommender, turn.request, turn.call.deadline
        assert recommender.answers is not None
        read_by = deadline - self.service.budgets.after_features_s(_fewest(turn))
        turn.known = await recommender.fetch(request, read_by)
        read = time.perf_counter()
        turn.read_s = read - began
        self.service.budgets.features.learn(turn.read_s, read)
        key = recommender.key(request, turn.known)
        if key is None:
            _cache_refused.inc()
            return
        ranked, leader = recommender.answers.get(key), None
        if ranked is None and (task := recommender.answers.in_flight(key)):
            ranked = await self._follow(turn, task)
        elif ranked is None and admitted and self._has_room_for_all(turn, read):
            leader = replace(turn)
            try:
                ranked = await self._lead(leader, key)
            finally:
                turn.is_paid = leader.is_paid
        if ranked is None:
            return
        made = leader.prepared if leader else None
        stage_ms = dict(made.stage_ms) if made else {}
        stage_ms.setdefault("features", turn.read_s * 1e3)
        stage_ms["cache"] = (time.perf_counter() - began) * 1e3 - sum(stage_ms.values())
        turn.response = recommender.finish_cached(request, turn.known, ranked, stage_ms, made)

    def _has_room_for_all(self, turn: Turn, now: float) -> bool:
        """Say whether there is time to rank all candidates, as a list for other requests needs."""
        total = turn.recommender.bundle.profiles[turn.request.profile].quotas.total
        return self.service.budgets.has_room(turn.call.deadline - now, total, is_read=True)

    async def _lead(self, leader: Turn, key: AnswerKey) -> Ranked | None:
        """Compute a list for the cache and wait for it; None if there is time for fewer candidates only.

        Raises:
            RankingFailed: naming the reason.
        """
        answers, until = leader.recommender.answers, self._rerank_at(leader)
        assert answers is not None
        with self.service.admission.computing():
            try:
                task = answers.start(key, lambda: self._compute_list(leader))
                return await _by(until, "the list for the cache", asyncio.shield(task))
            except DeadlineNear:
                return None

    async def _follow(self, turn: Turn, task: asyncio.Task[Ranked]) -> Ranked | None:
        """Wait for the list that another request computes; None if only that request was too late.

        Raises:
            RankingFailed: naming the reason.
        """
        until = self._rerank_at(turn)
        try:
            return await _by(until, "the list of another request", asyncio.shield(task))
        except (DeadlineNear, DeadlineExceeded):
            if time.perf_counter() >= until:
                raise
            return None

    async def _compute_list(self, leader: Turn) -> Ranked:
        """Rank all candidates, for every request that waits for this list.

        It has the server's deadline and a checkout's priority: those of the request that came first are its
        own.
        """
        now = time.perf_counter()
        leader.call = Call(now, now + self.service.limit_s, leader.call.request_id)
        prepared = leader.prepared = await self._gather(leader, NOTHING_HIDDEN, whole=True)
        leader.scores = await self._score(leader)
        prepared.stage_ms["ranking"] = (time.perf_counter() - prepared.ready_at) * 1e3
        self.service.admission.served(leader.began_s, time.thread_time())
        return leader.recommender.best(prepared, leader.scores)

    def _rerank_at(self, turn: Turn) -> float:
        """Return the latest moment of perf_counter at which re-ranking must begin."""
        return turn.call.deadline - self.service.budgets.after_ranking_s()

    def _is_answered(self, turn: Turn) -> bool:
        """Say whether a turn has its response; after the deadline a lower rung gives it one here."""
        if turn.response is None and time.perf_counter() > turn.call.deadline:
            turn.response = _step_down(turn, DeadlineExceeded.reason)
        return turn.response is not None


@contextlib.contextmanager
def _stage(turn: Turn, name: str, fault: str | None) -> Iterator[None]:
    """Time a stage; where it fails, a lower rung answers: no fault of ours may become a 500.

    Args:
        turn: gets the answer and the times.
        name: of the stage.
        fault: reason of that answer if the error is our own; None: the answer goes on without the stage.
    """
    began = time.perf_counter()
    try:
        yield
    except RankingFailed as error:
        _log.warning("answered from a lower rung: %s", error)
        turn.response = _step_down(turn, error.reason)
    except Exception:  # noqa: BLE001 - the edge of the process
        _log.exception("%s failed; answered %s", name, "from a lower rung" if fault else "without it")
        if fault:
            turn.response = _step_down(turn, fault)
    turn.stages.append((name, began, time.perf_counter()))


def _fewest(turn: Turn) -> int:
    return max(POOL * turn.request.k, FEWEST)


def _until(moment: float) -> asyncio.Timeout:
    """Return the time-out that comes at a moment of perf_counter."""
    return asyncio.timeout(None if moment == math.inf else max(moment - time.perf_counter(), 0.0))


async def _by(moment: float, stage: str, given: Awaitable[_Result]) -> _Result:
    """Return the result of a stage.

    Raises:
        DeadlineExceeded: that is not there at a moment of perf_counter, whatever the stage does.
    """
    try:
        async with _until(moment) as limit:
            return await given
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"{stage} did not end in time") from error
        raise


def _step_down(turn: Turn, reason: str) -> Response:
    """Answer from the next rung that has something: a list that was kept, best sellers, nothing."""
    recommender, request = turn.recommender, turn.request
    try:
        kept = recommender.last_kept(request, turn.known, reason, turn.began)
        if kept is not None:
            return kept
    except Exception:  # noqa: BLE001 - as above
        _log.exception("a kept list cannot be used; answered by best sellers")
    try:
        return recommender.fallback(request, reason, turn.began)
    except Exception:  # noqa: BLE001 - as above
        _log.exception("the fallback failed; answered with an empty list")
        bundle_id = recommender.bundle.bundle_id
        return Response(request.request_id, (), bundle_id, "empty", degraded=True, degraded_reason=reason)
