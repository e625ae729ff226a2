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
    is_visible, visible_size = _visible(codes, visible, marks)
    visible_type, visible_types = _types_of(visible, types, type_count)
    for number in range(len(bought)):
        marks[bought[number]] = number + 1
    in_basket = np.full(type_count, -1)  # the first line of the latest basket with the type
    begin = 0
    while begin < len(at):
        end, size, shared, size_types, shared_types = _compare(
            begin, at, basket, item, kind, codes, types, is_visible, visible_type, in_basket
        )
        if size:
            weight = np.exp((at[begin] - now) / decay_s)
            total += weight
            shares += weight if shared else 0.0
            alike = shared / np.sqrt(size * max(visible_size, 1))
            alike_types = shared_types / np.sqrt(max(size_types, 1) * max(visible_types, 1))
            if shared or shared_types:
                _add(found, begin, end, item, kind, codes, marks, weight, shared > 0, alike, alike_types)
            if shared:
                _add_types(by_type, begin, end, item, kind, codes, types, in_basket, weight)
        begin = end
    for code in bought:
        marks[code] = 0
    return found, by_type, shares, total


@compiled
def _visible(codes: np.ndarray, visible: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, int]:
    """Return which items of a row are in the visible basket, (m,) bool, and its number of items."""
    is_visible, size = np.zeros(len(codes), np.bool_), 0
    for code in visible:
        size += marks[code] == 0
        marks[code] = 1
    for place in range(len(codes)):
        is_visible[place] = codes[place] >= 0 and marks[codes[place]] == 1
    for code in visible:
        marks[code] = 0
    return is_visible, size


@compiled
def _types_of(visible: np.ndarray, types: np.ndarray, type_count: int) -> tuple[np.ndarray, int]:
    """Return which types some items have, (type_count,) bool, and how many; an unknown one is no type."""
    there = np.zeros(type_count, np.bool_)
    for code in visible:
        there[types[code]] = True
    there[0] = False
    return there, there.sum()


@compiled
def _compare(
    begin: int,
    at: np.ndarray,
    basket: np.ndarray,
    item: np.ndarray,
    kind: np.ndarray,
    codes: np.ndarray,
    types: np.ndarray,
    is_visible: np.ndarray,
    visible_type: np.ndarray,
    in_basket: np.ndarray,
) -> tuple[int, int, int, int, int]:
    """Return the end of the basket that begins here, its items, the shared ones, and both of its types."""
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
    return end, size, shared, size_types, shared_types


@compiled
def _add(
    found: np.ndarray,
    begin: int,
    end: int,
    item: np.ndarray,
    kind: np.ndarray,
    codes: np.ndarray,
    marks: np.ndarray,
    weight: float,
    shares: bool,
    alike: float,
    alike_types: float,
) -> None:
    """Add one basket to the sums of each of its items."""
    before = -1
    for line in range(begin, end):
        if kind[line] == 0 and item[line] != before:
            before = item[line]
            number = marks[codes[before]] - 1 if codes[before] >= 0 else -1
            if number >= 0:
                found[0, number] += weight * alike
                found[1, number] = max(found[1, number], alike)
                found[2, number] += weight if shares else 0.0
                found[3, number] += weight * alike_types


@compiled
def _add_types(
    by_type: np.ndarray,
    begin: int,
    end: int,
    item: np.ndarray,
    kind: np.ndarray,
    codes: np.ndarray,
    types: np.ndarray,
    in_basket: np.ndarray,
    weight: float,
) -> None:
    """Add the weight of one basket to each of its types, once."""
    for line in range(begin, end):
        own = types[codes[item[line]]] if kind[line] == 0 and codes[item[line]] >= 0 else 0
        if own > 0 and in_basket[own] == begin:
            by_type[own] += weight
            in_basket[own] = -1
