"""The loop over own baskets against sets; the features made of it are tested in test_transforms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.own_baskets import like_this_one

TYPES = np.array([0, 1, 1, 2, 3, 3])  # of six items; the first has none
CODES = np.array([-1, 0, 1, 2, 3, 4, 5, -1])  # two items of the row are not of the catalogue
NOW, DECAY_S = 1_000.0, 400.0
LINES = st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 7), st.integers(0, 1))


@given(st.lists(LINES, max_size=25), st.lists(st.integers(0, 5), max_size=5))
def test_each_earlier_basket_is_compared(lines: list[tuple[int, int, int, int]], visible: list[int]) -> None:
    lines = sorted(lines, key=lambda line: line[:3])
    at, basket, item, kind = np.array(lines, np.int64).reshape(-1, 4).T
    baskets: dict[tuple[int, int], set[int]] = {}
    for moment, number, place, of in lines:
        if of == 0:
            baskets.setdefault((moment, number), set()).add(place)
    found, by_type = np.zeros((4, 6)), np.zeros(4)
    shares = total = 0.0
    own, own_types = set(visible), {int(TYPES[code]) for code in visible} - {0}
    for (moment, _), places in baskets.items():
        codes = {int(CODES[place]) for place in places} - {-1}
        types = {int(TYPES[code]) for code in codes} - {0}
        weight = np.exp((moment - NOW) / DECAY_S)
        alike = len(codes & own) / np.sqrt(max(len(places), 1) * max(len(own), 1))
        alike_types = len(types & own_types) / np.sqrt(max(len(types), 1) * max(len(own_types), 1))
        total += weight
        shares += weight * bool(codes & own)
        by_type[list(types)] += weight * bool(codes & own)
        for code in codes:
            found[:, code] += weight * np.array([alike, 0, bool(codes & own), alike_types])
            found[1, code] = max(found[1, code], alike)
    marks = np.zeros(6, np.int32)
    basket_codes = np.array(visible, np.int64)
    sums, types_found, shared, all_weight = like_this_one(
        at.astype(float),
        basket,
        item,
        kind.astype(np.uint8),
        CODES,
        np.arange(6),
        basket_codes,
        TYPES,
        4,
        NOW,
        DECAY_S,
        marks,
    )
    np.testing.assert_allclose(sums, found, atol=1e-12)
    np.testing.assert_allclose(types_found, by_type, atol=1e-12)
    assert [shared, all_weight] == pytest.approx([shares, total])
    assert not marks.any()
