"""Candidates and their scores -> `Ranked`, the best of them: what is cached, and as which bytes.

It holds what is costly and lasts, never what must be true now: price, stock, promotion and coupon are looked
up for each answer, and so are the reasons' words.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from feature_repo.kernels.compiled import best, best_rows
from feature_repo.transforms import Query
from serving.shop.rules import NO_PLAN, Plan
from serving.stages.reranking import NEW, NO_RARITY, NO_SLOTS, POOL, REPEAT, rare_pool
from serving.stages.retrieval import SOURCES, Candidates

KEPT = 60  # candidates; re-ranking to ten looks at 40, so 20 of them may be sold out by then
_MAGIC = b"RK"
_FORMAT = 2
_HEADER = struct.Struct("<2sBBHH")  # magic, format, flags, candidates, the best of them
_WHOLE, _BOUGHT = 1, 2
_COLUMNS = (("codes", "<i4"), ("scores", "<f4"), ("source", "i1"))
_OF_HISTORY = (("times", "<u2"), ("last_at", "<f8"))
_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)
_HISTORY_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _OF_HISTORY)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best candidates of one request: the first `best` of them are worth most, best first.

    Behind them come those that only pins, reserved slots and novel slots may need.

    `times` and `last_at` say how often and when last the user bought a candidate; the reason of one that the
    history brought is made of them at the time of the answer. Other reasons follow from basket and source.
    """

    codes: np.ndarray  # (m,) int32
    scores: np.ndarray  # (m,) float32 purchase probabilities
    source: np.ndarray  # (m,) int8, index of SOURCES
    times: np.ndarray  # (m,) uint16, 0 where the user never did
    last_at: np.ndarray  # (m,) float64 seconds since the epoch, likewise
    best: int
    whole: bool  # nothing was left out: these are all the candidates there were

    def without(self, barred: np.ndarray) -> Ranked:
        """Return what is left when some codes must not be shown: not whole, best sellers would fill it up."""
        kept = ~np.isin(self.codes, barred)
        if kept.all():
            return self
        return Ranked(
            self.codes[kept],
            self.scores[kept],
            self.source[kept],
            self.times[kept],
            self.last_at[kept],
            best=int(np.count_nonzero(kept[: self.best])),
            whole=False,
        )

    def suffices(self, k: int) -> bool:
        """Say whether the list of k items is the one that all candidates would give, see `fill_slots`."""
        return self.whole or self.best >= POOL * k

    def to_bytes(self) -> bytes:
        """Return the list as bytes (little endian, no pickle): header, then one column after the other."""
        bought = bool(self.times.any())
        flags = _WHOLE * self.whole + _BOUGHT * bought
        columns = (*_COLUMNS, *(_OF_HISTORY if bought else ()))
        return b"".join(
            [
                _HEADER.pack(_MAGIC, _FORMAT, flags, len(self.codes), self.best),
                *(getattr(self, name).astype(dtype, copy=False).tobytes() for name, dtype in columns),
            ]
        )

    @classmethod
    def from_bytes(cls, data: bytes, items: int | None = None) -> Ranked:
        """Return the list that `to_bytes` wrote; its arrays are views of the bytes.

        Args:
            data: the bytes.
            items: size of the catalogue, for bytes of a store that others write to; None: of this process,
                and what the columns hold is not looked at.

        Raises:
            ValueError: they are not such a list, of this format and this catalogue.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"a ranked list has {_HEADER.size} bytes or more, this one has {len(data)}")
        magic, found, flags, m, most = _HEADER.unpack_from(data)
        if magic != _MAGIC or found != _FORMAT:
            raise ValueError(f"no ranked list of format {_FORMAT}: another version of this code wrote it")
        expected = _HEADER.size + m * (_BYTES + (_HISTORY_BYTES if flags & _BOUGHT else 0))
        if len(data) != expected:
            raise ValueError(
                f"a ranked list of {m} candidates has {expected} bytes, this one has {len(data)}"
            )
        columns, at = {}, _HEADER.size
        for name, dtype in (*_COLUMNS, *(_OF_HISTORY if flags & _BOUGHT else ())):
            columns[name] = np.frombuffer(data, dtype, m, at)
            at += columns[name].nbytes
        if not flags & _BOUGHT:
            columns |= {name: np.zeros(m, dtype) for name, dtype in _OF_HISTORY}
        if items is not None:
            _check(columns, m, items)
        return cls(**columns, best=min(most, m), whole=bool(flags & _WHOLE))


def best_of(
    query: Query,
    candidates: Candidates,
    scores: np.ndarray,
    most: int = KEPT,
    worth: np.ndarray | None = None,
    plan: Plan = NO_PLAN,
    rarity: np.ndarray = NO_RARITY,
    novel: np.ndarray = NO_SLOTS,
) -> Ranked:
    """Return the candidates of most worth, equal ones in the order they were retrieved.

    Args:
        query: the request; only its history is read.
        candidates: what was retrieved for it.
        scores: one purchase probability per candidate, (n,) float32.
        most: how many to keep at most, beside those that rules and novel slots may need.
        worth: what each candidate is worth, (n,) 0 or more; None: its score.
        plan: the rules; what they pin is kept, and so is enough for the slots that they keep.
        rarity: see `fill_slots`.
        novel: likewise.
    """
    worth = scores.astype(np.float64) if worth is None else worth
    others = []
    if len(plan.pins):
        pinned = query.statistics.find(candidates.codes, plan.pinned)
        others.append(pinned[pinned >= 0])
        worth = worth.copy()
        worth[others[0]] = -1.0  # they take no place among the best
    places = best(worth, most)
    if plan.reserved.any():
        others += _of_kinds(query, candidates.codes, worth, places, plan)
    if len(rarity) and len(novel):
        others.append(best(worth * rarity, 2 * rare_pool(novel)))  # some of them may be sold out
    first = len(places)
    if others:
        more = np.zeros(len(worth), bool)
        more[np.concatenate(others)] = True
        more[places] = False
        places = np.concatenate([places, np.flatnonzero(more)])
    history = query.history
    columns = best_rows(
        places, scores, candidates.codes, candidates.source, history.items, history.count, history.last_at
    )
    return Ranked(*columns, best=first, whole=len(places) >= len(candidates.codes))


def _check(columns: dict[str, np.ndarray], m: int, items: int) -> None:
    """Raise ValueError if one of the m candidates is none of this catalogue, or nothing like it."""
    codes, source = columns["codes"], columns["source"]
    if m and (codes.min() < 0 or codes.max() >= items):
        raise ValueError(f"a ranked list names items outside the catalogue of {items}")
    if m and (source.min() < 0 or source.max() >= len(SOURCES)):
        raise ValueError("a ranked list names a source that there is none of")
    if m and not (columns["scores"].min() >= 0 and columns["scores"].max() <= 1):  # NaN is neither
        raise ValueError("a ranked list holds a score that is no probability")
    if not np.isfinite(columns["last_at"]).all():
        raise ValueError("a ranked list holds a time that is none")


def _of_kinds(
    query: Query, codes: np.ndarray, worth: np.ndarray, places: np.ndarray, plan: Plan
) -> list[np.ndarray]:
    """Return the places of the best candidates beyond some, as many of each kind as slots are kept for it."""
    bought = query.statistics.find(query.history.items, codes) >= 0
    order = np.argsort(-worth, kind="stable")
    free = np.ones(len(worth), bool)
    free[places] = False
    rest = order[free[order]]
    slots = [int(np.count_nonzero(plan.reserved == kind)) for kind in (REPEAT, NEW)]
    return [rest[bought[rest]][: slots[0]], rest[~bought[rest]][: slots[1]]]
