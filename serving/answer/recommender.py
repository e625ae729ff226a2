"""Request -> response: the whole path from basket to ten items, with no server around it.

    read      the user's row
    prepare   candidates from every source, one row of features per candidate
    rank      one purchase probability per candidate
    finish    the list: rules, diversity, reasons, prices, the log record

Where answers are cached (`serving.cache.answer_cache`), what `prepare` and `rank` would give may exist
already.

Everything that belongs to one request travels in `Prepared`; nothing is kept on `self`, because one
recommender answers all requests.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from feature_repo.aggregates import DAY_S, UserEvents, no_events, unpack
from feature_repo.queries import Query, Rows, strongest_partners
from feature_repo.schema import DENSE_NAMES, model_inputs
from feature_repo.snapshots import USER_TTL_DAYS
from feature_repo.users import User
from serving.cache.answer_cache import HOUR_S, AnswerCache, AnswerKey, answer_key
from serving.cache.ranked import KEPT, Ranked, best_of
from serving.errors import BundleInvalid, DeadlineNear, FeaturesUnavailable
from serving.prediction_log import Record, RecordSink
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import DEFAULT_PROFILE, NOTHING_LEFT, Recommendation, Request, Response, parse_request
from serving.shop.availability import AvailabilityFile
from serving.shop.fact_store import FactStore
from serving.shop.facts import LiveFacts
from serving.shop.rules import NO_PLAN, Minimum, Plan, RulesFile
from serving.stages.ranking import rank
from serving.stages.reranking import POOL, SlotRules, WeighedCandidates, fill_slots
from serving.stages.retrieval import SOURCES, Candidates, retrieve, thin
from serving.stores.freshness import Freshness
from serving.stores.online_features import MemoryStore, OnlineStore, UserRow

log = logging.getLogger(__name__)

ROUNDS = 3  # of retrieval at most, where so many candidates miss a minimum that fewer than k are left
NOTHING_HIDDEN = np.empty(0, np.int64)  # for a list that is kept: it outlives what is sold out now
_NO_FEATURES = np.empty((0, len(DENSE_NAMES)), np.float32)
GOLDEN_TOLERANCE = 1e-4  # of a probability: other processors round differently


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a request before any candidate: its user, and the rules that hold to its end."""

    row: UserRow | None = None  # as it was read; None where there is none that can be used
    events: UserEvents | None = None  # the same, with item codes
    degraded_reason: str | None = None  # why there is none, or why it may be old
    plan: Plan = NO_PLAN


@dataclass(frozen=True, slots=True)
class Asked:
    """One request before any candidate."""

    request: Request
    known: Known
    query: Query
    began: float  # perf_counter
    ready_at: float  # likewise, when the two-tower search may start


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request on its way: what was retrieved for it and what the ranker will see."""

    request: Request
    known: Known
    query: Query
    candidates: Candidates
    dense: np.ndarray  # (n, features) float32
    categorical: np.ndarray  # (n, 4) int64
    stage_ms: dict[str, float]
    retrieved_at: float  # perf_counter when the candidates were found
    ready_at: float  # likewise, when the ranker may start
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

    def recommend(self, request: Request) -> Response:
        """Answer one request."""
        prepared = self.prepare(request)
        return self.finish(prepared, self.rank(prepared.dense, prepared.categorical))

    def prepare(self, request: Request) -> Prepared:
        """Read the user's row, retrieve candidates and compute their features."""
        asked = self.ask(request)
        return self.gather(asked, self.near(asked))

    def ask(self, request: Request, known: Known | None = None, read_by: float = math.inf) -> Asked:
        """Return what is known of a request before any candidate.

        Args:
            request: what is asked.
            known: of `read`; None: it is read now.
            read_by: perf_counter when the read is given up.
        """
        began = time.perf_counter()
        known = self.read(request, read_by) if known is None else known
        statistics, at = self.bundle.statistics, request.at
        user = User(no_events(np.int64) if known.events is None else known.events, at)
        query = Query(statistics, at, statistics.codes(request.basket), len(request.basket), user)
        return Asked(request, known, query, began, time.perf_counter())

    def near(self, asked: Asked) -> np.ndarray:
        """Return the codes of the items near the request's query, nearest first."""
        profile = self.bundle.profiles[asked.request.profile]
        return profile.tower.search([asked.query], profile.quotas.tower)[0]

    def gather(
        self,
        asked: Asked,
        near: np.ndarray,
        hidden: np.ndarray | None = None,
        most: Callable[[int], int] | None = None,
    ) -> Prepared:
        """Return the candidates of a request, those that `near` found among them, and their features.

        Args:
            asked: of `ask`.
            near: of `near`.
            hidden: codes that must not be offered; None: what holds now.
            most: how many of as many candidates as were found there is time to rank; None: all.
        """
        request, query, statistics = asked.request, asked.query, self.bundle.statistics
        plan = asked.known.plan
        for_now = hidden is None
        hidden = self._hidden(request, plan) if hidden is None else hidden
        row = None if request.store_id is None else statistics.store_row.get(request.store_id)
        store = None if row is None else statistics.store_popular[row]
        profile = self.bundle.profiles[request.profile]
        barred = np.concatenate([hidden, profile.barred])
        candidates = retrieve(query, store, profile.quotas, near, barred)
        for more in reversed(range(ROUNDS if for_now and plan.minimums else 0)):
            codes = np.concatenate([candidates.codes, plan.pinned])
            low = self.below_minimum(codes, request, plan)
            barred = np.concatenate([barred, codes[low]])
            kept = ~low[: len(candidates.codes)]
            if not more or kept.all() or np.count_nonzero(kept) >= request.k:
                candidates = Candidates(candidates.codes[kept], candidates.source[kept])
                break
            candidates = retrieve(query, store, profile.quotas, near, barred)
        retrieved, found = time.perf_counter(), len(candidates.codes)
        if most is not None and (there_is_time_for := most(found)) < found:
            candidates = thin(candidates, there_is_time_for)
        is_thinned = len(candidates.codes) < found
        if len(plan.pins):
            candidates = _with_pinned(candidates, plan, np.concatenate([query.basket, barred]))
        dense, categorical = model_inputs(Rows(query, candidates.codes))
        ready = time.perf_counter()
        stage_ms = {
            "features": (asked.ready_at - asked.began + ready - retrieved) * 1e3,
            "retrieval": (retrieved - asked.ready_at) * 1e3,
        }
        return Prepared(
            request,
            asked.known,
            query,
            candidates,
            dense,
            categorical,
            stage_ms,
            retrieved,
            ready,
            is_thinned,
        )

    def read(self, request: Request, by: float = math.inf) -> Known:
        """Return what the store says of the user by a moment of perf_counter, what is wrong, and rules."""
        plan = self.facts.rules.plan(request.at, request.store_id)
        if request.user_id is None:
            return Known(plan=plan)
        try:
            row = self._store.read(request.user_id, by)
            if row is None:
                return Known(degraded_reason=self._freshness.reason, plan=plan)
            if request.at - row.written_at > USER_TTL_DAYS * DAY_S:
                return Known(degraded_reason="stale_features", plan=plan)
            events = unpack(row.history, self.bundle.statistics.codes_in)
            return Known(row, events, self._freshness.reason, plan)
        except FeaturesUnavailable as error:
            log.warning("answering without the user's history: %s", error)
            return Known(degraded_reason="features_unavailable", plan=plan)
        except ValueError as error:
            log.warning("answering without the user's history: %s", error)
            return Known(degraded_reason="features_invalid", plan=plan)

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
        if self._log is not None:
            self._record(request, prepared.known, response, self._features(prepared, shown))
        return response

    def key(self, request: Request, known: Known) -> AnswerKey | None:
        """Return what the request's list is kept under, None if it cannot be."""
        row = None if known.events is None else known.row  # one that is too old or broken is not used
        return answer_key(self.bundle.statistics, request, row, known.plan.digest)

    def finish_cached(
        self,
        request: Request,
        known: Known,
        kept: Ranked,
        stage_ms: dict[str, float],
        made: Prepared | None = None,
    ) -> Response | None:
        """Do as `finish` with a list that is kept; None if too little of it can be shown now.

        Args:
            request: whose list it is.
            known: of its user.
            kept: the list, from which nothing was left out that is sold out now.
            stage_ms: of the stages up to here.
            made: what the list was made of if this request made it; without, its log record has no features.
        """
        began = time.perf_counter()
        ranked = self._left_of(kept, request, known.plan)
        if not ranked.suffices(request.k):
            return None
        response, shown = self._respond(request, known, ranked, stage_ms, began)
        if self._log is not None:
            features = _NO_FEATURES if made is None else self._features(made, shown)
            self._record(request, known, response, features)
        return response

    def warm(self, request: Request) -> None:
        """Rank for a request and cache the list, before any other request uses this recommender."""
        known = self.read(request)
        key = self.key(request, known)
        if self.answers is None or key is None or self.answers.get_stale(key) is not None:
            return
        asked = self.ask(request, known)
        prepared = self.gather(asked, self.near(asked), NOTHING_HIDDEN)
        self.answers.put(key, self.best(prepared, self.rank(prepared.dense, prepared.categorical)))

    def _respond(
        self,
        request: Request,
        known: Known,
        ranked: Ranked,
        stage_ms: dict[str, float],
        began: float,
        rung: str = "full",
        reason: str | None = None,
    ) -> tuple[Response, np.ndarray]:
        """Return the answer and the codes of its items; `began` is when its last stage did."""
        reason = reason or known.degraded_reason
        items, shown = self.present(request, known, ranked)
        stage_ms["reranking"] = (time.perf_counter() - began) * 1e3
        stage_ms["total"] = sum(stage_ms.values())
        is_empty = not items and request.k > 0
        response = Response(
            request_id=request.request_id,
            items=items,
            bundle_id=self.bundle.bundle_id,
            rung="empty" if is_empty else rung,
            degraded=reason is not None,
            degraded_reason=NOTHING_LEFT if is_empty and reason is None else reason,
            stage_ms=stage_ms,
        )
        return response, shown

    def _features(self, prepared: Prepared, shown: np.ndarray) -> np.ndarray:
        """Return the ranker's rows of the items that are shown."""
        return prepared.dense[self.bundle.statistics.find(prepared.candidates.codes, shown)]

    def _record(self, request: Request, known: Known, response: Response, dense: np.ndarray) -> None:
        assert self._log is not None
        version = None if known.events is None else known.events.version
        self._log.append(Record(request, response, dense, time.time(), version))

    def best(self, prepared: Prepared, scores: np.ndarray, most: int = KEPT) -> Ranked:
        """Return the candidates that come into question for the list, at most so many and what rules need."""
        plan = prepared.known.plan
        codes = prepared.candidates.codes
        worth = plan.weigh(codes, self.bundle.worth(codes, scores))
        rare = self.bundle.rarity_of(codes), self.bundle.novel
        return best_of(prepared.query, prepared.candidates, scores, most, worth, plan, *rare)

    def present(
        self, request: Request, known: Known, ranked: Ranked
    ) -> tuple[tuple[Recommendation, ...], np.ndarray]:
        """Return the items to show of a ranked list, with reasons and what holds now; and their codes."""
        statistics, plan = self.bundle.statistics, known.plan
        pins = statistics.find(ranked.codes.astype(np.int64), plan.pins) if len(plan.pins) else plan.pins
        pool = WeighedCandidates(
            plan.weigh(ranked.codes, self.bundle.worth(ranked.codes, ranked.scores)),
            statistics.categorical[ranked.codes, 0],
            self.bundle.rarity_of(ranked.codes),
            ranked.times > 0,
        )
        slots = SlotRules(pins, plan.reserved, self.bundle.novel)
        rows, why = fill_slots(pool, slots, request.k, self.bundle.settings.type_penalty)
        codes = ranked.codes[rows].astype(np.int64)
        reasons = self._reasons(request, ranked, rows)
        items = map(
            Recommendation,
            statistics.item_ids[codes].tolist(),
            ranked.scores[rows].tolist(),
            [SOURCES[source] for source in ranked.source[rows].tolist()],
            plan.explain(reasons, codes, why) if plan.digest or why.any() else reasons,
            *self._terms(codes, request),
        )
        return tuple(items), codes

    def last_kept(
        self, request: Request, known: Known | None, reason: str, asked_at: float
    ) -> Response | None:
        """Answer with a list that was kept for the same question, however long ago; None if there is none.

        The user's own list of this hour or the one before, else that of nobody with this basket. What is sold
        out now is taken out, prices are those of now; what is left is to be as long as what is asked for.

        Args:
            request: what is asked.
            known: of its user; None: it was not read.
            reason: why there is no better answer.
            asked_at: perf_counter since which the total counts.
        """
        if self.answers is None:
            return None
        began = time.perf_counter()
        plan = self.facts.rules.plan(request.at, request.store_id) if known is None else known.plan
        nobody = Known(plan=plan)
        known = nobody if known is None else known
        questions = (request, known), (replace(request, at=request.at - HOUR_S), known), (request, nobody)
        for question in questions if known.events is not None else questions[-1:]:
            key = self.key(*question)
            if key is None:
                return None
            if (kept := self.answers.get_stale(key)) is None:
                continue
            ranked = self._left_of(kept, request, plan)
            if len(ranked.codes) < request.k and not ranked.whole:
                continue
            found = time.perf_counter()
            stage_ms = {"cache": (found - began) * 1e3}
            response, _ = self._respond(request, known, ranked, stage_ms, found, "cached", reason)
            stage_ms["total"] = (time.perf_counter() - asked_at) * 1e3
            if self._log is not None:
                self._record(request, known, response, _NO_FEATURES)
            return response
        return None

    def fallback(self, request: Request, reason: str, asked_at: float | None = None) -> Response:
        """Answer from best sellers alone, needing neither store nor models: the last rungs of the ladder.

        Args:
            request: what is asked.
            reason: why there is no better answer.
            asked_at: perf_counter since which the total counts: what was tried before took time, too.
        """
        began = time.perf_counter()
        asked_at = began if asked_at is None else asked_at
        statistics = self.bundle.statistics
        row = None if request.store_id is None else statistics.store_row.get(request.store_id)
        ranked = statistics.popular if row is None else statistics.store_popular[row]
        profiles = self.bundle.profiles
        profile = profiles.get(request.profile, profiles[DEFAULT_PROFILE])  # the last rung refuses nobody
        plan = self.facts.rules.plan(request.at, request.store_id)
        barred = np.concatenate(
            [statistics.codes(request.basket), self._hidden(request, plan), profile.barred]
        )
        codes = self._sellers(ranked, barred, request, plan)
        source = "popular" if row is None else "store"
        why = _POPULAR[source]
        buyers = max(float(statistics.total_baskets), 1.0)
        items = tuple(
            map(
                Recommendation,
                statistics.item_ids[codes].tolist(),
                (statistics.basket_count[codes] / buyers).tolist(),
                [source] * len(codes),
                [plan.pinned_because(code) or why for code in codes.tolist()]
                if len(plan.pins)
                else [why] * len(codes),
                *self._terms(codes, request),
            )
        )
        ended = time.perf_counter()
        rung = "empty" if not items else "segment" if source == "store" else "popular"
        response = Response(
            request.request_id,
            items,
            self.bundle.bundle_id,
            rung,
            True,
            reason,
            {"fallback": (ended - began) * 1e3, "total": (ended - asked_at) * 1e3},
        )
        if self._log is not None:
            self._record(request, Known(), response, _NO_FEATURES)
        return response

    def below_minimum(self, codes: np.ndarray, request: Request, plan: Plan) -> np.ndarray:
        """Return which items are known to miss one of the plan's minimums, (n,) bool."""
        low = np.zeros(len(codes), bool)
        for minimum in plan.minimums:
            low |= self._found(minimum, codes, request) < minimum.of(codes)  # never of what is not known: NaN
        return low

    def minimum_missed(self, code: int, request: Request, plan: Plan) -> str:
        """Return the name of the rule whose minimum an item is known to miss, "" if it misses none."""
        one = np.array([code], np.int64)
        for minimum in plan.minimums:
            if self._found(minimum, one, request)[0] < minimum.of(one)[0]:
                return minimum.because(code)
        return ""

    def _found(self, minimum: Minimum, codes: np.ndarray, request: Request) -> np.ndarray:
        known = self.facts.stock if minimum.kind == "minimum_stock" else self.facts.margin
        return known(codes, request.at, request.store_id)

    def _sellers(self, ranked: np.ndarray, barred: np.ndarray, request: Request, plan: Plan) -> np.ndarray:
        """Return the k best sellers that may be shown, (k,) int64, with what is pinned in its slots."""
        pinned = plan.pinned
        codes = np.concatenate([pinned, ranked[~np.isin(ranked, pinned)]]) if len(pinned) else ranked
        codes = codes[~np.isin(codes, barred)]
        if plan.minimums:
            codes = codes[~self.below_minimum(codes, request, plan)]
        if not len(pinned):
            return codes[: request.k].astype(np.int64)
        shown = codes[~np.isin(codes, pinned)].tolist()
        for slot, code in enumerate(plan.pins.tolist()):
            if code in codes and slot < request.k:
                shown.insert(slot, code)
        return np.array(shown[: request.k], np.int64)

    def _left_of(self, kept: Ranked, request: Request, plan: Plan) -> Ranked:
        """Return what may be offered now of a list that is kept."""
        hidden = self._hidden(request, plan)
        if plan.minimums:
            low = self.below_minimum(kept.codes.astype(np.int64), request, plan)
            hidden = np.concatenate([hidden, kept.codes[low]])
        return kept.without(hidden)

    def _hidden(self, request: Request, plan: Plan) -> np.ndarray:
        """Return codes that must not be offered by what holds now."""
        excluded = self.facts.excluded(request.at, request.store_id)
        return np.concatenate([excluded, plan.banned]) if len(plan.banned) else excluded

    def _terms(
        self, codes: np.ndarray, request: Request
    ) -> tuple[list[float | None], list[float | None], list[str | None]]:
        """Return price, promotion and coupon of each item, None where nothing is known."""
        at, store_id = request.at, request.store_id
        return (
            _known(self.facts.price(codes, at, store_id)),
            _known(self.facts.promotion(codes, at, store_id)),
            self.facts.coupons(codes, at, request.user_id, store_id),
        )

    def _reasons(self, request: Request, ranked: Ranked, rows: np.ndarray) -> list[str]:
        """Return why each of some rows is shown."""
        statistics = self.bundle.statistics
        partners = self._partners(request, ranked.codes[rows[ranked.source[rows] == _TOGETHER]])
        reasons = []
        for row in rows.tolist():
            match SOURCES[ranked.source[row]]:
                case "history":
                    times = int(ranked.times[row])
                    days = int(max(request.at - float(ranked.last_at[row]), 0) // DAY_S)
                    unit = "time" if times == 1 else "times"
                    reasons.append(f"bought {times} {unit} before, last {days} days ago")
                case "together":
                    partner = partners[int(ranked.codes[row])]
                    reasons.append(f"often bought together with {statistics.item_ids[partner]}")
                case name:
                    reasons.append(_POPULAR[name])
        return reasons

    def _partners(self, request: Request, codes: np.ndarray) -> dict[int, int]:
        """Return which item of the basket each of some codes is bought together with most."""
        if not len(codes):
            return {}
        statistics, wanted = self.bundle.statistics, codes.astype(np.int64)
        found = strongest_partners(statistics, statistics.codes(request.basket), wanted)
        return dict(zip(wanted.tolist(), found.tolist(), strict=True))


def _with_pinned(candidates: Candidates, plan: Plan, taken: np.ndarray) -> Candidates:
    """Return candidates with those that rules pin and no source brought, unless they must not be offered."""
    pinned = plan.pinned
    more = pinned[~np.isin(pinned, np.concatenate([candidates.codes, taken]))]
    source = np.full(len(more), SOURCES.index("pinned"), np.int8)
    return Candidates(np.concatenate([candidates.codes, more]), np.concatenate([candidates.source, source]))


def _known(numbers: np.ndarray) -> list[float | None]:
    return [None if number != number else number for number in numbers.tolist()]


_TOGETHER = SOURCES.index("together")
_POPULAR = {
    "tower": "fits this basket and shopper",
    "store": "popular in this store",
    "popular": "popular now",
    "pinned": "chosen by the shop",
}


def open_bundle(path: Path) -> Bundle:
    """Load a bundle and ask it its golden requests.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests differently than recorded.
    """
    bundle = load_bundle(path)
    verify_golden(bundle)
    return bundle


def open_recommender(
    bundle_path: Path,
    store: OnlineStore,
    log: RecordSink | None = None,
    availability: Path | None = None,
    facts: FactStore | None = None,
    freshness: Freshness | None = None,
    answers: AnswerCache | None = None,
    rules: Path | None = None,
    open_bundle: Callable[[Path], Bundle] = open_bundle,
) -> Recommender:
    """Load a bundle, ask it its golden requests, and return a recommender that is warm.

    Args:
        bundle_path: the bundle.
        store: users' rows.
        log: the prediction log.
        availability: file of excluded items, which need not exist.
        facts: store of prices, stock, promotions and coupons; it is watched until `facts.close()`.
        freshness: what knows whether the store of rows is kept up to date; None: nothing is ever stale.
        answers: an empty cache, for this recommender alone; None: each answer is computed.
        rules: file of rules, which need not exist.
        open_bundle: loads and verifies the bundle.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests differently than recorded.
    """
    bundle = open_bundle(bundle_path)
    file = None if availability is None else AvailabilityFile(availability)
    rules_file = None if rules is None else RulesFile(rules, bundle.statistics, bundle.vocabulary)
    live = LiveFacts(bundle.statistics, facts, file, rules_file)
    return Recommender(bundle, store, log, live, freshness, answers)


def verify_golden(bundle: Bundle) -> int:
    """Ask the golden requests and compare; return how many there were.

    Raises:
        BundleInvalid: naming the request, the answer and what was expected; or they can't be read or asked.
    """
    try:
        return _verify_golden(bundle)
    except BundleInvalid:
        raise
    except Exception as error:
        raise BundleInvalid(
            f"the golden requests of {bundle.path} can't be read or asked "
            f"({error.__class__.__name__}: {str(error)[:200]}): assemble the bundle again"
        ) from error


def _verify_golden(bundle: Bundle) -> int:
    records = [json.loads(line) for line in (bundle.path / "golden.jsonl").read_text().splitlines()]
    if not records:
        raise BundleInvalid(f"{bundle.path / 'golden.jsonl'} holds no request: assemble the bundle again")
    for record in records:
        answer = answer_golden(bundle, record["request"], record["history"])
        expected = record["expected"]
        if not _same_answer(answer, expected):
            raise BundleInvalid(
                f"bundle {bundle.bundle_id} answers golden request {record['request']['request_id']} "
                f"with {answer[:3]}…, recorded was {expected[:3]}…: "
                "the models or this code are not those it was built with; serve it with that code, "
                "or train again with `reco run`"
            )
    return len(records)


def _same_answer(answer: list[tuple[str, float]], expected: list[tuple[str, float]]) -> bool:
    """Compare two answers: the same items, but for one on the edge of the list, with the same scores.

    Items whose scores are as good as equal may change places on another processor.
    """
    scores = dict(answer)
    known = [(scores[item], score) for item, score in expected if item in scores]
    if len(answer) != len(expected) or len(known) < len(expected) - 1:
        return False
    return all(abs(got - score) <= GOLDEN_TOLERANCE for got, score in known)


def golden_question(
    bundle: Bundle, request: dict[str, Any], history: str | None
) -> tuple[Recommender, Request]:
    """Return a recommender that knows a golden request's shopper alone, and the request."""
    store = MemoryStore()
    parsed = parse_request(request, now=0.0, default_id="golden")
    if history is not None and parsed.user_id is not None:
        store.write(parsed.user_id, UserRow(base64.b64decode(history), parsed.at))
    return Recommender(bundle, store), parsed


def answer_golden(bundle: Bundle, request: dict[str, Any], history: str | None) -> list[tuple[str, float]]:
    """Return item ids and scores for one golden request; `history` is a packed row in base64, or None.

    Raises:
        BundleInvalid: the answer does without the row.
    """
    recommender, parsed = golden_question(bundle, request, history)
    response = recommender.recommend(parsed)
    if response.degraded:
        raise BundleInvalid(
            f"bundle {bundle.bundle_id} answers golden request {parsed.request_id} degraded "
            f"({response.degraded_reason}), expected the full path: train again with `reco run`"
        )
    return [(item.item_id, round(item.score, 6)) for item in response.items]
