"""Ports of this machine -> one that is free now; an address of it -> its page, or why it does not answer."""

from __future__ import annotations

import http.client
import socket
import urllib.request

from feature_repo.errors import CONFLICT, RecoError

ANSWER_S = 2.0  # how long a part may take to answer a check
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the shell's `http_proxy`


class PortInUse(RecoError):
    """Another process listens on the port of a part."""

    exit_code = CONFLICT


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; another process may take it before it is used."""
    return claim_port(0, "")


def claim_port(port: int, option: str) -> int:
    """Return a port if it is free; for 0, any free one.

    Args:
        port: the port, or 0.
        option: the command's option that chooses another one, for the error.

    Raises:
        PortInUse: naming the option.
    """
    with socket.socket() as probe:
        # As servers set it: a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortInUse(
                f"port {port} of 127.0.0.1 is taken ({error.strerror}): end the process that listens there, "
                f"or choose another one with {option} (0 is any free port)"
            ) from error
        return int(probe.getsockname()[1])


def page(url: str, timeout_s: float) -> bytes:
    """Return the answer of a part of this machine; OSError or HTTPException without one."""
    with _DIRECT.open(url, timeout=timeout_s) as answer:
        return bytes(answer.read())


def answers(url: str) -> str:
    """Return the fault of an HTTP endpoint, or an empty text."""
    try:
        page(url, ANSWER_S)
        return ""
    except (OSError, http.client.HTTPException) as error:  # or the port of gRPC
        return f"{url}: {getattr(error, 'reason', error)}"
