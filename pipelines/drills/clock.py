"""A number of seconds in a file -> an endpoint whose clock is off by so much.

To set the machine's clock takes rights that a drill should not have, and would reach all processes on it. So
the endpoint starts through this module, `python -m pipelines.drills.clock FILE OPTIONS`. It adds the number
to the result of `time.time`: all our code reads the date from that. C libraries keep the true date.
`time.monotonic` and `perf_counter`, which time deadlines and cached answers, do not jump on a real machine
either.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

_OFFSET = struct.Struct("<d")  # eight bytes, written at once


class Clock:
    """The clock of an endpoint that is started with `command`."""

    def __init__(self, file: Path) -> None:
        """Write a file with the offset, 0 at first."""
        self._file = file
        file.write_bytes(_OFFSET.pack(0.0))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), _OFFSET.size)

    def command(self) -> list[str]:
        """Return what starts the endpoint; its options follow."""
        return [sys.executable, "-P", "-m", "pipelines.drills.clock", str(self._file)]

    def jump(self, seconds: float) -> None:
        """Set the clock so far off the true time."""
        self._offset[:] = _OFFSET.pack(seconds)


def main() -> int:
    """Run the endpoint with the clock of a file; return its exit code."""
    with open(sys.argv[1], "rb") as opened:
        offset = mmap.mmap(opened.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    true_time = time.time

    def shifted() -> float:
        return true_time() + _OFFSET.unpack_from(offset)[0]

    time.time = shifted
    # Not before: an imported module may keep the function.
    from serving.server import main as serve

    return serve(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
