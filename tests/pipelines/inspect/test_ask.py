import json
from pathlib import Path

import pytest

from pipelines.inspect.ask import answer_lines, evaluation_requests
from serving.answer.recommender import Recommender, open_recommender
from serving.errors import BundleInvalid
from serving.stores.online_features import MemoryStore


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


def test_a_bundle_without_requests_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match=r"holds no reference_log\.parquet"):
        evaluation_requests(tmp_path, 5)
