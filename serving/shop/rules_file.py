"""CONTRACT the rules file: a merchandiser's YAML -> `Rule`s, and the problems of each line.

    pin:
      - name: Christmas           # of the campaign; shown in the reason
        item: 1041453
        slot: 1
        from: 2026-12-01          # UTC; a day begins at midnight
        until: 2026-12-27T20:00   # the rule ends here
        stores: [406]
    ban:
      - name: recall 17
        items: [995242]

`{}` or a comment alone is a file without rules; an empty one is refused.
`SECTIONS` lists the kinds, docs/how-to/own-rules.md explains them. Text is not converted, so the item 007
stays 007. YAML beyond lists and mappings (aliases, tags, several documents) is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from feature_repo.atomic_files import read_regular
from feature_repo.ids import MAX_ID_LENGTH, closest, is_id
from serving.schemas import MAX_K

MAX_BYTES = 1 << 20  # a hundred thousand ids; to read more would keep requests waiting
MAX_FACTOR = 1_000.0
SELECTORS = ("items", "types", "categories", "departments", "manufacturers", "own_brand")
SECTIONS: dict[str, tuple[str, ...]] = {  # section -> the keys of its rules beside `COMMON`
    "pin": ("item", "slot"),
    "boost": ("factor", *SELECTORS),
    "bury": ("factor", *SELECTORS),
    "ban": SELECTORS,
    "minimum_stock": ("units", *SELECTORS),
    "minimum_margin": ("share", *SELECTORS),
    "slots": ("repeat", "new"),
}
COMMON = ("name", "from", "until", "stores")
_DEEPEST = 4  # sections, rules, keys, lists
_SHOWN = 5  # problems in one message
_COMMA = re.compile(r"-?\d+,\d+")
# Parsing in C is ten times as fast; PyYAML without libyaml lacks it.
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class RuleProblem(NamedTuple):
    """A problem in one line, and how to mend it."""

    line: int
    text: str
    refused: bool  # True: the file is refused; False: a warning


class RulesInvalid(ValueError):
    """A rules file that is refused; `problems` has the reasons, by line."""

    def __init__(self, problems: Iterable[RuleProblem]) -> None:
        self.problems = sorted(problems)
        wrong = [f"line {problem.line}: {problem.text}" for problem in self.problems if problem.refused]
        more = [f"and {len(wrong) - _SHOWN} more: `reco rules check`"] if len(wrong) > _SHOWN else []
        super().__init__("; ".join([*wrong[:_SHOWN], *more]))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as it was written."""

    kind: str  # of SECTIONS
    name: str
    line: int
    number: float = math.nan  # the factor of a boost or bury, the required number of a minimum
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by selector; empty: every item
    item: str = ""  # of a pin
    slot: int = 0  # of a pin, from 1
    repeat: tuple[int, ...] = ()  # slots
    new: tuple[int, ...] = ()  # slots
    starts: float = -math.inf  # seconds since the epoch
    ends: float = math.inf
    stores: frozenset[str] = frozenset()  # empty: every store

    def overlaps(self, other: Rule) -> bool:
        """Return whether both rules hold at some time in some store."""
        shares_store = not (self.stores and other.stores) or bool(self.stores & other.stores)
        return shares_store and self.starts < other.ends and other.starts < self.ends


def read_rules(file: Path) -> tuple[list[Rule], list[RuleProblem]]:
    """Return the rules of a file, and warnings, which are no reason to refuse it.

    Raises:
        FileNotFoundError: the file does not exist.
        RulesInvalid: it is no rules file, or its rules are invalid or contradict each other.
    """
    try:
        content = read_regular(file, MAX_BYTES)
    except ValueError as error:
        raise RulesInvalid([RuleProblem(1, str(error), True)]) from error
    return rules_of(content)


def rules_of(content: bytes) -> tuple[list[Rule], list[RuleProblem]]:
    """Return the rules in the content of a file, and warnings.

    Raises:
        RulesInvalid: as `read_rules`.
    """
    if len(content) > MAX_BYTES:
        _refuse(1, f"expected a file of at most {MAX_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RulesInvalid([RuleProblem(1, f"no text in UTF-8 ({error}): save it as UTF-8", True)]) from error
    rules, problems = parse_rules(text)
    if any(problem.refused for problem in problems):
        raise RulesInvalid(problems)
    return rules, problems


def parse_rules(text: str) -> tuple[list[Rule], list[RuleProblem]]:
    """Return the rules in a text, and all its errors and warnings, by line."""
    # A half-finished save leaves an empty file: it must not end the bans.
    if not text.removeprefix("\ufeff").strip():
        return [], [RuleProblem(1, "the file is empty: for no rules write {}, or delete it", True)]
    try:
        root = _read_yaml(text)
    except RulesInvalid as error:
        return [], error.problems
    if root is None or root.value == "":
        return [], []
    if not isinstance(root.value, dict):
        return [], [RuleProblem(root.line, f"expected sections: {', '.join(SECTIONS)}", True)]
    rules, problems = [], []
    for section, node in root.value.items():
        if section not in SECTIONS:
            problems.append(
                RuleProblem(node.key_line, f"no section {section!r}: {closest(section, SECTIONS)}", True)
            )
        elif isinstance(node.value, list):
            for entry in node.value:
                rule, wrong = _read_rule(section, entry)
                rules += [rule] if rule else []
                problems += wrong
        elif node.value != "":
            message = f"{section} is no list: each of its rules begins with a dash, `- name: …`"
            problems.append(RuleProblem(node.line, message, True))
    return rules, sorted(problems + list(_contradictions(rules)))


# ---------------------------------------------------------------------------------------------- YAML


@dataclass(slots=True)
class Node:
    """A YAML node: a text, a list or a mapping, with its line and that of its key."""

    line: int
    value: str | list[Node] | dict[str, Node]
    key_line: int = 0


def _read_yaml(text: str) -> Node | None:
    """Return the text as nodes, None if it is empty.

    Raises:
        RulesInvalid: it is no YAML, or it uses YAML that rules files do not support.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            line = event.start_mark.line + 1
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # composing would end the process
                _refuse(line, "nested too deep: sections hold rules, rules hold words and lists of words")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                _refuse(line, "names (&) and references to them (*) are not read: write it out")
            if tag := getattr(event, "tag", None):
                _refuse(line, f"tags ({tag}) are not read: leave it out")
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse(
            mark.line + 1 if mark else 1, f"no YAML ({error.problem}): look at indents, quotes and colons"
        )
    except yaml.YAMLError as error:  # a character that YAML forbids
        position = getattr(error, "position", 0)
        _refuse(text.count("\n", 0, position) + 1, "a character that YAML does not know: remove it")
    return None if root is None else _node(root)


def _node(node: Any) -> Node:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        is_null = not node.style and node.value.lower() in ("~", "null")
        return Node(line, "" if is_null else node.value)
    if isinstance(node, yaml.SequenceNode):
        return Node(line, [_node(one) for one in node.value])
    values: dict[str, Node] = {}
    for key, value in node.value:
        at = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            _refuse(at, "a list or mapping as a key: expected a word and a colon")
        if key.value in values:
            _refuse(at, f"{key.value!r} stands here twice: put both into one")
        values[key.value] = _node(value)
        values[key.value].key_line = at
    return Node(line, values)


def _refuse(line: int, text: str) -> NoReturn:
    raise RulesInvalid([RuleProblem(line, text, True)])


# --------------------------------------------------------------------------------------------- rules


class _Wrong(Exception):
    """A value that is invalid for its key."""


def _read_rule(section: str, node: Node) -> tuple[Rule | None, list[RuleProblem]]:
    """Return a rule, or None if it is invalid, and its problems."""
    if not isinstance(node.value, dict):
        return None, [RuleProblem(node.line, f"expected a rule of {section}: {_example(section)}", True)]
    values, problems = _read_values(section, node.value)
    if missing := _missing_keys(section, node.value.keys()):
        text = f"a rule of {section} needs {' and '.join(missing)}: {_example(section)}"
        problems.append(RuleProblem(node.line, text, True))
    starts, ends = values.get("from", -math.inf), values.get("until", math.inf)
    if ends <= starts:
        text = "until is not after from, so that the rule would never hold: exchange them"
        problems.append(RuleProblem(node.value["until"].line, text, True))
    both = set(values.get("repeat", ())) & set(values.get("new", ()))
    if both:
        text = f"slot {min(both)} is reserved for repeat and for new items: choose one"
        problems.append(RuleProblem(node.line, text, True))
    if problems:
        return None, problems
    number = next((values[key] for key in ("factor", "units", "share") if key in values), math.nan)
    return Rule(
        kind=section,
        name=values["name"],
        line=node.line,
        number=number,
        chosen={key: values[key] for key in SELECTORS if key in values},
        item=values.get("item", ""),
        slot=values.get("slot", 0),
        repeat=values.get("repeat", ()),
        new=values.get("new", ()),
        starts=starts,
        ends=ends,
        stores=frozenset(values.get("stores", ())),
    ), []


def _read_values(section: str, nodes: dict[str, Node]) -> tuple[dict[str, Any], list[RuleProblem]]:
    """Return the valid values of a rule by key, and the problems of the others."""
    allowed = (*COMMON, *SECTIONS[section])
    values: dict[str, Any] = {}
    problems: list[RuleProblem] = []
    for key, node in nodes.items():
        if key not in allowed:
            text = f"a rule of {section} has no {key!r}: {closest(key, allowed)}"
            problems.append(RuleProblem(node.key_line, text, True))
            continue
        try:
            values[key] = _READERS[key](node, section)
        except _Wrong as error:
            problems.append(RuleProblem(node.line, f"{key}: {error}", True))
    return values, problems


def _missing_keys(section: str, keys: Set[str]) -> list[str]:
    """Return the keys that a rule of a section needs and lacks, as words of a message."""
    needed = [key for key in ("name", *SECTIONS[section]) if key not in (*SELECTORS, "repeat", "new")]
    missing = [key for key in needed if key not in keys]
    if section in ("boost", "bury", "ban") and not keys & set(SELECTORS):
        missing.append(f"one of {', '.join(SELECTORS)}")
    if section == "slots" and not keys & {"repeat", "new"}:
        missing.append("repeat or new")
    return missing


_EXAMPLES = {
    "pin": "item: 1041453, slot: 1",
    "boost": "factor: 1.5, own_brand: true",
    "bury": "factor: 0.5, types: [candles]",
    "ban": "items: [995242]",
    "minimum_stock": "units: 5",
    "minimum_margin": "share: 0.1",
    "slots": "repeat: [1, 2], new: [3]",
}


def _example(section: str) -> str:
    return f"for example {{name: …, {_EXAMPLES[section]}}}"


def _text(node: Node, section: str) -> str:
    if not is_id(node.value):
        raise _Wrong(f"expected one text of 1 to {MAX_ID_LENGTH} printable characters")
    return node.value


def _texts(node: Node, section: str) -> tuple[str, ...]:
    nodes = node.value if isinstance(node.value, list) else [node]
    texts = tuple(dict.fromkeys(_text(entry, section) for entry in nodes))
    if not texts:
        raise _Wrong("an empty list chooses nothing: name some, or leave the rule out")
    return texts


def _truth(node: Node, section: str) -> tuple[str, ...]:
    if str(node.value).lower() not in ("true", "false"):
        raise _Wrong("expected true or false")
    return (str(node.value).lower(),)


def _number(node: Node) -> float:
    if isinstance(node.value, str) and _COMMA.fullmatch(node.value):
        raise _Wrong(f"write {node.value.replace(',', '.')}, with a point")
    try:
        return float(node.value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _factor(node: Node, section: str) -> float:
    factor = _number(node)
    if section == "boost" and not 1 < factor <= MAX_FACTOR:
        raise _Wrong(f"expected a number above 1 and at most {MAX_FACTOR:g}; one below 1 belongs under bury")
    if section == "bury" and not 0 < factor < 1:
        raise _Wrong("expected a number between 0 and 1, as 0.5; 0 would be a ban, above 1 a boost")
    return factor


def _units(node: Node, section: str) -> float:
    units = _number(node)
    if not 0 < units <= 1e9:
        raise _Wrong("expected a number of units above 0")
    return units


def _share(node: Node, section: str) -> float:
    share = _number(node)
    if not -1 <= share < 1:
        raise _Wrong("expected the margin as a share of the price, as 0.1 for 10 %")
    return share


def _slot(node: Node, section: str) -> int:
    slot = _number(node)
    if not (1 <= slot <= MAX_K and slot == int(slot)):
        raise _Wrong(f"expected a whole number from 1, the first place of the answer, to {MAX_K}")
    return int(slot)


def _slots(node: Node, section: str) -> tuple[int, ...]:
    nodes = node.value if isinstance(node.value, list) else [node]
    if not nodes:
        raise _Wrong("an empty list reserves no slot: name some, or leave it out")
    return tuple(_slot(entry, section) for entry in nodes)


def _time(node: Node, section: str) -> float:
    try:
        parsed = datetime.fromisoformat(str(node.value))
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise _Wrong("expected a day or a time in UTC, as 2026-12-01 or 2026-12-01T18:30") from error


_READERS: dict[str, Callable[[Node, str], Any]] = {
    "name": _text,
    "from": _time,
    "until": _time,
    "stores": _texts,
    "item": _text,
    "slot": _slot,
    "factor": _factor,
    "units": _units,
    "share": _share,
    "repeat": _slots,
    "new": _slots,
    **dict.fromkeys(SELECTORS, _texts),
    "own_brand": _truth,
}


# ------------------------------------------------------------------------------------ contradictions


def _contradictions(rules: list[Rule]) -> Iterator[RuleProblem]:
    """Yield the contradictions between rules that hold at the same time in the same store."""
    pins = [rule for rule in rules if rule.kind == "pin"]
    for first, second in _clashes(pins, lambda rule: [rule.slot]):
        if first.item != second.item:
            text = (
                f"{_label(first)} pins {first.item} to slot {first.slot}, where this rule pins {second.item}"
            )
            yield RuleProblem(second.line, f"{text}: one of them needs another slot, time or store", True)
    for first, second in _clashes(pins, lambda rule: [rule.item]):
        if first.slot != second.slot:
            text = f"{_label(first)} pins {first.item} to slot {first.slot}, this rule to slot {second.slot}"
            yield RuleProblem(second.line, f"{text}: an item is shown once, take one of them out", True)
    reservations = [rule for rule in rules if rule.kind == "slots"]
    for first, second in _clashes(reservations, lambda rule: [*rule.repeat, *rule.new]):
        if both := {*first.repeat} & {*second.new} | {*first.new} & {*second.repeat}:
            text = f"slot {min(both)} is reserved for repeat and for new items, here and by {_label(first)}"
            yield RuleProblem(second.line, f"{text}: choose one", True)
    for first, second in _clashes([*pins, *reservations], lambda rule: [rule.slot, *rule.repeat, *rule.new]):
        if {first.kind, second.kind} == {"pin", "slots"}:
            pin, other = (first, second) if first.kind == "pin" else (second, first)
            text = f"slot {pin.slot} is reserved for {_label(other)} and pinned here: the pin stands there"
            yield RuleProblem(pin.line, text, False)


def _label(rule: Rule) -> str:
    return f"{rule.name!r} (line {rule.line})"


def _clashes(rules: list[Rule], claims: Callable[[Rule], Iterable[Any]]) -> Iterator[tuple[Rule, Rule]]:
    """Yield pairs of rules with the same claim at one time in one store, in the order of their lines.

    Three such rules give at least two pairs: the rules of one claim and store are passed through once.
    """
    seen: set[tuple[int, int]] = set()
    claimed: dict[Any, list[Rule]] = {}
    for rule in rules:
        for claim in set(claims(rule)) - {0}:
            claimed.setdefault(claim, []).append(rule)
    for held in claimed.values():
        everywhere = [rule for rule in held if not rule.stores]
        local: dict[str, list[Rule]] = {"": []}
        for rule in held:
            for store in rule.stores:
                local.setdefault(store, []).append(rule)
        # Stores that the same rules name are looked at once.
        for named in {tuple(map(id, named)): named for named in local.values()}.values():
            together = sorted([*everywhere, *named], key=lambda rule: rule.starts)
            last: Rule | None = None
            for rule in together:
                if last is not None and rule.starts < last.ends:
                    first, second = sorted((last, rule), key=lambda clashing: clashing.line)
                    if (pair := (id(first), id(second))) not in seen:  # two rules may share a line
                        seen.add(pair)
                        yield first, second
                if last is None or rule.ends > last.ends:
                    last = rule
