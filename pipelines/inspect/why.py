"""A request and one item -> why it is in the answer, or at which step of the path it was lost, by how much.

The request is answered again, as it would be now and in any time; each step that could have lost the item is
then asked for its own reason. What re-ranking lost is found by leaving one part of it away after the other:
the part without which the item is shown is the one that it was lost to.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feature_repo.errors import USAGE, RecoError
from pipelines.inspect.items import check_items
from serving.schemas import NOTHING_LEFT
from serving.shop.rules import NO_PLAN
from serving.stages.reranking import POOL
from serving.stages.retrieval import SOURCES

if TYPE_CHECKING:
    from serving.answer.recommender import Asked, Prepared, Recommender
    from serving.schemas import Request, Response


_UNWEIGHED = {"novelty": 0.0, "exposure": 0.0}


class NotLogged(RecoError):
    """The prediction log holds no answer of that id."""

    exit_code = USAGE


@dataclass(frozen=True)
class SourcePlace:
    """Where a source has an item among all that it knows."""

    source: str
    rank: int  # from 1
    brings: int  # how many of the best it brings


@dataclass(frozen=True)
class Verdict:
    """What became of one item."""

    item_id: str
    # shown, or what lost it: request, rules, facts, profile, retrieval or reranking
    step: str
    why: str
    slot: int | None = None  # of the answer, from 1
    score: float | None = None  # purchase probability, if it was ranked
    rank: int | None = None  # by score among the candidates, from 1
    candidates: int = 0
    places: tuple[SourcePlace, ...] = ()


def explain(recommender: Recommender, request: Request, item_id: str) -> tuple[Verdict, Response]:
    """Return what becomes of an item in the answer of a request, and that answer.

    Raises:
        ItemUnknown: the bundle does not know the item.
    """
    check_items(recommender.bundle, [item_id])
    asked = recommender.ask(request)
    prepared = recommender.compose(asked, recommender.retrieve(asked))
    scores = recommender.rank(prepared.dense, prepared.categorical)
    response = recommender.finish(prepared, scores)
    code = recommender.bundle.statistics.code_of[item_id]
    places = tuple(places_of(recommender, asked, prepared, code))
    found = np.flatnonzero(prepared.candidates.codes == code)
    if not len(found):
        step, why = _before_ranking(recommender, asked, code, places)
        return Verdict(item_id, step, why, candidates=len(scores), places=places), response
    score = float(scores[found[0]])
    rank = 1 + int(np.count_nonzero(scores > score))
    slots = [slot for slot, item in enumerate(response.items, 1) if item.item_id == item_id]
    if slots:
        step, why = "shown", response.items[slots[0] - 1].reason
    else:
        step, why = _in_reranking(recommender, prepared, scores, code)
    slot = slots[0] if slots else None
    return Verdict(item_id, step, why, slot, round(score, 6), rank, len(scores), places), response


def places_of(recommender: Recommender, asked: Asked, prepared: Prepared, code: int) -> list[SourcePlace]:
    """Return where each source that knows an item has it; the tower's place is that of an exact search."""
    request, query, statistics = asked.request, asked.query, recommender.bundle.statistics
    profile = recommender.bundle.profiles[request.profile]
    quotas, together = profile.quotas, query.together
    partners = together.codes[np.argsort(-together.sums[0], kind="stable")]
    best = statistics.best_of_store(request.store_id)
    near = profile.tower.search(query, len(statistics.item_ids))

    def reached(source: str, codes: np.ndarray) -> int:
        """Return how far down its list a source was asked: some fill up the room that the others leave."""
        taken = prepared.candidates.codes[prepared.candidates.source == SOURCES.index(source)]
        return int(np.flatnonzero(np.isin(codes, taken)).max(initial=-1)) + 1

    lists: list[tuple[str, np.ndarray, int]] = [
        ("history", query.history.items[query.favourites], quotas.history),
        ("together", partners, max(quotas.together, reached("together", partners))),
        ("week", statistics.best_of_week, quotas.week),
        ("tower", near, quotas.tower),
        ("store", np.empty(0, np.int64) if best is None else best, quotas.store),
        ("popular", statistics.popular, reached("popular", statistics.popular)),
    ]
    ranks = ((source, np.flatnonzero(codes == code), brings) for source, codes, brings in lists)
    return [SourcePlace(source, int(at[0]) + 1, brings) for source, at, brings in ranks if len(at)]


def _before_ranking(
    recommender: Recommender, asked: Asked, code: int, places: tuple[SourcePlace, ...]
) -> tuple[str, str]:
    """Return the step that kept an item from being ranked, and why."""
    request, plan = asked.request, asked.known.plan
    if code in asked.query.basket:
        return "request", "it is in the basket"
    if name := plan.banned_because(code):
        return "rules", f"banned by {name}"
    if why := recommender.facts.excluded_because(code, request.at, request.store_id):
        return "facts", why
    if not recommender.bundle.profiles[request.profile].offers[code]:
        return "profile", f"profile {request.profile} leaves it out, or it was removed from the index"
    if name := recommender.facts.minimum_missed(code, request.at, request.store_id, plan):
        return "rules", f"below the minimum of {name}"
    if not places:
        return "retrieval", "no source knows it for this request"
    if inside := [place for place in places if place.rank <= place.brings]:
        first = inside[0]
        if first.source == "tower":
            why = f"the index overlooked it: it is number {first.rank} of an exact search"
        else:
            total = recommender.bundle.profiles[request.profile].quotas.total
            why = f"{first.source} has it as number {first.rank}, when {total} candidates were there already"
        return "retrieval", why
    nearest = min(places, key=lambda place: place.rank / max(place.brings, 1))
    return "retrieval", (
        f"no source brings it: the nearest is {nearest.source}, where it is number {nearest.rank} and "
        f"{nearest.brings} come"
    )


def _in_reranking(
    recommender: Recommender, prepared: Prepared, scores: np.ndarray, code: int
) -> tuple[str, str]:
    """Return what lost an item that was ranked, and by how much."""
    request, bundle = prepared.request, recommender.bundle
    if request.k == 0:
        return "request", "nothing was asked for: k is 0"
    shown = _chosen(recommender, prepared, scores)
    if code in _chosen(_with(recommender, type_penalty=1.0), prepared, scores):
        types = bundle.statistics.categorical[:, 0]
        alike = [bundle.statistics.item_ids[one] for one in shown if types[one] == types[code]]
        return "reranking", f"makes room for other types: {', '.join(alike)} of its own type stand before it"
    unruled = replace(prepared, known=replace(prepared.known, plan=NO_PLAN))
    if code in _chosen(recommender, unruled, scores):
        return "reranking", "makes room for what rules raise, pin or reserve a place for"
    if code in _chosen(_with(recommender, **_UNWEIGHED), prepared, scores):
        return "reranking", "makes room for what is seldom shown: novelty and new manufacturers have a weight"
    if code in _chosen(_with(recommender, type_penalty=1.0, **_UNWEIGHED), unruled, scores):
        parts = "other types, for what rules raise, pin or reserve a place for, or for what is seldom shown"
        return (
            "reranking",
            f"makes room for {parts}: several of these act together, without one of them it is still lost",
        )
    score_of = dict(zip(prepared.candidates.codes.tolist(), scores.tolist(), strict=True))
    last = min(shown, key=score_of.__getitem__)
    name = bundle.statistics.item_ids[last]
    missing = score_of[last] / score_of[code] if score_of[code] else np.inf
    return "reranking", (
        f"outscored: {_percent(score_of[code])} against {_percent(score_of[last])} of {name}, "
        "the least likely that is shown, "
        + ("more than 1,000 x as much" if missing > 1_000 else f"{missing:.1f} x as much")
    )


def _percent(share: float) -> str:
    """Return a share in percent; a small one with three digits, so that it is not shown as 0.00%."""
    if 0 < share < 1e-6:
        return "less than 0.0001%"
    return f"{share:.2%}" if share >= 0.001 or not share else f"{share * 100:.3g}%"


def _with(recommender: Recommender, **settings: Any) -> Recommender:
    """Return a recommender of the same bundle with other settings."""
    plain = copy(recommender)
    plain.bundle = replace(plain.bundle, settings=replace(plain.bundle.settings, **settings))
    return plain


def _chosen(recommender: Recommender, prepared: Prepared, scores: np.ndarray) -> list[int]:
    """Return the codes of the list that re-ranking makes of some scores."""
    request = prepared.request
    from serving.answer.presentation import present

    best = recommender.best(prepared, scores, max(POOL * request.k, 1))
    _, shown = present(recommender.bundle, recommender.facts, request, prepared.known.plan, best)
    chosen: list[int] = shown.codes.tolist()
    return chosen


def logged_answer(log: Path, request_id: str) -> dict[str, Any]:
    """Return the newest record of an answer, without features, as plain types.

    Raises:
        NotLogged: no record has this id.
    """
    import pyarrow.compute as pc

    from serving.prediction_log import join_segments, read_segments

    segments = read_segments(log, features=False)  # one after the other: a long log fits no memory
    matches = (segment.filter(pc.equal(segment["request_id"], request_id)) for segment in segments)
    found = join_segments([rows for rows in matches if len(rows)], features=False)
    if not len(found):
        raise NotLogged(
            f"{log} holds no answer to request {request_id!r}: look at the id (what was answered a moment "
            "ago may not be written yet), or ask with --user and --basket"
        )
    record: dict[str, Any] = found.drop_columns(["features", "stage_ms"]).to_pylist()[-1]
    return record


def request_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the request line of a log record."""
    names = ("request_id", "user_id", "basket", "store_id", "k", "profile")
    line = {name: record[name] for name in names if record[name] is not None}
    return {**line, "at": record["at"].isoformat()}


def served(record: dict[str, Any], item_id: str, bundle_id: str) -> str:
    """Return the item's place in the logged answer, and the reason if that answer was degraded."""
    had = (
        f"shown as number {record['item_ids'].index(item_id) + 1}"
        if item_id in record["item_ids"]
        else "not shown"
    )
    text = f"then: {had}, rung {record['rung']}"
    if (place := record["place_explored"]) is not None:
        text += f"; that answer explored its place {place + 1}"
    if (reason := record["degraded_reason"]) is not None:
        what = "there was no other item" if reason == NOTHING_LEFT else "what it lacks was dropped by that"
        text += f" ({reason}): {what}"
    if record["bundle_id"] != bundle_id:
        text += f"; by bundle {record['bundle_id']}, now it is {bundle_id}"
    return text
