"""A data set -> its events on the broker, at any speed, by the data's own clock.

With a shopper, the endpoint gets a request with the first half of each basket before the basket is bought.
For tests of a consumer, events are repeated, delayed and mixed with invalid messages.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson
import pandas as pd

from feature_repo.events import EventsInvalid, as_times, iso
from feature_repo.stream.delivery import Delivery

CHUNK = 5_000  # messages that are encoded at once
LONGEST_BASKET = 100  # items of a request
LAG_S = 1.0  # a longer lag is reported
REPORT_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Disturbance:
    """The faults of a hard test stream as shares of the events; a seed always chooses the same events."""

    duplicates: float = 0.0  # sent once more, up to `within` events later
    out_of_order: float = 0.0  # sent up to `within` events too late
    poison: float = 0.0  # invalid messages in between
    within: int = 1_000
    seed: int = 0


@dataclass
class ReplayCounts:
    """Messages and requests of a replay so far."""

    messages: int = 0  # given to the delivery
    duplicates: int = 0
    delayed: int = 0
    poison: int = 0
    asked: int = 0  # requests that the endpoint answered
    degraded: int = 0  # answers from a lower rung of the ladder
    errors: int = 0  # requests without an answer
    lag_s: float = 0.0  # how late the current messages are
    most_lag_s: float = 0.0


def choose(events: pd.DataFrame, since: str = "", until: str = "", limit: int = 0) -> pd.DataFrame:
    """Return the events of a time span, in order; `since` is included, `until` excluded.

    Raises:
        EventsInvalid: a time cannot be read, or no event lies in the span.
    """
    chosen = events
    for text, name in ((since, "from"), (until, "until")):
        if text:
            at = moment(name, text)
            chosen = chosen[chosen["at"] >= at if name == "from" else chosen["at"] < at]
    if chosen.empty:
        first, last = iso(events["at"].min()), iso(events["at"].max())
        raise EventsInvalid(
            f"no event lies between {since or 'the start'} and {until or 'the end'}; "
            f"the data reach from {first} to {last}: choose a stretch of that"
        )
    chosen = chosen.sort_values(["at", "basket_id", "item_id"], kind="stable", ignore_index=True)
    return chosen.head(limit) if limit else chosen


def moment(option: str, text: str) -> pd.Timestamp:
    """Return the time of an option.

    Raises:
        EventsInvalid: the text is not a time.
    """
    [at] = as_times(pd.Series([text], dtype=object))
    if at is pd.NaT:
        raise EventsInvalid(f"--{option} {text!r} is no time; expected for example 2017-11-27T05:00:00Z")
    return at


def order(rows: int, disturbance: Disturbance) -> tuple[np.ndarray, np.ndarray, ReplayCounts]:
    """Return the messages of a replay in their order, and their times.

    Returns:
        For each message the row of its event, or -1 for poison, and the row with the message's time; counts.
    """
    rng = np.random.default_rng(disturbance.seed)

    def some(share: float) -> np.ndarray:
        return rng.choice(rows, round(share * rows), replace=False)

    def later(chosen: np.ndarray) -> np.ndarray:
        # Half a row later: behind that row, never at its place.
        return chosen + rng.integers(1, disturbance.within + 1, len(chosen)) + 0.5

    place = np.arange(rows, dtype=np.float64)
    late, again, poison = (
        some(share) for share in (disturbance.out_of_order, disturbance.duplicates, disturbance.poison)
    )
    place[late] = later(late)
    row = np.concatenate([np.arange(rows), again, np.full(len(poison), -1)])
    place = np.concatenate([place, later(again), poison + 0.5])
    by_place = np.argsort(place, kind="stable")
    when = np.minimum(place[by_place].astype(np.int64), rows - 1)
    counts = ReplayCounts(duplicates=len(again), delayed=len(late), poison=len(poison))
    return row[by_place], when, counts


def encode(events: pd.DataFrame) -> list[tuple[str, bytes]]:
    """Return key and value of the message of each event, without unknown values."""
    at = np.datetime_as_string(events["at"].dt.tz_convert(None).to_numpy("datetime64[us]"), timezone="UTC")
    columns = {name: events[name].tolist() for name in events.columns} | {"at": at.tolist()}
    messages = []
    for values in zip(*columns.values(), strict=True):
        # Only NaN differs from itself.
        event = {k: v for k, v in zip(columns, values, strict=True) if v == v and v not in (None, "")}
        messages.append((event["user_id"], orjson.dumps(event)))
    return messages


def poison(number: int, good: bytes) -> tuple[str | None, bytes]:
    """Return an invalid message, made from a valid one."""
    event = orjson.loads(good) | {"event_id": f"poison-{number}"}
    kinds: tuple[tuple[str | None, bytes], ...] = (
        (None, b"{not JSON"),
        (None, b"\xff\xfe\x00"),
        ("poison", orjson.dumps([event])),
        ("poison", orjson.dumps({k: v for k, v in event.items() if k != "item_id"})),
        ("poison", orjson.dumps(event | {"at": "yesterday"})),
        ("poison", orjson.dumps(event | {"at": "2999-01-01T00:00:00Z"})),
        ("poison", orjson.dumps(event | {"quantity": "many"})),
        ("poison", orjson.dumps(event | {"item_id": "x" * 100_000})),
        ("poison", orjson.dumps(event | {"event_type": "wish"})),
    )
    return kinds[number % len(kinds)]


class Shopper:
    """Requests recommendations for a basket, one request at a time over one connection."""

    def __init__(self, url: str, token: str = "") -> None:
        """Prepare a client of the endpoint; `token` is of a caller, where the endpoint wants one."""
        self.url, self.fault = url, ""  # why the last request had no answer
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, timeout=5.0, trust_env=False)

    def ask(self, question: dict[str, Any], counts: ReplayCounts) -> None:
        """Send one request and count the outcome."""
        path = f"{self.url.rstrip('/')}/v1/models/checkout:predict"
        try:
            response = self._client.post(path, json={"instances": [question]})
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {response.content[:200]!r}")
            degraded = bool(response.json()["predictions"][0]["degraded"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            if not counts.errors:
                _log.warning(
                    "the endpoint at %s did not answer (%r); such errors are counted", self.url, error
                )
            counts.errors += 1
            self.fault = str(error) or repr(error)
            return
        counts.asked += 1
        counts.degraded += degraded

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def replay_events(
    events: pd.DataFrame,
    topic: str,
    delivery: Delivery,
    speed: float,
    disturbance: Disturbance | None = None,
    shopper: Shopper | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> ReplayCounts:
    """Send each event at its time by the data's clock, which is `speed` times as fast as ours.

    Events that are due at the same time are sent together. While the broker is slow or away, the replay waits
    and reports its lag.

    Args:
        events: as `choose` returns them.
        topic: the topic of the messages.
        delivery: sends the messages; the caller flushes it.
        speed: seconds of the data per second; 0 is as fast as possible.
        disturbance: the faults to inject.
        shopper: sends a request before each basket is bought.
        report: gets a line about every five seconds.
    """
    rows, when, counts = order(len(events), disturbance or Disturbance())
    at = events["at"].astype("int64").to_numpy() / (1e6 if events["at"].dt.unit == "us" else 1e9)
    due = (at - at[0])[when] / speed if speed else np.zeros(len(when))
    questions = _Questions(events)
    poisoned, began = itertools.count(), time.monotonic()
    reported = began
    for first in range(0, len(rows), CHUNK):
        chunk = rows[first : first + CHUNK]
        # A poisonous message is made from the event at its time.
        source = np.where(chunk >= 0, chunk, when[first : first + CHUNK])
        messages = _messages(events.iloc[source], chunk, poisoned)
        sent = 0
        while sent < len(chunk):
            now = time.monotonic() - began
            if now - (reported - began) >= REPORT_S:
                at_text = iso(events["at"].iloc[source[sent]])
                report(_progress(counts, len(rows), now, float(due[-1]), at_text))
                reported = time.monotonic()
            ready = int(np.searchsorted(due[first : first + len(chunk)], now, "right"))
            if ready <= sent:
                time.sleep(min(float(due[first + sent]) - now, 0.2))
                continue
            counts.lag_s = now - float(due[first + sent]) if speed else 0.0
            counts.most_lag_s = max(counts.most_lag_s, counts.lag_s)
            ready = min(ready, sent + 100)  # not all at once: a late replay must still report
            for place in range(sent, ready):
                if shopper and (question := questions.before(int(chunk[place]))):
                    shopper.ask(question, counts)
                reported = _wait(delivery, report, reported)
                delivery.send(topic, *messages[place])
                counts.messages += 1
            sent = ready
    return counts


def _messages(
    events: pd.DataFrame, chunk: np.ndarray, poisoned: Iterator[int]
) -> list[tuple[str | None, bytes]]:
    """Return the message of each event, and a poisonous message where the chunk has no row."""
    messages: list[tuple[str | None, bytes]] = [*encode(events)]
    for place in np.flatnonzero(chunk < 0).tolist():
        messages[place] = poison(next(poisoned), messages[place][1])
    return messages


def _wait(delivery: Delivery, report: Callable[[str], None], reported: float) -> float:
    """Wait while the broker is slower than the replay; return the time of the last report."""
    while delivery.is_full:
        delivery.flush(0.01)
        if time.monotonic() - reported >= REPORT_S:
            report("the broker does not take the messages as fast as they come: waiting for it")
            reported = time.monotonic()
    return reported


class _Questions:
    """The shopper's request before each basket: its first half, at the time of the purchase."""

    def __init__(self, events: pd.DataFrame) -> None:
        rows = np.flatnonzero(events["event_type"] == "purchase")  # an archive holds impressions as well
        bought = events.iloc[rows]
        names = ("user_id", "basket_id", "item_id", "store_id")
        self._user, self._basket, self._item, self._store = (bought[name].to_numpy() for name in names)
        self._at = bought["at"]
        first = np.flatnonzero(~bought["basket_id"].duplicated())
        self._first = dict(zip(rows[first].tolist(), first.tolist(), strict=True))  # row -> its purchase

    def before(self, row: int) -> dict[str, Any] | None:
        """Return the request if this row is the first of a basket without a request yet."""
        begin = self._first.pop(row, None)
        if begin is None:
            return None
        end = begin + 1
        while end < len(self._basket) and self._basket[end] == self._basket[begin]:
            end += 1
        items = [*dict.fromkeys(self._item[begin:end].tolist())]  # without repeated scans
        question = {
            "user_id": self._user[begin],
            "basket": items[: min((len(items) + 1) // 2, LONGEST_BASKET)],
            "at": iso(self._at.iloc[begin]),
            "request_id": self._basket[begin],
        }
        return question | ({"store_id": self._store[begin]} if self._store[begin] else {})


def _progress(counts: ReplayCounts, total: int, now: float, end: float, at: str) -> str:
    rate = counts.messages / now
    by_rate = (total - counts.messages) / rate if rate else 0.0
    left = by_rate if not end or counts.lag_s > LAG_S else end - now
    lag = f", lags {counts.lag_s:.1f} s behind" if counts.lag_s > LAG_S else ""
    asked = f", asked {counts.asked:,} ({counts.degraded} degraded, {counts.errors} errors)"
    head = f"{counts.messages:,} of {total:,} messages, at {at[:16]}, {rate:,.0f} a second"
    return f"{head}, {left:,.0f} s to go{lag}{asked if counts.asked or counts.errors else ''}"
