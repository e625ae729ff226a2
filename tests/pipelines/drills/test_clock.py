"""An endpoint's clock that is set: its own date moves, the machine's does not, deadlines do not."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.drills.clock import Clock

# Takes the endpoint's place: prints date and deadlines' clock, then waits for a line, three times.
SAYS = """
import sys, time, types
endpoint = types.ModuleType("serving.server")
def main(arguments):
    for _ in range(3):
        print(time.time(), time.monotonic(), *arguments, flush=True)
        sys.stdin.readline()
    return 7
endpoint.main = main
sys.modules["serving.server"] = endpoint
import pipelines.drills.clock
sys.exit(pipelines.drills.clock.main())
"""


@pytest.mark.slow
def test_the_date_jumps_and_deadlines_do_not(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    command = [sys.executable, "-c", SAYS, str(tmp_path / "clock"), "--home", "here"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        said = []
        for offset in (-3_600.0, 400 * 86_400.0, 0.0):
            line = process.stdout.readline().split()
            said.append((float(line[0]), float(line[1])))
            assert line[2:] == ["--home", "here"]
            clock.jump(offset)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 7
    dates, deadlines = zip(*said, strict=True)
    passed = [later - deadlines[0] for later in deadlines]
    assert dates[1] - dates[0] == pytest.approx(passed[1] - 3_600.0, abs=1.0)
    assert dates[2] - dates[0] == pytest.approx(passed[2] + 400 * 86_400.0, abs=1.0)
    assert passed == sorted(passed)
