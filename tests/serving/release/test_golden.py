"""Golden requests: written, read and compared in one place."""

import base64
import json
from pathlib import Path

import pytest

from serving.errors import BundleInvalid
from serving.release.golden import (
    FILE,
    MAX_BYTES,
    TOLERANCE,
    GoldenRequest,
    read_golden,
    same_answer,
    verify_answers,
    write_golden,
)

REQUEST = {"request_id": "golden-0", "user_id": "u1", "basket": ["a"], "at": "2024-06-12T10:00:00Z", "k": 3}
EXPECTED = [["a", 0.5], ["b", 0.4], ["c", 0.3]]
ANSWER = [("a", 0.5), ("b", 0.4), ("c", 0.3)]


def test_golden_requests_round_trip_in_the_format_of_old_bundles(tmp_path: Path) -> None:
    records = [GoldenRequest(REQUEST, None, EXPECTED), GoldenRequest(REQUEST, "aGk=", EXPECTED)]
    write_golden(tmp_path, records)
    assert read_golden(tmp_path) == records
    first = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert first == {"request": REQUEST, "history": None, "expected": EXPECTED}


def test_a_store_of_a_golden_request_knows_its_shopper(tmp_path: Path) -> None:
    history = base64.b64encode(b"row").decode()
    row = GoldenRequest(REQUEST, history).store().read("u1")
    assert row is not None
    assert (row.history, row.written_at) == (b"row", 1_718_186_400.0)
    assert GoldenRequest(REQUEST, None).store().read("u1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"request": 1}', "[" * 5_000])
def test_a_file_without_golden_requests_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(BundleInvalid, match="assemble the bundle again"):
        read_golden(tmp_path)


def test_an_absent_file_and_one_too_long_are_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match="can't be read"):
        read_golden(tmp_path)
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # takes no space
    with pytest.raises(BundleInvalid, match=f"at most {MAX_BYTES} bytes"):
        read_golden(tmp_path)


def test_answers_are_compared_up_to_the_last_place_and_rounding() -> None:
    assert same_answer(ANSWER, EXPECTED)
    assert same_answer([ANSWER[1], ANSWER[0], ANSWER[2]], EXPECTED), "as good as equal scores change places"
    assert same_answer([*ANSWER[:2], ("d", 0.3)], EXPECTED), "one on the edge"
    assert same_answer([("a", 0.5 + TOLERANCE / 2), *ANSWER[1:]], EXPECTED)
    assert not same_answer([("a", 0.5 + TOLERANCE * 2), *ANSWER[1:]], EXPECTED)
    assert not same_answer(ANSWER[:2], EXPECTED)
    assert not same_answer([("a", 0.5), ("d", 0.4), ("e", 0.3)], EXPECTED)


def test_verification_names_the_request_that_differs_and_keeps_the_shop(tmp_path: Path) -> None:
    write_golden(tmp_path, [GoldenRequest(REQUEST, None, EXPECTED)])
    assert verify_answers(tmp_path, "b1", lambda golden: ANSWER) == 1
    with pytest.raises(BundleInvalid, match=r"golden request golden-0 with .* `reco run --data DIR`"):
        verify_answers(tmp_path, "b1", lambda golden: ANSWER[:1])


def test_an_error_while_asking_is_a_broken_bundle(tmp_path: Path) -> None:
    def fails(golden: GoldenRequest) -> list[tuple[str, float]]:
        raise KeyError("basket")

    write_golden(tmp_path, [GoldenRequest(REQUEST, None, EXPECTED)])
    with pytest.raises(BundleInvalid, match="can't be asked"):
        verify_answers(tmp_path, "b1", fails)
