"""Fixtures of the packages that the benches measure."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench.compression import TrainingLine
from pipelines.bench.load.connections import OK
from pipelines.bench.load.generator import Load
from tests.monitoring.conftest import bundle, bundle_id, dataset, day, events, log, records
from tests.serving.conftest import toy_bundle, toy_store

__all__ = ["bundle", "bundle_id", "dataset", "day", "events", "log", "records", "toy_bundle", "toy_store"]


@pytest.fixture
def toy_training_line(toy_line: Path) -> TrainingLine:
    """The artefacts that a run leaves."""
    return TrainingLine(
        examples=toy_line / "examples",
        statistics=toy_line / "statistics",
        teachers=[toy_line / "teacher"],
        student=toy_line / "student",
        pruned=toy_line / "pruned",
        variants=toy_line / "variants",
        compiled=toy_line / "ranker",
        bundle=toy_line / "evaluated",
        dataset=toy_line / "dataset",
        ranker_params={},
    )


def load_of(
    client_ms: Sequence[float], degraded: Sequence[int] = (), due_s: Sequence[float] | None = None
) -> Load:
    """Return the load of so many requests, ten a second, all answered; some of them degraded."""
    ms = np.array(client_ms, float)
    flags = np.isin(np.arange(len(ms)), degraded)
    due = np.arange(len(ms)) / 10.0 if due_s is None else np.array(due_s)
    return Load(due, ms, np.zeros(len(ms)), np.full(len(ms), OK), flags)
