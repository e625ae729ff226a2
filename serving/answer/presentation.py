"""A ranked list -> the items that are shown: slots, reasons, and the price and terms that hold now."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from feature_repo.aggregates import DAY_S, UserEvents, is_cut_off
from feature_repo.queries import strongest_partners
from feature_repo.statistics import NO_ITEM
from serving.prediction_log import Trial
from serving.release.bundle import Bundle
from serving.schemas import Recommendation, Request, Response
from serving.shop.facts import LiveFacts
from serving.shop.rules import Plan
from serving.stages.exploration import explore
from serving.stages.reranking import Ranked, SlotRules, WeighedCandidates, fill_slots
from serving.stages.retrieval import SOURCES

_TOGETHER = SOURCES.index("together")
POPULAR = {
    "tower": "fits this basket and shopper",
    "store": "popular in this store",
    "popular": "popular now",
    "week": "popular this week",
    "pinned": "chosen by the shop",
}
_CODES = {
    "history": "bought_before",
    "together": "bought_together",
    "tower": "fits",
    "store": "popular_in_store",
    "popular": "popular",
    "week": "popular",
    "pinned": "pinned",
}
Terms = tuple[list[float | None], list[float | None], list[str | None]]


class Shown(NamedTuple):
    """The codes of an answer's items, (k,), and its part in an experiment."""

    codes: np.ndarray
    trial: Trial | None


NOTHING_SHOWN = Shown(np.empty(0, np.int64), None)


def present(
    bundle: Bundle,
    facts: LiveFacts,
    request: Request,
    plan: Plan,
    ranked: Ranked,
    counts: str | None = "",
    explores: float = 0.0,
) -> tuple[tuple[Recommendation, ...], Shown]:
    """Return the items to show, with reasons and current terms, and the rest that the log needs.

    `counts` comes before the number of purchases in a reason; with None a reason says neither how often nor
    when. `explores` is the share of requests that explore, see `serving.stages.exploration`.
    """
    statistics = bundle.statistics
    pins = statistics.find(ranked.codes.astype(np.int64), plan.pins) if len(plan.pins) else plan.pins
    pool = WeighedCandidates(
        ranked.worth,
        statistics.categorical[ranked.codes, 0],
        bundle.rarity_of(ranked.codes),
        ranked.times > 0,
    )
    settings = bundle.settings
    slots = SlotRules(pins, plan.reserved, bundle.novel, settings.novel_loss, settings.spares_new)
    rows, why = fill_slots(pool, slots, request.k, settings.type_penalty)
    trial = None
    if explores:
        rows, trial = explore(ranked, rows, why, request.request_id, explores, plan.reserved)
    codes = ranked.codes[rows].astype(np.int64)
    reasons = _reasons(bundle, request, ranked, rows, counts)
    items = map(
        Recommendation,
        statistics.item_ids[codes].tolist(),
        ranked.scores[rows].tolist(),
        [SOURCES[source] for source in ranked.source[rows].tolist()],
        plan.explain(reasons, codes, why) if plan.digest or why.any() else reasons,
        *terms(facts, codes, request),
    )
    return tuple(items), Shown(codes, trial)


def explained(bundle: Bundle, request: Request, plan: Plan, response: Response) -> Response:
    """Return the response with the items' names and reason codes, and the number of unknown items."""
    each_code = bundle.statistics.each_code
    items = []
    shown = each_code([item.item_id for item in response.items]).tolist()
    for item, code in zip(response.items, shown, strict=True):
        is_pinned = item.reason == plan.pinned_because(code)
        reason_code = _CODES["pinned" if is_pinned else item.source]
        items.append(msgspec.structs.replace(item, name=bundle.name_of(code), reason_code=reason_code))
    unknown = int(np.count_nonzero(each_code(request.basket) == NO_ITEM))
    return msgspec.structs.replace(response, items=tuple(items), unknown_items=unknown)


def terms(facts: LiveFacts, codes: np.ndarray, request: Request) -> Terms:
    """Return price, promotion and coupon of each item, None where no fact says any."""
    at, store_id = request.at, request.store_id
    return (
        _known(facts.price(codes, at, store_id)),
        _known(facts.promotion(codes, at, store_id)),
        facts.coupons(codes, at, request.user_id, store_id),
    )


def _known(numbers: np.ndarray) -> list[float | None]:
    return [None if number != number else number for number in numbers.tolist()]


def counting(events: UserEvents | None) -> str:
    """Return the words before the number of purchases: a row that was cut off counts too few."""
    return "at least " if events is not None and is_cut_off(events) else ""


def _reasons(
    bundle: Bundle, request: Request, ranked: Ranked, rows: np.ndarray, counts: str | None
) -> list[str]:
    """Return why each of some rows is shown."""
    partners = _partners(bundle, request, ranked.codes[rows[ranked.source[rows] == _TOGETHER]])
    reasons = []
    for row in rows.tolist():
        match SOURCES[ranked.source[row]]:
            case "history" if counts is None:
                reasons.append("bought before")
            case "history":
                times = int(ranked.times[row])
                days = int(max(request.at - float(ranked.last_at[row]), 0) // DAY_S)
                unit, ago = "time" if times == 1 else "times", "day" if days == 1 else "days"
                reasons.append(f"bought {counts}{times} {unit} before, last {days} {ago} ago")
            case "together":
                partner = partners[int(ranked.codes[row])]
                name = f" {bundle.name_of(partner)}" if request.explain else ""
                reasons.append(f"often bought together with {bundle.statistics.item_ids[partner]}{name}")
            case name:
                reasons.append(POPULAR[name])
    return reasons


def _partners(bundle: Bundle, request: Request, codes: np.ndarray) -> dict[int, int]:
    """Return the basket item that each of some codes is bought together with most."""
    if not len(codes):
        return {}
    statistics, shown = bundle.statistics, codes.astype(np.int64)
    partners = strongest_partners(statistics, statistics.codes(request.basket), shown)
    return dict(zip(shown.tolist(), partners.tolist(), strict=True))
