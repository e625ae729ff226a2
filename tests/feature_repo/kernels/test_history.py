"""Sums of a user against a few lines of plain Python."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.history import last_distinct, repeated


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 5))
def test_the_last_distinct_values(item: list[int], most: int) -> None:
    expected = list(dict.fromkeys(item[::-1]))[:most]
    assert last_distinct(np.array(item, np.uint16), most).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 2)] * 3), max_size=20))
def test_a_repeated_scan_is_like_the_purchase_before_it(lines: list[tuple[int, int, int, int]]) -> None:
    lines.sort()
    columns = np.array(lines, np.int64).reshape(-1, 4).T
    at, basket, item = columns[0].astype(float), columns[1].astype("u4"), columns[2].astype("u2")
    found = repeated(at, basket, item, columns[3].astype("u1"))
    bought = [n for n, line in enumerate(lines) if line[3] == 0]
    expected = [n for before, n in pairwise(bought) if lines[n] == lines[before]]
    assert np.flatnonzero(found).tolist() == expected
