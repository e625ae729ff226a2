"""A process that has imported everything -> a fork of it for each process of the endpoint that is asked for.

Imports take seconds. A fork takes milliseconds, and shares the pages that no process writes. This process
starts no thread and opens nothing, so no lock, connection or model is copied. Threads of OpenBLAS and of
jemalloc may run here: these libraries prepare for a fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

LONGEST_PATH = 4_096  # bytes


def fork_on_request(requests: socket.socket) -> tuple[Path, socket.socket, socket.socket] | None:
    """Fork for each request until the parent ends; return in each fork what its request brought.

    A request is the path of a bundle with two files: the socket of the fork's events, and that of HTTP. To
    the first, events are written here, too: `forked` with the process id, `ended` with the exit status, or
    `not_forked` with the reason.

    Args:
        requests: SOCK_SEQPACKET, from the parent.

    Returns:
        In a fork the bundle and both sockets; None when the parent has ended.
    """
    living: dict[int, socket.socket] = {}
    # A handler alone could miss a signal that comes just before a wait begins.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # a collection in a fork would write to, and so copy, the pages of all imported modules
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4_096)
            _report_ended(living)
        if requests.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, LONGEST_PATH, 2)
        if not message:
            return None
        events, http_socket = (socket.socket(fileno=file) for file in files)
        try:
            pid = os.fork()
        except OSError as error:
            _tell(events, event="not_forked", message=str(error))
            events.close()
        else:
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (woken, wakes):
                    os.close(file)
                for other in (requests, *living.values()):  # the parent would not see the end of a sibling
                    other.close()
                return Path(os.fsdecode(message)), events, http_socket
            living[pid] = events
            _tell(events, event="forked", pid=pid)
        http_socket.close()


def _report_ended(living: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with living.pop(ended[0]) as events:
                _tell(events, event="ended", code=os.waitstatus_to_exitcode(ended[1]))


def _tell(events: socket.socket, **event: Any) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        events.sendall(json.dumps(event).encode() + b"\n")
