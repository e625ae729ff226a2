"""Scores -> the list that is shown: a soft penalty on more of the same type."""

from __future__ import annotations

import numpy as np

POOL = 4  # times k candidates take part; the rest are too far down to come up


def rerank(scores: np.ndarray, types: np.ndarray, k: int, type_penalty: float) -> np.ndarray:
    """Return the rows of the k items to show, best first.

    Greedy: each item already chosen of a type multiplies the scores of the others of that type by
    `type_penalty`. 1 changes nothing; a hard "one of each type" (0) costs a sixth of the recall on
    grocery baskets, where shoppers do buy two yogurts.

    Args:
        scores: (n,) purchase probabilities.
        types: (n,) type codes; 0 is unknown and never penalised.
        k: how many to show.
        type_penalty: in (0, 1].
    """
    pool = np.argsort(-scores, kind="stable")[: POOL * k]
    if type_penalty >= 1.0:
        return pool[:k]
    left, kinds = scores[pool].astype(np.float64), types[pool]
    rows = []
    for _ in range(min(k, len(pool))):
        best = int(np.argmax(left))
        rows.append(pool[best])
        if kinds[best]:
            left[kinds == kinds[best]] *= type_penalty
        left[best] = -1.0
    return np.array(rows, np.int64)
