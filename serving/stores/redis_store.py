"""User id -> the user's row in Feast's Redis online store: one round trip, never longer than its time-out."""

from __future__ import annotations

import math
import threading
import time

from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.redis.address import RedisAddress, parse_redis_url
from serving.redis.commands import RedisCommands
from serving.redis.connection import ReplyError
from serving.redis.pool import CONNECT_S
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
FAIR = 0.5  # of the time-out: a store that had less of a hurried request's time is not at fault


class RedisStore:
    """A server, a cluster, or the master that sentinels name; safe to share between threads.

    The first read may take CONNECT_S seconds: it is the warm-up, before which no endpoint is ready. Each
    later one takes at most the time-out, or what its request has left, whatever the server does.
    """

    def __init__(
        self, url: str | RedisAddress, timeout_ms: float = TIMEOUT_MS, *, project: str = PROJECT
    ) -> None:
        """Take the address; nothing is connected yet.

        Raises:
            ValueError: the URL is not one of Redis.
        """
        self._address = address = parse_redis_url(url) if isinstance(url, str) else url
        self._project = project.encode()
        self._timeout_ms = timeout_ms
        self._warm = threading.Event()
        self._commands = RedisCommands(address)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Raises:
            RowInvalid: what stands there is not Feast's.
            FeaturesLate: the deadline came before FAIR of the time-out.
            FeaturesUnavailable: Redis is gone, late, or refuses the user.
        """
        now = time.perf_counter()
        patience_s = self._timeout_ms / 1e3 if self._warm.is_set() else CONNECT_S
        given_s = min(patience_s, deadline - now)
        if given_s <= 0:
            raise FeaturesLate("no time is left to read the online store")
        self._warm.set()
        try:
            key = entity_key(user_id) + self._project
            reply = self._commands.ask(now + given_s, b"HMGET", key, HISTORY_FIELD, WRITTEN_FIELD)
        except ReplyError as error:
            if error.code == "WRONGTYPE":
                raise RowInvalid("the online store holds no hash under a user's key") from error
            raise self._unavailable(error) from error
        except TimeoutError as error:
            if given_s < FAIR * patience_s:
                raise FeaturesLate("the online store did not answer in the little time left") from error
            raise self._unavailable(f"no answer in {given_s * 1e3:g} ms") from error
        except (OSError, ValueError) as error:
            raise self._unavailable(error) from error
        match reply:
            case [bytes(history), bytes(written)]:
                try:
                    return UserRow(bytes_value(history), timestamp(written))
                except ValueError as error:
                    raise RowInvalid(f"the online store's row of a user: {error}") from error
            case [None, _] | [_, None]:
                return None
        raise RowInvalid("the online store gave something else than the two fields of a row")

    def close(self) -> None:
        """Close the connections; a later read opens them again."""
        self._commands.close()
        self._warm.clear()

    def _unavailable(self, reason: object) -> FeaturesUnavailable:
        if isinstance(reason, ReplyError):
            reason = f"it answers {reason}"
        elif isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}"
        return FeaturesUnavailable(f"online store in Redis at {self._address}: {reason}")
