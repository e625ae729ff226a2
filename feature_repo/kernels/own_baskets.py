"""A user's lines and a basket -> the user's earlier baskets that are like this one, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled


@compiled
def like_this_one(
    at: np.ndarray,
    basket: np.ndarray,
    item: np.ndarray,
    kind: np.ndarray,
    codes: np.ndarray,
    bought: np.ndarray,
    visible: np.ndarray,
    types: np.ndarray,
    type_count: int,
    now: float,
    decay_s: float,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Compare the user's earlier baskets with the visible one, and sum that up for each item bought.

    A basket that is `age` old weighs exp(-age / decay). Its likeness is the cosine of the two sets: shared
    over the root of the product of the two sizes. An item scanned twice counts once.

    Args:
        at: (n,) times in order.
        basket: (n,) numbers of the baskets; lines of one basket are neighbours, sorted by item.
        item: (n,) places in `codes`.
        kind: (n,) 0 a purchase; other lines are skipped.
        codes: (m,) of the catalogue, -1 outside it.
        bought: (h,) distinct codes that the results are for.
        visible: (v,) codes of the visible basket.
        types: (catalogue,) the type of each item, 0 unknown.
        type_count: how many types there are.
        now: the time from which ages count.
        decay_s: the decay.
        marks: see `partners.link`.

    Returns:
        For each code bought, (4, h): the sum of the weighted likenesses of the baskets with it, the largest
        likeness, the weight of the baskets with it that share an item, and the sum of the weighted likenesses
        in types. For each type, (type_count,), the weight of the baskets with it that share an item. The
        weight of the baskets that share an item, and of all.
    """
    in_visible, visible_size = _numbers(codes, visible, marks)
    in_bought, _ = _numbers(codes, bought, marks)
    own_type = np.where(codes >= 0, types[codes], 0)
    visible_type = np.zeros(type_count, np.bool_)
    visible_type[types[visible]] = True
    visible_type[0] = False

    found, by_type, shares, total = np.zeros((4, len(bought))), np.zeros(type_count), 0.0, 0.0
    visible_types = visible_type.sum()
    places = np.empty(len(at), np.int64)  # of the items of one basket, each once
    seen = np.full(type_count, -1)  # the first line of the latest basket with the type
    begin = end = 0
    while begin < len(at):
        while end < len(at) and at[end] == at[begin] and basket[end] == basket[begin]:
            end += 1
        size = _items(begin, end, item, kind, places)
        if size:
            shared = (in_visible[places[:size]] > 0).sum()
            size_types, shared_types = _types(own_type[places[:size]], visible_type, seen, begin)
            weight = np.exp((at[begin] - now) / decay_s)
            total += weight
            shares += weight if shared else 0.0
            alike = shared / np.sqrt(size * max(visible_size, 1))
            alike_types = shared_types / np.sqrt(max(size_types, 1) * max(visible_types, 1))
            for place in places[: size if shared or shared_types else 0]:
                line, own = in_bought[place] - 1, own_type[place]
                if line >= 0:
                    found[0, line] += weight * alike
                    found[1, line] = max(found[1, line], alike)
                    found[2, line] += weight if shared else 0.0
                    found[3, line] += weight * alike_types
                if shared and own > 0 and seen[own] == begin:
                    by_type[own] += weight
                    seen[own] = -1
        begin = end
    return found, by_type, shares, total


@compiled
def _numbers(codes: np.ndarray, members: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the place, from 1, of each item of a row among the members, 0 for others; how many there are."""
    numbers, size = np.zeros(len(codes), np.int64), 0
    for place in range(len(members)):
        size += marks[members[place]] == 0
        marks[members[place]] = place + 1
    for place in range(len(codes)):
        if codes[place] >= 0:
            numbers[place] = marks[codes[place]]
    for code in members:
        marks[code] = 0
    return numbers, size


@compiled
def _items(begin: int, end: int, item: np.ndarray, kind: np.ndarray, places: np.ndarray) -> int:
    """Write the items of one basket into `places`, each once; return how many."""
    size = 0
    for line in range(begin, end):
        if kind[line] == 0 and (size == 0 or item[line] != places[size - 1]):
            places[size] = item[line]
            size += 1
    return size


@compiled
def _types(types: np.ndarray, wanted: np.ndarray, seen: np.ndarray, mark: int) -> tuple[int, int]:
    """Mark the known types of one basket; return how many there are, and how many of them are wanted."""
    size, shared = 0, 0
    for one in types:
        if one > 0 and seen[one] != mark:
            seen[one] = mark
            size += 1
            shared += wanted[one]
    return size, shared
