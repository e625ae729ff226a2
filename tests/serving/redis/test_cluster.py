"""Slots as redis-py counts them; a real cluster of two nodes, and a slot on its way from one to the other."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot as redis_key_slot

from serving.errors import FeaturesUnavailable
from serving.redis.cluster import _nodes_by_slot, key_slot, moved_to
from serving.redis.connection import ReplyError
from serving.stores.feast_layout import entity_key
from serving.stores.redis_store import RedisStore
from tests.chaos.procs import Valkey, eventually, valkey_server
from tests.chaos.rows import ROW_42, put_row


@pytest.mark.parametrize(
    "key", [b"", b"a", b"{a}b", b"x{a}{b}", b"{}a", b"{a", b"a}", b"}a{b}", b"\x00{\xff}"]
)
def test_the_slot_of_a_key_is_redis_own(key: bytes) -> None:
    assert key_slot(key) == redis_key_slot(key)


def test_the_map_is_read_with_a_hole_and_a_node_that_does_not_know_its_name() -> None:
    reply = [[0, 1, [b"a", 1, b"id", []], [b"replica", 2]], [5, 5, [None, 3]], [6, 6, [b"", 4]]]
    nodes = _nodes_by_slot(reply, "asked")  # type: ignore[arg-type]
    assert nodes[:8] == [("a", 1), ("a", 1), None, None, None, ("asked", 3), ("asked", 4), None]
    for wrong in (None, [], [[1]], [[0, 99_999, [b"a", 1]]], b"OK"):
        with pytest.raises(ValueError, match=r"slots?"):
            _nodes_by_slot(wrong, "asked")  # type: ignore[arg-type]


def test_where_a_moved_key_is() -> None:
    assert moved_to(ReplyError("MOVED 42 ::1:7000")) == ("::1", 7000)
    with pytest.raises(ValueError, match="without an address"):
        moved_to(ReplyError("MOVED 42 :7000"))


CLUSTERED = ("--cluster-enabled", "yes", "--save", "", "--cluster-node-timeout", "1000")


def state_of(client: redis.Redis) -> str:
    return str(client.execute_command("CLUSTER INFO")["cluster_state"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Valkey, Valkey]]:
    """Two nodes with half the slots each."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(valkey_server(tmp_path / name, *CLUSTERED)) for name in ("a", "b")]
        with nodes[0].client() as one, nodes[1].client() as other:
            one.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8_191)
            other.execute_command("CLUSTER ADDSLOTSRANGE", 8_192, 16_383)
            one.execute_command("CLUSTER MEET", "127.0.0.1", nodes[1].port)
            eventually(lambda: all(state_of(client) == "ok" for client in (one, other)))
        yield nodes[0], nodes[1]


def nodes_of(store: RedisStore) -> list[tuple[str, int] | None]:
    """Which node holds which slot, as the store knows."""
    known = store._commands._cluster
    assert known is not None
    return known._nodes


def user_of(first: int, last: int) -> str:
    """A user whose key stands in these slots."""
    users = (str(number) for number in range(10_000))
    return next(user for user in users if first <= key_slot(entity_key(user) + b"checkout") <= last)


@pytest.mark.slow
def test_each_user_is_found_on_its_node_though_the_url_names_one_dead_node_and_one_live(
    cluster: tuple[Valkey, Valkey],
) -> None:
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster[1].port}"
    users = [str(number) for number in range(20)]
    with redis.RedisCluster("127.0.0.1", cluster[0].port) as client:
        for user in users:
            put_row(client, user)
    store = RedisStore(url, timeout_ms=1_000)
    assert [store.read(user) for user in [*users, "absent"]] == [ROW_42] * 20 + [None]
    store.close()


@pytest.mark.slow
def test_a_slot_that_moves_is_followed_while_and_after_it_moves(cluster: tuple[Valkey, Valkey]) -> None:
    source, target = cluster
    user = user_of(0, 8_191)
    key = entity_key(user) + b"checkout"
    slot = key_slot(key)
    store = RedisStore(f"redis+cluster://127.0.0.1:{source.port}", timeout_ms=1_000)
    with source.client() as one, target.client() as other:
        put_row(one, user)
        assert store.read(user) == ROW_42
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (one, other)]
        other.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        one.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5_000)
        assert store.read(user) == ROW_42, "the source says ASK"
        for client in (other, one):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert store.read(user) == ROW_42, "the source says MOVED"
        eventually(lambda: nodes_of(store)[slot] == ("127.0.0.1", target.port))
        assert store.read(user) == ROW_42
    store.close()


@pytest.mark.slow
def test_a_cluster_that_is_gone_is_unavailable_and_found_again(cluster: tuple[Valkey, Valkey]) -> None:
    store = RedisStore(f"redis+cluster://127.0.0.1:{cluster[0].port}")
    user = user_of(8_192, 16_383)
    with cluster[1].client() as client:
        put_row(client, user)
    assert store.read(user) == ROW_42
    cluster[1].kill()
    with pytest.raises(FeaturesUnavailable, match=r"cluster 127\.0\.0\.1"):
        store.read(user)
    cluster[1].restart()

    def back() -> bool:
        try:
            return store.read(user) is None  # it kept nothing on disk but its place in the cluster
        except FeaturesUnavailable:
            return False

    eventually(back)
    store.close()
