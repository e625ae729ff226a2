"""`python -m pipelines.drills.callers HOST PORT PATH` sends bodies of 80 MB until its input ends.

Every other body has no announced length. It is a process of its own with the lowest priority: the cost of
sending so much must not count as the cost of refusing it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections import Counter
from collections.abc import Callable

import orjson

BODY_BYTES = 80_000_000
PATIENCE_S = 6.0
_PIECE = b" " * 65_536
_HOW = (
    (f"Content-Length: {BODY_BYTES}", _PIECE),
    ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n" % (len(_PIECE), _PIECE)),
)


def send_long_bodies(host: str, port: int, path: str, is_over: Callable[[], bool]) -> dict[str, int]:
    """Send one body after the other until it is over; return how many were answered with which status."""
    answers = Counter[str]()
    number = 0
    while not is_over():
        how, piece = _HOW[number % 2]
        number += 1
        answer = b""
        with contextlib.suppress(OSError), socket.create_connection((host, port), PATIENCE_S) as caller:
            with contextlib.suppress(OSError):  # a refused caller cannot send all
                caller.sendall(f"POST {path} HTTP/1.1\r\nHost: drill\r\n{how}\r\n\r\n".encode())
                for _ in range(BODY_BYTES // len(_PIECE)):
                    caller.sendall(piece)
            answer = caller.recv(64)
        answers[answer[9:12].decode(errors="replace") or "none"] += 1
    return dict(answers)


def _main() -> None:
    os.nice(19)

    def is_over() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    host, port, path = sys.argv[1:]
    sys.stdout.buffer.write(orjson.dumps(send_long_bodies(host, int(port), path, is_over)))


if __name__ == "__main__":
    _main()
