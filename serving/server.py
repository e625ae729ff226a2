"""A bundle on disk -> the running endpoint: `python -m serving.server --bundle PATH`.

Two models share one process: `checkout` (the whole path) and `ranker` (its middle, for a remote
transformer). Nothing listens before the bundle is verified and warm.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from serving.errors import BundleInvalid, FeaturesUnavailable
from serving.settings import SettingInvalid, Settings, unknown_variables, variable

if TYPE_CHECKING:
    from serving.tracing import Tracing

# How long a request may wait for the interpreter while the log's thread has it; Python's own 5 ms is
# longer than a whole answer takes.
SWITCH_S = 0.0005
EXIT_CHECK, EXIT_USAGE, EXIT_CONFLICT = 1, 2, 4
_log = logging.getLogger(__name__)


class PortTaken(OSError):
    """Another process listens where this one should."""


def serve(bundle_path: Path, settings: Settings) -> None:
    """Serve the bundle until SIGTERM or SIGINT, then let requests in flight finish.

    Raises:
        BundleInvalid: the bundle is missing, broken, or answers its golden requests wrongly.
        PortTaken: naming the address and the variable that changes it.
        SettingInvalid: the host is no address of this machine.
    """
    began = time.monotonic()
    if settings.http_port == settings.grpc_port != 0:
        raise SettingInvalid(
            f"{variable('http_port')} and {variable('grpc_port')} are both {settings.http_port}; "
            "expected two different ports"
        )
    with contextlib.ExitStack() as cleanup:
        http_socket = cleanup.enter_context(_bind(settings.host, settings.http_port, "http_port"))
        _bind(settings.host, settings.grpc_port, "grpc_port").close()
        # These take seconds to import; a taken port or a wrong host is told before.
        from feature_repo.schema import DENSE_NAMES
        from serving.checkout import Checkout, Observer, Rank, count, rank_here
        from serving.endpoint import Endpoint
        from serving.fact_store import open_fact_store
        from serving.freshness import Freshness
        from serving.metrics import BUNDLE
        from serving.online_features import open_store
        from serving.prediction_log import PredictionLog
        from serving.recommender import open_recommender
        from serving.request_log import RequestLog

        sys.setswitchinterval(SWITCH_S)
        store = open_store(settings.online_store_url)
        cleanup.callback(store.close)
        log = None
        if settings.log:
            directory = settings.prediction_log_dir
            log = PredictionLog(directory, DENSE_NAMES, segment_s=settings.log_segment_s)
            cleanup.callback(log.close)
        facts = open_fact_store(settings.fact_store_url)
        freshness = Freshness(store, settings.stale_after_s)
        cleanup.callback(freshness.close)
        recommender = open_recommender(bundle_path, store, log, settings.availability_path, facts, freshness)
        cleanup.callback(recommender.facts.close)
        bundle = recommender.bundle
        BUNDLE.labels(bundle.bundle_id).set(1)
        try:
            store.read("warm-up")
            store_state = "ready"
        except FeaturesUnavailable as error:
            store_state = "unavailable"
            _log.warning("answers will lack the users' history until the online store is back: %s", error)
        observers: list[Observer] = [count]
        if settings.request_log:
            request_log = RequestLog(sys.stderr.buffer, settings.request_log_key)
            cleanup.callback(request_log.close)
            observers.append(request_log.observe)
        if settings.trace_url:
            tracing = _tracing(settings.trace_url)
            cleanup.callback(tracing.close)
            observers.append(tracing.observe)
        rank: Rank = rank_here
        if settings.ranker_address:
            from serving.remote_ranker import RemoteRanker

            rank = RemoteRanker(settings.ranker_address).rank
        checkout = Checkout(recommender, settings.deadline_ms, rank, observers)

        def on_ready(http: str, grpc: str) -> None:
            line = {
                "event": "ready",
                "http": http,
                "grpc": grpc,
                "bundle_id": bundle.bundle_id,
                "bundle": str(bundle_path),
                "online_store": store_state,
                "fact_store": recommender.facts.state,
                "prediction_log": str(settings.prediction_log_dir) if log else "off",
                "ready_s": round(time.monotonic() - began, 2),
            }
            sys.stderr.write(json.dumps(line) + "\n")
            sys.stderr.flush()

        Endpoint(settings, http_socket).start(checkout, on_ready)


def _tracing(url: str) -> Tracing:
    try:
        from serving.tracing import trace_to

        return trace_to(url)
    except ImportError as error:
        raise SettingInvalid(
            f"{variable('trace_url')} is set but {error.name} is not installed; "
            "expected the extra: pip install 'checkout-recommender[trace]'"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the endpoint; return 0 after a drain, else 1 broken bundle, 2 wrong settings, 4 port taken."""
    parser = argparse.ArgumentParser(prog="python -m serving.server", description="Serve one release bundle.")
    parser.add_argument("--bundle", type=Path, required=True, help="directory of the bundle")
    bundle = parser.parse_args(arguments).bundle
    _log_to_stderr()
    for name in unknown_variables():
        _log.warning("%s names no setting and has no effect", name)
    try:
        serve(bundle, Settings.from_env())
    except SettingInvalid as error:
        return _say(EXIT_USAGE, error)
    except BundleInvalid as error:
        return _say(EXIT_CHECK, error)
    except PortTaken as error:
        return _say(EXIT_CONFLICT, error)
    return 0


class Seldom(logging.Filter):
    """Lets one line per place in the code and second through: a broken store must not flood the log."""

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # place -> time of its last line, held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the line appears; the next one that does tells how many were held back."""
        place = (record.pathname, record.lineno)
        last, held_back = self._last.get(place, (-self._every_s, 0))
        if record.created - last < self._every_s:
            self._last[place] = (last, held_back + 1)
            return False
        self._last[place] = (record.created, 0)
        if held_back:
            record.msg = f"{record.getMessage()} (and {held_back} more like it before)"
            record.args = ()
        return True


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.addFilter(Seldom())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING, handlers=[handler]
    )
    # KServe logs each request and, with a traceback, each mistake of a client; `endpoint` logs what is ours.
    logging.getLogger("kserve").setLevel(logging.CRITICAL)
    # KServe answers with a response class that FastAPI deprecates, and would be told so on each request.
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")


def _say(code: int, error: Exception) -> int:
    sys.stderr.write(f"reco serve: {error}\n")
    return code


def _bind(host: str, port: int, field: str) -> socket.socket:
    """Return a socket bound but not yet listening, so that callers are refused until all is ready."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise _wrong_host(host) from error
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _wrong_host(host) from error
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}): "
            f"stop what listens there, or set {variable(field)} to another port"
        ) from error
    return bound


def _wrong_host(host: str) -> SettingInvalid:
    return SettingInvalid(f"{variable('host')} is {host!r}; expected an address of this machine")


if __name__ == "__main__":
    sys.exit(main())
