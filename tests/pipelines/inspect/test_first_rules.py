"""The rules file to begin with: valid as it stands, and with each comment taken away."""

import json
from pathlib import Path

import pytest

from pipelines.inspect.first_rules import first_rules
from serving.shop.rules_file import SECTIONS, parse_rules
from tests.champions import promote_sealed
from tests.pipelines.cli.conftest import reco

CATEGORIES = [
    *("CIGARETTES", "CIGARS", "TOBACCO OTHER", "BEERS/ALES", "DOMESTIC WINE", "DUTY FREE LIQUOR"),
    *(
        "SMOKED MEATS",
        "SMOKING CESSATIONS",
        "NON ALCOHOLIC BEER",
        "ALCOHOL-FREE WINE",
        "BEERS ALC/FREE",
        "SALES",
        "TOMATOES",
    ),
]


def home_with(home: Path, departments: list[str], categories: list[str]) -> Path:
    statistics = home / "bundles" / "b" / "statistics"
    statistics.mkdir(parents=True)
    names = {"type": [""], "category": ["", *categories], "department": ["", *departments]}
    (statistics / "vocabulary.json").write_text(json.dumps(names))
    promote_sealed(home, "b")
    return home


def test_age_restricted_goods_are_a_ready_ban(tmp_path: Path) -> None:
    rules, problems = parse_rules(first_rules(home_with(tmp_path, ["GROCERY", "SPIRITS"], CATEGORIES)))
    assert not problems
    assert [(rule.kind, rule.chosen) for rule in rules] == [
        ("ban", {"departments": ("spirits",)}),
        ("ban", {"categories": tuple(name.lower() for name in CATEGORIES[:6])}),
    ]


@pytest.mark.parametrize("has_champion", [False, True])
def test_without_such_goods_nothing_is_banned(tmp_path: Path, has_champion: bool) -> None:
    home = home_with(tmp_path, ["GROCERY"], ["TOMATOES"]) if has_champion else tmp_path
    assert parse_rules(first_rules(home)) == ([], [])


def test_beside_a_damaged_pointer_no_file_without_the_ban_is_written(tmp_path: Path) -> None:
    home = home_with(tmp_path, [], CATEGORIES)
    (home / "champion.json").write_text("{")
    done = reco(home, "rules", "init")
    assert (done.exit_code, "is not a champion pointer" in done.output) == (2, True)
    assert not (home / "rules.yaml").exists()


def test_each_kind_of_rule_is_a_comment_that_can_be_used(tmp_path: Path) -> None:
    head, _, examples = first_rules(tmp_path).partition("\nban:")
    assert all(line.startswith("#") for line in head.splitlines() if line)
    lines = [line for line in f"ban:{examples}".splitlines() if "No champion" not in line]
    rules, problems = parse_rules("\n".join(line.removeprefix("# ") for line in lines))
    assert not problems
    assert {rule.kind for rule in rules} == set(SECTIONS)
