"""The load of an arm as a test wants it measured."""

from collections.abc import Sequence

import numpy as np

from pipelines.bench.load.connections import OK
from pipelines.bench.load.generator import Load


def load_of(
    client_ms: Sequence[float], degraded: Sequence[int] = (), due_s: Sequence[float] | None = None
) -> Load:
    """Return the load of so many requests, ten a second, all answered; some of them degraded."""
    ms = np.array(client_ms, float)
    flags = np.isin(np.arange(len(ms)), degraded)
    due = np.arange(len(ms)) / 10.0 if due_s is None else np.array(due_s)
    return Load(due, ms, np.zeros(len(ms)), np.full(len(ms), OK), flags)
