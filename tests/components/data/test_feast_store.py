"""One URL says where the online store is, to Feast as to the endpoint; opening it twice changes nothing."""

from pathlib import Path

import pytest

from components.data.feast_store import open_feature_store, quiet_feast, redis_settings


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_url_becomes_feasts_notation() -> None:
    said = redis_settings("rediss://shop:p%40s%2Cs@cache:6380/2?ssl_ca_certs=/ca.pem")
    assert said.keys() == {"connection_string"}
    from feast.infra.online_stores.redis import RedisOnlineStore

    nodes, options = RedisOnlineStore._parse_connection_string(said["connection_string"])
    assert nodes == [{"host": "cache", "port": "6380"}]
    assert options == {
        "db": 2, "username": "shop", "password": "p@s,s", "ssl": True, "ssl_check_hostname": True,
        "ssl_ca_certs": "/ca.pem", "socket_timeout": 5, "socket_connect_timeout": 5, "retry": None,
    }  # fmt: skip
    said = redis_settings("redis+sentinel://:1234@a:1,b:2/shop?sentinel_password=guard")
    assert (said["redis_type"], said["sentinel_master"]) == ("redis_sentinel", "shop")
    nodes, options = RedisOnlineStore._parse_connection_string(said["connection_string"])
    assert nodes == [{"host": "a", "port": "1"}, {"host": "b", "port": "2"}]
    assert options["password"] == "1234", "no number"
    assert options["sentinel_kwargs"] == {"password": "guard"}
    said = redis_settings("redis+cluster://a:1,b:2")
    assert said["redis_type"] == "redis_cluster"
    assert (
        not {"db", "retry"} & RedisOnlineStore._parse_connection_string(said["connection_string"])[1].keys()
    )


def test_a_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECO_STORE_PASSWORD", "word")
    assert ',password="word"' in redis_settings("redis://cache")["connection_string"]


@pytest.mark.slow
def test_a_missing_store_is_created_and_an_existing_one_kept(tmp_path: Path) -> None:
    with quiet_feast():
        first = open_feature_store(tmp_path / "home")
        views = {view.name for view in first.list_feature_views()}
        again = open_feature_store(tmp_path / "home", f"sqlite:///{tmp_path}/home/online_store.db")
        assert (
            {view.name for view in again.list_feature_views()} == views == {"user_history", "item_statistics"}
        )
        with pytest.raises(
            ValueError, match=r"is sqlite:///elsewhere.db, and runs and the stream fill no other"
        ):
            open_feature_store(tmp_path / "home", "sqlite:///elsewhere.db")
        (tmp_path / "link").symlink_to("home")
        open_feature_store(tmp_path / "link", f"sqlite:///{tmp_path}/home/../home/online_store.db")
    assert (tmp_path / "home" / "online_store.db").is_file()
