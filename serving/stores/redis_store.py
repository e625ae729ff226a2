"""User id -> the user's row in Feast's Redis online store: one round trip, within its timeout."""

from __future__ import annotations

import asyncio
import math
import time

from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.redis.address import RedisAddress, parse_redis_url
from serving.redis.client import CONNECT_S, RedisClient, Reply, ReplyError
from serving.stores.feast_layout import (
    HISTORY_FIELD,
    PROJECT,
    WRITTEN_FIELD,
    UserRow,
    bytes_value,
    entity_key,
    timestamp,
)

TIMEOUT_MS = 5.0
_THREADS = 0
FAIR = 0.5  # share of the timeout; a store that got less time than that from a late request is not at fault


class RedisStore:
    """The online store in a server, in a cluster, or in the master that sentinels name.

    The first read of an event loop, and the first read by threads, may take CONNECT_S seconds. It is the
    warm-up; the endpoint is not ready before it. Each later read takes at most the timeout, or the time that
    its request has left, even if the server hangs. Meanwhile the loop that awaits `fetch` runs other tasks.
    """

    def __init__(
        self, url: str | RedisAddress, timeout_ms: float = TIMEOUT_MS, *, project: str = PROJECT
    ) -> None:
        """Take the address; nothing is connected yet.

        Raises:
            ValueError: it is no Redis URL.
        """
        self._address = address = parse_redis_url(url) if isinstance(url, str) else url
        self._project = project.encode()
        self._timeout_s = timeout_ms / 1e3
        self._warm: set[int] = set()  # ids of event loops, and _THREADS
        self._client = RedisClient(address)

    async def fetch(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Raises:
            RowInvalid: the stored value does not have Feast's layout.
            FeaturesLate: the deadline came before FAIR of the timeout.
            FeaturesUnavailable: Redis cannot be reached, is late, or refuses our login.
        """
        patience_s, given_s = self._times(deadline, id(asyncio.get_running_loop()))
        command = self._command(user_id)
        try:
            reply = await self._client.ask(time.perf_counter() + given_s, *command)
        except (ReplyError, OSError, ValueError) as error:
            raise self._failure(error, given_s, patience_s) from error
        return _row(reply)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Do as `fetch` and wait for the row; for threads without an event loop."""
        patience_s, given_s = self._times(deadline, _THREADS)
        command = self._command(user_id)
        try:
            reply = self._client.ask_now(time.perf_counter() + given_s, *command)
        except (ReplyError, OSError, ValueError) as error:
            raise self._failure(error, given_s, patience_s) from error
        return _row(reply)

    async def aclose(self) -> None:
        """Close the connections of the running loop; a later read opens them again."""
        await self._client.aclose()
        self._warm.clear()

    def close(self) -> None:
        """Close the connections, from a thread without an event loop; a later read opens them again."""
        self._client.close()
        self._warm.clear()

    def _times(self, deadline: float, reader: int) -> tuple[float, float]:
        """Return the seconds that any read may take, and the seconds that this one may take."""
        patience_s = self._timeout_s if reader in self._warm else CONNECT_S
        given_s = min(patience_s, deadline - time.perf_counter())
        if given_s <= 0:
            raise FeaturesLate("no time is left to read the online store")
        self._warm.add(reader)
        return patience_s, given_s

    def _command(self, user_id: str) -> tuple[str, bytes, bytes, bytes]:
        return "HMGET", entity_key(user_id) + self._project, HISTORY_FIELD, WRITTEN_FIELD

    def _failure(self, error: Exception, given_s: float, patience_s: float) -> Exception:
        """Return the error of a read that got no reply."""
        if isinstance(error, TimeoutError):
            if given_s < FAIR * patience_s:
                return FeaturesLate("the online store did not answer in the little time left")
            reason = f"no answer in {given_s * 1e3:g} ms"
        elif isinstance(error, ReplyError):
            if error.code == "WRONGTYPE":
                return RowInvalid("the online store holds no hash under a user's key")
            reason = f"it answers {error.code}"
        else:
            reason = f"{type(error).__name__}: {error}"
        return FeaturesUnavailable(f"online store in Redis at {self._address}: {reason}")


def _row(reply: Reply) -> UserRow | None:
    match reply:
        case [bytes(history), bytes(written)]:
            try:
                return UserRow(bytes_value(history), timestamp(written))
            except ValueError as error:
                raise RowInvalid(f"the online store's row of a user: {error}") from error
        case [None, _] | [_, None]:
            return None
    raise RowInvalid("the online store gave something else than the two fields of a row")
