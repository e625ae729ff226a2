"""Sums of a user against a few lines of plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.history import count_baskets, last_distinct, repeats, totals_of


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 30), st.integers(1, 5))
def test_the_last_distinct_values(item: list[int], lines: int, most: int) -> None:
    expected = list(dict.fromkeys(item[::-1][:lines]))[:most]
    assert last_distinct(np.array(item, np.uint16), lines, most).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=20))
def test_baskets_and_repetitions(lines: list[tuple[int, int, int]]) -> None:
    lines.sort()
    columns = np.array(lines, np.int64).reshape(-1, 3).T
    at, basket, item = columns[0].astype(float), columns[1].astype("u4"), columns[2].astype("u2")
    assert count_baskets(at, basket) == len({line[:2] for line in lines})
    assert repeats(at, basket, item) == (len(set(lines)) < len(lines))
    paid = np.arange(len(lines), dtype=np.float32)
    expected = len({line[:2] for line in lines}), len({line[2] for line in lines}), sum(range(len(lines)))
    assert totals_of(at, basket, item, paid, 3) == expected
