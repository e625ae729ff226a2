"""A stranger's way with own purchases, by the commands of the how-tos: check, train, ask, ban, drift."""

from pathlib import Path

import pytest

from feature_repo.toy_shop import held_out, request_basket, toy_dataset, user_name
from tests.docs.source import ROOT, shell_lines
from tests.programs import run_python

PROGRAM = "from tests.docs.reference import program; program()()"
USER, AT = 4, "2024-06-12T10:00:00Z"
ASKED = f"--user {user_name(USER)} --basket {','.join(request_basket(USER))}"
BAN = f"ban:\n  - name: recall 17\n    items: [{held_out(USER)}]\n"
WINDOW = "--from 2024-05-13 --until 2024-05-27"  # of the training data: nothing has moved


@pytest.mark.slow
def test_no_step_fails_from_own_purchases_to_a_ban_and_a_drift_report(tmp_path: Path) -> None:
    home, purchases, report = tmp_path / "home", tmp_path / "purchases", tmp_path / "drift.html"
    values = {
        "purchases": f"{purchases}",
        "white bread": "bread",
        "rules.yaml": f"{home / 'rules.yaml'}",
        "--user 1228 --basket 1041453": ASKED,
        "drift.html": f"{report}",
    }

    def reco(words: str) -> str:
        return run_python("-W", "ignore", "-c", PROGRAM, "--home", home, *words.split(), timeout_s=1_800)

    def step(page: str, line: str, more: str = "") -> str:
        """Run a command of a page with the values of this shop, and more options."""
        assert line in shell_lines((ROOT / "docs" / page).read_text(encoding="utf-8")), line
        for value, own in values.items():
            line = line.replace(value, own)
        return reco(f"{line.removeprefix('reco ')} {more}")

    shop = toy_dataset()
    purchases.mkdir()
    shop.items.to_csv(purchases / "items.csv", index=False)
    events = shop.events.drop(columns="event_id")
    events.loc[7, "quantity"] = -1
    events.to_csv(purchases / "events.csv", index=False)

    checked = step("how-to/own-data.md", "reco check purchases")
    assert "1 " in next(line for line in checked.splitlines() if "quantity" in line)
    step("how-to/own-data.md", "reco run --data purchases --param max_quarantine_ratio=0.05", "--fast")
    ask = f"recommend --at {AT} -k 3 {ASKED}"
    assert held_out(USER) in reco(ask)

    step("how-to/own-rules.md", "reco rules init")
    assert "item-002" in step("how-to/own-rules.md", "reco items white bread")
    (home / "rules.yaml").write_text(BAN)
    step("how-to/own-rules.md", "reco rules check rules.yaml")
    preview = "reco rules preview --file rules.yaml --user 1228 --basket 1041453"
    assert held_out(USER) in step("how-to/own-rules.md", preview, f"--at {AT}"), (
        "it shows the answer before, too"
    )
    assert held_out(USER) not in reco(ask)

    verdict = step("runbooks/DriftFound.md", "reco drift --report drift.html", f"--data {purchases} {WINDOW}")
    assert "\nok: " in f"\n{verdict}"
    assert "<html" in report.read_text(encoding="utf-8")
