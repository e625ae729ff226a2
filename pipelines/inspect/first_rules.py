"""A home -> a rules file to begin with: what each rule does, and a ban of age-restricted goods."""

from __future__ import annotations

import json
import re
from pathlib import Path

from feature_repo.statistics import read_vocabulary
from serving.errors import NoChampion
from serving.release.champion import FILE as POINTER
from serving.release.champion import read_champion

_RESTRICTED = re.compile(
    r"\b(tobacco|cigar\w*|beers?|ales?|wines?|liquors?|spirits?|alcohol\w*)\b", re.IGNORECASE
)
_HARMLESS = re.compile(r"\bnon\b|\b(alc\w*|nicotine|tobacco)\W?free\b", re.IGNORECASE)
_SELECTORS = {"department": "departments", "category": "categories"}
_TEXT = """\
# Rules say what no model can know. A running endpoint follows this file within two seconds.
# Check it with `reco rules check`, and see its effect with `reco rules preview`.
# `reco items WORDS` finds the ids of items. Remove the # of a line to use it.

ban:                          # never
# - name: recall 17           # each rule needs a name
#   items: [995242, 983795]
"""
_MORE = """
# pin:                        # an item to a place of the answer
# - name: Christmas
#   item: 1041453
#   slot: 2
#   from: 2026-12-01          # UTC; without a time, midnight
#   until: 2026-12-27T20:00
#   stores: [406, 367]        # without this line, every store

# boost:                      # more often and further up
# - name: own brand week
#   factor: 1.5               # a score counts as half as much again
#   own_brand: true

# bury:                       # less often
# - name: out of season
#   factor: 0.5
#   types: [candles]          # or categories, departments, manufacturers

# minimum_stock:              # no item with fewer units left; unknown stock counts as enough
# - name: enough on the shelf
#   units: 5

# minimum_margin:             # no item that earns less of its price
# - name: earns its place
#   share: 0.1

# slots:                      # places for items that this shopper bought before, or never
# - name: something old and new
#   repeat: [1, 3]
#   new: [4, 8]
"""


def first_rules(home: Path) -> str:
    """Return the text; the champion's departments and categories tell which goods are age-restricted.

    Raises:
        NoChampion: the champion pointer is damaged; without one, the text has no ban.
        BundleInvalid: the champion's bundle is gone or damaged.
    """
    try:
        place = read_champion(home).bundle(home) / "statistics"
        vocabulary = read_vocabulary(place)
    except NoChampion:
        if (home / POINTER).exists():
            raise  # it is damaged: the file would lack the ban
        return f"{_TEXT}# No champion is here yet: `reco items WORDS` shows its categories later.\n{_MORE}"
    bans = [
        f"- name: age-restricted {selector}\n  {selector}: {json.dumps(names, ensure_ascii=False)}\n"
        for level, selector in _SELECTORS.items()
        if (names := [name.lower() for name in vocabulary[level] if _is_restricted(name)])
    ]
    if not bans:
        return f"{_TEXT}# No department or category of this data set names tobacco or alcohol.\n{_MORE}"
    head = "# Sold to adults only, by their names in this data set. Remove what the checkout may offer.\n"
    return _TEXT + head + "".join(bans) + _MORE


def _is_restricted(name: str) -> bool:
    return bool(_RESTRICTED.search(name)) and not _HARMLESS.search(name)
