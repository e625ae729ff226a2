"""The hash table of ids against a dict."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.ids import codes_of, index_ids
from feature_repo.statistics import NO_ITEM, Statistics

names = st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1, max_size=9)


@given(st.lists(names, unique=True, min_size=1, max_size=20), st.lists(names, max_size=20))
def test_ids_become_the_same_codes_as_in_a_dict(known: list[str], asked: list[str]) -> None:
    """The ids have any length in bytes; some are in the catalogue, some are only similar."""
    known.sort()
    asked = [*asked, *known[::-1], known[0] + "x", known[0][:-1] or "y"]
    text = np.frombuffer("".join(known).encode(), np.uint8)
    ends = np.cumsum([len(name.encode()) for name in known])
    slots = np.empty((64, 2), np.int64)
    assert index_ids(text, ends, slots) == -1
    found = codes_of(np.frombuffer("\n".join(asked).encode(), np.uint8), len(asked), slots)
    code_of = {name: code for code, name in enumerate(known)}
    assert found.tolist() == [code_of.get(name, -1) for name in asked]


def test_two_ids_with_one_hash_are_reported() -> None:
    text, slots = np.frombuffer(b"aba", np.uint8), np.empty((8, 2), np.int64)
    assert index_ids(text, np.array([1, 2, 3]), slots) == 2, "the third is the first again"


def test_a_text_with_another_number_of_ids_gives_no_codes(toy_tables: Statistics) -> None:
    assert toy_tables.codes_in(b"item-001\nitem-000", 2).tolist() == [1, 0]
    assert toy_tables.codes_in(b"item-001\nitem-000", 1).tolist() == []
    assert toy_tables.codes_in(b"item-001\nitem-000", 3).tolist() == []
    assert toy_tables.codes_in(b"", 1).tolist() == [NO_ITEM]
    assert toy_tables.codes_in(b"item-001", 2**40).tolist() == [], (
        "no memory is taken for what a damaged row claims"
    )
