"""The rules file: the valid entries, and the line and fix reported for each mistake."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.shop.rules_file import Rule, RuleProblem, RulesInvalid, parse_rules, read_rules

WHOLE = """\
pin:
  - name: Christmas
    item: 007
    slot: 1
    from: 2026-12-01
    until: 2026-12-27T20:00:00+01:00
    stores: [406, "367"]
boost:
  - {name: own brand, factor: 1.5, own_brand: true, types: [Soft Drinks, bread]}
bury:
  - {name: slow, factor: 0.5, categories: candles}
ban:
  - name: recall
    items:
      - "1"
      - 1e3
minimum_stock:
  - {name: enough, units: 5}
minimum_margin:
  - {name: earns, share: 0.1, manufacturers: [69]}
slots:
  - {name: both, repeat: [1, 2], new: 3}
"""


def test_a_full_file_is_read_field_by_field() -> None:
    rules, problems = parse_rules(WHOLE)
    assert [problem.text for problem in problems] == [
        "slot 1 is reserved for 'both' (line 22) and pinned here: the pin stands there"
    ]
    assert [rule.line for rule in rules] == [2, 9, 11, 13, 18, 20, 22]
    # 2026-12-01T00:00Z and 2026-12-27T19:00Z
    assert rules[0] == Rule(
        "pin", "Christmas", 2, item="007", slot=1, starts=1796083200.0, ends=1798398000.0,
        stores=frozenset({"406", "367"}), number=rules[0].number,
    )  # fmt: skip
    assert math.isnan(rules[0].number)
    assert rules[1].chosen == {"types": ("Soft Drinks", "bread"), "own_brand": ("true",)}
    assert (rules[1].number, rules[2].number, rules[4].number, rules[5].number) == (1.5, 0.5, 5.0, 0.1)
    assert rules[2].chosen == {"categories": ("candles",)}
    assert rules[3].chosen == {"items": ("1", "1e3")}, "an id is text, whatever YAML would make of it"
    assert (rules[6].repeat, rules[6].new) == ((1, 2), (3,))
    assert (rules[6].starts, rules[6].ends) == (-math.inf, math.inf)


@pytest.mark.parametrize("text", ["{}", "# nothing yet\n", "---\n", "~", "pin:\nban: []\n"])
def test_a_file_without_rules_is_valid(text: str) -> None:
    assert parse_rules(text) == ([], [])


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        *((empty, 1, "the file is empty: for no rules write {}") for empty in ("", " \n\n", "\ufeff\n")),
        ("pins:\n  - {name: a}", 1, "no section 'pins': did you mean 'pin'?"),
        ("pin:\n  - {name: a, item: x, slot: 1, sore: [3]}", 2, "no 'sore': did you mean 'stores'?"),
        ("pin:\n  - {name: a, item: x}", 2, "a rule of pin needs slot: for example"),
        ("ban:\n  - {items: [x]}", 2, "a rule of ban needs name: for example"),
        ("ban:\n  - {name: all}", 2, "a rule of ban needs one of items, types, "),
        ("boost:\n  - name: a\n    factor: 0.5\n    items: [x]", 3, "one below 1 belongs under bury"),
        ("boost:\n  - name: a\n    factor: 1,5\n    items: [x]", 3, "factor: write 1.5, with a point"),
        ("bury:\n  - name: a\n    factor: 0\n    items: [x]", 3, "0 would be a ban"),
        ("boost:\n  - {name: a, factor: .nan, items: [x]}", 2, "factor: expected a number"),
        ("minimum_stock:\n  - {name: a, units: -1}", 2, "units: expected a number of units above 0"),
        ("minimum_margin:\n  - {name: a, share: 15}", 2, "as 0.1 for 10 %"),
        ("pin:\n  - {name: a, item: x, slot: 0}", 2, "slot: expected a whole number from 1"),
        ("pin:\n  - {name: a, item: x, slot: 1.5}", 2, "slot: expected a whole number from 1"),
        ("ban:\n  - {name: a, items: []}", 2, "items: an empty list chooses nothing"),
        ("ban:\n  - {name: a, items: [[x]]}", 2, "nested too deep"),
        ("ban:\n  - {name: a, items: ['']}", 2, "items: expected one text of 1 to 128 printable characters"),
        ("ban:\n  - {name: a, own_brand: perhaps}", 2, "own_brand: expected true or false"),
        ("ban:\n  - name: a\n    items: [x]\n    from: christmas", 4, "from: expected a day or a time"),
        (
            "ban:\n  - name: a\n    items: [x]\n    from: 2026-12-27\n    until: 2026-12-01",
            5,
            "until is not after from, so that the rule would never hold: exchange them",
        ),
        ("slots:\n  - {name: a, repeat: [1], new: [1]}", 2, "slot 1 is reserved for repeat and"),
        ("slots:\n  - {name: a}", 2, "a rule of slots needs repeat or new"),
        ("ban: x", 1, "ban is no list: each of its rules begins with a dash"),
        ("ban:\n  - x", 2, "expected a rule of ban: for example"),
        ("- ban", 1, "expected sections: pin, boost,"),
        ("ban:\n\t- x", 2, "no YAML (found character"),
        ("ban:\n  - {name: a, items: [x}", 2, "no YAML"),
        ("ban: \x07", 1, "a character that YAML does not know"),
        ("ban:\n  - {name: a, name: b, items: [x]}", 2, "'name' stands here twice"),
        ("a: &a [x]", 1, "references to them (*) are not read"),
        ("ban:\n  - {name: a, items: *x}", 2, "references to them (*) are not read"),
        ("ban: !!python/object/apply:os.system [date]", 1, "tags (tag:yaml.org,2002:python"),
        ("ban: []\n---\nban: []", 2, "no YAML (but found another document)"),
        ("? [a]\n: b", 1, "a list or mapping as a key"),
        ("ban: [{items: [[[x]]]}]", 1, "nested too deep"),
        ("[" * 100_000, 1, "nested too deep"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_a_fix(text: str, line: int, said: str) -> None:
    rules, problems = parse_rules(text)
    assert rules == []
    [problem] = problems
    assert problem.refused
    assert problem.line == line
    assert said in problem.text


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("ban:\n" + "  - {name: a, item: x}\n" * 4)
    with pytest.raises(
        RulesInvalid, match=r"^line 2: a rule of ban has no 'item'.*; and 3 more: `reco rules check`$"
    ) as found:
        read_rules(file)
    assert [problem.line for problem in found.value.problems] == [2, 2, 3, 3, 4, 4, 5, 5]
    file.write_bytes(b"ban:\xff")
    with pytest.raises(RulesInvalid, match="line 1: no text in UTF-8"):
        read_rules(file)


# ------------------------------------------------------------------------------------ contradictions


def pin(name: str, item: str, slot: int, more: str = "") -> str:
    return f"  - {{name: {name}, item: {item}, slot: {slot}{more}}}\n"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (pin("a", "x", 1), pin("b", "y", 1), "'a' (line 2) pins x to slot 1, where this rule pins y"),
        (pin("a", "x", 1), pin("b", "x", 2), "'a' (line 2) pins x to slot 1, this rule to slot 2"),
        (pin("a", "x", 1, ", stores: [s]"), pin("b", "y", 1), "pins x to slot 1, where this rule pins y"),
        (
            pin("a", "x", 1, ", until: 2026-12-02"),
            pin("b", "y", 1, ", from: 2026-12-01"),
            "pins x to slot 1, where this rule pins y",
        ),
        (pin("a", "x", 1), pin("b", "x", 1), ""),
        (pin("a", "x", 1), pin("b", "y", 2), ""),
        (pin("a", "x", 1, ", stores: [s]"), pin("b", "y", 1, ", stores: [t]"), ""),
        (pin("a", "x", 1, ", until: 2026-12-01"), pin("b", "y", 1, ", from: 2026-12-01"), ""),
    ],
)
def test_two_pins_in_one_slot_are_refused(first: str, second: str, said: str) -> None:
    _, problems = parse_rules(f"pin:\n{first}{second}")
    assert [(problem.line, problem.refused) for problem in problems] == ([(3, True)] if said else [])
    assert all(said in problem.text for problem in problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "pin: [{name: a, item: x, slot: 1}, {name: b, item: x, slot: 1}, {name: c, item: x, slot: 2}]",
            RuleProblem(1, "'a' (line 1) pins x to slot 1, this rule to slot 2", True),
        ),
        (
            "pin: [{name: a, item: x, slot: 1}, {name: b, item: x, slot: 1}, {name: c, item: y, slot: 1}]",
            RuleProblem(1, "'a' (line 1) pins x to slot 1, where this rule pins y", True),
        ),
        (
            "slots:\n  - {name: a, new: [4, 8]}\n  - {name: b, repeat: [8]}\n",
            RuleProblem(3, "slot 8 is reserved for repeat and for new items, here and by 'a' (line 2)", True),
        ),
    ],
    ids=["one line, two slots", "one line, two items", "a slot for two kinds"],
)
def test_a_conflict_is_reported_once(text: str, problem: RuleProblem) -> None:
    [found] = parse_rules(text)[1]
    assert (found.line, found.refused) == (problem.line, problem.refused)
    assert found.text.startswith(problem.text)


def test_a_long_rule_conflicts_with_each_rule_in_its_period() -> None:
    text = "pin:\n" + pin("all year", "x", 1)
    text += "".join(
        pin(f"day {day}", f"y{day}", 1, f", from: 2026-05-0{day}, until: 2026-05-0{day + 1}")
        for day in range(1, 6)
    )
    _, problems = parse_rules(text)
    assert [problem.line for problem in problems] == [3, 4, 5, 6, 7]


# ------------------------------------------------------------------------------------------- fuzzing

words = st.sampled_from(
    ["pin", "ban", "slots", "name", "item", "items", "slot", "new", "from", ":", "- ", "\n", "  ", "[", "]",
     "{", "}", ",", "&a", "*a", "!!x", "'", '"', "|", ">", "? ", "# ", "---", "1", "2026-01-01",
     "x", "\t", "\u2028", "%"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(words, max_size=40).map("".join)))
def test_any_text_is_read_or_reported(text: str) -> None:
    rules, problems = parse_rules(text)
    assert all(isinstance(rule, Rule) for rule in rules)
    last = 2 + sum(text.count(end) for end in "\n\r\x85\u2028\u2029")
    assert all(1 <= problem.line <= last for problem in problems)
