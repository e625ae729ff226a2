"""A key and a command about it -> Redis' reply, whatever form of Redis holds the key, before a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serving.redis.address import RedisAddress
from serving.redis.cluster import Cluster, moved_to
from serving.redis.connection import Connection, Reply, ReplyError, connect, connect_to_master
from serving.redis.pool import Pool


class RedisCommands:
    """A server, a cluster, or the master that sentinels name; safe to share between threads."""

    def __init__(self, address: RedisAddress) -> None:
        """Take the address; nothing is connected yet."""
        self._cluster = Cluster(address) if address.kind == "cluster" else None
        open_one = connect_to_master if address.kind == "sentinel" else _connect_to_server
        self._pool = Pool(lambda deadline: open_one(address, deadline))

    def ask(self, deadline: float, command: bytes, key: bytes, *words: bytes) -> Reply:
        """Send a command about one key and return the reply; it may be sent twice.

        Args:
            deadline: the moment of `time.perf_counter()` when this raises, whatever has come by then.
            command: its first word.
            key: what the command is about: a cluster's node is chosen by it.
            words: the rest of the command.

        Raises:
            ReplyError: the server refuses the command.
            OSError: no server can be reached, or TimeoutError at the deadline.
            ValueError: what came is no reply of a Redis server.
        """
        try:
            with self._connection(key, deadline) as connection:
                return connection.ask(deadline, command, key, *words)
        except ReplyError as error:
            if self._cluster is None or error.code not in ("MOVED", "ASK"):
                raise
            if error.code == "MOVED":
                self._cluster.refresh()
            with self._cluster.pool_of(moved_to(error)).connection(deadline) as connection:
                if error.code == "ASK":
                    connection.ask(deadline, b"ASKING")
                return connection.ask(deadline, command, key, *words)
        except TimeoutError:
            raise
        except OSError:
            # A server that was restarted, or a firewall, has closed what was ready: the next one is new.
            with self._connection(key, deadline) as connection:
                return connection.ask(deadline, command, key, *words)

    def close(self) -> None:
        """Close the connections; a later command opens them again."""
        self._pool.close()
        if self._cluster:
            self._cluster.close()

    @contextmanager
    def _connection(self, key: bytes, deadline: float) -> Iterator[Connection]:
        pool = self._pool if self._cluster is None else self._cluster.pool(key, deadline)
        try:
            with pool.connection(deadline) as connection:
                yield connection
        except OSError:
            if self._cluster:
                self._cluster.refresh()  # the node may have been replaced
            raise


def _connect_to_server(address: RedisAddress, deadline: float) -> Connection:
    return connect(address, address.nodes[0], deadline)
