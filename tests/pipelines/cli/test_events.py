"""Facts from a file, and forgetting a shopper."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.home import Running, announced, locked
from serving.shop.fact_store import open_fact_store
from tests.feature_repo.stream.published_shop import write_note
from tests.pipelines.cli.conftest import PRICE, SOLD_OUT, reco, standing


def test_facts_from_a_file_are_written_to_the_store_beside_the_users(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text(f"{PRICE}\n\n{SOLD_OUT}\n")
    checked = reco(tmp_path, "facts", str(file), "--dry-run")
    assert (checked.exit_code, standing(tmp_path)) == (0, [])
    assert "2 valid facts; nothing was written" in checked.output
    written = reco(tmp_path, "facts", str(file), "--output", "json")
    assert json.loads(written.output) == {"facts": 2, "refused": [], "changed": 2}
    assert standing(tmp_path) == [("price", 2.5), ("stock", 0.0)]
    assert "2 facts read, 0 changed a stored value" in reco(tmp_path, "facts", str(file)).output


def test_items_that_the_champion_does_not_know_are_named(shop: Path, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    common = ["facts", str(file), "--dry-run", "--output", "json"]
    for items, said in (
        (
            ["1000000", "1000O00", "milk", "milk"],
            "2 items of the file not in the champion's bundle: 1000O00, milk\n",
        ),
        (
            [f"i{n}" for n in range(6)],
            "6 items of the file not in the champion's bundle: i0, i1, i2, i3, i4, …\n",
        ),
        (["1000000"], ""),
    ):
        file.write_text("\n".join(PRICE.replace("item-001", item) for item in items))
        done = reco(shop, *common)
        assert (json.loads(done.stdout)["facts"], done.stderr) == (len(items), said)


def test_facts_outlive_their_writer_beside_a_store_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECO_STORE_URL", "memory:")
    file = tmp_path / "facts.jsonl"
    file.write_text(f"{PRICE}\n")
    assert "1 fact read, 1 changed a stored value" in reco(tmp_path, "facts", str(file)).output
    assert "1 fact read, 0 changed a stored value" in reco(tmp_path, "facts", str(file)).output
    assert standing(tmp_path) == [("price", 2.5)]


def test_one_invalid_line_refuses_the_whole_file_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text("\n".join([PRICE, "", SOLD_OUT.replace("stock", "stok"), "{"]))
    refused = reco(tmp_path, "facts", str(file))
    assert (refused.exit_code, standing(tmp_path)) == (1, [])
    assert "line 3: fact is not one of price, stock" in refused.output
    assert "line 4: no fact: Input data was truncated" in refused.output
    assert "nothing was written; invalid lines: 2" in refused.output


def test_forgetting_a_shopper_does_not_print_the_user_id(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    coupon = {**json.loads(PRICE), "fact": "coupon", "value": "TEA", "user_id": "somebody"}
    file.write_text(json.dumps(coupon))
    reco(tmp_path, "facts", str(file))
    counted = reco(tmp_path, "forget", "somebody", "--dry-run")
    assert counted.exit_code == 0
    assert counted.output.startswith("nothing was changed\n")
    assert counted.output.splitlines()[1].split() == ["where", "what", "would", "remove", "state"]
    assert " done" not in counted.output
    assert not (tmp_path / "forgotten.json").exists()
    told = reco(tmp_path, "forget", "somebody", "--output", "json")
    assert told.exit_code == 0
    assert "somebody" not in told.output + counted.output
    assert json.loads(told.output)["removed"] == 1
    assert "0 changed a stored value" in reco(tmp_path, "facts", str(file)).output  # it is not restored
    assert reco(tmp_path, "forget", "").exit_code == 2


@pytest.mark.slow
def test_a_second_terminal_uses_the_store_of_reco_up(
    tmp_path: Path, valkey: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    from serving.stores.online_features import HISTORY_FIELD, PROJECT, entity_key

    row = entity_key("somebody") + PROJECT.encode()
    (tmp_path / "store").mkdir()
    (tmp_path / "facts.jsonl").write_text(PRICE)
    with redis.Redis.from_url(valkey[0]) as client:
        client.hset(row, HISTORY_FIELD, b"whatever")
        alone = reco(tmp_path, "forget", "somebody")
        assert (alone.exit_code, client.exists(row)) == (3, 1)
        assert " up` and repeat" in alone.output
        running = Running(valkey[0], "127.0.0.1:1", True)
        with locked(tmp_path / "up.lock", "running `reco up`"), announced(tmp_path, running):
            assert reco(tmp_path, "forget", "somebody").exit_code == 0
            assert reco(tmp_path, "facts", str(tmp_path / "facts.jsonl")).exit_code == 0
        assert not client.exists(row)
        assert len(open_fact_store(valkey[0]).changed_since(0)[0]) == 1
        assert standing(tmp_path) == []


def test_forgetting_with_an_unavailable_store_asks_to_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECO_STORE_URL", "redis://127.0.0.1:1/0")
    (tmp_path / "offline_store").mkdir()
    told = reco(tmp_path, "forget", "somebody")
    assert told.exit_code == 3
    assert "repeat when it is back" in told.output


@pytest.mark.slow
def test_a_replay_that_compared_nothing_is_no_success(home: Path, toy_line: Path, tmp_path: Path) -> None:
    place = tmp_path / "shop"
    shutil.copytree(home, place, symlinks=True)
    shutil.copytree(toy_line / "home" / "offline_store", place / "offline_store")
    write_note(place)
    done = reco(place, "replay")
    assert done.exit_code == 1
    assert "nothing to compare: what is written of the log holds no answer" in done.output


def test_a_refused_replay_makes_no_topics_and_starts_no_parts(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feature_repo.stream.kafka.create_topics", lambda settings: pytest.fail("topics"))
    for command, option in (("replay-events", "--data"), ("up", "--replay")):
        refused = reco(shop, command, option, "toy")
        assert refused.exit_code == 2
        assert f"{option} toy: the champion knows none of its 80 items" in refused.output
        assert not (shop / "up").exists()
