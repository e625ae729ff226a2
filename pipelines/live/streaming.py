"""Settings -> one consumer of the stream, which runs until SIGTERM or SIGINT."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from components.data.feast_store import open_feature_store, quiet_feast
from feature_repo.facts import FactInvalid, parse_fact
from feature_repo.stream.dead_letters import Counts
from feature_repo.stream.erasure import Forgotten
from feature_repo.stream.fact_stream import FactStream
from feature_repo.stream.kafka import KafkaSettings, create_topics
from feature_repo.stream.online_rows import OnlineRows
from feature_repo.stream.stream import Stream
from pipelines.run.stopping import on_stop
from serving.errors import FactsUnavailable
from serving.settings import Settings
from serving.shop.fact_store import FactStore, open_fact_store


def run_stream(settings: Settings, kafka: KafkaSettings, on_ready: Callable[[], None]) -> Counts:
    """Fold events and facts into the stores of a home until SIGTERM or SIGINT; return what became of them.

    Raises:
        ConnectionError: the broker cannot be reached, or refuses.
        ValueError: the online store is one that Feast cannot write.
    """
    create_topics(kafka)
    stop, facts = threading.Event(), open_fact_store(settings.fact_store_url)
    with on_stop(stop.set), closing(facts), quiet_feast(), ThreadPoolExecutor(1, "facts") as threads:
        rows = OnlineRows(lambda: open_feature_store(settings.home, settings.store_url))
        stream = Stream(settings.home, rows, kafka)
        fact_stream = FactStream(
            kafka,
            lambda messages: take_facts(facts, messages, settings.home),
            stream.letters,
            facts,
        )
        taking = threads.submit(fact_stream.run, stop)
        taking.add_done_callback(lambda _: stop.set())  # whichever fails ends the other too
        try:
            stream.run(stop, on_ready)
        finally:
            stop.set()
        taking.result()
    return stream.counts


def take_facts(store: FactStore, messages: list[bytes], home: Path) -> list[str | None]:
    """Write messages of the facts topic; return for each one why it is no fact, or None.

    Args:
        store: gets them, but none that is for a user whom the home has forgotten since.
        messages: of the topic.
        home: folder of all state.

    Raises:
        ConnectionError: the store cannot be written now.
    """
    reasons: list[str | None] = []
    facts = []
    for message in messages:
        try:
            facts.append(parse_fact(message))
            reasons.append(None)
        except FactInvalid as error:
            reasons.append(str(error))
    try:
        if facts:
            store.write(Forgotten.load(home).facts_that_count(facts))
    except FactsUnavailable as error:
        raise ConnectionError(str(error)) from error
    return reasons
