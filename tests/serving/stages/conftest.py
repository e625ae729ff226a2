"""The list that re-ranking shows of plain arrays."""

import numpy as np

from serving.stages.reranking import (
    NO_BOUGHT,
    NO_RARITY,
    NO_SLOTS,
    UNBOUNDED,
    SlotRules,
    WeighedCandidates,
    fill_slots,
)


def rerank(
    worth: np.ndarray,
    types: np.ndarray,
    k: int,
    type_penalty: float,
    rarity: np.ndarray = NO_RARITY,
    novel: np.ndarray = NO_SLOTS,
    bought: np.ndarray = NO_BOUGHT,
    novel_loss: float = UNBOUNDED,
) -> np.ndarray:
    """Return the rows of the k items to show without rules, int64; with `bought`, new items are spared."""
    pool = WeighedCandidates(worth.astype(np.float64), types, rarity, bought)
    slots = SlotRules(novel=novel, novel_loss=novel_loss, spares_new=len(bought) > 0)
    return fill_slots(pool, slots, k, type_penalty)[0]
