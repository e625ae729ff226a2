"""Features of a request -> the columns of the ranker's input, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled


@compiled
def fill_rows(rows: np.ndarray, first: int, table: np.ndarray, places: np.ndarray) -> None:
    """Copy a table's entries at `places` into columns of rows, from `first` on; place -1 is its last entry.

    Args:
        rows: (n, columns), written to.
        first: the first column.
        table: (k, m), one row for each of k columns.
        places: (n,) columns of the table.
    """
    for row in range(len(places)):
        place = places[row]
        for column in range(table.shape[0]):
            rows[row, first + column] = table[column, place]


@compiled
def categories(codes: np.ndarray, known: int, levels: np.ndarray) -> np.ndarray:
    """Return the models' categorical inputs, (n, 1 + levels) int64: codes shifted by one, 0 is unknown.

    Args:
        codes: (n,) codes of the catalogue.
        known: how many items the models know.
        levels: (levels, n) the columns behind the code.
    """
    rows = np.empty((len(codes), 1 + levels.shape[0]), np.int64)
    for row in range(len(codes)):
        rows[row, 0] = codes[row] + 1 if codes[row] < known else 0
        for level in range(levels.shape[0]):
            rows[row, 1 + level] = levels[level, row]
    return rows


@compiled
def begin_rows(
    rows: np.ndarray, shared: np.ndarray, table: np.ndarray, fresh: np.ndarray, places: np.ndarray
) -> None:
    """Write shared values into the first columns of rows, and two tables' entries at `places` behind them.

    Args:
        rows: (n, columns), written to.
        shared: (s,) values of all rows.
        table: (m, k).
        fresh: (m, f).
        places: (n,) rows of the tables.
    """
    for row in range(len(places)):
        place = places[row]
        for column in range(len(shared)):
            rows[row, column] = shared[column]
        for column in range(table.shape[1]):
            rows[row, len(shared) + column] = table[place, column]
        for column in range(fresh.shape[1]):
            rows[row, len(shared) + table.shape[1] + column] = fresh[place, column]


@compiled
def put_columns(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
    """Write some columns of rows, row by row: one pass over memory, not one for each column.

    Args:
        rows: (n, columns), written to.
        columns: (k,) numbers of the columns; values with a number below 0 are left out.
        values: (k, n).
    """
    for row in range(len(rows)):
        for number in range(len(columns)):
            if columns[number] >= 0:
                rows[row, columns[number]] = values[number, row]
