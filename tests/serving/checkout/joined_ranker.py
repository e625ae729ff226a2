"""A shared ranker in this process: joined calls, as a remote ranker gets them, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.checkout.batching import Batcher
from serving.checkout.checkout import Rank, Turn
from serving.stages.ranking import rank

Inputs = tuple[np.ndarray, np.ndarray]


def rank_rows(session: Any, works: Sequence[Inputs]) -> list[np.ndarray]:
    """Return the scores of each request, out of one call for the rows of all."""
    dense, categorical = (np.concatenate(columns) for columns in zip(*works, strict=True))
    return np.split(rank(session, dense, categorical), np.cumsum([len(rows) for rows, _ in works])[:-1])


def joined_ranker(sizes: list[int] | None = None) -> Rank:
    """Return a `Rank` whose calls are shared; `sizes` takes the number of requests of each call."""

    async def call(bundle_id: str, turns: Sequence[Turn], deadline: float) -> list[np.ndarray]:
        if sizes is not None:
            sizes.append(len(turns))
        prepared = [turn.prepared for turn in turns if turn.prepared is not None]
        return rank_rows(turns[0].recommender.bundle.ranker, [(p.dense, p.categorical) for p in prepared])

    batcher: list[Batcher] = []

    async def rank_turn(turn: Turn) -> np.ndarray:
        if not batcher:  # made here: it belongs to the running loop
            batcher.append(Batcher(call, max_wait_ms=5.0, max_rows=8_192))
        assert turn.prepared is not None
        scores: np.ndarray = await batcher[0].ask(
            turn,
            rows=len(turn.prepared.dense),
            bundle_id=turn.recommender.bundle.bundle_id,
            deadline=turn.until,
        )
        return scores

    return rank_turn
