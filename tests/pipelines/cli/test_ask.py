"""Commands that answer and explain, on a small champion; `reco try` is in tests/docs/test_tutorial.py."""

import json
from pathlib import Path

import pytest

from serving.client.client import read_best_sellers
from serving.release.champion import read_champion
from tests.pipelines.cli.conftest import answered, reco

AT = "2017-12-05T18:30:00Z"


def test_three_baskets_get_three_answers(shop: Path) -> None:
    common = ["recommend", "--at", AT, "--output", "json", "-k", "5"]
    answers = [
        answered(reco(shop, *common, "--user", user, "--basket", basket))
        for user, basket in (("u1", "1000000,1000002"), ("u2", "1000010"), ("nobody", "1000030,1000031"))
    ]
    shown = [tuple(item["item_id"] for item in answer["items"]) for answer in answers]
    assert len(set(shown)) == 3
    assert not {"1000000", "1000002"} & set(shown[0])
    assert [answer["degraded"] for answer in answers] == [False, False, False]
    assert {answer["bundle_id"] for answer in answers} == {read_champion(shop).bundle_id}


def test_the_table_names_items_source_and_reason(shop: Path) -> None:
    done = reco(shop, "recommend", "--basket", "1000010", "-k", "2", "--at", AT)
    head, *rows, notes = done.stdout.splitlines()
    assert head.split() == ["#", "item", "what", "score", "source", "reason"]
    assert [row.split()[1].startswith("100") for row in rows] == [True, True]
    assert notes.startswith(f"bundle {read_champion(shop).bundle_id}, rung full, ")


def test_a_profile_retrieves_other_candidates(shop: Path) -> None:
    common = ["recommend", "--basket", "1000000", "--at", AT, "--output", "json"]
    usual, dear = (answered(reco(shop, *common, "--profile", name)) for name in ("default", "premium"))
    assert {i["item_id"] for i in dear["items"]} != {i["item_id"] for i in usual["items"]}
    refused = reco(shop, *common, "--profile", "gold")
    assert refused.exit_code == 2
    assert "profile must be one of default, premium" in refused.stderr


def test_a_file_of_requests_is_answered_line_by_line(shop: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"basket": ["1000000", "unknown"], "k": 1}\n{"basket": 3}\n')
    done = reco(shop, "recommend", "--requests", str(file))
    assert done.exit_code == 1, "one line was no request"
    good, bad = [json.loads(line) for line in done.stdout.splitlines()]
    assert (len(good["items"]), "name" in good["items"][0]) == (1, False)
    assert bad["line"] == 2
    assert "reco: 1 invalid request; the answers say why" in done.stderr


@pytest.mark.parametrize("command", [["recommend"], ["why", "1000000"]])
def test_an_invalid_question_is_refused_before_the_bundle_is_opened(
    shop: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("serving.answer.recommender.open_recommender", None)  # a call would be another error
    done = reco(shop, *command, "--at", "nope")
    assert (done.exit_code, "at must be an ISO 8601 time" in done.output) == (2, True)


@pytest.mark.parametrize(
    "command",
    [
        ["recommend", "--basket", "1000010,Type 4"],
        ["why", "type 4"],
        ["why", "1000010", "--basket", "tipe 4"],
    ],
    ids=" ".join,
)
def test_an_unknown_item_is_refused_with_the_one_that_was_meant(shop: Path, command: list[str]) -> None:
    done = reco(shop, *command, "--at", AT)
    assert (done.exit_code, "did you mean 1000004 type 4?" in done.output) == (2, True)


@pytest.mark.parametrize(
    "question", [["recommend"], ["why", "1000000"], ["best-sellers", "-o", "best.json"]], ids=lambda q: q[0]
)
def test_an_unreadable_rules_file_is_refused(shop: Path, question: list[str]) -> None:
    """A command has no earlier rules: without any, it would show banned items."""
    rules = shop / "rules.yaml"
    try:
        rules.write_text("ban: [")
        done = reco(shop, *question)
    finally:
        rules.unlink()
    assert (done.exit_code, done.stdout) == (2, "")
    assert "rules.yaml: line 2: no YAML" in done.stderr
    assert "rules check" in done.stderr
    assert not Path("best.json").exists()


def test_an_answer_of_now_says_how_old_the_data_are(shop: Path) -> None:
    done = reco(shop, "recommend", "--user", "u1", "--basket", "1000010")
    assert done.exit_code == 0
    assert "asked for now: u1's newest data are " in done.stderr
    assert "add --at 2017-11-27T05:00:00Z" in done.stderr, "the time of the row"
    assert "the bundle's newest data are " in reco(shop, "recommend", "--basket", "1000010").stderr
    assert "asked for now" not in reco(shop, "recommend", "--basket", "1000010", "--at", AT).stderr


def test_an_unknown_shopper_or_store_is_said_beside_the_answer(shop: Path) -> None:
    common = ["recommend", "--basket", "1000010", "--at", AT, "--output", "json"]
    done = reco(shop, *common, "--user", "999", "--store", "store-9")
    assert answered(done)["items"]
    assert done.stderr.splitlines() == [
        "user 999 has no history here: the answer is that of a stranger",
        "store store-9 is not in the bundle: best sellers of all stores are used",
    ]
    assert reco(shop, *common, "--user", "u1", "--store", "store-1").stderr == ""
    assert reco(shop, *common).stderr == ""


def test_the_notes_read_an_unreachable_store_once(
    shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECO_STORE_URL", "redis://127.0.0.1:1/0")
    done = reco(shop, "recommend", "--basket", "1000010", "--user", "u1")
    assert "features_unavailable" in done.stdout
    assert (
        sum(said.startswith("answering without") for said in caplog.messages) == 2
    )  # the answer's, and theirs
    assert "the bundle's newest data are " in done.stderr


def test_items_are_found_by_words(shop: Path) -> None:
    found = answered(reco(shop, "items", "TYPE 4", "grocery", "--limit", "3", "--output", "json"))
    assert [row["item_id"] for row in found] == ["1000004", "1000016", "1000028"]
    assert set(found[0]) == {"item_id", "name", "category", "department", "price", "baskets"}
    for words in (["caviar"], ["type 3", "grocery"]):  # every type 3 is household
        nothing = reco(shop, "items", *words)
        assert (nothing.exit_code, nothing.stdout) == (1, "no such item\n")


def test_the_best_sellers_leave_out_banned_items(shop: Path, tmp_path: Path) -> None:
    rules, file = shop / "rules.yaml", tmp_path / "best_sellers.json"
    try:
        rules.write_text("ban:\n  - {name: recall, items: [1000000]}\n")
        done = reco(shop, "best-sellers", "-o", str(file))
    finally:
        rules.unlink()
    assert (done.exit_code, done.stdout) == (0, f"119 best sellers written to {file}\n")
    assert read_best_sellers(file)[:2] == ["1000001", "1000002"]


def test_no_best_sellers_are_written_while_the_facts_cannot_be_read(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recalled item would be shown by each till that cannot reach the endpoint."""
    monkeypatch.setenv("RECO_STORE_URL", "redis://127.0.0.1:1/0")
    done = reco(shop, "best-sellers", "-o", str(tmp_path / "best_sellers.json"))
    assert (done.exit_code, "the facts cannot be read" in done.stderr) == (3, True), done.output
    assert not list(tmp_path.iterdir())
