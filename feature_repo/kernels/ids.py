"""Item ids -> codes of the catalogue, by a hash table, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled

SEEDS = (np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3))  # FNV-1a's, 64 bit


@compiled
def index_ids(text: np.ndarray, ends: np.ndarray, slots: np.ndarray) -> int:
    """Fill a hash table of ids: each slot holds the hash and the code of its id, code -1 if it is empty.

    Returns the code of an id that has the hash of another id, -1 if all hashes differ. For two million ids
    the chance of a shared hash is one in ten million.

    Args:
        text: the UTF-8 bytes of all ids, concatenated.
        ends: (n,) the end of each id in the text.
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
    """Return the codes of the ids in a text, one a line, (count,) int64; -1 for an unknown id.

    64 bits of its hash identify an id, so that each takes one memory access.

    Args:
        ids: the text's UTF-8 bytes.
        count: the number of ids; a text with another number gives an empty array.
        slots: the table that `index_ids` filled.
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
    """Return the slot of a key, or the empty slot where it belongs."""
    last = len(slots) - 1
    slot = key & last
    while slots[slot, 1] >= 0 and slots[slot, 0] != key:
        slot = (slot + 1) & last
    return slot
