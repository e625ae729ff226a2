"""Keys and values of bytes -> the values worth their memory, each made once for all who ask.

Which entries stay is W-TinyLFU (Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission
Policy", ACM Transactions on Storage 13(4), 2017): new entries pass a small window; one that leaves it comes
into the main part only if it was asked for more often than the one that would have to go.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from serving.metrics import CACHE_BYTES, CACHE_ENTRIES, CACHE_LOOKUPS

WINDOW_RATIO = 0.01  # of the cache
PROTECTED_RATIO = 0.8  # of the rest: entries that were asked for again there
# Of an entry's life, either way. 10,000 entries that are written at once and asked for all the time are then
# made anew at no more than twice their mean rate; a fifth would not do: see `reco bench cache`.
JITTER_RATIO = 0.35
ENTRY_BYTES = 380  # what an entry takes beside its key and value: CPython's objects and dictionary slots
LUCKY_RATIO = 1 / 128  # of candidates that lose, and come in all the same
RETRY_S = 1.0  # a refresh that failed is not tried again before
UNTIL_BYTES = 130  # what one of a bounded `kept_s` takes beside that
_OLD_AT_ONCE = 8
_ROWS = 4
_WIDTH = 4  # counters of a row per entry of the cache, so that few keys share one
_MOST = 15  # what a counter counts to: four bits, each in a byte of its own, as Python is slow at halves
_AGE_AT = 10  # additions per entry, until all counters are halved
_WINDOW, _PROBATION, _PROTECTED = range(3)  # parts of the cache
_HALVES = bytes(count >> 1 for count in range(256))

Make = Callable[[], Awaitable[bytes]]
_log = logging.getLogger(__name__)
_outcomes = {name: CACHE_LOOKUPS.labels("process", name) for name in ("hit", "stale", "miss")}


class Sketch:
    """How often each key was asked for lately: a count-min sketch that forgets.

    Each key has a counter in each of four rows, and its count is the least of them. After ten additions per
    entry of the cache all counters are halved, so that what was popular once makes room.
    """

    def __init__(self, entries: int) -> None:
        """Take the number of entries of the cache."""
        width = 1 << (_WIDTH * entries - 1).bit_length()
        self._mask = width - 1
        self._rows = tuple(bytearray(width) for _ in range(_ROWS))
        self._limit = _AGE_AT * entries
        self._additions = 0

    def add(self, key: bytes) -> None:
        """Count one question."""
        # Written out: a loop over the rows takes three times as long, and every look-up needs it.
        mask, (first, second, third, fourth) = self._mask, self._rows
        mixed = hash(key)
        if first[at := mixed & mask] < _MOST:
            first[at] += 1
        if second[at := mixed >> 15 & mask] < _MOST:
            second[at] += 1
        if third[at := mixed >> 30 & mask] < _MOST:
            third[at] += 1
        if fourth[at := mixed >> 45 & mask] < _MOST:
            fourth[at] += 1
        self._additions += 1
        if self._additions >= self._limit:
            self._additions //= 2
            self._rows = tuple(row.translate(_HALVES) for row in self._rows)

    def count(self, key: bytes) -> int:
        """Return how often a key was asked for: seldom more than it was, at most 15, halved now and then."""
        mixed = hash(key)
        return min(row[mixed >> 15 * number & self._mask] for number, row in enumerate(self._rows))


class Life(NamedTuple):
    """How long a value is good: fresh, then stale until it is dead; seconds from when it was made.

    A dead one stays, for want of a better one, until its room is needed; one older than `kept_s` is no answer
    at all, and goes with the questions that follow.
    """

    fresh_s: float
    dead_s: float
    kept_s: float = math.inf


class Entry:
    """A value and until when it is good."""

    __slots__ = ("dead_at", "part", "size_bytes", "stale_at", "value")

    def __init__(self, value: bytes, stale_at: float, dead_at: float, size_bytes: int) -> None:
        self.value = value
        self.stale_at = stale_at  # from then on it is answered once more, and made anew
        self.dead_at = dead_at  # from then on it is no answer but for want of a better one
        self.size_bytes = size_bytes
        # A number, not the part: that would be a cycle, and one that was frozen (`gc.freeze`) stays for ever.
        self.part = _WINDOW


class _Part:
    """Entries in the order in which they were last asked for, the longest ago first."""

    __slots__ = ("bytes", "entries", "number")

    def __init__(self, number: int) -> None:
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.bytes = 0
        self.number = number

    def add(self, key: bytes, entry: Entry) -> None:
        self.entries[key] = entry
        self.bytes += entry.size_bytes
        entry.part = self.number

    def remove(self, key: bytes) -> Entry:
        entry = self.entries.pop(key)
        self.bytes -= entry.size_bytes
        return entry

    def oldest(self) -> bytes:
        return next(iter(self.entries))

    def fits(self, entries: int, size_bytes: int) -> bool:
        return len(self.entries) <= entries and self.bytes <= size_bytes


class Cache:
    """Values in this process, bounded in number and bytes; one event loop uses it, not several threads.

    A stale value is still answered at once, while a single new one is made. Lives are spread by JITTER_RATIO,
    entry by entry: what was written together, as after a deploy, must not end together.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """Take the bounds, and the clock and the chance that tests set.

        Raises:
            ValueError: there is no room for an entry.
        """
        if max_entries < 1 or max_bytes <= ENTRY_BYTES:
            raise ValueError(
                f"a cache of {max_entries} entries and {max_bytes} bytes holds nothing: "
                f"expected 1 entry and more than {ENTRY_BYTES} bytes at least"
            )
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._clock = clock
        self._chance = random.Random() if chance is None else chance
        self._flights: dict[bytes, asyncio.Task[bytes]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.clear()

    def __len__(self) -> int:
        """Return the number of entries, also of those that are stale or dead and not yet gone."""
        return len(self._all)

    def __contains__(self, key: bytes) -> bool:
        """Say whether there is an entry, without counting that somebody asked."""
        return key in self._all

    @property
    def size_bytes(self) -> int:
        """What the entries take, keys and bookkeeping included, as estimated."""
        return self._window.bytes + self._probation.bytes + self._protected.bytes

    def show(self) -> None:
        """Say in the metrics what is kept: by the cache that answers, not by one that is warmed beside it."""
        CACHE_ENTRIES.set(len(self))
        CACHE_BYTES.set(self.size_bytes)

    def clear(self) -> None:
        """Forget all entries, and how often each was asked for; what is being made now is still kept."""
        self._all: dict[bytes, Entry] = {}
        # Those that may not stay, and until when, in the order in which they were made.
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._sketch = Sketch(self._max_entries)
        self._parts = tuple(_Part(number) for number in (_WINDOW, _PROBATION, _PROTECTED))
        self._window, self._probation, self._protected = self._parts

    def get(self, key: bytes) -> tuple[bytes, bool] | None:
        """Return a value and whether it is fresh; None if there is none or it is dead."""
        self._sketch.add(key)
        now = self._clock()
        self._drop_old(now)
        entry = self._all.get(key)
        if entry is None:
            return None
        if now >= entry.dead_at:
            return None  # it stays for `last_kept`
        if entry.part == _PROBATION:
            self._promote(key)
        else:
            self._parts[entry.part].entries.move_to_end(key)
        return entry.value, now < entry.stale_at

    def last_kept(self, key: bytes) -> bytes | None:
        """Return a value even if it is dead, without counting that somebody asked; None if there is none."""
        now = self._clock()
        self._drop_old(now)
        entry = self._all.get(key)
        return None if entry is None or now >= self._until.get(key, math.inf) else entry.value

    def is_alive(self, key: bytes) -> bool:
        """Say whether there is a value that is not dead, likewise."""
        entry = self._all.get(key)
        return entry is not None and self._clock() < entry.dead_at

    def put(self, key: bytes, value: bytes, life: Life) -> bool:
        """Keep a value under a key; return whether there was room for it.

        It is the cache's choice whether it, or another one, stays.
        """
        if key in self._all:
            self._drop(key)
        size_bytes = len(key) + len(value) + ENTRY_BYTES + (UNTIL_BYTES if life.kept_s < math.inf else 0)
        if size_bytes > self._max_bytes:
            return False
        spread = self._chance.uniform(1 - JITTER_RATIO, 1 + JITTER_RATIO)
        now = self._clock()
        self._drop_old(now)
        stale_at, dead_at = now + life.fresh_s * spread, now + life.dead_s * spread
        entry = Entry(value, stale_at, dead_at, size_bytes)
        self._all[key] = entry
        if life.kept_s < math.inf:
            self._until[key] = now + life.kept_s
        self._window.add(key, entry)
        self._shrink()
        return key in self._all

    def is_being_made(self, key: bytes) -> bool:
        """Say whether somebody makes the value of a key just now."""
        return key in self._flights

    async def get_or_make(self, key: bytes, make: Make, life: Life) -> bytes:
        """Return the value of a key; make it if there is none, once however many ask at the same time.

        Who gives up waiting does not stop what others wait for. A stale value is returned at once, and made
        anew behind it; if that fails, it is still good until it is dead.

        Raises:
            Exception: what `make` raised reaches all who waited for it, and is not kept.
        """
        found = self.get(key)
        if found is None:
            _outcomes["miss"].inc()
            return await asyncio.shield(self._flight(key, make, life))
        value, is_fresh = found
        _outcomes["hit" if is_fresh else "stale"].inc()
        if not is_fresh and key not in self._flights:
            task = asyncio.get_running_loop().create_task(self._refresh(key, make, life))
            self._background.add(task)  # the loop itself holds only a weak reference
            task.add_done_callback(self._background.discard)
        return value

    def _flight(self, key: bytes, make: Make, life: Life) -> asyncio.Task[bytes]:
        """Return the one task that makes a key's value now."""
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._make(key, make, life))
            self._flights[key] = flight
            flight.add_done_callback(_seen)
        return flight

    async def _make(self, key: bytes, make: Make, life: Life) -> bytes:
        try:
            value = await make()
            self.put(key, value, life)
            self.show()
            return value
        finally:
            del self._flights[key]

    async def _refresh(self, key: bytes, make: Make, life: Life) -> None:
        try:
            await self._flight(key, make, life)
        except Exception as error:  # noqa: BLE001 - nobody waits for it: the stale value was the answer
            _log.warning("a cached value could not be made anew: %s: %s", type(error).__name__, error)
            if (entry := self._all.get(key)) is not None:
                entry.stale_at = self._clock() + RETRY_S

    def _promote(self, key: bytes) -> None:
        """Move an entry that was asked for again among the protected; the oldest of them makes room."""
        self._protected.add(key, self._probation.remove(key))
        entries, size_bytes = self._main()
        while len(self._protected.entries) > 1 and not self._protected.fits(
            int(entries * PROTECTED_RATIO), int(size_bytes * PROTECTED_RATIO)
        ):
            oldest = self._protected.oldest()
            self._probation.add(oldest, self._protected.remove(oldest))

    def _main(self) -> tuple[int, int]:
        """Return the entries and bytes of the cache without its window."""
        return self._max_entries - self._window_entries(), int(self._max_bytes * (1 - WINDOW_RATIO))

    def _window_entries(self) -> int:
        return max(int(self._max_entries * WINDOW_RATIO), 1)

    def _shrink(self) -> None:
        """Let what leaves the window compete with the oldest on probation until all fits."""
        while len(self._window.entries) > 1 and not self._window.fits(
            self._window_entries(), int(self._max_bytes * WINDOW_RATIO)
        ):
            candidate = self._window.oldest()
            self._probation.add(candidate, self._window.remove(candidate))
            self._compete(candidate)
        while self._is_over():  # a single large entry in the window
            self._drop(self._victim())

    def _compete(self, candidate: bytes) -> None:
        asked = self._sketch.count(candidate)
        while self._is_over():
            victim = self._victim()
            wins = asked > self._sketch.count(victim)
            # One whose counters others share would stand there for ever, and nobody come past it.
            lucky = asked > 1 and self._chance.random() < LUCKY_RATIO
            if victim == candidate or not (wins or lucky):
                self._drop(candidate)
                return
            self._drop(victim)

    def _victim(self) -> bytes:
        for part in (self._probation, self._protected):
            if part.entries:
                return part.oldest()
        return self._window.oldest()

    def _drop(self, key: bytes) -> None:
        self._parts[self._all.pop(key).part].remove(key)
        self._until.pop(key, None)

    def _drop_old(self, now: float) -> None:
        """Drop those whose time is over, a few with each question: nobody waits for all of them."""
        for _ in range(_OLD_AT_ONCE):
            if not self._until or now < self._until[key := next(iter(self._until))]:
                return
            self._drop(key)

    def _is_over(self) -> bool:
        return len(self._all) > self._max_entries or self.size_bytes > self._max_bytes


def _seen(flight: asyncio.Task[bytes]) -> None:
    """Look at a flight's error: if all who waited are gone, asyncio would complain that nobody did."""
    if not flight.cancelled():
        flight.exception()
