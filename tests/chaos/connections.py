"""A guard in the test's process and in each Python that it starts: no connection leaves this machine.

`tests/conftest.py` copies this file as `sitecustomize.py` to a folder on PYTHONPATH. Python imports that at
its start and installs the audit hook. A refused connection is also noted beside the copy, because libraries
swallow errors of telemetry. C libraries raise no audit event: `tests/test_no_outside_connection.py` watches
the endpoint and the commands with strace.
"""

import sys
from typing import Any

NOTES = __file__.rpartition("/")[0] + "/connections.log"
_CONNECTS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_THIS_MACHINE = ("127.", "::1", "::ffff:127.", "0.0.0.0", "localhost")


def _stay_here(event: str, arguments: tuple[Any, ...]) -> None:
    address = arguments[-1] if event in _CONNECTS else None
    if isinstance(address, tuple) and not str(address[0]).startswith(_THIS_MACHINE):
        with open(NOTES, "a", encoding="utf-8") as notes:
            notes.write(f"{sys.argv[:1]} connects to {address}\n")
        raise ConnectionRefusedError(f"a test connects to {address}: inject the transport")


sys.addaudithook(_stay_here)
