"""Words -> the items of a bundle that they name; an unknown id -> the item that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from feature_repo.errors import USAGE, RecoError
from feature_repo.schema import LEVELS

if TYPE_CHECKING:
    from serving.release.bundle import Bundle


class ItemUnknown(RecoError):
    """A text that is no id of an item."""

    exit_code = USAGE


def find_items(bundle: Bundle, words: Iterable[str], limit: int) -> list[dict[str, Any]]:
    """Return the items of all these words, best sellers first.

    A word is a part of the type, category or department, or the beginning of the id.
    """
    wanted = [word.casefold() for word in words]
    statistics = bundle.statistics
    names = [[name.casefold() for name in bundle.vocabulary[level]] for level in LEVELS]
    # Rows of one type, category and department share their names: few texts are searched.
    kinds, kind_of = np.unique(statistics.categorical, axis=0, return_inverse=True)
    texts = [
        " ".join(level[code] for level, code in zip(names, kind, strict=True)) for kind in kinds.tolist()
    ]
    matches = [
        code
        for code, item_id in enumerate(statistics.item_ids.tolist())
        if all(item_id.casefold().startswith(word) or word in texts[kind_of[code]] for word in wanted)
    ]
    matches.sort(key=lambda code: -statistics.basket_count[code])
    return [_row(bundle, code) for code in matches[:limit]]


def _row(bundle: Bundle, code: int) -> dict[str, Any]:
    statistics = bundle.statistics
    kind = zip(LEVELS, statistics.categorical[code].tolist(), strict=True)
    return {
        "item_id": str(statistics.item_ids[code]),
        "name": bundle.name_of(code).lower(),
        **{level: bundle.vocabulary[level][number].lower() for level, number in kind if level != "type"},
        "price": round(float(statistics.price[code]), 2),
        "baskets": int(statistics.basket_count[code]),
    }


def named(bundle: Bundle, item_id: str) -> str:
    """Return an item's id and name."""
    return f"{item_id} {bundle.name_of(bundle.statistics.code_of[item_id]).lower()}".rstrip()


def has_names(bundle: Bundle) -> bool:
    """Return whether any item has a type, a category or a department."""
    return bool(bundle.statistics.categorical.any())


def check_items(bundle: Bundle, item_ids: Iterable[str]) -> None:
    """Check that the bundle knows these items.

    Raises:
        ItemUnknown: with the item that was probably meant.
    """
    for text in item_ids:
        if text not in bundle.statistics.code_of:
            raise ItemUnknown(f"no item {text!r} in bundle {bundle.bundle_id}{_meant(bundle, text)}")


def _meant(bundle: Bundle, text: str) -> str:
    found = find_items(bundle, text.split(), 1)
    if not found:
        words = {name.casefold() for level in LEVELS for name in bundle.vocabulary[level] if name}
        if near := difflib.get_close_matches(text.casefold(), words, 1):
            found = find_items(bundle, near, 1)
        elif near := difflib.get_close_matches(text, bundle.statistics.code_of, 1):
            found = [_row(bundle, bundle.statistics.code_of[near[0]])]
    if not found:
        return ", and no similar one: train again if it is new, or add it with `reco extend`"
    return f"; did you mean {named(bundle, found[0]['item_id'])}?"
