"""One place of a list is drawn: as often as its propensity says, once for a request, never cached."""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import bdtr, chdtri

from feature_repo.schema import DENSE_NAMES
from serving.answer.recommender import open_recommender
from serving.cache.answer_cache import AnswerCache
from serving.checkout.checkout import Checkout
from serving.prediction_log import PredictionLog, Trial, read_log
from serving.schemas import Request, Response
from serving.stages.exploration import FIRST, explore
from serving.stages.reranking import ANY, CHOSEN, NEW, PINNED, POOL, REPEAT, RESERVED, Ranked
from serving.stores.online_features import open_store
from tests.serving.conftest import call, ids

K, REQUESTS = 10, 50_000
Draws = tuple[np.ndarray, list[Trial]]
CHANCE = 1e-6  # of a false failure


def ranked_of(worth: np.ndarray) -> Ranked:
    n = len(worth)
    zeros = np.zeros(n)
    return Ranked(np.arange(n, dtype=np.int32), worth, zeros, zeros, zeros, worth, best=n, whole=True)


RANKED = ranked_of(np.geomspace(0.5, 0.01, POOL * K))
ROWS, WHY = np.array([0, 2, 1, 3, 5, 4, 6, 8, 9, 7]), np.full(K, CHOSEN, np.int8)


@pytest.fixture(scope="module")
def draws() -> tuple[np.ndarray, list[Trial]]:
    """The rows and trials of requests that all explore."""
    made = [explore(RANKED, ROWS, WHY, f"r{number}", 1.0) for number in range(REQUESTS)]
    return np.array([rows for rows, _ in made]), [trial for _, trial in made if trial is not None]


def test_each_item_is_drawn_as_often_as_its_propensity_says(draws: Draws) -> None:
    rows, trials = draws
    claimed: dict[tuple[int, int], float] = {}
    for shown, trial in zip(rows, trials, strict=True):
        assert trial.propensities is not None
        for place, chance in enumerate(trial.propensities.tolist()):
            assert claimed.setdefault((place, shown[place]), chance) == chance
    for place in range(K):
        at = {row: chance for (where, row), chance in claimed.items() if where == place}
        assert sum(at.values()) == pytest.approx(1, abs=1e-5)
        found = np.array([np.count_nonzero(rows[:, place] == row) for row in at])
        expected = np.array([*at.values()]) * REQUESTS
        if place < FIRST:
            assert at == {ROWS[place]: 1.0}
        else:
            squares = ((found - expected) ** 2 / expected).sum()
            assert squares < chdtri(len(at) - 1, CHANCE)
    assert all(np.count_nonzero(shown != ROWS) <= 1 for shown in rows)


def test_a_place_reserved_for_a_kind_is_never_drawn_also_if_the_usual_item_is_of_the_kind() -> None:
    reserved = np.array([ANY, ANY, REPEAT, ANY, NEW], np.int8)
    for number in range(300):
        rows, trial = explore(RANKED, ROWS, WHY, f"r{number}", 1.0, reserved)
        assert trial is not None
        assert rows[[0, 1, 2, 4]].tolist() == ROWS[[0, 1, 2, 4]].tolist()
    assert explore(RANKED, ROWS[:3], WHY[:3], "r", 1.0, reserved)[1] is None


def test_the_share_of_exploring_requests_is_the_setting() -> None:
    trials = [explore(RANKED, ROWS, WHY, f"r{number}", 0.05)[1] for number in range(REQUESTS)]
    variants = [trial.variant for trial in trials if trial is not None]
    assert len(variants) == REQUESTS
    low, high = np.searchsorted(bdtr(np.arange(REQUESTS), REQUESTS, 0.05), [CHANCE / 2, 1 - CHANCE / 2])
    assert low <= variants.count("explored") <= high
    assert set(variants) == {"explored", "control"}


def test_an_explored_answer_loses_less_than_one_place_of_k(draws: Draws) -> None:
    rows, _ = draws
    lost = 1 - RANKED.worth[rows].sum(1).mean() / RANKED.worth[ROWS].sum()
    assert 0 < lost < 1 / K


@pytest.mark.parametrize("kind", [PINNED, RESERVED])
def test_places_of_rules_are_never_drawn(kind: int) -> None:
    why = WHY.copy()
    why[2:9] = kind
    for number in range(1_000):
        rows, trial = explore(RANKED, ROWS, why, f"r{number}", 1.0)
        assert trial is not None
        assert trial.place_explored == K - 1
        np.testing.assert_array_equal(rows[:-1], ROWS[:-1])
    assert explore(RANKED, ROWS, np.full(K, kind, np.int8), "r", 1.0)[1] is None


def test_a_list_without_candidates_below_is_in_no_experiment() -> None:
    rows = np.arange(4)
    assert explore(ranked_of(np.ones(4)), rows, np.zeros(4, np.int8), "r", 1.0) == (rows, None)
    assert explore(ranked_of(np.zeros(9)), rows, np.zeros(4, np.int8), "r", 1.0)[1] is not None


# ------------------------------------------------------------------------------------ through the checkout

AT = 1_512_498_600.0


def questions(count: int) -> list[Request]:
    return [Request(("1000005",), AT, None, "store-1", K, f"r{number}") for number in range(count)]


@pytest.mark.parametrize("answers", [None, AnswerCache()], ids=["computed", "cached"])
async def test_explored_answers_repeat_are_logged_and_never_cached(
    toy_bundle: Path, tmp_path: Path, answers: AnswerCache | None
) -> None:
    log = PredictionLog(tmp_path, DENSE_NAMES)
    plain = open_recommender(toy_bundle, open_store("memory:"))
    recommender = open_recommender(toy_bundle, open_store("memory:"), log, answers=answers)
    recommender.explores = 0.5

    async def ask(requests: list[Request]) -> list[Response]:
        checkout, given = Checkout(recommender, 1e6), call()
        return [await checkout.answer(request, given) for request in requests]

    asked = questions(60)
    first, again = await ask(asked), await ask(asked)
    log.close()
    assert [ids(one) for one in first] == [ids(one) for one in again]
    usual = ids(plain.recommend(asked[0]))
    records = read_log(tmp_path).to_pylist()[:60]
    assert {record["variant"] for record in records} == {"explored", "control"}
    for response, record in zip(first, records, strict=True):
        place, shown = record["place_explored"], ids(response)
        assert (record["experiment"], record["unit"]) == ("exploration", record["request_id"])
        assert record["item_ids"] == shown
        if record["variant"] == "control":
            assert (shown, place, record["propensities"]) == (usual, None, None)
        else:
            assert shown[:place] + shown[place + 1 :] == usual[:place] + usual[place + 1 :]
            assert place >= FIRST
            assert len(record["propensities"]) == K
    assert any(ids(one) != usual for one in first)


def test_without_the_setting_nothing_is_drawn(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.answer.presentation.explore", None)
    recommender = open_recommender(toy_bundle, open_store("memory:"))
    assert recommender.recommend(questions(1)[0]).rung == "full"
