"""The fitted tables of a toy shop."""

import pytest

from feature_repo.statistics import Statistics
from tests.feature_repo.conftest import Fitted


@pytest.fixture(scope="module")
def statistics(fitted: Fitted) -> Statistics:
    return fitted[0]
