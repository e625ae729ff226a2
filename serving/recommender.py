"""Request -> response: the whole path from basket to ten items, with no server around it.

    read      the user's row
    prepare   candidates from every source, one row of features per candidate
    rank      one purchase probability per candidate
    finish    the list: diversity, reasons, prices, the log record

Everything that belongs to one request travels in `Prepared`; nothing is kept on `self`, because one
recommender answers all requests.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feature_repo.aggregates import DAY_S, UserEvents, no_events, unpack
from feature_repo.schema import DENSE_NAMES, model_inputs
from feature_repo.snapshots import USER_TTL_DAYS
from feature_repo.transforms import Query, Rows, User, strongest_partner
from serving.availability import AvailabilityFile
from serving.bundle import Bundle, load_bundle
from serving.errors import BundleInvalid, FeaturesUnavailable
from serving.fact_store import FactStore
from serving.facts import LiveFacts
from serving.freshness import Freshness
from serving.online_features import MemoryStore, OnlineStore, UserRow
from serving.prediction_log import Record, RecordSink
from serving.ranked import Ranked, best_of
from serving.ranking import rank
from serving.reranking import POOL, rerank
from serving.retrieval import SOURCES, Candidates, retrieve
from serving.schemas import Recommendation, Request, Response, parse_request

log = logging.getLogger(__name__)

GOLDEN_TOLERANCE = 1e-4  # of a probability: other processors round differently


@dataclass(frozen=True, slots=True)
class Known:
    """What the online store says of a request's user."""

    row: UserRow | None = None  # as it was read; None where there is none that can be used
    events: UserEvents | None = None  # the same, with item codes
    degraded_reason: str | None = None  # why there is none, or why it may be old


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
    ready_at: float  # perf_counter when the ranker may start


class Recommender:
    """Answers requests with one bundle and one online store."""

    def __init__(
        self,
        bundle: Bundle,
        store: OnlineStore,
        log: RecordSink | None = None,
        facts: LiveFacts | None = None,
        freshness: Freshness | None = None,
    ) -> None:
        """Take the bundle, the store of rows, the log, what holds of the items, and the stream's pulse."""
        self.bundle = bundle
        self._store = store
        self._log = log
        self.facts = LiveFacts(bundle.statistics) if facts is None else facts
        self._freshness = Freshness() if freshness is None else freshness

    def recommend(self, request: Request) -> Response:
        """Answer one request."""
        prepared = self.prepare(request)
        return self.finish(prepared, self.rank(prepared.dense, prepared.categorical))

    def prepare(self, request: Request) -> Prepared:
        """Read the user's row, retrieve candidates and compute their features."""
        began = time.perf_counter()
        statistics, at = self.bundle.statistics, request.at
        known = self.read(request)
        user = User(no_events(np.int64) if known.events is None else known.events, at)
        query = Query(statistics, at, statistics.codes(request.basket), len(request.basket), user)
        read = time.perf_counter()
        row = None if request.store_id is None else statistics.store_row.get(request.store_id)
        store = None if row is None else statistics.store_popular[row]
        profile = self.bundle.profiles[request.profile]
        candidates = retrieve(query, store, profile.quotas, profile.tower, self._excluded(request))
        retrieved = time.perf_counter()
        dense, categorical = model_inputs(Rows(query, candidates.codes))
        ready = time.perf_counter()
        stage_ms = {
            "features": (read - began + ready - retrieved) * 1e3,
            "retrieval": (retrieved - read) * 1e3,
        }
        return Prepared(request, known, query, candidates, dense, categorical, stage_ms, ready)

    def read(self, request: Request) -> Known:
        """Return what the store says of the user, and what is wrong with it."""
        if request.user_id is None:
            return Known()
        try:
            row = self._store.read(request.user_id)
            if row is None:
                return Known(degraded_reason=self._freshness.reason)
            if request.at - row.written_at > USER_TTL_DAYS * DAY_S:
                return Known(degraded_reason="stale_features")
            events = unpack(row.history, self.bundle.statistics.codes_in)
            return Known(row, events, self._freshness.reason)
        except FeaturesUnavailable as error:
            log.warning("answering without the user's history: %s", error)
            return Known(degraded_reason="features_unavailable")
        except ValueError as error:
            log.warning("answering without the user's history: %s", error)
            return Known(degraded_reason="features_invalid")

    def rank(self, dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        """Return one purchase probability per candidate, (n,) float32."""
        return rank(self.bundle.ranker, dense, categorical)

    def finish(self, prepared: Prepared, scores: np.ndarray) -> Response:
        """Choose the items to show and say why; write the log record."""
        ranked = time.perf_counter()
        request, known = prepared.request, prepared.known
        best = best_of(prepared.query, prepared.candidates, scores, max(POOL * request.k, 1))
        items, shown = self.present(request, best)
        done = time.perf_counter()
        stage_ms = {
            **prepared.stage_ms,
            "ranking": (ranked - prepared.ready_at) * 1e3,
            "reranking": (done - ranked) * 1e3,
        }
        stage_ms["total"] = sum(stage_ms.values())
        response = Response(
            request_id=request.request_id,
            items=items,
            bundle_id=self.bundle.bundle_id,
            rung="full" if items or request.k == 0 else "empty",
            degraded=known.degraded_reason is not None,
            degraded_reason=known.degraded_reason,
            stage_ms=stage_ms,
        )
        if self._log is not None:
            rows = self.bundle.statistics.find(prepared.candidates.codes, shown)
            version = None if known.events is None else known.events.version
            self._log.append(Record(request, response, prepared.dense[rows], time.time(), version))
        return response

    def present(self, request: Request, ranked: Ranked) -> tuple[tuple[Recommendation, ...], np.ndarray]:
        """Return the items to show of a ranked list, with reasons and what holds now; and their codes."""
        statistics = self.bundle.statistics
        types = statistics.categorical[ranked.codes, 0]
        rows = rerank(ranked.scores, types, request.k, self.bundle.settings.type_penalty)
        codes = ranked.codes[rows].astype(np.int64)
        basket = statistics.codes(request.basket)
        items = tuple(
            Recommendation(
                str(statistics.item_ids[code]),
                score,
                SOURCES[source],
                self._reason(source, code, times, request.at - last_at, basket),
                *term,
            )
            for code, score, source, times, last_at, term in zip(
                codes.tolist(),
                ranked.scores[rows].tolist(),
                ranked.source[rows].tolist(),
                ranked.times[rows].tolist(),
                ranked.last_at[rows].tolist(),
                self._terms(codes, request),
                strict=True,
            )
        )
        return items, codes

    def fallback(self, request: Request, reason: str) -> Response:
        """Answer from best sellers alone, needing neither store nor models: the last rungs of the ladder."""
        began = time.perf_counter()
        statistics = self.bundle.statistics
        row = None if request.store_id is None else statistics.store_row.get(request.store_id)
        ranked = statistics.popular if row is None else statistics.store_popular[row]
        barred = np.concatenate([statistics.codes(request.basket), self._excluded(request)])
        codes = ranked[~np.isin(ranked, barred)][: request.k]
        source = "popular" if row is None else "store"
        buyers = max(float(statistics.total_baskets), 1.0)
        items = tuple(
            Recommendation(
                str(statistics.item_ids[code]),
                float(statistics.basket_count[code]) / buyers,
                source,
                _POPULAR[source],
                *term,
            )
            for code, term in zip(codes.tolist(), self._terms(codes, request), strict=True)
        )
        took = (time.perf_counter() - began) * 1e3
        rung = "empty" if not items else "segment" if source == "store" else "popular"
        response = Response(
            request.request_id,
            items,
            self.bundle.bundle_id,
            rung,
            True,
            reason,
            {"fallback": took, "total": took},
        )
        if self._log is not None:
            self._log.append(
                Record(request, response, np.empty((0, len(DENSE_NAMES)), np.float32), time.time())
            )
        return response

    def _excluded(self, request: Request) -> np.ndarray:
        """Return codes that must not be offered: by what holds now, or by the request's profile."""
        excluded = self.facts.excluded(request.at, request.store_id)
        return np.concatenate([excluded, self.bundle.profiles[request.profile].barred])

    def _terms(
        self, codes: np.ndarray, request: Request
    ) -> Iterator[tuple[float | None, float | None, str | None]]:
        """Yield price, promotion and coupon of each item, None where nothing is known."""
        at, store_id = request.at, request.store_id
        prices, promotions = (
            (None if math.isnan(number) else number for number in numbers.tolist())
            for numbers in (self.facts.price(codes, at, store_id), self.facts.promotion(codes, at, store_id))
        )
        return zip(prices, promotions, self.facts.coupons(codes, at, request.user_id, store_id), strict=True)

    def _reason(self, source: int, code: int, times: int, age_s: float, basket: np.ndarray) -> str:
        match SOURCES[source]:
            case "history":
                days = int(max(age_s, 0) // DAY_S)
                return f"bought {times} {'time' if times == 1 else 'times'} before, last {days} days ago"
            case "together":
                partner = strongest_partner(self.bundle.statistics, basket, code)
                return f"often bought together with {self.bundle.statistics.item_ids[partner]}"
            case name:
                return _POPULAR[name]


_POPULAR = {
    "tower": "fits this basket and shopper",
    "store": "popular in this store",
    "popular": "popular now",
}


def open_recommender(
    bundle_path: Path,
    store: OnlineStore,
    log: RecordSink | None = None,
    availability: Path | None = None,
    facts: FactStore | None = None,
    freshness: Freshness | None = None,
) -> Recommender:
    """Load a bundle, ask it its golden requests, and return a recommender that is warm.

    Args:
        bundle_path: the bundle.
        store: users' rows.
        log: the prediction log.
        availability: file of excluded items, which need not exist.
        facts: store of prices, stock, promotions and coupons; it is watched until `facts.close()`.
        freshness: what knows whether the store of rows is kept up to date; None: nothing is ever stale.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests differently than recorded.
    """
    bundle = load_bundle(bundle_path)
    verify_golden(bundle)
    file = None if availability is None else AvailabilityFile(availability)
    return Recommender(bundle, store, log, LiveFacts(bundle.statistics, facts, file), freshness)


def verify_golden(bundle: Bundle) -> int:
    """Ask the golden requests and compare; return how many there were.

    Raises:
        BundleInvalid: naming the request, the answer and what was expected.
    """
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


def answer_golden(bundle: Bundle, request: dict[str, Any], history: str | None) -> list[tuple[str, float]]:
    """Return item ids and scores for one golden request; `history` is a packed row in base64, or None.

    Raises:
        BundleInvalid: the answer does without the row.
    """
    store = MemoryStore()
    parsed = parse_request(request, now=0.0, default_id="golden")
    if history is not None and parsed.user_id is not None:
        store.write(parsed.user_id, UserRow(base64.b64decode(history), parsed.at))
    response = Recommender(bundle, store).recommend(parsed)
    if response.degraded:
        raise BundleInvalid(
            f"bundle {bundle.bundle_id} answers golden request {parsed.request_id} degraded "
            f"({response.degraded_reason}), expected the full path: train again with `reco run`"
        )
    return [(item.item_id, round(item.score, 6)) for item in response.items]
