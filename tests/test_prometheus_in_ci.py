"""CI has Prometheus' programs, so that the tests of alerts run there; a machine without them skips."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "prometheus"
APT_GET = """#!/bin/sh
echo "$@" >> {calls}
exit {code}
"""


def fetch(tmp_path: Path, code: int) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
    """Run the script where apt-get ends with a code and no program of Prometheus is on the path."""
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    for name in ("bash", "id", "mktemp", "realpath", "rm"):
        (programs / name).symlink_to(next(p for d in ("/usr/bin", "/bin") if (p := Path(d, name)).exists()))
    for name, text in (
        ("apt-get", APT_GET.format(calls=calls, code=code)),
        ("sudo", '#!/bin/sh\nshift\nexec "$@"\n'),
        ("sleep", "#!/bin/sh\n"),
        ("dpkg", "#!/bin/sh\n"),
        ("cp", "#!/bin/sh\n"),  # the machine of this test keeps its files
        ("mkdir", "#!/bin/sh\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "sh").symlink_to("/bin/sh")
    done = subprocess.run(
        [programs / "bash", SCRIPT, tmp_path / "out"],
        env=os.environ | {"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    return done, calls.read_text().splitlines()


@pytest.mark.slow
def test_packages_that_cannot_be_fetched_fail_the_run_after_a_second_try(tmp_path: Path) -> None:
    done, calls = fetch(tmp_path, code=100)
    assert done.returncode == 1
    assert "promtool" in done.stderr
    assert "PATH" in done.stderr
    assert calls == ["-qq update"] * 2


@pytest.mark.slow
def test_a_machine_that_fetches_them_gets_both(tmp_path: Path) -> None:
    done, calls = fetch(tmp_path, code=0)
    assert calls == ["-qq update", "-qq download prometheus prometheus-alertmanager"]
    assert done.returncode == 0


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/test.yml", ".github/workflows/infra.yml"])
def test_whatever_runs_the_slow_tests_fetches_them_before(file: str) -> None:
    text = (ROOT / file).read_text()
    assert (
        0 < text.find(".ci/prometheus .venv/prometheus") < max(map(text.rfind, ("make test", "make infra")))
    )
