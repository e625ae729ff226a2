"""An answer names why it is not full: each failure of ranking has a listed reason."""

from serving.errors import RankingFailed, UserOverLimit
from serving.schemas import REASONS


def test_each_failure_of_ranking_has_a_listed_reason() -> None:
    kinds: tuple[type[RankingFailed], ...] = (RankingFailed, *RankingFailed.__subclasses__(), UserOverLimit)
    assert {kind.reason for kind in kinds} <= set(REASONS)
