"""A real server: every way to log in, and every way in which it can fail."""

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.drills.fault_proxy import Proxy
from serving.errors import FeaturesLate, FeaturesUnavailable, RowInvalid
from serving.stores.online_features import (
    FAIR,
    GuardedStore,
    OnlineStore,
    RedisStore,
    UserRow,
    entity_key,
    open_store,
)
from tests.chaos.listening import listening
from tests.chaos.procs import Valkey, eventually, valkey_server
from tests.chaos.rows import HISTORY_FIELD, ROW_42, TIMESTAMP, proto, put_row

PASSWORD = "p@ss,w/örd"
QUOTED = "p%40ss%2Cw%2F%C3%B6rd"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    """Holds user 42, and accepts the password."""
    with valkey_server(tmp_path / "valkey", "--save", "", password=PASSWORD) as server:
        with server.client() as client:
            put_row(client, "42")
        yield server


@pytest.fixture
def proxy(server: Valkey) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


def url_of(place: Valkey | Proxy) -> str:
    return f"redis://:{QUOTED}@127.0.0.1:{place.port}/0"


def reads(store: OnlineStore, count: int) -> list[UserRow | str | None]:
    """The row of each read, or "unavailable".

    A server that never answers holds a read that has no time limit for ever: that reads end while the fault
    lasts shows the limit, on a busy machine too.
    """
    rows: list[UserRow | str | None] = []
    for _ in range(count):
        try:
            rows.append(store.read("42"))
        except FeaturesUnavailable as error:
            rows.append("unavailable" if "p@ss" not in str(error) else f"shows the password: {error}")
    return rows


def warm_up(store: OnlineStore) -> None:
    eventually(lambda: reads(store, 1) == [ROW_42])


# ------------------------------------------------------------------------------------------ ways in


def test_a_read_ends_with_the_request_and_a_short_one_is_no_store_failure() -> None:
    def serve(connection: socket.socket) -> None:
        while asked := connection.recv(4_096):
            if b"HMGET" not in asked:
                connection.sendall(b"+PONG\r\n")
            elif b"warm" in asked:
                connection.sendall(b"*2\r\n$-1\r\n$-1\r\n")

    with listening(serve) as (host, port):
        store = RedisStore(f"redis://{host}:{port}", timeout_ms=400.0)
        for given_s, kind in ((0.4 * FAIR / 4, FeaturesLate), (0.4 * FAIR * 1.5, FeaturesUnavailable)):
            eventually(lambda: store.read("warm") is None)
            began = time.perf_counter()
            with pytest.raises(FeaturesUnavailable) as caught:
                store.read("42", began + given_s)
            assert type(caught.value) is kind
            assert time.perf_counter() - began >= given_s
        with pytest.raises(FeaturesLate, match="no time is left"):
            store.read("42", time.perf_counter() - 1)
        store.close()


@pytest.mark.slow
class TestWaysIn:
    def test_a_password_is_accepted(self, server: Valkey) -> None:
        store = RedisStore(url_of(server), timeout_ms=1_000)
        assert store.read("42") == ROW_42
        assert store.read("43") is None
        store.close()
        assert store.read("42") == ROW_42
        store.close()

    @pytest.mark.parametrize(("entry", "code"), [("", "NOAUTH"), (":hunter2@", "WRONGPASS")])
    def test_a_wrong_password_is_reported_and_not_shown(self, entry: str, code: str, server: Valkey) -> None:
        store = RedisStore(f"redis://{entry}127.0.0.1:{server.port}")
        with pytest.raises(
            FeaturesUnavailable, match=f"127.0.0.1:{server.port}: it answers {code}"
        ) as caught:
            store.read("42")
        assert "hunter2" not in str(caught.value)
        store.close()

    def test_a_user_with_read_permission_suffices(self, server: Valkey) -> None:
        with server.client() as client:
            client.execute_command("ACL SETUSER", "shop", "on", ">word", "~*", "+ping", "+hmget")
        store = RedisStore(f"redis://shop:word@127.0.0.1:{server.port}/0")
        assert store.read("42") == ROW_42
        store.close()

    def test_a_database_number_is_honoured(self, server: Valkey) -> None:
        store = RedisStore(url_of(server).removesuffix("0") + "3")
        assert store.read("42") is None
        store.close()

    def test_a_sentinel_failover_is_followed(self, server: Valkey, tmp_path: Path) -> None:
        """The master is killed: the sentinel promotes the replica, and the store follows."""
        replica_of = ("--save", "", "--replicaof", f"127.0.0.1 {server.port}", "--masterauth", PASSWORD)
        with server.client() as client:
            client.config_set("masterauth", PASSWORD)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor shop 127.0.0.1 {server.port} 1\n"
            f'sentinel auth-pass shop "{PASSWORD}"\n'
            "sentinel down-after-milliseconds shop 500\nsentinel failover-timeout shop 2000\n"
            "requirepass guard\n"
        )
        with (
            valkey_server(tmp_path / "replica", *replica_of, password=PASSWORD) as replica,
            valkey_server(tmp_path / "sentinel", str(config), "--sentinel", password="guard") as sentinel,
        ):
            with replica.client() as client:
                eventually(lambda: client.exists(entity_key("42") + b"checkout") == 1)
            with sentinel.client() as client:
                eventually(lambda: client.execute_command("SENTINEL MASTERS") != [])
                eventually(lambda: len(client.execute_command("SENTINEL REPLICAS", "shop")) == 1)
            url = f"redis+sentinel://:{QUOTED}@127.0.0.1:1,127.0.0.1:{sentinel.port}/shop/0"
            store = open_store(url + "?sentinel_password=guard")
            assert store.read("42") == ROW_42
            server.kill()
            rows = reads(store, 50)
            assert set(rows) == {"unavailable"}
            warm_up(store)
            with replica.client() as client:
                assert client.info("replication")["role"] == "master"
            store.close()


@pytest.fixture
def tls_proxy(server: Valkey, certificates: Path) -> Iterator[Proxy]:
    """The wheel's server is built without TLS: the proxy terminates TLS and requires a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    context.load_verify_locations(certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 reports a missing certificate to the client late
    with Proxy(("127.0.0.1", server.port), context) as proxy:
        yield proxy


@pytest.mark.slow
class TestTls:
    def test_mutual_tls_works_and_dripping_answers_end_in_time(
        self, tls_proxy: Proxy, certificates: Path
    ) -> None:
        parameters = f"ssl_ca_certs={certificates}/ca.pem&ssl_certfile={certificates}/cert.pem"
        parameters += f"&ssl_keyfile={certificates}/key.pem"
        store = RedisStore(f"rediss://:{QUOTED}@{tls_proxy.address}/0?{parameters}")
        warm_up(store)
        tls_proxy.drip = (1, 0.004)
        rows = reads(store, 10)
        assert rows == ["unavailable"] * 10
        tls_proxy.heal()
        warm_up(store)
        store.close()

    def test_a_server_with_an_untrusted_certificate_is_refused(self, tls_proxy: Proxy) -> None:
        store = RedisStore(f"rediss://:{QUOTED}@{tls_proxy.address}/0")
        with pytest.raises(FeaturesUnavailable, match="certificate verify failed"):
            store.read("42")
        store.close()

    def test_a_client_without_a_certificate_is_refused(self, tls_proxy: Proxy, certificates: Path) -> None:
        store = RedisStore(f"rediss://:{QUOTED}@{tls_proxy.address}/0?ssl_ca_certs={certificates}/ca.pem")
        with pytest.raises(FeaturesUnavailable):
            store.read("42")
        store.close()


# --------------------------------------------------------------------------------------------- rows


@pytest.mark.slow
def test_an_invalid_row_is_no_store_failure(server: Valkey) -> None:
    keys = {user: entity_key(user) + b"checkout" for user in ("list", "torn", "half")}
    with server.client() as client:
        client.set(keys["list"], b"no hash")
        client.hset(keys["torn"], mapping={HISTORY_FIELD: b"\x0a\x09abc", b"_ts:user_history": TIMESTAMP})
        client.hset(keys["half"], mapping={HISTORY_FIELD: proto(b"abc")})
    store = RedisStore(url_of(server), timeout_ms=1_000)
    for user_id in ("list", "torn", "\ud800"):
        with pytest.raises(RowInvalid):
            store.read(user_id)
    assert store.read("half") is None
    assert store.read("42") == ROW_42
    store.close()


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.slow
class TestFaults:
    @pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
    def test_a_frozen_or_killed_server_blocks_no_read_and_is_found_again(
        self, fault: signal.Signals, server: Valkey
    ) -> None:
        store = open_store(url_of(server))
        assert isinstance(store, GuardedStore)
        warm_up(store)
        server.process.send_signal(fault)
        time.sleep(0.1)
        rows = reads(store, 200)
        assert rows == ["unavailable"] * 200
        assert store._breaker.is_open
        if fault == signal.SIGSTOP:
            server.process.send_signal(signal.SIGCONT)
        else:
            server.restart()
        eventually(lambda: reads(store, 1) in ([ROW_42], [None]))
        store.close()

    def test_a_restart_between_two_reads_fails_no_read(self, server: Valkey) -> None:
        store = RedisStore(url_of(server), timeout_ms=1_000)
        assert store.read("42") == ROW_42
        server.restart()
        assert store.read("42") is None, "it kept nothing, but it answered"
        store.close()

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda proxy: setattr(proxy, "latency_s", lambda: 0.2),
            lambda proxy: setattr(proxy, "latency_s", lambda: 5.0),
            lambda proxy: setattr(proxy, "drip", (1, 0.004)),
            lambda proxy: setattr(proxy, "limit_bytes", 3),
            lambda proxy: setattr(proxy, "frozen", True),
            lambda proxy: (proxy.refuse(), proxy.reset_peer()),
        ],
        ids=["200 ms late", "5 s late", "drips", "half answers", "accepts and never answers", "refuses"],
    )
    def test_a_corrupt_answer_is_dropped_in_time_without_open_sockets(
        self, spoil: Callable[[Proxy], None], proxy: Proxy
    ) -> None:
        store = RedisStore(url_of(proxy))

        async def read() -> UserRow | str | None:
            try:
                return await store.fetch("42")
            except FeaturesUnavailable:
                return "unavailable"

        async def spoilt_and_healed() -> None:
            while await read() != ROW_42:
                pass
            spoil(proxy)
            before = len(os.listdir("/proc/self/fd"))
            assert [await read() for _ in range(60)] == ["unavailable"] * 60
            # A connection being opened fails within half a second; the proxy's own ends are in this process.
            proxy.reset_peer()
            while len(os.listdir("/proc/self/fd")) > before + 3:
                await asyncio.sleep(0.01)
            proxy.heal()
            if proxy._listener.fileno() < 0:
                proxy.listen()
            while await read() != ROW_42:
                pass
            await store.aclose()

        asyncio.run(asyncio.wait_for(spoilt_and_healed(), 60))

    def test_the_first_read_has_time_for_a_slow_connection(self, proxy: Proxy) -> None:
        """The warm-up, before which no endpoint is ready; the reads after it keep to their time-out."""
        proxy.latency_s = lambda: 0.03
        store = RedisStore(url_of(proxy))
        assert store.read("42") == ROW_42
        with pytest.raises(FeaturesUnavailable, match="no answer in 5 ms"):
            store.read("42")
        store.close()
