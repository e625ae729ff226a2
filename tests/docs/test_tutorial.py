"""The commands of docs/tutorial.md run in this order with the answers that the page shows."""

import contextlib
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from pipelines.trial import EXPECTED
from tests.docs.source import ROOT, shell_lines
from tests.pipelines.cli.conftest import answered, reco
from tests.programs import outside, run_python, watched

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
GENERATE = ".venv/bin/python -W ignore -m tests.docs.generate"
PROGRAM = "from tests.docs.reference import program; program()()"


def test_the_page_uses_one_home_and_known_targets() -> None:
    lines = shell_lines(PAGE)
    assert len(lines) >= 7
    for line in lines:
        assert line.startswith(("make ", ".venv/bin/reco --home .reco/tutorial ", GENERATE)), line


@pytest.mark.slow
@pytest.mark.usefixtures("toy_line")  # has compiled the loops, for all processes: else the first command does
def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    """What trains or answers is a process of its own; what looks at it runs in this one."""
    printed, home, log = {}, tmp_path / "home", tmp_path / "connections.log"
    before = watched(log) if shutil.which("strace") else []
    for line in shell_lines(PAGE):
        if line.startswith(("make ", GENERATE)):
            continue
        if "over_champion=0" in line:  # with another feature: see tests/test_adding_a_feature.py
            continue
        words = line.replace(".reco/tutorial", str(home)).split()[1:]
        if words[2] in ("try", "run", "recommend"):
            said = run_python("-W", "ignore", "-c", PROGRAM, *words, timeout_s=1_800, before=before)
            assert not before or not outside(log), "a command connects to nothing"
        else:
            done = reco(home, *words[2:])
            assert done.exit_code == 0, done.output
            said = done.stdout
        printed[words[2]] = said
        if words[2] == "try":
            shows_the_right_answer_and_is_no_champion(home, said)
    first, *_ = re.findall(r"^1 +(\S+)", printed["recommend"], re.MULTILINE)
    assert f"The first item is `{first}`" in " ".join(PAGE.split())
    assert "rung full" in printed["recommend"]
    assert "item-046" in printed["why"]
    assert "promote-bundle" in printed["runs"]
    with contextlib.closing(sqlite3.connect(home / "mlflow.db")) as database:
        query = "SELECT r.name FROM runs r JOIN experiments e USING (experiment_id) WHERE e.name = ?"
        steps = {name for (name,) in database.execute(query, ["checkout-recommender-steps"])}
        query = "SELECT r.name FROM metrics m JOIN runs r USING (run_uuid) WHERE m.key = 'curve.loss'"
        curved = {name for (name,) in database.execute(query)}
    trained = {"train_retriever", "train_ranker", "distill_ranker"}
    assert steps == trained | {"prune_ranker", "quantize_ranker", "compile_ranker"}
    assert curved == trained
    for run in (home / "runs").iterdir():
        pages = {page.parent.name: page.read_text() for page in run.glob("artifacts/*/page")}
        assert len(pages) >= 8
        assert all("| epoch | loss |" in pages[name.replace("_", "-")] for name in trained)
        assert "| ndcg_at_10 against blend |" in pages["promote-bundle"]
        assert all((page.parent / "numbers").is_file() for page in run.glob("artifacts/*/page"))


def shows_the_right_answer_and_is_no_champion(home: Path, said: str) -> None:
    assert f"1  {EXPECTED}  rolls" in said
    assert f"reco --home {home} run " in said
    assert {path.name for path in home.iterdir()} == {"trial", "trial.lock"}
    again = reco(home, "try", "--output", "json")
    assert again.stderr == "", "the second call builds nothing"
    found = answered(again)
    first = found["answer"]["items"][0]
    assert (first["item_id"], first["name"], first["reason_code"]) == (EXPECTED, "rolls", "bought_before")
    assert found["answer"]["rung"] == "full"
