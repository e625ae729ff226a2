"""The command: its conventions without training anything, its answers on the toy champion."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from components.gate import GateFailed
from components.home import Champion, Conflict, NoChampion, read_champion, write_champion
from components.registry import RegistryUnreachable
from feature_repo.events import EventsInvalid
from pipelines.cli import exit_code, main
from serving.bundle import read_manifest
from serving.errors import BundleInvalid, InvalidRequest
from serving.settings import SettingInvalid


def reco(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *arguments])


@pytest.fixture(scope="module")
def home(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose champion is the toy bundle; its online store is the one the line wrote."""
    home = tmp_path_factory.mktemp("home")
    (home / "bundles").mkdir()
    (home / "bundles" / "toy").symlink_to(toy_line / "evaluated")
    (home / "online_store.db").symlink_to(toy_line / "home" / "online_store.db")
    manifest = read_manifest(toy_line / "evaluated")
    write_champion(
        home, Champion(manifest["bundle_id"], "1", "toy", "bundles/toy", manifest["cut"], "2026-01-01")
    )
    return home


# ----------------------------------------------------------------------------------------- conventions


def test_help_lists_the_commands_in_the_order_of_use(tmp_path: Path) -> None:
    said = reco(tmp_path, "--help").output
    order = ["run", "compile", "submit", "models", "promote", "serve", "recommend", "drift", "doctor"]
    places = [said.index(f"\n  {name} ") for name in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_explains_itself_in_one_line_and_takes_the_common_options(name: str) -> None:
    said = CliRunner().invoke(main, [name, "--help"]).output
    assert len((main.commands[name].help or "").splitlines()[0]) < 100
    if name != "bench":
        assert {"--home", "--output", "--debug"} <= set(said.split())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateFailed("ndcg_at_10", 0.1, 0.2, "floor"), 1),
        (BundleInvalid("x"), 1),
        (EventsInvalid("x"), 1),
        (NoChampion("x"), 2),
        (SettingInvalid("x"), 2),
        (InvalidRequest("x"), 2),
        (ValueError("x"), 2),
        (RegistryUnreachable("x"), 3),
        (PermissionError("x"), 3),
        (Conflict("x"), 4),
        (ZeroDivisionError("x"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_an_error_means_to_the_caller(error: Exception, code: int | None) -> None:
    """0 done, 1 a check said no, 2 wrong usage, 3 something is unreachable, 4 conflict; None: a bug."""
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu"], "did you mean 'run'"),
        (["run", "--data", "toi"], "did you mean 'toy'"),
        (["run", "--train-until", "tomorrow"], "'tomorrow' is no date"),
        (["run", "--only", "train-ranker"], "--only needs --resume"),
        (["run", "--resume", "nothing"], "none yet: start one with `reco run`"),
        (["run", "--data", "toy", "--param", "ranker_params.epochs"], "ranker_params.epochs"),
        (["run", "--data", "toy", "--param", "ranker_parms.epochs=1"], "did you mean 'ranker_params'"),
        (["submit", "--host", "http://127.0.0.1:1"], "needs --tracking-uri http"),
        (["recommend", "--basket", "1"], "has no champion"),
        (["serve"], "has no champion"),
        (["drift"], "has no champion"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_two_and_says_how_to_mend_it(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = reco(tmp_path / "home", *arguments)
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "home").exists(), "a command that did nothing left something behind"


def test_no_runs_is_an_answer(tmp_path: Path) -> None:
    done = reco(tmp_path, "runs")
    assert (done.exit_code, done.output) == (0, "no runs yet: reco run\n")
    assert json.loads(reco(tmp_path, "runs", "--output", "json").output) == []


# ---------------------------------------------------------------------------------------- the toy champion


def answered(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


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
def test_a_file_of_requests_is_answered_line_by_line(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"basket": ["item-000"], "k": 1}\n{"basket": 3}\n')
    done = reco(home, "recommend", "--requests", str(file))
    assert done.exit_code == 1, "one line was no request"
    good, bad = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(good["items"]) == 1
    assert bad["line"] == 2
    assert "1 lines were no requests" in done.stderr


@pytest.mark.slow
def test_an_empty_log_is_one_line_not_a_table(home: Path) -> None:
    done = reco(home, "drift", "--quick")
    assert done.exit_code == 0
    assert done.output.startswith("insufficient_data: ")
    assert len(done.output.splitlines()) == 1


@pytest.mark.slow
def test_drift_against_another_stretch_of_the_same_data(home: Path, toy_line: Path) -> None:
    """The toy shop's weeks before the cut are alike; against themselves nothing has moved at all."""
    place = str(toy_line / "dataset")
    stretch = ["2024-03-01", "2024-04-01"]
    same = ["--from", stretch[0], "--until", stretch[1]]
    reference = ["--reference-from", stretch[0], "--reference-until", stretch[1]]
    verdict = answered(reco(home, "drift", "--quick", "--data", place, *same, *reference, "--output", "json"))
    assert verdict["status"] == "ok"
    assert {column["psi"] for column in verdict["columns"]} == {0.0}
    assert verdict["compared"] == "purchases with those of another window"


@pytest.mark.slow
def test_a_window_upside_down_is_wrong_usage(home: Path, toy_line: Path) -> None:
    window = ["--from", "2024-04-01", "--until", "2024-03-01"]
    done = reco(home, "drift", "--data", str(toy_line / "dataset"), *window)
    assert done.exit_code == 2
    assert "2024-03-01" in done.output


@pytest.mark.slow
def test_the_pipeline_is_written_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "training.yaml"
    done = answered(reco(tmp_path, "compile", "--file", str(file), "--output", "json"))
    assert done == {"file": str(file), "steps": 12}
    assert file.read_text().startswith("# PIPELINE DEFINITION")


@pytest.mark.slow
def test_the_doctor_finds_the_champion_and_a_flipped_byte(home: Path, tmp_path: Path) -> None:
    import shutil

    found = {f["name"]: f for f in json.loads(reco(home, "doctor", "--output", "json").stdout)}
    assert found["champion"]["status"] == "ok"
    broken = tmp_path / "broken"
    shutil.copytree(home, broken)
    graph = broken / "bundles" / "toy" / "ranker.onnx"
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    done = reco(broken, "doctor")
    assert done.exit_code == 1
    assert "ranker.onnx" in done.output
