"""`make infra` counts a check as passed only if all its tests ran."""

import sys
from pathlib import Path

import pytest

from tests.infra.check import CHECKS, PYTEST, ROOT, main, skips

TESTS = """
import pytest

def test_runs():
    pass

def test_lacks_a_tool():
    pytest.skip("frobnicator is not installed")
"""


@pytest.mark.slow
def test_a_check_with_skipped_tests_has_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)  # there, a skip without a listed reason fails
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    python = [sys.executable, "-c"]
    checks = [
        ("half", "sh", [*PYTEST, f"--rootdir={tmp_path}", str(file)]),
        ("whole", "sh", ["sh", "-c", "exit 0"]),
        ("missing", "no-such-tool", ["no-such-tool"]),
        ("broken", "sh", [*python, "raise SystemExit(3)"]),
    ]
    assert main(checks) == 1
    end = capsys.readouterr().out.splitlines()[-4:]
    assert end == [
        "skipped  half: frobnicator is not installed",
        "skipped  missing: no-such-tool is not installed",
        "FAILED   broken",
        "1 checks passed, 1 failed, 2 skipped, in part or whole",
    ]
    assert main(checks[1:2]) == 0


def test_a_reason_is_listed_once() -> None:
    output = (
        "SKIPPED [2] a/b.py:3: no tool\n3 passed\nSKIPPED [1] a/c.py:9: no tool\nSKIPPED [1] c.py:1: no net\n"
    )
    assert skips(output) == ["no tool", "no net"]


def test_every_test_module_of_infra_is_a_check() -> None:
    named = {argument for _, _, command in CHECKS for argument in command if argument.startswith("tests/")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "infra").glob("test_*.py")} - {
        "tests/infra/test_check.py"
    }
    assert modules <= named
