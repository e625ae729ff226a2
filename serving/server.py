"""A bundle on disk -> the running endpoint: `python -m serving.server --bundle DIR`, or `--home DIR`.

Two models share one process: `checkout` (the whole path) and `ranker` (its middle, for a remote
transformer). Nothing listens before the bundle is verified and warm. With `--home` the endpoint follows the
home's champion (`serving.release.updates`); with RECO_PROCESSES several processes answer
(`serving.processes`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_repo.errors import CONFLICT, RecoError
from serving.fork_server import fork_on_request
from serving.metrics import REQUEST_LOG_DROPPED, drop_own_files, shown
from serving.observe.stderr_log import log_to
from serving.processes import Processes, say, write_line
from serving.release.champion import read_champion
from serving.settings import SettingInvalid, Settings, unknown_variables, variable, without_effect

if TYPE_CHECKING:
    from serving.wiring import Wiring

EVERY_HOST = {"0.0.0.0", "::"}
ENDING_S = 3.0  # that a port may still be taken by an endpoint that was just killed
_log = logging.getLogger(__name__)

Wire = Callable[[Settings], "Wiring"]


class PortTaken(RecoError, OSError):
    """Another process listens where this one should."""

    exit_code = CONFLICT


def serve(bundle_path: Path, settings: Settings, home: Path | None = None, wire: Wire | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish.

    Args:
        bundle_path: the bundle to begin with.
        settings: of the endpoint.
        home: whose champion is followed from then on; None: the bundle stays.
        wire: makes the parts of a single process; None: `serving.wiring.wire`. Several processes always
            run with the parts that ship.

    Raises:
        BundleInvalid: the bundle is missing, broken, or answers its golden requests wrongly.
        NoneStarts: the same, or anything else, of each of several processes.
        PortTaken: naming the address and the variable that changes it.
        SettingInvalid: the host is no address of this machine, two ports are one, or a file for the ranker
            cannot be read.
    """
    host, _, port = settings.metrics_address.rpartition(":")
    host = host.strip("[]")
    ports = [number for number in (settings.http_port, settings.grpc_port) if number]
    if port and (host == settings.host or EVERY_HOST & {host, settings.host}):
        ports.append(int(port))
    if len(set(ports)) < len(ports):
        raise SettingInvalid(
            f"of {variable('http_port')}, {variable('grpc_port')} and {variable('metrics_address')} two are "
            f"port {max(ports, key=ports.count)}; expected different ports"
        )
    _check_certificates(settings)
    if port:
        _bind(host, int(port), "metrics_address", "metrics_address").close()  # to fail now
    with (
        _bind(settings.host, settings.http_port, "http_port") as http_socket,
        _bind(settings.host, settings.grpc_port, "grpc_port") as grpc_socket,
    ):
        if not settings.caller_tokens and not settings.is_local:
            _log.warning(
                "any caller of %s may ask about any shopper: set %s, or let a gateway check callers",
                settings.host,
                variable("caller_tokens"),
            )
        if settings.processes > 1:
            Processes(settings, http_socket, grpc_socket, bundle_path, home).run()
        else:
            grpc_socket.close()
            with shown(settings.metrics_address):
                _answer(bundle_path, settings, home, http_socket, say, wire)


def _check_certificates(settings: Settings) -> None:
    """Refuse files for a ranker behind TLS that no call can use; of half a pair gRPC ends the process."""
    if not settings.ranker_address.startswith("https://"):
        return
    if (settings.ranker_certificate is None) != (settings.ranker_key is None):
        raise SettingInvalid(
            f"of {variable('ranker_certificate')} and {variable('ranker_key')} one is set; "
            "expected both or neither"
        )
    for name in ("ranker_ca", "ranker_certificate", "ranker_key"):
        file: Path | None = getattr(settings, name)
        try:
            fault = "" if file is None or file.read_bytes() else "it is empty"
        except OSError as error:
            fault = str(error.strerror)
        if fault:
            raise SettingInvalid(
                f"{variable(name)} is {file}, which cannot be used ({fault}); expected a PEM file"
            )


def _answer(
    bundle_path: Path,
    settings: Settings,
    home: Path | None,
    http_socket: socket.socket,
    tell: Callable[[dict[str, Any]], None],
    wire: Wire | None = None,
) -> None:
    began = time.monotonic()
    with _uncollected():
        from serving import wiring  # seconds of imports: a taken port or a wrong host is reported before

    parts = (wiring.wire if wire is None else wire)(settings)
    wiring.run(parts, bundle_path, home, http_socket, tell, began)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Import without garbage collections: they look again and again at modules, which stay to the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def main(arguments: Sequence[str] | None = None, wire: Wire | None = None) -> int:
    """Run the endpoint; return 0 after a drain, 1 broken bundle, 2 wrong settings, 4 port taken.

    Ctrl-C while a single process starts gives 130.

    Args:
        arguments: of the command line; None: those of this process.
        wire: see `serve`.
    """
    parser = argparse.ArgumentParser(prog="python -m serving.server", description="Serve one release bundle.")
    parser.add_argument("--bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--home", type=Path, help="follow the champion of this home")
    # Of `Processes`: an inherited file, see `serving.fork_server`.
    parser.add_argument("--forks", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.bundle is None and given.home is None:
        parser.error("expected --bundle DIR or --home DIR")
    os.umask(0o077)  # the prediction log names shoppers
    # Read when Arrow is loaded, later than here: its own allocator keeps memory that the log has freed.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if given.forks is not None:
        return _fork_children(given.forks, given.home)
    log_to(sys.stderr.buffer)
    if names := unknown_variables():  # in one line: the log shows one a second from each place
        _log.warning("%s", without_effect(names))

    def serve_given() -> None:
        settings = Settings.from_env()
        if given.home is not None:  # its rules, facts and log belong to its champion
            settings = replace(settings, home=given.home)
        serve(given.bundle or read_champion(given.home).bundle(given.home), settings, given.home, wire)

    home = given.home or os.environ.get(variable("home"))  # `reco serve --bundle` gives no option
    return _exit_code(serve_given, lambda error: write_line(f"reco serve: {_pasteable(error, home)}"))


def _pasteable(error: RecoError, home: Path | str | None) -> str:
    """Return an error whose commands in backticks can be pasted into the shell that started us."""
    if not home:
        return str(error)
    program, beside = "reco", Path(sys.executable).with_name("reco")
    if not shutil.which(program) and beside.exists():  # no environment is active
        program = shlex.quote(str(beside))
    return str(error).replace("`reco ", f"`{program} --home {shlex.quote(str(home))} ")


def _exit_code(run: Callable[[], None], say_why: Callable[[RecoError], None]) -> int:
    try:
        run()
    except RecoError as error:
        say_why(error)
        return error.exit_code
    except KeyboardInterrupt:  # while it starts, or closes the log: between them a signal drains
        return 130
    return 0


def _fork_children(requests_file: int, home: Path | None) -> int:
    """Import everything and fork; each fork answers, and reports to the parent."""
    with _uncollected():
        from feature_repo.kernels.compiled import load_loops
        from serving import wiring  # noqa: F401

        load_loops()
    drop_own_files()
    with socket.socket(fileno=requests_file) as requests:
        request = fork_on_request(requests)
    return 0 if request is None else _be_a_child(*request, home)


def _be_a_child(bundle: Path, control: socket.socket, http_socket: socket.socket, home: Path | None) -> int:
    """Answer on the parent's socket and report events to it; end with it, as by SIGTERM."""
    REQUEST_LOG_DROPPED.inc(0)  # its files of counters exist from now on: its death will be counted
    log_to(sys.stderr.buffer)
    with control, http_socket:

        def tell(event: dict[str, Any]) -> None:
            control.sendall(json.dumps(event).encode() + b"\n")

        threading.Thread(target=end_with, args=(control,), name="parent", daemon=True).start()
        return _exit_code(
            lambda: _answer(bundle, Settings.from_env(), home, http_socket, tell),
            lambda error: tell({"event": "failed", "message": str(error), "exit_code": error.exit_code}),
        )


def end_with(parent: socket.socket) -> None:
    """Wait until the parent ends, and end this process then as by SIGTERM."""
    with contextlib.suppress(OSError):  # it ended before it read our events
        parent.recv(1)  # it says nothing: this returns when it ends
    os.kill(os.getpid(), signal.SIGTERM)


def _bind(host: str, port: int, field: str, host_field: str = "host") -> socket.socket:
    """Return a socket bound but not yet listening, so that callers are refused until all is ready.

    The children of an endpoint that was killed hold its ports until they have ended.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise _wrong_host(host, host_field) from error
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    until = time.monotonic() + ENDING_S
    try:
        while True:
            try:
                bound.bind(address)
                return bound
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
            time.sleep(0.1)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _wrong_host(host, host_field) from error
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}): "
            f"stop what listens there, or set {variable(field)} to another port"
        ) from error


def _wrong_host(host: str, field: str) -> SettingInvalid:
    return SettingInvalid(f"{variable(field)} is {host!r}; expected an address of this machine")


if __name__ == "__main__":
    sys.exit(main())
