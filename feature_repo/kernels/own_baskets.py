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
    found, by_type = np.zeros((4, len(bought))), np.zeros(type_count)
    shares, total = 0.0, 0.0
    is_visible = np.zeros(len(codes), np.bool_)
    visible_size = 0
    for code in visible:
        visible_size += marks[code] == 0
        marks[code] = 1
    for place in range(len(codes)):
        is_visible[place] = codes[place] >= 0 and marks[codes[place]] == 1
    for code in visible:
        marks[code] = 0
    visible_type, visible_types = np.zeros(type_count, np.bool_), 0
    for code in visible:
        if types[code] > 0 and not visible_type[types[code]]:
            visible_type[types[code]] = True
            visible_types += 1
    for number in range(len(bought)):
        marks[bought[number]] = number + 1
    in_basket = np.full(type_count, -1)  # the first line of the latest basket with the type
    begin = 0
    while begin < len(at):
        end, size, shared, size_types, shared_types, before = begin, 0, 0, 0, 0, -1
        while end < len(at) and at[end] == at[begin] and basket[end] == basket[begin]:
            if kind[end] == 0 and item[end] != before:
                before = item[end]
                size += 1
                shared += is_visible[before]
                own = types[codes[before]] if codes[before] >= 0 else 0
                if own > 0 and in_basket[own] != begin:
                    in_basket[own] = begin
                    size_types += 1
                    shared_types += visible_type[own]
            end += 1
        if size:
            weight = np.exp((at[begin] - now) / decay_s)
            total += weight
            shares += weight if shared else 0.0
            alike = shared / np.sqrt(size * max(visible_size, 1))
            alike_types = shared_types / np.sqrt(max(size_types, 1) * max(visible_types, 1))
            before = -1
            for line in range(begin, end if shared or shared_types else begin):
                if kind[line] != 0 or item[line] == before:
                    continue
                before = item[line]
                if codes[before] < 0:
                    continue
                own = types[codes[before]]
                if shared and own > 0 and in_basket[own] == begin:
                    by_type[own] += weight
                    in_basket[own] = -1  # once a basket
                number = marks[codes[before]] - 1
                if number >= 0:
                    found[0, number] += weight * alike
                    found[1, number] = max(found[1, number], alike)
                    found[2, number] += weight if shared else 0.0
                    found[3, number] += weight * alike_types
        begin = end
    for code in bought:
        marks[code] = 0
    return found, by_type, shares, total
