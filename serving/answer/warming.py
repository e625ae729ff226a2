"""The prediction log -> a cache that holds the answers to its most frequent requests from the start."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from serving.answer.recommender import Recommender
from serving.schemas import DEFAULT_K, Request

BUDGET_S = 5.0  # of the time until an endpoint is ready, or a new bundle takes over
MOST_REQUESTS = 1_000
MOST_RECORDS = 20_000  # of the log, the newest ones
ROWS_AT_ONCE = 64

_log = logging.getLogger(__name__)


def warm_up(recommender: Recommender, log_dir: Path, rest: Callable[[float], None]) -> None:
    """Fill the cache of a recommender that no request uses yet with the log's most frequent answers.

    Without a log, or with one that cannot be read, the cache begins empty. For `rest` see `warm`.
    """
    if recommender.answers is None:
        return
    try:
        requests = frequent_requests(log_dir, time.time())
    except Exception:  # noqa: BLE001 - the edge of the start: an endpoint with an empty cache can answer, too
        _log.exception("the cache begins empty: the prediction log in %s cannot be read", log_dir)
        return
    warm(requests, recommender.warm, rest=rest)


def frequent_requests(log_dir: Path, at: float) -> list[Request]:
    """Return what anonymous shoppers asked at least twice in the newest records, the most frequent first.

    The list of a known shopper depends on a row and an hour, so it would seldom be asked for again.
    Baskets count without their order. The requests are of the time `at`, seconds since the epoch.
    """
    counts: Counter[tuple[str, str | None, tuple[str, ...]]] = Counter()
    for record in itertools.islice(_newest_records(log_dir), MOST_RECORDS):
        if record["user_id"] is None:
            profile = record["profile"]
            counts[profile, record["store_id"], tuple(sorted(record["basket"]))] += 1
    return [
        Request(basket, at, None, store_id, DEFAULT_K, f"warm-up-{number}", profile)
        for number, ((profile, store_id, basket), times) in enumerate(counts.most_common(MOST_REQUESTS))
        if times > 1
    ]


def _newest_records(log_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the log's records segment by segment, the newest segment first."""
    for path in sorted(log_dir.glob("*.parquet"), reverse=True):  # a segment's name begins with its time
        with contextlib.suppress(FileNotFoundError):  # `reco feedback --keep-days` has just deleted it
            columns = ["user_id", "profile", "store_id", "basket"]
            with pq.ParquetFile(path) as file:
                # No other thread runs while PyArrow converts rows, and requests are answered meanwhile.
                for rows in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                    yield from rows.to_pylist()


def warm(
    requests: Sequence[Request],
    ask: Callable[[Request], None],
    budget_s: float = BUDGET_S,
    rest: Callable[[float], None] = lambda took_s: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask one request after the other until all are asked or the time is over.

    One that fails is skipped. `rest` is called after each with the seconds it took: where other requests need
    the processor.
    """
    began, has_failed = clock(), False
    for request in requests:
        asked_at = clock()
        if asked_at - began >= budget_s:
            return
        try:
            ask(request)
        except Exception:  # noqa: BLE001 - the same
            if not has_failed:
                _log.exception("a request that should warm the cache failed")
            has_failed = True
        rest(clock() - asked_at)
