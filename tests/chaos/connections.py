"""A guard in the test's process and in each Python that it starts: none connects or looks up elsewhere.

`tests/conftest.py` copies this file as `sitecustomize.py` to a folder on PYTHONPATH. Python imports that at
its start and installs the audit hook. A refused connection is also noted beside the copy, because libraries
swallow errors of telemetry. C libraries raise no audit event: `tests/test_no_outside_connection.py` watches
the endpoint and the commands with strace.
"""

import os
import sys
from typing import Any

NOTES = __file__.rpartition("/")[0] + "/connections.log"
_CONNECTS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_LOOK_UPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
_THIS_MACHINE = ("127.", "::1", "::ffff:127.", "0.0.0.0", "localhost")
_NAMES = {"", "None", "localhost", os.uname().nodename}


def _stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _CONNECTS:
        address = arguments[-1]
        if isinstance(address, tuple) and not str(address[0]).startswith(_THIS_MACHINE):
            _refuse(f"connects to {address}")
    elif event in _LOOK_UPS:
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        # A number needs no look-up, and a name that never exists (RFC 2606) is one that a test wants to miss.
        is_number = ":" in host or host.replace(".", "").isdecimal()
        if not is_number and host not in _NAMES and not host.endswith(".invalid"):
            _refuse(f"looks up {host!r}")


def _refuse(act: str) -> None:
    with open(NOTES, "a", encoding="utf-8") as notes:
        notes.write(f"{sys.argv[:1]} {act}\n")
    raise ConnectionRefusedError(f"a test {act}: inject the transport")


sys.addaudithook(_stay_here)
