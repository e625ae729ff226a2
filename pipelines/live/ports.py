"""Ports of this machine -> one that is free now."""

from __future__ import annotations

import socket

from feature_repo.errors import CONFLICT, RecoError


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
