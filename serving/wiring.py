"""Settings -> the parts of one endpoint process -> that process, answering until SIGTERM.

`wire(settings)` opens the parts that ship: store, log, cache, observers and ranker. A bench or a test
replaces one of them. `run(wiring, ...)` loads the bundle, answers, follows the champion, and closes the
parts.

Nothing listens before the bundle is verified and warm.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from feature_repo.schema import DENSE_NAMES
from serving.answer.recommender import Recommender, open_bundle, open_recommender
from serving.answer.warming import warm_up
from serving.api.endpoint import Endpoint
from serving.cache.answer_cache import AnswerCache
from serving.checkout.checkout import Checkout, Observer, Rank, count, rank_here
from serving.checkout.remote_ranker import RemoteRanker
from serving.errors import FactsUnavailable, RulesUnread
from serving.metrics import BUNDLE, BUNDLE_CUT_AT, FACTS_READ_AT
from serving.observe.request_log import RequestLog
from serving.prediction_log import PredictionLog, RecordSink
from serving.processes import memory_mb
from serving.release.bundle import Bundle
from serving.release.champion import Champion
from serving.release.signatures import check_signed
from serving.release.updates import Updates
from serving.settings import SettingInvalid, Settings, names_collector
from serving.shop.fact_store import FactStore, open_fact_store
from serving.stores.freshness import Freshness
from serving.stores.online_features import OnlineStore, open_store

# How long a request may wait for the interpreter while the log's thread holds it; Python's own 5 ms is
# longer than a whole answer takes.
SWITCH_S = 0.0005

Tell = Callable[[dict[str, Any]], None]  # takes an event of the process: `ready`, or `bundle` after a swap


class Door(Protocol):
    """The server in front of the checkout: `Endpoint`, or a bench's own server."""

    def start(
        self,
        checkout: Checkout,
        on_ready: Callable[[str, str], None],
        at_end: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Serve until SIGTERM or SIGINT; `on_ready` gets the HTTP and the gRPC address."""

    def on_loop(self, act: Callable[[], None]) -> None:
        """Run `act` on the server's event loop and return when it is done; for other threads."""


@dataclass(frozen=True)
class Wiring:
    """The parts of one endpoint process. `replace` one of them to measure or test without it."""

    settings: Settings
    store: OnlineStore
    log: RecordSink | None = None
    freshness: Freshness = field(default_factory=Freshness)
    open_facts: Callable[[], FactStore | None] = lambda: None  # each bundle closes its own
    open_bundle: Callable[[Path], Bundle] = open_bundle  # loads and verifies
    new_cache: Callable[[], AnswerCache] | None = None  # None: every answer is computed
    rank: Rank = rank_here
    observers: Sequence[Observer] = (count,)
    door: Callable[[Settings, socket.socket], Door] = Endpoint
    at_end: Callable[[], Awaitable[None]] | None = None  # closes what belongs to the event loop
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closes the other parts

    def load(
        self, bundle_path: Path, rest: Callable[[float], None], after: Path | None = None
    ) -> Recommender:
        """Return a warm recommender for a bundle; the caller closes its `facts`.

        Args:
            bundle_path: the bundle.
            rest: see `serving.answer.warming.warm`.
            after: the bundle that answers now.

        Raises:
            SignatureInvalid: no trusted key signed it, or it was signed before the one that answers.
            BundleInvalid: the bundle is broken, or answers its golden requests wrongly.
        """
        if self.settings.trusted_keys:
            check_signed(bundle_path, self.settings.trusted_keys, after)
        facts = self.open_facts()
        try:
            recommender = open_recommender(
                bundle_path,
                self.store,
                self.log,
                facts,
                self.freshness,
                self.new_cache() if self.new_cache else None,
                self.settings.rules_path,
                self.open_bundle,
            )
            recommender.tells_counts = self.settings.reasons == "counts"
            recommender.explores = self.settings.explore_share
            warm_up(recommender, self.settings.prediction_log_dir, rest)
            return recommender
        except BaseException:
            if facts is not None:
                facts.close()
            raise

    def checkout(self, recommender: Recommender) -> Checkout:
        """Return the checkout that answers with a recommender."""
        settings = self.settings
        return Checkout(
            recommender, settings.deadline_ms, self.rank, self.observers, settings.user_limit_per_s
        )


def wire(settings: Settings) -> Wiring:
    """Open the parts that the settings name; `run` closes them.

    Raises:
        SettingInvalid: a setting needs a library that is not installed.
    """
    with contextlib.ExitStack() as cleanup:
        observers = _observers(settings, cleanup)  # closed last: a silent collector of spans holds up no log
        store = open_store(settings.online_store_url)
        cleanup.callback(store.close)
        log = None
        if settings.log:
            log = PredictionLog(settings.prediction_log_dir, DENSE_NAMES, segment_s=settings.log_segment_s)
            cleanup.callback(log.close)
        freshness = Freshness(store, settings.stale_after_s)
        cleanup.callback(freshness.close)
        remote = None
        if settings.ranker_address:
            remote = RemoteRanker(
                settings.ranker_address,
                tls=(settings.ranker_ca, settings.ranker_key, settings.ranker_certificate),
                max_wait_ms=settings.batch_max_wait_ms,
                max_rows=settings.batch_max_rows,
            )

        async def at_end() -> None:
            await store.aclose()
            if remote is not None:
                await remote.close()

        return Wiring(
            settings,
            store,
            log,
            freshness,
            open_facts=lambda: open_fact_store(settings.fact_store_url),
            new_cache=AnswerCache if settings.answer_cache else None,
            rank=rank_here if remote is None else remote.rank,
            observers=observers,
            at_end=at_end,
            cleanup=cleanup.pop_all(),
        )


def run(
    wiring: Wiring,
    bundle_path: Path,
    home: Path | None,
    http_socket: socket.socket,
    tell: Tell,
    began: float | None = None,
) -> None:
    """Answer on a bound socket, in this process, until SIGTERM or SIGINT; then close the parts.

    Args:
        wiring: the parts.
        bundle_path: the first bundle.
        home: the home whose champion is followed, or None.
        http_socket: bound; it listens when all is ready.
        tell: takes the events of this process.
        began: monotonic time of the start, for the ready line; None: now.

    Raises:
        BundleInvalid: the bundle is broken, or answers its golden requests wrongly.
        RulesUnread: the rules file cannot be read, or is being written all the time.
    """
    began = time.monotonic() if began is None else began
    with wiring.cleanup as cleanup:
        sys.setswitchinterval(SWITCH_S)
        FACTS_READ_AT.set(time.time())  # facts that are never read grow old from now on
        recommender = wiring.load(bundle_path, rest=lambda took_s: None)
        bundle_id = recommender.bundle.bundle_id
        _require_rules(recommender, wiring.settings)
        _show(recommender)
        checkout = wiring.checkout(recommender)
        cleanup.callback(lambda: checkout.recommender.facts.close())
        door = wiring.door(wiring.settings, http_socket)
        updates = None if home is None else Updates(home, bundle_id, Swap(wiring, checkout, door, home, tell))
        if updates:
            cleanup.callback(updates.close)

        def on_ready(http: str, grpc: str) -> None:
            tell(
                {
                    "event": "ready",
                    "http": http,
                    "grpc": grpc,
                    "bundle_id": bundle_id,
                    "bundle": str(bundle_path),
                    "follows": "" if home is None else str(home),
                    "online_store": recommender.store_state,
                    "fact_store": recommender.facts.state,
                    "prediction_log": str(wiring.settings.prediction_log_dir) if wiring.log else "off",
                    "processes": 1,
                    "ready_s": round(time.monotonic() - began, 2),
                    "memory_mb": memory_mb(os.getpid()),
                }
            )
            if updates:
                updates.start()

        door.start(checkout, on_ready, wiring.at_end)


def _require_rules(recommender: Recommender, settings: Settings) -> None:
    """Refuse to start with a rules file that was not read: unlike a swap, a start has no earlier rules."""
    if fault := recommender.facts.rules_fault:
        recommender.facts.close()
        raise RulesUnread(
            f"{settings.rules_path}: {fault}; an endpoint that starts has no earlier rules, "
            "and would offer banned items: mend the file, `reco rules check` names each line"
        )


class Swap:
    """Loads another bundle beside the one that answers, and lets it take over; see `updates.Take`."""

    def __init__(self, wiring: Wiring, checkout: Checkout, door: Door, home: Path, tell: Tell) -> None:
        self._wiring, self._checkout, self._door = wiring, checkout, door
        self._home, self._tell = home, tell

    def __call__(self, champion: Champion) -> Callable[[], None]:
        """Load the bundle, let it answer, and return what remains to be done; the old one goes last.

        Raises:
            BundleInvalid: the bundle is broken, or not the one that the champion names.
            FactsUnavailable: the new bundle could not read facts that the old one knew before.
        """
        began = time.monotonic()
        path = champion.bundle(self._home)
        before = self._checkout.recommender
        known = before.facts.known()
        # Requests are answered meanwhile: the warm-up takes half of the time.
        loaded = self._wiring.load(path, time.sleep, before.bundle.path)

        def take_over() -> None:
            self._checkout.recommender = loaded

        try:
            if lacks := loaded.facts.lacks(known):
                why = {
                    "fact store": "the fact store could not be read again, or has lost facts: restore it, or "
                    "write its facts again; a restart takes what is there",
                    "rules file": f"{self._wiring.settings.rules_path} could not be read again: mend it",
                }
                faults = "; ".join(why[source] for source in lacks)
                raise FactsUnavailable(f"what must not be shown would come back: {faults}")
            self._door.on_loop(take_over)
        except BaseException:
            loaded.facts.close()
            raise

        def follow_up() -> None:
            before.facts.close()
            BUNDLE.labels(before.bundle.bundle_id).set(0)
            _show(loaded)
            line = {"event": "bundle", "bundle_id": champion.bundle_id, "was": before.bundle.bundle_id}
            load_s = round(time.monotonic() - began, 2)
            self._tell({**line, "bundle": str(path), "load_s": load_s})

        return follow_up


def _show(recommender: Recommender) -> None:
    """Show the bundle that answers in the metrics."""
    BUNDLE.labels(recommender.bundle.bundle_id).set(1)
    BUNDLE_CUT_AT.set(datetime.fromisoformat(recommender.bundle.manifest["cut"]).timestamp())
    if recommender.answers is not None:
        recommender.answers.show()


def _observers(settings: Settings, cleanup: contextlib.ExitStack) -> list[Observer]:
    observers: list[Observer] = [count]
    if settings.request_log:
        request_log = RequestLog(sys.stderr.buffer, settings.request_log_key)
        cleanup.callback(request_log.close)
        observers.append(request_log.observe)
    if settings.trace_url or names_collector():
        try:
            from serving.observe.tracing import trace_to

            tracing = trace_to(settings.trace_url)
        except ImportError as error:
            raise SettingInvalid(
                f"a collector of spans is set but {error.name} is not installed; "
                "expected the extra: pip install 'checkout-recommender[trace]'"
            ) from error
        cleanup.callback(tracing.close)
        observers.append(tracing.observe)
    return observers
