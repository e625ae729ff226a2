"""A rules file -> its errors, and its effect on one answer."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_repo.errors import RecoError
from feature_repo.statistics import read_statistics, read_vocabulary
from serving.errors import NoChampion
from serving.release.champion import FILE as POINTER
from serving.release.champion import read_champion
from serving.shop.rules import NO_RULES, Catalogue, Rules
from serving.shop.rules_file import MAX_BYTES, RuleProblem, RulesInvalid, rules_of

if TYPE_CHECKING:
    from serving.answer.recommender import Recommender
    from serving.schemas import Request


class RulesRefused(RecoError):
    """A rules file that the endpoint would refuse."""


@dataclass(frozen=True)
class Checked:
    """A rules file that was looked through."""

    rules: Rules
    problems: list[RuleProblem]  # by line
    # The bundle among whose items, types and manufacturers its words were looked up; "" without a champion.
    bundle_id: str

    @property
    def refused(self) -> bool:
        """Whether the endpoint would not take it."""
        return any(problem.refused for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        found = [
            {"line": one.line, "level": "error" if one.refused else "warning", "text": one.text}
            for one in self.problems
        ]
        return {
            "taken": not self.refused,
            "rules": self.times(),
            "bundle_id": self.bundle_id,
            "problems": found,
        }

    def times(self) -> dict[str, int]:
        """Return how many rules hold now, how many will, and how many did."""
        now = time.time()
        counted = Counter(
            "over" if rule.ends <= now else "later" if rule.starts > now else "now"
            for rule in self.rules.rules
        )
        return {name: counted[name] for name in ("now", "later", "over")}


def check_rules(file: Path, home: Path) -> Checked:
    """Return the errors of a file, and its rules over the items of a home's champion.

    Raises:
        NoChampion: the champion pointer is damaged; without one, no name is looked up.
        BundleInvalid: the champion's bundle is gone or damaged.
    """
    try:
        rules, problems = rules_of(_content(file))
    except RulesInvalid as error:
        return Checked(NO_RULES, error.problems, "")
    try:
        champion = read_champion(home)
    except NoChampion:
        if (home / POINTER).exists():
            raise  # it is damaged
        return Checked(Rules(rules, [None] * len(rules)), problems, "")
    place = champion.bundle(home) / "statistics"
    bound, missing = Catalogue(read_statistics(place), read_vocabulary(place)).bind(rules)
    return Checked(bound, sorted(problems + missing), champion.bundle_id)


def _content(file: Path) -> bytes:
    """Return the content of a file; a pipe is read once, until its other end closes."""
    with file.open("rb") as stream:
        return stream.read(MAX_BYTES + 1)


def preview(recommender: Recommender, rules: Rules, request: Request) -> dict[str, Any]:
    """Return a request's answer without rules and with some, and each item's slots, as JSON types."""
    facts = recommender.facts
    facts.rules = NO_RULES
    before = recommender.recommend(request)
    facts.rules = rules
    after = recommender.recommend(request)
    slots = {item.item_id: slot for slot, item in enumerate(before.items, 1)}
    rows = [
        {**item.to_dict(), "slot": slot, "slot_before": slots.pop(item.item_id, None)}
        for slot, item in enumerate(after.items, 1)
    ]
    for item in before.items:
        if item.item_id in slots:
            gone = {"slot": None, "slot_before": slots[item.item_id]}
            rows.append(
                {**item.to_dict(), **gone, "reason": _gone(recommender, rules, request, item.item_id)}
            )
    return {"before": before.to_dict(), "after": after.to_dict(), "items": rows}


def _gone(recommender: Recommender, rules: Rules, request: Request, item_id: str) -> str:
    """Return why an item is not in the answer any more."""
    plan = rules.plan(request.at, request.store_id)
    code = recommender.bundle.statistics.code_of[item_id]
    if name := plan.banned_because(code):
        return f"banned by {name}"
    name = recommender.facts.minimum_missed(code, request.at, request.store_id, plan)
    return f"below the minimum of {name}" if name else "makes room for others"
