"""A misspelt word gets the nearest known one, or the list of all."""

import pytest

from feature_repo.spelling import closest, did_you_mean


@pytest.mark.parametrize(
    ("word", "hint"),
    [("pirce", "did you mean 'price'?"), ("price", "did you mean 'price'?"), ("zzz", ""), ("", "")],
)
def test_the_nearest_word(word: str, hint: str) -> None:
    assert did_you_mean(word, ("item", "price", "user")) == hint


def test_no_word_is_near() -> None:
    assert closest("pirce", iter(["price", "item"])) == "did you mean 'price'?"
    assert closest("zzz", {"a": 1, "b": 2}) == "there is a, b"
    assert closest("zzz", ["a", "b"], "it has") == "it has a, b"
    assert closest("zzz", []) == "there is none"
