"""A stranger's way with own purchases, by the commands of the how-tos: check, train, ask, ban, drift."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from feature_repo.events import Dataset, read_dataset
from feature_repo.toy_shop import held_out, request_basket, toy_dataset, user_name
from pipelines.run.runs import find_run, list_runs
from tests.chaos.procs import eventually
from tests.docs.reference import program
from tests.docs.source import ROOT, shell_lines
from tests.pipelines.conftest import toy_home
from tests.programs import environment

PROGRAM = "from tests.docs.reference import program; program()()"
USER, AT = 4, "2024-06-12T10:00:00Z"
ASKED = f"--user {user_name(USER)} --basket {','.join(request_basket(USER))}"
BAN = f"ban:\n  - name: recall 17\n    items: [{held_out(USER)}]\n"
WINDOW = "--from 2024-05-13 --until 2024-05-27"  # of the training data: nothing has moved


def first_step(home: Path, words: list[str]) -> Dataset:
    """Run a command until its first step has ended; return the data set that the next steps get."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, "--home", str(home), *words]
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as process:
        try:
            eventually(lambda: process.poll() is not None or ended(home, "ingest-events"), 300)
        finally:
            process.terminate()
    return read_dataset(find_run(home, "last").artifacts("ingest-events") / "dataset")


def ended(home: Path, step: str) -> bool:
    return any(run.step(step).status == "done" for run in list_runs(home))


@pytest.mark.slow
def test_no_step_fails_from_own_purchases_to_a_ban_and_a_drift_report(tmp_path: Path, toy_line: Path) -> None:
    """The purchases are the toy shop's. Training them to the end is proven by tests/docs/test_tutorial.py."""
    home, purchases, report = tmp_path / "home", tmp_path / "purchases", tmp_path / "drift.html"
    values = {
        "purchases": f"{purchases}",
        "white bread": "bread",
        "rules.yaml": f"{home / 'rules.yaml'}",
        "--user 1228 --basket 1041453": ASKED,
        "drift.html": f"{report}",
        "$(date -u -d -7days +%F)": "2024-05-13",
    }

    def reco(words: str) -> str:
        done = CliRunner().invoke(program(), ["--home", str(home), *words.split()])
        assert done.exit_code == 0, done.output
        return done.stdout

    def words_of(page: str, line: str) -> str:
        """Return a command of a page with the values of this shop."""
        assert line in shell_lines((ROOT / "docs" / page).read_text(encoding="utf-8")), line
        for value, own in values.items():
            line = line.replace(value, own)
        return line.removeprefix("reco ")

    def step(page: str, line: str, more: str = "") -> str:
        return reco(f"{words_of(page, line)} {more}")

    shop = toy_dataset()
    purchases.mkdir()
    shop.items.to_csv(purchases / "items.csv", index=False)
    events = shop.events.drop(columns="event_id")
    events.loc[7, "quantity"] = -1
    events.to_csv(purchases / "events.csv", index=False)

    checked = step("how-to/own-data.md", "reco check purchases")
    assert "1 " in next(line for line in checked.splitlines() if "quantity" in line)
    run = words_of("how-to/own-data.md", "reco run --data purchases --param max_quarantine_ratio=0.05")
    found = first_step(tmp_path / "trained", [*run.split(), "--fast"])
    expected = shop.events.drop(index=7).sort_values(["at", "basket_id", "item_id"], ignore_index=True)
    own = [name for name in expected.columns if name != "event_id"]  # they brought none
    pd.testing.assert_frame_equal(found.events[own], expected[own], check_dtype=False)
    assert list(found.manifest["quarantined"].values()) == [1]
    toy_home(home, toy_line)
    ask = f"recommend --at {AT} -k 3 {ASKED}"
    assert held_out(USER) in reco(ask)

    step("how-to/own-rules.md", "reco rules init")
    assert "item-002" in step("how-to/own-rules.md", "reco items white bread")
    (home / "rules.yaml").write_text(BAN)
    step("how-to/own-rules.md", "reco rules check")
    preview = "reco rules preview --user 1228 --basket 1041453"
    assert held_out(USER) in step("how-to/own-rules.md", preview, f"--at {AT}"), (
        "it shows the answer before, too"
    )
    assert held_out(USER) not in reco(ask)

    drift = "reco drift --report drift.html --from $(date -u -d -7days +%F)"
    verdict = step("runbooks/DriftFound.md", drift, f"--data {purchases} {WINDOW}")
    assert "\nok: " in f"\n{verdict}"
    assert "<html" in report.read_text(encoding="utf-8")
