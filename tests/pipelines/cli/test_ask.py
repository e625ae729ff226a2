"""`reco recommend` on the toy champion."""

import json
from pathlib import Path

import pytest

from serving.release.champion import read_champion
from tests.pipelines.cli.conftest import answered, reco


@pytest.mark.slow
def test_three_baskets_get_three_answers(home: Path) -> None:
    common = ["recommend", "--at", "2024-06-12T10:00:00Z", "--output", "json", "-k", "5"]
    answers = [
        answered(reco(home, *common, "--user", user, "--basket", basket))
        for user, basket in (
            ("user-001", "item-000,item-002"),
            ("user-002", "item-010"),
            ("nobody", "item-030,item-031"),
        )
    ]
    shown = [tuple(item["item_id"] for item in answer["items"]) for answer in answers]
    assert len(set(shown)) == 3
    assert not {"item-000", "item-002"} & set(shown[0])
    assert [answer["degraded"] for answer in answers] == [False, False, False]
    assert {answer["bundle_id"] for answer in answers} == {read_champion(home).bundle_id}


@pytest.mark.slow
def test_the_table_names_items_source_and_reason(home: Path) -> None:
    done = reco(home, "recommend", "--basket", "item-000", "-k", "2")
    head, first, _, notes = done.output.splitlines()
    assert head.split() == ["#", "item", "what", "score", "source", "reason"]
    assert first.split()[1].startswith("item-")
    assert notes.startswith(f"bundle {read_champion(home).bundle_id}, rung full, ")


@pytest.mark.slow
def test_a_profile_retrieves_other_candidates(home: Path) -> None:
    common = ["recommend", "--basket", "item-000", "--at", "2024-06-12T10:00:00Z", "--output", "json"]
    usual, dear = (answered(reco(home, *common, "--profile", name)) for name in ("default", "premium"))
    assert {i["item_id"] for i in dear["items"]} != {i["item_id"] for i in usual["items"]}
    refused = reco(home, *common, "--profile", "gold")
    assert refused.exit_code == 2
    assert "profile must be one of default, clearance, premium" in refused.stderr


@pytest.mark.slow
def test_a_file_of_requests_is_answered_line_by_line(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"basket": ["item-000"], "k": 1}\n{"basket": 3}\n')
    done = reco(home, "recommend", "--requests", str(file))
    assert done.exit_code == 1, "one line was no request"
    good, bad = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(good["items"]) == 1
    assert bad["line"] == 2
    assert "1 lines are invalid requests" in done.stderr
