"""A list about to be shown -> the same list with one place drawn by chance, and its exact propensities.

A model learns only of items that it shows. A share of the requests explores: one place behind the first two
is chosen, then its item, from the usual one and the candidates below the list. Only that place changes, so
that an explored answer loses at most one place of k. Places that rules or novelty fill stay as they are.

The draw is a hash of the request id: a repeated request gets the same answer.
"""

from __future__ import annotations

import hashlib

import numpy as np

from serving.prediction_log import Trial
from serving.stages.reranking import ANY, CHOSEN, NO_KINDS, Ranked

FIRST = 2  # the first place that may be explored, counted from 0
REACH = 2  # times k candidates take part: with more, each is drawn too seldom to learn of it
FLOOR = 0.3  # share of the draws in which every candidate is equally likely; the rest follow worth
LEAST = 1e-9  # of a worth: a list without any worth draws evenly
EXPERIMENT, EXPLORED, CONTROL = "exploration", "explored", "control"
_WORDS = 3  # 64-bit numbers of a request id: whether it explores, which place, which item


def explore(
    ranked: Ranked,
    rows: np.ndarray,
    why: np.ndarray,
    request_id: str,
    share: float,
    reserved: np.ndarray = NO_KINDS,
) -> tuple[np.ndarray, Trial | None]:
    """Return the rows of the items to show, and the trial; None if no place may be explored.

    Args:
        ranked: the candidates.
        rows: (k,) of the list without exploration.
        why: (k,) kinds of slot from `serving.stages.reranking.fill_slots`.
        request_id: decides the draw.
        share: of the requests that explore.
        reserved: (r,) kinds that slots are reserved for: the usual item may be of the kind, another is not.
    """
    free = why == CHOSEN
    free[: len(reserved)] &= reserved[: len(why)] == ANY
    places = np.flatnonzero(free[FIRST:]) + FIRST
    is_below = np.arange(len(ranked.worth)) < min(ranked.best, REACH * len(rows))
    is_below[rows] = False
    below = np.flatnonzero(is_below)
    if not len(places) or not len(below):
        return rows, None
    digest = hashlib.blake2b(request_id.encode(), digest_size=8 * _WORDS, person=b"exploration").digest()
    chance, which, what = (word / 2**64 for word in np.frombuffer(digest, np.uint64).tolist())
    if chance >= share:
        return rows, Trial(EXPERIMENT, CONTROL, request_id)
    place = places[min(int(which * len(places)), len(places) - 1)]
    worth = np.maximum(ranked.worth, LEAST)
    options, usual = worth[np.append(rows[place], below)], worth[rows[places]]
    drawn = _mixed(options, options.sum(), len(options))
    stays = _mixed(usual, usual + options[1:].sum(), len(options))
    option = min(int(np.searchsorted(drawn.cumsum(), what, "right")), len(below))
    propensities = np.ones(len(rows), np.float32)
    propensities[places] = 1 - (1 - stays) / len(places)
    if option:
        rows = rows.copy()
        rows[place] = below[option - 1]
        propensities[place] = drawn[option] / len(places)
    return rows, Trial(EXPERIMENT, EXPLORED, request_id, int(place), propensities)


def _mixed(worth: np.ndarray, total: np.ndarray, options: int) -> np.ndarray:
    return FLOOR / options + (1 - FLOOR) * worth / total
