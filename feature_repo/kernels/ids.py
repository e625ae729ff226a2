"""Item ids -> codes of the catalogue, by a hash table, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled

SEEDS = (np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3))  # FNV-1a's, 64 bit


@compiled
def index_ids(text: np.ndarray, ends: np.ndarray, slots: np.ndarray) -> int:
    """Fill a hash table of ids: each slot the hash and the code of the id that is there, code -1 where none.

    Returns the code of an id whose hash another one has as well, -1 if there is none: of two million ids two
    share one with a chance of one in ten million.

    Args:
        text: the UTF-8 bytes of all ids, one after the other.
        ends: (n,) where each ends.
        slots: (s, 2) int64 to fill; s is a power of two above n.
    """
    slots[:, 1] = -1
    begin = 0
    for code in range(len(ends)):
        hashed = SEEDS[0]
        for at in range(begin, ends[code]):
            hashed = (hashed ^ np.uint64(text[at])) * SEEDS[1]
        key = _mixed(hashed)
        slot = _slot(slots, key)
        if slots[slot, 1] >= 0:
            return code
        slots[slot, 0], slots[slot, 1] = key, code
        begin = ends[code]
    return -1


@compiled
def codes_of(ids: np.ndarray, count: int, slots: np.ndarray) -> np.ndarray:
    """Return the codes of ids that stand in one text, each on a line, (count,) int64; -1 for an unknown one.

    Ids are told apart by 64 bits of their hash, which takes one look into memory for each.

    Args:
        ids: the text's UTF-8 bytes.
        count: how many ids there are; a text with another number gives an empty array.
        slots: what `index_ids` filled.
    """
    codes = np.empty(count, np.int64)
    found, hashed = 0, SEEDS[0]
    for at in range(len(ids) + 1):
        if at < len(ids) and ids[at] != 10:
            hashed = (hashed ^ np.uint64(ids[at])) * SEEDS[1]
            continue
        if found == count:
            return codes[:0]
        codes[found] = slots[_slot(slots, _mixed(hashed)), 1]
        found += 1
        hashed = SEEDS[0]
    return codes if found == count else codes[:0]


@compiled
def _mixed(hashed: np.uint64) -> np.int64:
    """Return FNV-1a (Fowler, Noll and Vo) of some bytes, mixed once more: its low bits choose the slot."""
    return np.int64(hashed ^ (hashed >> np.uint64(32)))


@compiled
def _slot(slots: np.ndarray, key: np.int64) -> np.int64:
    """Return the slot in which a key stands, or the empty one in which it would."""
    last = len(slots) - 1
    slot = key & last
    while slots[slot, 1] >= 0 and slots[slot, 0] != key:
        slot = (slot + 1) & last
    return slot
