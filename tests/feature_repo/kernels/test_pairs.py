"""The loops of pair features against numpy; their values are tested in test_transforms."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.pairs import levels_of, lift, sums_by_level
from feature_repo.kernels.rows import categories
from feature_repo.statistics import Statistics


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 8)), max_size=9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=4),
)
def test_sums_by_level(lines: list[tuple[int, int, int]], wanted: list[tuple[int, int]]) -> None:
    columns = np.array(lines, np.int64).reshape(-1, 3).T
    asked = np.array(wanted, np.int64).reshape(-1, 2).T
    found = sums_by_level(columns[:2], columns[2:].astype(float), np.array([3, 2]), asked)
    for level in range(2):
        for at, codes in enumerate(wanted):
            own = [line[2] for line in lines if 0 < line[level] == codes[level]]
            assert found[level, :, at].tolist() == [sum(own), len(own)]


def test_lift_and_levels_come_from_the_tables(toy_tables: Statistics) -> None:
    basket, types = np.array([1, 3, 1]), np.array([0, 2, 3, 1])
    found = lift(toy_tables.type_lift.view(np.uint16), basket, types)
    expected = toy_tables.type_lift[np.ix_(basket, types)].astype(np.float32)
    assert found.tolist() == [expected.mean(0).tolist(), expected.max(0).tolist()]
    codes = np.array([5, 0, 5, 79])
    levels = toy_tables.categorical[codes].T.astype(np.int64)
    assert categories(codes, 79, levels).tolist() == np.vstack([[6, 1, 6, 0], levels]).T.tolist()
    assert levels_of(toy_tables.categorical, codes).tolist() == toy_tables.categorical[codes].T.tolist()


def test_every_float16_keeps_its_value() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    table = np.resize(finite, (252, 252))
    found = np.stack([lift(table, np.array([row]), np.arange(252)) for row in range(252)])
    expected = table.view(np.float16).astype(np.float32)
    assert (found[:, 0] == expected).all()
    assert (found[:, 1] == expected).all()
