"""Items -> the items that are bought together with them, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled


@compiled
def link(
    items: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the partners of a set of items, in the order of appearance, and the strengths of their links.

    Args:
        items: (b,) codes.
        neighbours: (n, K) codes of each item's partners, below 0 behind the last.
        together: (n, K) baskets that hold both.
        weights: (n, 6) factors of a count: three for the item at a link's start, three for its end.
        marks: (n,) zeros; zeros again at the end.

    Returns:
        Codes, (t,); sums and largest strengths, (3, t) float32; links, (t,) int64.
    """
    most = len(items) * neighbours.shape[1]
    codes = np.empty(most, np.int64)
    strengths = np.empty((most, 6), np.float32)  # three sums and three maxima: one cache line
    links = np.empty(most, np.int64)
    found = 0
    for source in items:
        first, second, third = weights[source, 0], weights[source, 1], weights[source, 2]
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            count = together[source, place]
            at = marks[partner] - 1
            if at < 0:
                at = found
                found += 1
                marks[partner] = found
                codes[at] = partner
                links[at] = 0
                for kind in range(6):
                    strengths[at, kind] = 0
            links[at] += 1
            own = strengths[at]
            own[0] += count * first
            own[1] += count * second
            own[2] += count * third
            own[3] = max(own[3], count * first)
            own[4] = max(own[4], count * second)
            own[5] = max(own[5], count * third)
    sums = np.empty((3, found), np.float32)
    largest = np.empty((3, found), np.float32)
    for at in range(found):
        marks[codes[at]] = 0
        for kind in range(3):
            weight = weights[codes[at], 3 + kind]
            sums[kind, at] = strengths[at, kind] * weight
            largest[kind, at] = strengths[at, 3 + kind] * weight
    return codes[:found], sums, largest, links[:found]


@compiled
def strongest_links(
    codes: np.ndarray,
    items: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
) -> np.ndarray:
    """Return the item with the strongest link to each code by the first strength, -1 without a link.

    Args:
        codes: (n,) distinct codes of partners.
        items: (b,) codes.
        neighbours: as in `link`.
        together: as in `link`.
        weights: as in `link`.
        marks: as in `link`.
    """
    largest, found = np.zeros(len(codes)), np.full(len(codes), -1)
    for at in range(len(codes)):
        marks[codes[at]] = at + 1
    for source in items:
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            at = marks[partner] - 1
            if at >= 0 and together[source, place] * weights[source, 0] > largest[at]:
                largest[at], found[at] = together[source, place] * weights[source, 0], source
    for code in codes:
        marks[code] = 0
    return found
