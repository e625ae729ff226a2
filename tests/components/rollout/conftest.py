"""A toy cluster for each test."""

from pathlib import Path

import pytest

from tests.components.rollout.toy_cluster import ToyCluster


@pytest.fixture
def cluster(tmp_path: Path) -> ToyCluster:
    return ToyCluster(tmp_path)
