"""Lines of the history: an intact chain is read, and each kind of change is named."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.release.history import (
    INTENT_TAG,
    HistoryBroken,
    Promotion,
    check_head,
    line_tag,
    next_line,
    read_history,
    stack,
    write_head,
)


def chain(length: int = 5) -> list[Promotion]:
    lines: list[Promotion] = []
    for number in range(1, length + 1):
        lines.append(next_line(lines, "promote", str(number), f"b{number}", str(number - 1), "2026-01-01"))
    return lines


def tags(lines: list[Promotion]) -> dict[str, str]:
    return {"owner": "ann", **{line_tag(line): json.dumps(asdict(line)) for line in lines}}


def test_an_intact_chain_is_read_in_order() -> None:
    lines = chain(12)
    assert read_history(dict(reversed(tags(lines).items())), "12") == lines
    assert read_history({}, None) == []


Change = Callable[[dict[str, str]], object]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("promotion.000003"), "line 3 of the history is missing"),
        (lambda t: t.pop("promotion.000001"), "line 1 of the history is missing"),
        (lambda t: t.update({"promotion.000003": "{"}), "line 3 of the history cannot be read"),
        (lambda t: t.update({"promotion.000003": "[]"}), "line 3 of the history cannot be read"),
        (lambda t: t.update({"promotion.000003": t["promotion.000002"]}), "line 3 .* holds line 2"),
        (lambda t: swap(t, 2, 3), "line 2 .* holds line 3"),
        (lambda t: alter(t, 3, version="9"), "line 3 of the history or line 4 was changed"),
        (lambda t: alter(t, 3, before=""), "line 2 of the history or line 3 was changed"),
        (lambda t: alter(t, 5, before="0" * 64), "line 4 of the history or line 5 was changed"),
        (lambda t: without_hashes(t), "line 1 of the history or line 2 was changed"),
    ],
)
def test_a_change_is_named(change: Change, named: str) -> None:
    changed = tags(chain())
    change(changed)
    with pytest.raises(HistoryBroken, match=named):
        read_history(changed, "5")


def swap(written: dict[str, str], one: int, other: int) -> None:
    keys = f"promotion.{one:06d}", f"promotion.{other:06d}"
    written[keys[0]], written[keys[1]] = written[keys[1]], written[keys[0]]


def alter(written: dict[str, str], number: int, **fields: str) -> None:
    key = f"promotion.{number:06d}"
    written[key] = json.dumps({**json.loads(written[key]), **fields})


def without_hashes(written: dict[str, str]) -> None:
    for number in range(1, 6):
        alter(written, number, before="")


@given(st.integers(1, 5), st.sampled_from(["action", "version", "bundle_id", "previous", "at"]))
def test_no_field_of_any_line_but_the_last_can_be_changed(number: int, field: str) -> None:
    changed = tags(chain(6))
    alter(changed, number, **{field: "forged"})
    with pytest.raises(HistoryBroken, match=f"line {number} "):
        read_history(changed, "6")


def test_the_last_line_is_held_by_the_home_that_wrote_it(tmp_path: Path) -> None:
    lines = chain()
    check_head(tmp_path, "shop", lines)
    write_head(tmp_path, "shop", lines[-1])
    for known in (lines, [*lines, next_line(lines, "promote", "6", "b6", "5", "")]):
        check_head(tmp_path, "shop", known)
        check_head(tmp_path, "another", known)
    with pytest.raises(HistoryBroken, match="line 5 of the history is missing"):
        check_head(tmp_path, "shop", lines[:-1])
    with pytest.raises(HistoryBroken, match="line 5 of the history was changed"):
        check_head(tmp_path, "shop", [*lines[:-1], replace(lines[-1], at="later")])
    write_head(tmp_path, "another", lines[0])
    with pytest.raises(HistoryBroken, match="line 5 of the history is missing"):
        check_head(tmp_path, "shop", lines[:-1])


@pytest.mark.parametrize("content", [b"{", b'{"shop": ["x", "y"]}', b'{"shop": [1, "\xff"]}'])
def test_a_torn_file_of_last_lines_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history.json").write_bytes(content)
    for act in (partial(check_head, history=chain()), partial(write_head, line=chain()[0])):
        with pytest.raises(HistoryBroken, match=r"history\.json holds no last lines .*restore it"):
            act(tmp_path, "shop")
    assert (tmp_path / "history.json").read_bytes() == content


def test_an_intent_counts_when_its_alias_moved() -> None:
    lines = chain(3)
    begun = tags(lines[:2]) | {INTENT_TAG: json.dumps(asdict(lines[2]))}
    assert read_history(begun, "3") == lines
    assert read_history(begun, "2") == lines[:2]
    assert read_history(tags(lines) | {INTENT_TAG: begun[INTENT_TAG]}, "3") == lines, "it is a line by now"


def test_the_history_is_a_stack() -> None:
    acts = [("promote", "1"), ("promote", "2"), ("rollback", "1"), ("restore", "1"), ("promote", "3")]
    lines: list[Promotion] = []
    for action, version in acts:
        lines.append(next_line(lines, action, version, "b", "", ""))
    assert stack(lines) == ["1", "3"]


def test_a_forged_rollback_before_any_promotion_is_named() -> None:
    with pytest.raises(HistoryBroken, match="line 1 of the history goes back before the first promotion"):
        stack([next_line([], "rollback", "1", "b1", "", "")])
