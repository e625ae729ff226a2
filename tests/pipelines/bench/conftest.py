"""Fixtures of the packages that the benches measure."""

from pathlib import Path

import pytest

from pipelines.bench.compression import TrainingLine
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
        ranker_params={"gradient_boosting": {"size": {"trees": 20}}},  # none asserts how good it is
    )
