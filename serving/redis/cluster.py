"""A key -> the pool of connections to the cluster's node that holds it, as the cluster itself says."""

from __future__ import annotations

import binascii
import threading
import time

from serving.redis.address import RedisAddress
from serving.redis.connection import Connection, Reply, ReplyError, connect
from serving.redis.pool import Pool

SLOTS = 16_384
Node = tuple[str, int]


class Cluster:
    """Which node holds which slot, and connections to each of them."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._pools: dict[Node, Pool] = {}
        self._nodes: list[Node | None] = []  # by slot; empty until some node told
        # Opening one of these connections reads the map: it happens in the background, like any opening.
        self._guides = Pool(self._connect_to_guide)

    def pool(self, key: bytes, deadline: float) -> Pool:
        """Return the pool of the node that holds the key.

        Raises:
            ReplyError, OSError, ValueError: no node of the cluster tells in time who holds what.
        """
        if not self._nodes:
            with self._guides.connection(deadline):
                pass
        node = self._nodes[key_slot(key)]
        if node is None:
            self.refresh()
            raise ConnectionError("no node of the cluster holds the key's slot")
        return self.pool_of(node)

    def pool_of(self, node: Node) -> Pool:
        """Return the pool of one node."""
        with self._lock:
            if node not in self._pools:
                self._pools[node] = Pool(lambda deadline: connect(self._address, node, deadline))
            return self._pools[node]

    def refresh(self) -> None:
        """Begin to read the map again, in the background; until then the old one holds."""
        self._guides.drop_ready()
        self._guides.prepare()

    def close(self) -> None:
        """Close all connections."""
        self._guides.close()
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
            self._nodes = []
        for pool in pools:
            pool.close()

    def _connect_to_guide(self, deadline: float) -> Connection:
        """Ask one node after the other, first those that the map names: the URL's may be long gone."""
        known = dict.fromkeys([*(node for node in self._nodes if node), *self._address.nodes])
        last: Exception = ConnectionError("no node of the cluster")
        for number, node in enumerate(known):
            share = time.perf_counter() + max(deadline - time.perf_counter(), 0) / (len(known) - number)
            try:
                guide = connect(self._address, node, share)
            except (OSError, ReplyError, ValueError) as error:
                last = error
                continue
            try:
                self._adopt(_nodes_by_slot(guide.ask(share, b"CLUSTER", b"SLOTS"), node[0]))
            except (OSError, ReplyError, ValueError) as error:
                last = error
                guide.close()
                continue
            return guide
        raise last

    def _adopt(self, nodes: list[Node | None]) -> None:
        with self._lock:
            self._nodes = nodes
            gone = self._pools.keys() - set(nodes)
            pools = [self._pools.pop(node) for node in gone]
        for pool in pools:
            pool.close()


def key_slot(key: bytes) -> int:
    """Return the slot of a key: only what stands in its first braces counts, if anything does."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    if start >= 0 and end > start + 1:
        key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def moved_to(error: ReplyError) -> Node:
    """Return where a MOVED or ASK error points.

    Raises:
        ValueError: nowhere.
    """
    host, _, port = str(error.args[0]).rpartition(" ")[2].rpartition(":")
    if not host:
        raise ValueError("the cluster's node points to a node without an address")
    return host, int(port)


def _nodes_by_slot(reply: Reply, asked: str) -> list[Node | None]:
    """Read CLUSTER SLOTS: [first, last, [host, port, ...] of the master, replicas ...] for each range."""
    nodes: list[Node | None] = [None] * SLOTS
    if not isinstance(reply, list) or not reply:
        raise ValueError("the node knows of no slot: it is not part of a cluster yet")
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                # A node that does not know its own address leaves it out: the one it was asked by.
                name = host.decode() if isinstance(host, bytes) and host else asked
                nodes[first : last + 1] = [(name, port)] * (last + 1 - first)
            case _:
                raise ValueError("the node's list of slots cannot be read")
    return nodes
