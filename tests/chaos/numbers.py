"""Bytes that our client sent to a fake Redis -> the replies to its numbered PINGs."""

import re

_PING = re.compile(rb"\$4\r\nPING\r\n(\$\d+\r\n\d+\r\n)")


def numbers_in(sent: bytes) -> bytes:
    """Return the replies to the PINGs with a number, in their order."""
    return b"".join(_PING.findall(sent))
