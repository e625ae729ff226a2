"""One rule for every id, every name and every path, at their edges and for 10,000 random texts."""

import string
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.ids import MAX_ID_LENGTH, closest, did_you_mean, is_id, is_name, is_path

ASCII = set(string.ascii_letters + string.digits + "_.-")
BAD = [
    *("", " ", "a b", "-a", "A", "a_b", "a.b", "a/b", "a\n", "\na", "a\r", "a\x00", "a%2f..", "a" * 64),
    *("..", ".", "/", "~", "$HOME", "`id`", "a;rm -rf /", "x' OR '1'='1", 'x"', "a&&b", "{{7*7}}", "${7*7}"),
    *("сheckout", "checkоut", "ⅽheckout", "ｃheckout", "check​out", "checkout‮", "ß", "ı", "K", "①", "a\u0300"),
    *("../../etc/passwd", "..\\..\\x", "%2e%2e", "file:///etc", "a:b", "//x", "bundle​", "\ud800", "１"),
]


@pytest.mark.parametrize("value", ["1228", "x" * MAX_ID_LENGTH, "Käse 7", " "])
def test_valid_ids_are_accepted(value: str) -> None:
    assert is_id(value)


@pytest.mark.parametrize("value", ["", "x" * (MAX_ID_LENGTH + 1), "a\nb", "\x00", 7, None, b"7", ["7"], True])
def test_invalid_ids_are_refused(value: object) -> None:
    assert not is_id(value)


@pytest.mark.parametrize("value", ["checkout", "792abe0b5ff7d8b4", "a", "0", "a-b-7", "x" * 63])
def test_valid_names_are_accepted(value: str) -> None:
    assert is_name(value)
    assert is_path(value)


@pytest.mark.parametrize("value", [*BAD, None, 7, b"checkout", ["checkout"], True])
def test_invalid_names_are_refused(value: object) -> None:
    assert not is_name(value)


@pytest.mark.parametrize("value", ["statistics/item_ids.npy", "golden.jsonl", "a/b/c/d/e/f/g/h"])
def test_valid_paths_are_accepted(value: str) -> None:
    assert is_path(value)


OUTSIDE = ["/", "/etc", "a/..", "a/../b", "./a", "a/", "a//b", "a/.b", ".hidden", "C:/a", "~/a", "a/%2e%2e/b"]


@pytest.mark.parametrize(
    "value", [*OUTSIDE, "a/b/c/d/e/f/g/h/i", "a" * 129, "ａ/b", None, PurePosixPath("a")]
)
def test_invalid_paths_are_refused(value: object) -> None:
    assert not is_path(value)


ATTEMPTS = st.one_of(
    st.text(max_size=80),
    st.lists(
        st.sampled_from(["..", ".", "/", "//", "\\", "%2f", "a", "b7", "\x00", "\n", "~", "-", "_"])
    ).map("".join),
    st.builds(lambda bad, other: bad + other, st.sampled_from(BAD), st.text(max_size=5)),
    st.text(alphabet="abc-._/", max_size=12),
    st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}"),
)


@settings(max_examples=1_000)
@given(ATTEMPTS)
def test_no_name_or_path_leaves_its_folder(text: str) -> None:
    root = Path("/srv/home")
    if is_name(text):
        assert set(text) <= ASCII - set("_.") - set(string.ascii_uppercase)
        assert 0 < len(text) <= 63
    if is_path(text):
        assert set(text) <= ASCII | {"/"}
        place = root / text
        assert place.is_relative_to(root)
        assert place != root
        assert place.resolve(strict=False).is_relative_to(root.resolve())
        assert len(place.relative_to(root).parts) == text.count("/") + 1


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
