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
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import BundleInvalid, FactsUnavailable, FeaturesUnavailable, PointerInvalid
from serving.metrics import shown
from serving.observe.stderr_log import log_to
from serving.processes import NoneStarts, Processes, memory_mb, say, write_line
from serving.release.updates import Pointer, Updates, read_pointer
from serving.settings import SettingInvalid, Settings, unknown_variables, variable

if TYPE_CHECKING:
    from serving.cache.answer_cache import AnswerCache
    from serving.observe.tracing import Tracing
    from serving.release.bundle import Bundle

# How long a request may wait for the interpreter while the log's thread has it; Python's own 5 ms is
# longer than a whole answer takes.
SWITCH_S = 0.0005
# Of the deadline: how long requests that share a call may take for it, their wait included.
RETRIEVAL_SHARE, RANKING_SHARE = 0.2, 0.3
EXIT_CHECK, EXIT_USAGE, EXIT_CONFLICT = 1, 2, 4
_log = logging.getLogger(__name__)


class PortTaken(OSError):
    """Another process listens where this one should."""


def serve(bundle_path: Path, settings: Settings, home: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish.

    Args:
        bundle_path: the bundle to begin with.
        settings: of the endpoint.
        home: whose champion is followed from then on; None: the bundle stays.

    Raises:
        BundleInvalid: the bundle is missing, broken, or answers its golden requests wrongly.
        NoneStarts: the same, or anything else, of each of several processes.
        PortTaken: naming the address and the variable that changes it.
        SettingInvalid: the host is no address of this machine.
    """
    if settings.http_port == settings.grpc_port != 0:
        raise SettingInvalid(
            f"{variable('http_port')} and {variable('grpc_port')} are both {settings.http_port}; "
            "expected two different ports"
        )
    if settings.metrics_address:
        host, _, port = settings.metrics_address.rpartition(":")
        _bind(host.strip("[]"), int(port), "metrics_address", "metrics_address").close()  # to be told now
    with (
        _bind(settings.host, settings.http_port, "http_port") as http_socket,
        _bind(settings.host, settings.grpc_port, "grpc_port") as grpc_socket,
    ):
        if settings.processes > 1:
            Processes(settings, http_socket, grpc_socket, bundle_path, home).run()
        else:
            grpc_socket.close()
            with shown(settings.metrics_address):
                answer(bundle_path, settings, home, http_socket, say)


def answer(
    bundle_path: Path,
    settings: Settings,
    home: Path | None,
    http_socket: socket.socket,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Answer on a bound socket, in this process, until SIGTERM or SIGINT.

    Args:
        bundle_path: the bundle to begin with.
        settings: of the endpoint.
        home: whose champion is followed, or None.
        http_socket: bound; it listens when all is ready.
        tell: takes what happens: `ready`, and `bundle` when another one answers.

    Raises:
        BundleInvalid: as `serve`.
    """
    began = time.monotonic()
    # These take seconds to import; a taken port or a wrong host is told before.
    from feature_repo.schema import DENSE_NAMES
    from serving.answer.recommender import Recommender, open_recommender
    from serving.answer.warming import warm_up
    from serving.api.endpoint import Endpoint
    from serving.checkout.checkout import Checkout, Observer, Rank, count, find_together, rank_together
    from serving.metrics import BUNDLE
    from serving.observe.request_log import RequestLog
    from serving.prediction_log import PredictionLog
    from serving.release.bundle import read_manifest
    from serving.shop.fact_store import open_fact_store
    from serving.stores.freshness import Freshness
    from serving.stores.online_features import open_store

    with contextlib.ExitStack() as cleanup:
        sys.setswitchinterval(SWITCH_S)
        store = open_store(settings.online_store_url)
        cleanup.callback(store.close)
        log = None
        if settings.log:
            directory = settings.prediction_log_dir
            log = PredictionLog(directory, DENSE_NAMES, segment_s=settings.log_segment_s)
            cleanup.callback(log.close)
        freshness = Freshness(store, settings.stale_after_s)
        cleanup.callback(freshness.close)

        new_cache = _cache_maker(settings, cleanup) if settings.answer_cache else None

        def load(path: Path, rest: Callable[[float], None]) -> Recommender:
            facts = open_fact_store(settings.fact_store_url)  # of its own: it is closed with the recommender
            try:
                loaded = open_recommender(
                    path,
                    store,
                    log,
                    settings.availability_path,
                    facts,
                    freshness,
                    new_cache,
                    settings.rules_path,
                )
                warm_up(loaded, rest)
                return loaded
            except BaseException:
                facts.close()
                raise

        recommender = load(bundle_path, rest=lambda took_s: None)
        cleanup.callback(lambda: recommender.facts.close())
        if recommender.answers is not None:
            recommender.answers.show()
        bundle_id = recommender.bundle.bundle_id
        BUNDLE.labels(bundle_id).set(1)
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
        rank: Rank
        at_end: Callable[[], Awaitable[None]] | None = None
        limits = settings.batch_max_wait_ms, settings.batch_max_rows
        if settings.ranker_address:
            from serving.checkout.remote_ranker import RemoteRanker

            remote = RemoteRanker(settings.ranker_address)
            rank, at_end = remote.rank, remote.close
        else:
            rank = rank_together(RANKING_SHARE * settings.deadline_ms, *limits)
        find = find_together(RETRIEVAL_SHARE * settings.deadline_ms, *limits)
        limit = settings.user_limit_per_s
        checkout = Checkout(recommender, settings.deadline_ms, rank, find, observers, limit)
        endpoint = Endpoint(settings, http_socket)

        def take(pointer: Pointer) -> Callable[[], None]:
            """Load the bundle, then let it answer; the one before goes with its last request."""
            nonlocal recommender
            began = time.monotonic()
            found = read_manifest(pointer.path)["bundle_id"]
            if found != pointer.bundle_id:
                raise BundleInvalid(
                    f"{pointer.path} is bundle {found}, expected {pointer.bundle_id}: promote it again"
                )
            # Requests come meanwhile: what warms takes half of the time.
            before, loaded = recommender, load(pointer.path, rest=time.sleep)
            if lacks := loaded.facts.lacks(before.facts):
                loaded.facts.close()
                raise FactsUnavailable(
                    f"what must not be shown would come back: {' and '.join(lacks)} could not be read anew"
                )

            def turn() -> None:
                checkout.recommender = loaded

            try:
                endpoint.on_loop(turn)
            except RuntimeError:
                loaded.facts.close()
                raise
            recommender = loaded

            def follow_up() -> None:
                before.facts.close()
                BUNDLE.labels(before.bundle.bundle_id).set(0)
                BUNDLE.labels(found).set(1)
                if loaded.answers is not None:
                    loaded.answers.show()
                line = {"event": "bundle", "bundle_id": found, "was": before.bundle.bundle_id}
                tell({**line, "bundle": str(pointer.path), "load_s": round(time.monotonic() - began, 2)})

            return follow_up

        updates = None if home is None else Updates(home, bundle_id, take)
        if updates:
            cleanup.callback(updates.close)

        def on_ready(http: str, grpc: str) -> None:
            line = {
                "event": "ready",
                "http": http,
                "grpc": grpc,
                "bundle_id": bundle_id,
                "bundle": str(bundle_path),
                "follows": "" if home is None else str(home),
                "online_store": store_state,
                "fact_store": recommender.facts.state,
                "prediction_log": str(settings.prediction_log_dir) if log else "off",
                "processes": 1,
                "ready_s": round(time.monotonic() - began, 2),
                "memory_mb": memory_mb(os.getpid()),
            }
            tell(line)
            if updates:
                updates.start()

        endpoint.start(checkout, on_ready, at_end)


def _cache_maker(settings: Settings, cleanup: contextlib.ExitStack) -> Callable[[Bundle], AnswerCache]:
    """Return what makes the cache of each bundle; the Redis behind them is one."""
    from serving.cache.answer_cache import SHARED, AnswerCache
    from serving.cache.redis_answers import RedisAnswers

    redis = None
    if settings.answer_cache_url:
        redis = RedisAnswers(settings.answer_cache_url, SHARED.dead_s)
        cleanup.callback(redis.close)
    return lambda bundle: AnswerCache(bundle.bundle_id, len(bundle.statistics.item_ids), redis)


def _tracing(url: str) -> Tracing:
    try:
        from serving.observe.tracing import trace_to

        return trace_to(url)
    except ImportError as error:
        raise SettingInvalid(
            f"{variable('trace_url')} is set but {error.name} is not installed; "
            "expected the extra: pip install 'checkout-recommender[trace]'"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the endpoint; return 0 after a drain, else 1 broken bundle, 2 wrong settings, 4 port taken."""
    parser = argparse.ArgumentParser(prog="python -m serving.server", description="Serve one release bundle.")
    parser.add_argument("--bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--home", type=Path, help="follow the champion of this home")
    # What a parent tells its child: the files that it inherits, for what it says and for HTTP.
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.bundle is None and given.home is None:
        parser.error("expected --bundle DIR or --home DIR")
    log_to(sys.stderr.buffer)
    if given.child:
        return _be_a_child(given.bundle, given.home, *given.child)
    for name in unknown_variables():
        _log.warning("%s names no setting and has no effect", name)
    return _exit_code(
        lambda: serve(given.bundle or read_pointer(given.home).path, Settings.from_env(), given.home), _say
    )


def _exit_code(run: Callable[[], None], say_why: Callable[[int, Exception], None]) -> int:
    code: int
    why: Exception
    try:
        run()
        return 0
    except (SettingInvalid, PointerInvalid) as error:
        code, why = EXIT_USAGE, error
    except BundleInvalid as error:
        code, why = EXIT_CHECK, error
    except PortTaken as error:
        code, why = EXIT_CONFLICT, error
    except NoneStarts as error:
        code, why = error.exit_code, error
    say_why(code, why)
    return code


def _be_a_child(bundle: Path, home: Path | None, control_file: int, http_file: int) -> int:
    """Answer on the parent's socket and tell it what happens; when it is gone, end as if it had said so."""
    with socket.socket(fileno=control_file) as control, socket.socket(fileno=http_file) as http_socket:

        def tell(event: dict[str, Any]) -> None:
            control.sendall(json.dumps(event).encode() + b"\n")

        threading.Thread(target=end_with, args=(control,), name="parent", daemon=True).start()
        return _exit_code(
            lambda: answer(bundle, Settings.from_env(), home, http_socket, tell),
            lambda code, error: tell({"event": "failed", "message": str(error), "exit_code": code}),
        )


def end_with(parent: socket.socket) -> None:
    """Wait until the parent ends, and end this process then as if it had been told to."""
    with contextlib.suppress(OSError):  # it ended before it read what we have told it
        parent.recv(1)  # it says nothing: this returns when it ends
    os.kill(os.getpid(), signal.SIGTERM)


def _say(code: int, error: Exception) -> None:
    write_line(f"reco serve: {error}")


def _bind(host: str, port: int, field: str, host_field: str = "host") -> socket.socket:
    """Return a socket bound but not yet listening, so that callers are refused until all is ready."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise _wrong_host(host, host_field) from error
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _wrong_host(host, host_field) from error
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}): "
            f"stop what listens there, or set {variable(field)} to another port"
        ) from error
    return bound


def _wrong_host(host: str, field: str) -> SettingInvalid:
    return SettingInvalid(f"{variable(field)} is {host!r}; expected an address of this machine")


if __name__ == "__main__":
    sys.exit(main())
