"""A request that gets no computed answer and no cached list -> best sellers of store and chain."""

from __future__ import annotations

import numpy as np

from serving.answer.presentation import POPULAR, terms
from serving.release.bundle import Bundle
from serving.schemas import DEFAULT_PROFILE, Recommendation, Request
from serving.shop.facts import LiveFacts
from serving.shop.rules import Plan


def best_sellers(bundle: Bundle, facts: LiveFacts, request: Request) -> tuple[Recommendation, ...]:
    """Return the best sellers of the store, then those of the chain; this needs neither row nor models."""
    statistics, profiles = bundle.statistics, bundle.profiles
    of_store = statistics.best_of_store(request.store_id)
    local = statistics.popular[:0] if of_store is None else of_store
    sellers = np.concatenate([local, statistics.popular[~np.isin(statistics.popular, local)]])
    profile = profiles.get(request.profile, profiles[DEFAULT_PROFILE])  # the last rung refuses no request
    plan = facts.rules.plan(request.at, request.store_id)
    hidden = facts.hidden(request.at, request.store_id, plan)
    barred = np.concatenate([statistics.codes(request.basket), hidden])
    codes = _shown(sellers, barred, profile.offers, facts, request, plan)
    sources = ["store" if is_local else "popular" for is_local in np.isin(codes, local).tolist()]
    buyers = max(float(statistics.total_baskets), 1.0)
    reasons = [POPULAR[source] for source in sources]
    if len(plan.pins):
        pinned = map(plan.pinned_because, codes.tolist())
        reasons = [by_rule or reason for by_rule, reason in zip(pinned, reasons, strict=True)]
    items = map(
        Recommendation,
        statistics.item_ids[codes].tolist(),
        (statistics.basket_count[codes] / buyers).tolist(),
        sources,
        reasons,
        *terms(facts, codes, request),
    )
    return tuple(items)


def _shown(
    sellers: np.ndarray,
    barred: np.ndarray,
    offers: np.ndarray,
    facts: LiveFacts,
    request: Request,
    plan: Plan,
) -> np.ndarray:
    """Return the k best sellers that may be shown, (k,) int64, with pinned items in their slots."""
    pinned = plan.pinned
    codes = np.concatenate([pinned, sellers[~np.isin(sellers, pinned)]]) if len(pinned) else sellers
    codes = codes[offers[codes] & ~np.isin(codes, barred)]
    if plan.minimums:
        codes = codes[~facts.below_minimum(codes, request.at, request.store_id, plan)]
    if not len(pinned):
        return codes[: request.k].astype(np.int64)
    shown = codes[~np.isin(codes, pinned)].tolist()
    for slot, code in enumerate(plan.pins.tolist()):
        if code in codes and slot < request.k:
            shown.insert(slot, code)
    return np.array(shown[: request.k], np.int64)
