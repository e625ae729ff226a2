"""Event -> ... -> answer in one process, by plain functions: the held-out item comes first."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from feature_repo.toy_shop import held_out, request_basket, user_name
from serving.answer.recommender import open_recommender
from serving.schemas import Request
from serving.stores.online_features import open_store

pytestmark = pytest.mark.slow


def test_every_shopper_is_offered_the_held_out_item_first(toy_line: Path) -> None:
    at = datetime.fromisoformat((toy_line / "cut.txt").read_text()).timestamp()
    recommender = open_recommender(
        toy_line / "evaluated", open_store(f"sqlite:///{toy_line}/home/online_store.db")
    )
    for user in range(60):
        request = Request(tuple(request_basket(user)), at, user_name(user), f"store-{user % 3}", 5)
        response = recommender.recommend(request)
        assert response.items[0].item_id == held_out(user)
        assert (response.rung, response.degraded, response.bundle_id) == (
            "full",
            False,
            recommender.bundle.bundle_id,
        )


def test_the_model_beats_every_baseline(toy_line: Path) -> None:
    evaluation = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    served = evaluation["served"]["ndcg_at_10"]
    for name, baseline in evaluation["baselines"].items():
        assert served > baseline["ndcg_at_10"], name
    low, high = evaluation["served"]["interval"]["ndcg_at_10"]
    assert low < served < high
