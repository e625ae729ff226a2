"""The columns of the ranker's input against numpy."""

import numpy as np

from feature_repo.kernels.rows import begin_rows, put_columns


def test_rows_are_filled_from_their_parts() -> None:
    rows = np.zeros((3, 7), np.float32)
    table = np.array([[10, 11], [20, 21]], np.float32)
    fresh = np.array([[5], [6]], np.float32)
    begin_rows(rows, np.array([1.5, 2.5]), table, fresh, np.array([1, 0, 1]))
    put_columns(rows, np.array([6, -1, 5]), np.array([[7, 8, 9], [6, 6, 6], [0, 1, 2]], np.float32))
    assert rows.tolist() == [
        [1.5, 2.5, 20, 21, 6, 0, 7],
        [1.5, 2.5, 10, 11, 5, 1, 8],
        [1.5, 2.5, 20, 21, 6, 2, 9],
    ]
