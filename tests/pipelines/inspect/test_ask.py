import json
import time
from pathlib import Path

import pytest

from feature_repo.aggregates import DAY_S, pack
from pipelines.inspect.ask import answer_lines, evaluation_requests, notes_on
from serving.answer.recommender import Recommender, open_recommender
from serving.errors import BundleInvalid
from serving.stores.online_features import MemoryStore, UserRow
from tests.conftest import make_row


@pytest.fixture(scope="module")
def recommender(toy_line: Path) -> Recommender:
    return open_recommender(toy_line / "evaluated", MemoryStore())


@pytest.mark.slow
def test_each_line_gets_an_answer_and_a_bad_one_its_number_and_reason(recommender: Recommender) -> None:
    lines = [
        b'{"request_id": "r1", "basket": ["item-000"], "k": 2}\n',
        b"\n",
        b"nonsense\n",
        b'{"basket": "item-000"}\n',
        b'{"basket": [], "k": NaN}\n',
        b'{"basket": ["item-002"], "k": 1}\n',
    ]
    answers = list(answer_lines(recommender, lines))
    assert [answer.get("line") for answer in answers] == [None, 3, 4, 5, None]
    assert answers[0]["request_id"] == "r1"
    assert len(answers[0]["items"]) == 2
    assert answers[-1]["request_id"] == "line-6"
    assert "not JSON" in answers[1]["error"]
    assert "Expected `array`, got `str` - at `$.basket`" in answers[2]["error"]
    for answer in answers:
        assert "nonsense" not in json.dumps(answer)


@pytest.mark.slow
def test_the_bundle_holds_requests_of_real_baskets(toy_line: Path, recommender: Recommender) -> None:
    lines = evaluation_requests(toy_line / "evaluated", 5)
    assert len(lines) == 5
    answers = answer_lines(recommender, [json.dumps(line).encode() for line in lines])
    assert all(answer["items"] for answer in answers)


@pytest.mark.slow
def test_a_row_is_too_old_by_its_own_time_as_in_the_endpoint(recommender: Recommender) -> None:
    """A published row is as of the publication, however long ago its shopper came last."""
    now, store = time.time(), MemoryStore()
    last = now - 1_100 * DAY_S
    for user, written_at in (("published", now - DAY_S), ("streamed", last)):
        store.write(user, UserRow(pack(make_row([(last - 1, ["item-000"], 1.0, 0.0)]), user), written_at))
    asked = Recommender(recommender.bundle, store)
    assert notes_on(asked, {"user_id": "published", "basket": []}) == []
    [note] = notes_on(asked, {"user_id": "streamed", "basket": []})
    assert note.startswith("asked for now: streamed's newest data are 1,100 days old")


def test_a_bundle_without_requests_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match=r"holds no reference_log\.parquet"):
        evaluation_requests(tmp_path, 5)
