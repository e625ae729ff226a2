"""Forks of a process that has imported everything: their requests, their events, their own random numbers."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.fork_server import fork_on_request

pytestmark = pytest.mark.slow
# Its forks write the bundle, an id of a request and a random number to the socket for HTTP, and exit with 7.
SERVER = f"""
import random, socket, sys
from {fork_on_request.__module__} import fork_on_request
from serving.schemas import read_call
request = fork_on_request(socket.socket(fileno=int(sys.argv[1])))
if request is None:
    sys.exit()
bundle, events, http_socket = request
call = read_call({{}}, "/", 1.0)
http_socket.sendall(f"{{bundle}} {{call.request_id}} {{random.random()}}\\n".encode())
sys.exit(7)
"""


@contextmanager
def fork_server() -> Iterator[socket.socket]:
    """Start one, which ends with the block."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    with requests, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield requests
        requests.close()
        assert process.wait(60) == 0


def ask(requests: socket.socket, bundle: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask for a fork; return its events and the words it writes, both read to their end."""
    (events, their_events), (answers, their_answers) = socket.socketpair(), socket.socketpair()
    with their_events, their_answers:
        socket.send_fds(requests, [bundle.encode()], [their_events.fileno(), their_answers.fileno()])
    with events, answers, events.makefile("rb") as said, answers.makefile("r") as written:
        return [json.loads(line) for line in said], written.read().rsplit(" ", 2)


def test_each_fork_gets_its_request_and_shares_no_random_number() -> None:
    bundles = [f"/bundles/größe {number}" for number in range(3)]
    with fork_server() as requests:
        found = [ask(requests, bundle) for bundle in bundles]
    for (events, words), bundle in zip(found, bundles, strict=True):
        assert [event["event"] for event in events] == ["forked", "ended"]
        assert events[-1]["code"] == 7
        assert Path(words[0]) == Path(bundle)
    assert len({events[0]["pid"] for events, _ in found}) == 3
    assert len({words[1] for _, words in found}) == 3, "an id names one request"
    assert len({words[2] for _, words in found}) == 3
