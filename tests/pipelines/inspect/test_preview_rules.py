"""`reco rules` on the toy champion: the errors of a file, and its effect on an answer."""

import json
import os
import threading
from pathlib import Path

import pytest

from pipelines.inspect.preview_rules import check_rules
from serving.shop.rules_file import MAX_BYTES
from tests.pipelines.cli.conftest import reco

BROKEN = """\
ban:
  - name: a
    item: [x]
pin:
  - {name: b, item: x, slot: 1, from: 2020-01-02, until: 2020-01-01}
"""


def test_each_mistake_has_its_line_and_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(BROKEN)
    done = reco(tmp_path, "rules", "check", str(file))
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[1].split()[:2] == ["2", "error"]
    assert "a rule of ban needs one of items" in lines[1]
    assert "a rule of ban has no 'item': did you mean 'items'?" in lines[2]
    assert "until is not after from" in lines[3]
    assert lines[4] == f"{file}: not taken: the rules that were last read stay in force"
    done = reco(tmp_path, "rules", "check", str(file), "--output", "json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["taken"] is False
    assert [(one["line"], one["level"]) for one in found["problems"]] == [
        (2, "error"),
        (3, "error"),
        (5, "error"),
    ]


def test_without_a_champion_names_are_not_checked(tmp_path: Path) -> None:
    text = "ban:\n  - {name: a, types: [anything], until: 2020-01-01}\n  - {name: b, items: [x]}\n"
    (tmp_path / "rules.yaml").write_text(text)
    done = reco(tmp_path, "rules", "check")
    assert done.exit_code == 0
    said = "2 rules (1 now, 0 later, 1 over); no champion here, items and names were not looked up"
    assert done.stdout == f"{tmp_path / 'rules.yaml'}: {said}\n"


def test_a_damaged_pointer_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("{}")
    (tmp_path / "champion.json").write_text("{")
    done = reco(tmp_path, "rules", "check")
    assert (done.exit_code, "is not a champion pointer" in done.output) == (2, True)


def test_a_missing_or_an_oversized_file_is_refused(tmp_path: Path) -> None:
    assert reco(tmp_path, "rules", "check").exit_code == 2
    assert f"write one with `reco --home {tmp_path} rules init`" in reco(tmp_path, "rules", "check").output
    assert reco(tmp_path, "rules", "check", str(tmp_path / "nothing")).exit_code == 2
    file = tmp_path / "rules.yaml"
    with file.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    [problem] = check_rules(file, tmp_path).problems
    assert (problem.refused, problem.text) == (True, f"expected a file of at most {MAX_BYTES} bytes")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("ban:\n  - {name: a, items: [x]}\n",))
    writer.start()
    done = reco(tmp_path, "rules", "check", str(pipe))
    writer.join()
    assert (done.exit_code, "1 rule (1 now" in done.stdout) == (0, True), done.output


@pytest.mark.slow
def test_a_name_unknown_to_the_champion_is_a_warning(home: Path) -> None:
    text = "ban:\n  - {name: a, items: [item-003, nothing]}\n  - {name: b, manufacturers: [Maker 1]}\n"
    (home / "rules.yaml").write_text(text)
    done = reco(home, "rules", "check")
    assert done.exit_code == 0
    assert "warning  of 2 items, 1 not in this catalogue: nothing" in done.stdout
    assert "maker" not in done.stdout.lower(), "the bundle knows its manufacturers"


@pytest.mark.slow
def test_an_answer_is_shown_before_and_after(home: Path) -> None:
    asked = ("--basket", "item-002,item-004", "--at", "2024-06-10T00:00:00Z", "--store", "store-0", "-k", "5")
    (home / "rules.yaml").write_text("{}")
    usual = json.loads(reco(home, "rules", "preview", *asked, "--output", "json").stdout)
    assert (
        [one["slot"] for one in usual["items"]]
        == [one["slot_before"] for one in usual["items"]]
        == [1, 2, 3, 4, 5]
    )
    before = [one["item_id"] for one in usual["items"]]
    (home / "rules.yaml").write_text(
        f"ban:\n  - {{name: recall, items: [{before[0]}]}}\n"
        "pin:\n  - {name: campaign, item: item-079, slot: 1, stores: [store-0]}\n"
    )
    found = json.loads(reco(home, "rules", "preview", *asked, "--output", "json").stdout)
    assert [one["item_id"] for one in found["before"]["items"]] == before
    after = [one["item_id"] for one in found["after"]["items"]]
    assert after[0] == "item-079"
    assert before[0] not in after
    rows = {one["item_id"]: (one["slot"], one["slot_before"], one["reason"]) for one in found["items"]}
    assert rows["item-079"] == (1, None, "pinned by campaign")
    assert rows[before[0]] == (None, 1, "banned by recall")
    assert rows[after[1]][0] == 2
    assert rows[before[1]][1] == 2
    done = reco(home, "rules", "preview", *asked)
    assert done.exit_code == 0
    [gone] = [line for line in done.stdout.splitlines() if "banned by recall" in line]
    assert gone.split()[:3] == ["-", "1", before[0]]
    elsewhere = reco(home, "rules", "preview", *asked[:-4], "--store", "store-1", "-k", "5").stdout
    assert "pinned by" not in elsewhere


@pytest.mark.slow
def test_a_rules_file_that_is_not_served_can_be_previewed(home: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.yaml"
    draft.write_text("pin:\n  - {name: draft, item: item-079, slot: 2}\n")
    (home / "rules.yaml").write_text("pin:\n  - {name: served, item: item-078, slot: 2}\n")
    said = reco(home, "rules", "preview", "--file", str(draft), "--at", "2024-06-10").stdout
    assert "pinned by draft" in said
    assert "served" not in said
    draft.write_text(BROKEN)
    done = reco(home, "rules", "preview", "--file", str(draft))
    assert done.exit_code == 1
    assert f"{draft} is not taken: `reco --home {home} rules check {draft}` says why" in done.output
