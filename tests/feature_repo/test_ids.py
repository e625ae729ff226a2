"""One rule for every id, at its edges."""

import pytest

from feature_repo.ids import MAX_ID_LENGTH, is_id


@pytest.mark.parametrize("value", ["1228", "x" * MAX_ID_LENGTH, "Käse 7", " "])
def test_what_is_an_id(value: str) -> None:
    assert is_id(value)


@pytest.mark.parametrize("value", ["", "x" * (MAX_ID_LENGTH + 1), "a\nb", "\x00", 7, None, b"7", ["7"], True])
def test_what_is_none(value: object) -> None:
    assert not is_id(value)
