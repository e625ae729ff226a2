"""Request -> response: the whole path from basket to ten items, with no server around it.

    read      the user's row
    prepare   candidates from every source, one row of features per candidate
    rank      one purchase probability per candidate
    finish    the list: rules, diversity, reasons, prices, the log record

Where answers are cached (`serving.cache.answer_cache`), a kept list may replace prepare and rank.
Everything that belongs to one request travels in `Prepared`: one recommender answers all requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from feature_repo.aggregates import DAY_S, UserEvents, no_events, unpack
from feature_repo.queries import Query, Rows, User
from feature_repo.schema import DENSE_NAMES, model_inputs
from feature_repo.snapshots import USER_TTL_DAYS
from serving.answer.fallback import best_sellers
from serving.answer.presentation import NOTHING_SHOWN, Shown, counting, explained, present
from serving.cache.answer_cache import HOUR_S, AnswerCache, AnswerKey, answer_key
from serving.errors import BundleInvalid, DeadlineNear, FeaturesUnavailable, RowInvalid
from serving.prediction_log import Record, RecordSink
from serving.release.bundle import Bundle, load_bundle
from serving.release.golden import GoldenRequest, Scores, verify_answers
from serving.schemas import NOTHING_LEFT, Request, Response
from serving.shop.fact_store import FactStore
from serving.shop.facts import LiveFacts
from serving.shop.rules import NO_PLAN, Plan, RulesFile
from serving.stages.ranking import check_scores, rank
from serving.stages.reranking import KEPT, POOL, Ranked, best_of, weigh
from serving.stages.retrieval import Candidates, add_pinned, retrieve, thin
from serving.stores.freshness import Freshness
from serving.stores.online_features import OnlineStore, UserRow

_log = logging.getLogger(__name__)

ROUNDS = 3  # of retrieval at most, where so many candidates miss a minimum that fewer than k are left
NOTHING_HIDDEN = np.empty(0, np.int64)  # for a list of the cache: it outlives the present stock
_NO_FEATURES = np.empty((0, len(DENSE_NAMES)), np.float32)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a request before any candidate: its user, and the rules that hold to its end."""

    row: UserRow | None = None  # as it was read; None without a usable row
    events: UserEvents | None = None  # the same, with item codes
    degraded_reason: str | None = None  # why there is no row, or why it may be old
    plan: Plan = NO_PLAN


@dataclass(frozen=True, slots=True)
class Asked:
    """One request before any candidate."""

    request: Request
    known: Known
    query: Query
    began: float  # perf_counter
    ready_at: float  # perf_counter when the two-tower search may start


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The candidates of a request, and the codes that must not be among them."""

    candidates: Candidates
    barred: np.ndarray  # int64
    ended_at: float  # perf_counter


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request before its ranking: its candidates and their features."""

    request: Request
    known: Known
    query: Query
    candidates: Candidates
    dense: np.ndarray  # (n, features) float32
    categorical: np.ndarray  # (n, 4) int64
    stage_ms: dict[str, float]
    retrieved_at: float  # perf_counter when the candidates were found
    ready_at: float  # perf_counter when the ranker may start
    is_thinned: bool  # there was no time to rank all that was retrieved


class Recommender:
    """Answers requests with one bundle and one online store."""

    def __init__(
        self,
        bundle: Bundle,
        store: OnlineStore,
        log: RecordSink | None = None,
        facts: LiveFacts | None = None,
        freshness: Freshness | None = None,
        answers: AnswerCache | None = None,
    ) -> None:
        """Take the bundle, the store of rows, the log, facts of items, the stream's pulse, cached answers."""
        self.bundle = bundle
        self._store = store
        self._log = log
        self.facts = LiveFacts(bundle.statistics) if facts is None else facts
        self._freshness = Freshness() if freshness is None else freshness
        self.answers = answers
        self.tells_counts = True  # in a reason: how often and when the shopper bought the item
        self.explores = 0.0  # share of the requests that explore, see `serving.stages.exploration`
        self.store_state = "unread"  # `ready` or `unavailable` after `connect`

    def recommend(self, request: Request) -> Response:
        """Answer one request."""
        prepared = self.prepare(request)
        return self.finish(prepared, self.rank(prepared.dense, prepared.categorical))

    def prepare(self, request: Request) -> Prepared:
        """Read the user's row, retrieve candidates and compute their features."""
        asked = self.ask(request)
        return self.compose(asked, self.retrieve(asked))

    def ask(self, request: Request, known: Known | None = None, began: float | None = None) -> Asked:
        """Return the state of a request before any candidate; without `known`, the user's row is read now.

        `began` is the perf_counter when the read of `known` began.
        """
        began = time.perf_counter() if began is None else began
        known = self.read(request) if known is None else known
        statistics, at = self.bundle.statistics, request.at
        user = User(no_events(np.int64) if known.events is None else known.events, at)
        query = Query(statistics, at, statistics.codes(request.basket), len(request.basket), user)
        return Asked(request, known, query, began, time.perf_counter())

    def near(self, asked: Asked) -> np.ndarray:
        """Return the codes of the items near the request's query, nearest first."""
        profile = self.bundle.profiles[asked.request.profile]
        return profile.tower.search(asked.query, profile.quotas.tower)

    def retrieve(self, asked: Asked, hidden: np.ndarray | None = None) -> Retrieved:
        """Return the candidates of a request from every source but those that must not be offered.

        `hidden` are their codes; None: those that hold now.
        """
        near = self.near(asked)
        request, query, statistics = asked.request, asked.query, self.bundle.statistics
        at, store_id, plan = request.at, request.store_id, asked.known.plan
        minimums = plan.minimums if hidden is None else ()
        barred = self.facts.hidden(at, store_id, plan) if hidden is None else hidden
        store = statistics.best_of_store(store_id)
        profile = self.bundle.profiles[request.profile]
        candidates = retrieve(query, store, profile.quotas, near, barred, profile.offers)
        for more in reversed(range(ROUNDS if minimums else 0)):
            codes = np.concatenate([candidates.codes, plan.pinned])
            low = self.facts.below_minimum(codes, at, store_id, plan)
            barred = np.concatenate([barred, codes[low]])
            stay = ~low[: len(candidates.codes)]
            if not more or stay.all() or np.count_nonzero(stay) >= request.k:
                candidates = Candidates(candidates.codes[stay], candidates.source[stay])
                break
            candidates = retrieve(query, store, profile.quotas, near, barred, profile.offers)
        return Retrieved(candidates, barred, time.perf_counter())

    def compose(self, asked: Asked, retrieved: Retrieved, most: int | None = None) -> Prepared:
        """Return the features of a request's candidates.

        There is time to rank `most` of them; None: all. Pinned items come on top.
        """
        query, plan, candidates = asked.query, asked.known.plan, retrieved.candidates
        is_thinned = most is not None and most < len(candidates.codes)
        if is_thinned and most is not None:
            candidates = thin(candidates, most)
        if len(plan.pins):
            pinned = plan.pinned[self.bundle.profiles[asked.request.profile].offers[plan.pinned]]
            candidates = add_pinned(candidates, pinned, np.concatenate([query.basket, retrieved.barred]))
        begun_at = retrieved.ended_at
        dense, categorical = model_inputs(Rows(query, candidates.codes))
        ready_at = time.perf_counter()
        stage_ms = {
            "features": (asked.ready_at - asked.began + ready_at - begun_at) * 1e3,
            "retrieval": (begun_at - asked.ready_at) * 1e3,
        }
        inputs = candidates, dense, categorical
        return Prepared(asked.request, asked.known, query, *inputs, stage_ms, begun_at, ready_at, is_thinned)

    async def connect(self) -> None:
        """Read once on the event loop that will answer, so that no request opens the connection."""
        try:
            await self._store.fetch("warm-up")
            self.store_state = "ready"
        except FeaturesUnavailable as error:
            self.store_state = "unavailable"
            _log.warning("answers will lack the users' history until the online store is back: %s", error)

    async def fetch(self, request: Request, by: float = math.inf) -> Known:
        """Return the user's row, read by a moment of perf_counter, or why it is absent; and the rules."""
        try:
            row = None if request.user_id is None else await self._store.fetch(request.user_id, by)
        except (FeaturesUnavailable, ValueError) as error:
            return self._unknown(request, error)
        return self._known(request, row)

    def read(self, request: Request) -> Known:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        try:
            row = None if request.user_id is None else self._store.read(request.user_id)
        except (FeaturesUnavailable, ValueError) as error:
            return self._unknown(request, error)
        return self._known(request, row)

    def _known(self, request: Request, row: UserRow | None) -> Known:
        plan = self._plan(request)
        if request.user_id is None:
            return Known(plan=plan)
        if row is None:
            return Known(degraded_reason=self._freshness.reason, plan=plan)
        if request.at - row.written_at > USER_TTL_DAYS * DAY_S:
            return Known(degraded_reason="stale_features", plan=plan)
        try:
            events = unpack(row.history, self.bundle.statistics.codes_in)
        except ValueError as error:
            return self._unknown(request, error)
        return Known(row, events, self._freshness.reason, plan)

    def _unknown(self, request: Request, error: Exception) -> Known:
        _log.warning("answering without the user's history: %s", error)
        reason = "features_invalid" if isinstance(error, RowInvalid | ValueError) else "features_unavailable"
        return Known(degraded_reason=reason, plan=self._plan(request))

    def rank(self, dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        """Return one purchase probability per candidate, (n,) float32."""
        return rank(self.bundle.ranker, dense, categorical)

    def finish(self, prepared: Prepared, scores: np.ndarray) -> Response:
        """Choose the items to show and say why; write the log record."""
        ranked = time.perf_counter()
        request = prepared.request
        best = self.best(prepared, scores, max(POOL * request.k, 1))
        stage_ms = {**prepared.stage_ms, "ranking": (ranked - prepared.ready_at) * 1e3}
        rung, reason = ("fewer", DeadlineNear.reason) if prepared.is_thinned else ("full", None)
        response, shown = self._respond(request, prepared.known, best, stage_ms, ranked, rung, reason)
        self._record(request, prepared.known, response, prepared, shown)
        return response

    def key(self, request: Request, known: Known, at: float | None = None) -> AnswerKey | None:
        """Return the cache key of the request's list, None if it has none.

        Of the user's row the lines before `at` are part of the key; None: those before the request's time.
        """
        if known.events is None:  # a row that is too old or broken is not used
            return answer_key(self.bundle.statistics, request, None, known.plan.digest)
        lines = len(known.events.before(request.at if at is None else at))
        return answer_key(self.bundle.statistics, request, known.row, known.plan.digest, lines)

    def finish_cached(
        self,
        request: Request,
        known: Known,
        kept: Ranked,
        stage_ms: dict[str, float],
        made: Prepared | None = None,
    ) -> Response | None:
        """Do as `finish` with a list that is kept; None if too little of it can be shown now.

        `kept` may hold items that are sold out now: they are taken out here. If this request made the list,
        `made` has its candidates; without it the log record has no features.
        """
        began = time.perf_counter()
        ranked = self._left_of(kept, request, known.plan)
        if not ranked.suffices(request.k):
            return None
        response, shown = self._respond(request, known, ranked, stage_ms, began)
        self._record(request, known, response, made, shown)
        return response

    def warm(self, request: Request) -> None:
        """Rank for a request and cache the list, before any other request uses this recommender."""
        known = self.read(request)
        key = self.key(request, known)
        if self.answers is None or key is None or self.answers.get_stale(key) is not None:
            return
        asked = self.ask(request, known)
        prepared = self.compose(asked, self.retrieve(asked, NOTHING_HIDDEN))
        scores = self.rank(prepared.dense, prepared.categorical)
        check_scores(scores, len(prepared.dense))
        self.answers.put(key, self.best(prepared, scores))

    def _respond(
        self,
        request: Request,
        known: Known,
        ranked: Ranked,
        stage_ms: dict[str, float],
        began: float,
        rung: str = "full",
        reason: str | None = None,
    ) -> tuple[Response, Shown]:
        """Return the answer and the rest that its record needs; `began` is when re-ranking began."""
        reason = reason or known.degraded_reason
        counts = counting(known.events) if self.tells_counts else None
        explores = self.explores if rung == "full" else 0.0
        items, shown = present(self.bundle, self.facts, request, known.plan, ranked, counts, explores)
        stage_ms["reranking"] = (time.perf_counter() - began) * 1e3
        stage_ms["total"] = sum(stage_ms.values())
        is_empty, degraded = not items and request.k > 0, reason is not None
        rung, reason = ("empty", reason or NOTHING_LEFT) if is_empty else (rung, reason)
        bundle_id = self.bundle.bundle_id
        response = Response(request.request_id, items, bundle_id, rung, degraded, reason, stage_ms)
        if request.explain:
            response = explained(self.bundle, request, known.plan, response)
        return response, shown

    def _record(
        self,
        request: Request,
        known: Known,
        response: Response,
        prepared: Prepared | None = None,
        shown: Shown = NOTHING_SHOWN,
    ) -> None:
        """Log an answer; if it was computed, with the ranker's rows of the items that are shown."""
        if self._log is None:
            return
        rows = _NO_FEATURES
        if prepared is not None:
            rows = prepared.dense[self.bundle.statistics.find(prepared.candidates.codes, shown.codes)]
        version = None if known.events is None else known.events.version
        self._log.append(Record(request, response, rows, time.time(), version, shown.trial))

    def best(self, prepared: Prepared, scores: np.ndarray, most: int = KEPT) -> Ranked:
        """Return the candidates that re-ranking may need: at most so many of the best, and those of rules."""
        plan = prepared.known.plan
        codes = prepared.candidates.codes
        bundle, history = self.bundle, prepared.query.history.items
        worth = weigh(bundle.statistics, codes, scores, bundle.weights, bundle.settings.new_gain, history)
        # Most requests have no rules, and do not enter their module.
        worth = plan.weigh(codes, worth) if len(plan.weighed) else worth
        pinned = plan.pinned if len(plan.pins) else plan.pins
        rules = pinned, plan.reserved, bundle.rarity_of(codes), bundle.novel
        return best_of(prepared.query, prepared.candidates, scores, most, worth, *rules)

    def last_kept(
        self, request: Request, known: Known | None, reason: str, asked_at: float
    ) -> Response | None:
        """Answer with a list that was cached for the same question, whatever its age; None without one.

        Items that are sold out now are taken out, and prices are those of now. `known` is None if the user's
        row was not read. `asked_at` is the perf_counter since which the total counts.
        """
        if self.answers is None:
            return None
        began = time.perf_counter()
        known = Known(plan=self._plan(request)) if known is None else known
        if (ranked := self._stale_list(self.answers, request, known)) is None:
            return None
        ready_at = time.perf_counter()
        stage_ms = {"cache": (ready_at - began) * 1e3}
        response, _ = self._respond(request, known, ranked, stage_ms, ready_at, "cached", reason)
        stage_ms["total"] = (time.perf_counter() - asked_at) * 1e3
        self._record(request, known, response)
        return response

    def _stale_list(self, answers: AnswerCache, request: Request, known: Known) -> Ranked | None:
        """Return what may be shown now of a cached list for this question; None if none suffices.

        The user's own list of this hour or of the one before comes first, then the anonymous list.
        """
        questions = [(request, Known(plan=known.plan))]
        if known.events is not None:
            before = replace(request, at=request.at - HOUR_S)
            questions = [(request, known), (before, known), *questions]
        for question, asker in questions:
            key = self.key(question, asker, request.at)
            cached = None if key is None else answers.get_stale(key)
            if cached is not None:
                ranked = self._left_of(cached, request, known.plan)
                if len(ranked.codes) >= request.k or ranked.whole:
                    return ranked
        return None

    def fallback(self, request: Request, reason: str, asked_at: float | None = None) -> Response:
        """Answer from best sellers alone, the last rungs of the ladder; this needs neither row nor models.

        The total counts since the perf_counter `asked_at`: earlier attempts count, too.
        """
        began = time.perf_counter()
        items = best_sellers(self.bundle, self.facts, request)
        ended = time.perf_counter()
        is_local = any(item.source == "store" for item in items)
        rung = "segment" if is_local else "popular" if items else "empty"
        stage_ms = {"fallback": (ended - began) * 1e3, "total": (ended - (asked_at or began)) * 1e3}
        response = Response(request.request_id, items, self.bundle.bundle_id, rung, True, reason, stage_ms)
        if request.explain:
            response = explained(self.bundle, request, self._plan(request), response)
        self._record(request, Known(), response)
        return response

    def _plan(self, request: Request) -> Plan:
        return self.facts.rules.plan(request.at, request.store_id) if self.facts.rules.rules else NO_PLAN

    def _left_of(self, cached: Ranked, request: Request, plan: Plan) -> Ranked:
        """Return what may be offered now of a cached list."""
        at, store_id = request.at, request.store_id
        hidden = self.facts.hidden(at, store_id, plan)
        if plan.minimums:
            low = self.facts.below_minimum(cached.codes.astype(np.int64), at, store_id, plan)
            hidden = np.concatenate([hidden, cached.codes[low]])
        return cached.without(hidden)


def open_bundle(path: Path) -> Bundle:
    """Load a bundle and ask it its golden requests.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests differently than recorded.
    """
    verify_golden(bundle := load_bundle(path))
    return bundle


def open_recommender(
    bundle_path: Path,
    store: OnlineStore,
    log: RecordSink | None = None,
    facts: FactStore | None = None,
    freshness: Freshness | None = None,
    answers: AnswerCache | None = None,
    rules: Path | None = None,
    open_bundle: Callable[[Path], Bundle] = open_bundle,
) -> Recommender:
    """Load a bundle, ask it its golden requests, and return a recommender that is warm.

    The facts are watched until `facts.close()`. `answers` is an empty cache, for this recommender alone;
    None: each answer is computed. The file of rules need not exist.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests differently than recorded.
    """
    bundle = open_bundle(bundle_path)
    # Compiled now: a log record needs it, and golden requests write none.
    bundle.statistics.find(NOTHING_HIDDEN, NOTHING_HIDDEN)
    rules_file = None if rules is None else RulesFile(rules, bundle.statistics, bundle.vocabulary)
    live = LiveFacts(bundle.statistics, facts, rules_file)
    return Recommender(bundle, store, log, live, freshness, answers)


def verify_golden(bundle: Bundle) -> int:
    """Ask the golden requests and compare; return their number.

    Raises:
        BundleInvalid: see `serving.release.golden.verify_answers`.
    """
    return verify_answers(bundle.path, bundle.bundle_id, partial(answer_golden, bundle))


def answer_golden(bundle: Bundle, golden: GoldenRequest) -> Scores:
    """Return item ids and scores for one golden request.

    Raises:
        BundleInvalid: the answer does without the shopper's row.
    """
    request = golden.parse()
    response = Recommender(bundle, golden.store()).recommend(request)
    if response.degraded:
        raise BundleInvalid(
            f"bundle {bundle.bundle_id} answers golden request {request.request_id} degraded "
            f"({response.degraded_reason}), expected the full path: train again with `reco run --data DIR`"
        )
    return [(item.item_id, round(item.score, 6)) for item in response.items]
