"""The command: its conventions without training anything, its answers on the toy champion."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from components.data.ingest_events import ingest_events
from components.home import (
    Champion,
    Conflict,
    NoChampion,
    Running,
    announced,
    locked,
    read_champion,
    write_champion,
)
from components.release.gate import GateFailed
from components.release.registry import Registry, RegistryUnreachable
from feature_repo.events import EventsInvalid
from monitoring.verdict import DriftVerdict
from monitoring.windows import Window
from pipelines.cli.shell import Context, _dataset, _newest_data, exit_code, main
from pipelines.run.arguments import ArgumentsInvalid
from pipelines.run.local_run import StepFailed
from pipelines.run.runs import Run, new_run
from pipelines.run.submit import Submitted
from serving.errors import BundleInvalid, InvalidRequest
from serving.release.bundle import read_manifest
from serving.settings import SettingInvalid
from serving.shop.fact_store import open_fact_store


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--port", "70000"), "70000 is not in the range"),
        (("up", "--broker-port", "-1"), "-1 is not in the range"),
        (("serve", "--http-port", "70000"), "70000 is not in the range"),
        (("up", "--replay", "toy", "--speed", "-1"), "--speed is -1.0, expected seconds of data per second"),
        (("up", "--replay", "toy", "--speed", "nan"), "--speed is nan"),
        (("up", "--replay", "toy", "--from", "yesterday"), "--from 'yesterday' is no time"),
        (("replay-events", "--seed", "-1"), "'--seed': -1 is not in the range"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = reco(tmp_path, *arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_commands_in_the_order_of_use(tmp_path: Path) -> None:
    said = reco(tmp_path, "--help").output
    order = ["run", "compile", "submit", "models", "promote", "serve", "recommend", "drift", "doctor"]
    places = [said.index(f"\n  {name} ") for name in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_explains_itself_in_one_line_and_takes_the_common_options(name: str) -> None:
    said = CliRunner().invoke(main, [name, "--help"]).output
    assert len((main.commands[name].help or "").splitlines()[0]) < 100
    if not isinstance(main.commands[name], click.Group):
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
        (["run", "--resume", "last", "--data", "complete-journey"], "--data means nothing with --resume"),
        (["run", "--resume", "last", "--train-until", "2024-01-01"], "--train-until means nothing"),
        (["run", "--resume", "last", "--fast"], "--fast means nothing"),
        (["run", "--resume", "last", "--param", "ranker_params.epochs=1"], "--param means nothing"),
        (["run", "--resume", "last", "--tracking-uri", ""], "--tracking-uri means nothing"),
        (["run", "--resume", "last", "--model-name", "other"], "--model-name means nothing"),
        (["submit", "--host", "http://127.0.0.1:1"], "needs --tracking-uri http"),
        (
            ["submit", "--host", "http://127.0.0.1:1", "--tracking-uri", "http://127.0.0.1:1"],
            "they end with the pod that wrote them",
        ),
        (
            ["run", "--data", "toy", "--param", "online_store=http://cache"],
            "is no scheme of an online store in Redis",
        ),
        (
            [
                "submit",
                "--host",
                "http://127.0.0.1:1",
                "--tracking-uri",
                "http://127.0.0.1:1",
                "--volume",
                "reco",
                "--online-store",
                "rediss+sentinel://cache/shop",
            ],
            "through TLS",
        ),
        (["compile", "--state", "/data"], "--state needs --volume"),
        (["compile", "--volume", "reco", "--state", "data"], "it begins with /"),
        (["models", "--tracking-uri", "ftp://x"], "tracking URI with scheme 'ftp'"),
        (["promote", "--gate", "over_blend"], "over_blend"),
        (["recommend", "--basket", "1"], "has no champion"),
        (["serve"], "has no champion"),
        (["run", "--data", ""], "--data is empty"),
        (
            ["run", "--data", "toy", "--param", "ranker_params.dlrm.epochs=-1"],
            "epochs is -1, expected more than 0",
        ),
        (["promote", "--gate", "over_blend"], "--gate 'over_blend': expected NAME=VALUE"),
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


# -------------------------------------------------------------------------------------- release, by exit code


@pytest.fixture(scope="module")
def empty_registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new MLflow database takes seconds of migrations: made once, copied for each test."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    Registry(f"sqlite:///{database}", "checkout-recommender").versions()
    return database


@pytest.mark.parametrize(
    "arguments", [["models"], ["models", "show", "2"], ["promote"], ["rollback"]], ids=" ".join
)
@pytest.mark.parametrize("left", [None, b""], ids=["nothing", "an empty file"])
def test_where_no_registry_is_none_is_made(tmp_path: Path, arguments: list[str], left: bytes | None) -> None:
    database = tmp_path / "lost" / "mlflow.db"
    if left is not None:
        database.parent.mkdir()
        database.write_bytes(left)
    done = reco(tmp_path / "home", *arguments, "--tracking-uri", f"sqlite:///{database}")
    assert done.exit_code == 2
    assert f"{database} is no registry: train with `reco run`" in done.output
    assert (database.read_bytes() if database.exists() else None) == left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["models"], 0, "no versions yet"),
        (["models", "show", "3"], 2, "has no version '3'"),
        (["promote"], 2, "has no version 'challenger'"),
        (["promote", "--gate", "over_everything=1"], 2, "over_everything"),
        (["promote", "--model-name", "A B"], 2, "expected lower-case letters"),
        (["rollback"], 2, "there is nothing to go back to"),
        (["models", "--tracking-uri", "http://127.0.0.1:9"], 3, "no registry at"),
        (["promote", "--tracking-uri", "http://127.0.0.1:9"], 3, "no registry at"),
        (["rollback", "--tracking-uri", "http://127.0.0.1:9"], 3, "no registry at"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_release_commands_keep_the_exit_codes(
    tmp_path: Path, empty_registry: Path, arguments: list[str], code: int, says: str
) -> None:
    shutil.copyfile(empty_registry, tmp_path / "mlflow.db")
    done = reco(tmp_path, *arguments)
    assert done.exit_code == code, done.output
    assert says in done.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_registry_that_is_no_database_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("hello" * 300)
    done = reco(tmp_path, "models")
    assert done.exit_code == 3
    assert "file is not a database" in done.output


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_two_who_release_at_once_are_a_conflict(tmp_path: Path, command: str) -> None:
    (tmp_path / "mlflow.db").write_text("not read: the lock comes first")
    with locked(tmp_path / "promote.lock", "promoting checkout-recommender 7"):
        done = reco(tmp_path, command)
    assert done.exit_code == 4
    assert "is promoting checkout-recommender 7" in done.output


# ------------------------------------------------------------------------------------------- the online store


@pytest.mark.parametrize(
    ("served", "params", "filled"),
    [
        ("", [], ""),
        ("redis://:word@cache:6379/1", [], "redis://:word@cache:6379/1"),
        ("rediss://cache", [], "rediss://cache"),
        ("sqlite:///elsewhere.db", [], ""),
        ("memory:", [], ""),
        ("redis://cache", ["online_store=redis://other"], "redis://other"),
        ("redis://cache", ["online_store="], ""),
    ],
)
def test_a_run_fills_the_redis_that_is_served_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: str, params: list[str], filled: str
) -> None:
    asked: list[dict[str, Any]] = []

    def start(home: Path, pipeline: str, spec: object, arguments: dict[str, Any], *_: object) -> Run:
        asked.append(arguments)
        return new_run(home, pipeline, arguments, ["promote-bundle"])

    monkeypatch.setattr("pipelines.run.local_run.start_run", start)
    monkeypatch.setenv("RECO_STORE_URL", served)
    done = reco(tmp_path, "run", "--data", "toy", *(word for one in params for word in ("--param", one)))
    assert done.exit_code == 0, done.output
    assert [arguments["online_store"] for arguments in asked] == [filled]


def test_a_run_beside_reco_up_fills_its_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def start(home: Path, pipeline: str, spec: object, arguments: dict[str, Any], *_: object) -> Run:
        asked.append(arguments)
        return new_run(home, pipeline, arguments, ["promote-bundle"])

    monkeypatch.setattr("pipelines.run.local_run.start_run", start)
    running = Running("redis://127.0.0.1:16379/0", "127.0.0.1:19092", True)
    with locked(tmp_path / "up.lock", "running `reco up`"), announced(tmp_path, running):
        assert reco(tmp_path, "run", "--data", "toy").exit_code == 0
    assert [arguments["online_store"] for arguments in asked] == ["redis://127.0.0.1:16379/0"]


def test_a_submission_fills_the_redis_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def submit(pipeline: object, host: str, arguments: dict[str, Any], *_: object) -> Submitted:
        asked.append(arguments)
        return Submitted("r1", "url", "p1", "v1", "PENDING")

    monkeypatch.setattr("pipelines.run.submit.submit_pipeline", submit)
    monkeypatch.setenv("RECO_STORE_URL", "redis://of-this-machine")
    common = ["submit", "--host", "http://kfp", "--tracking-uri", "http://mlflow", "--volume", "reco"]
    for more in ([], ["--online-store", "redis://cache:6379"]):
        done = reco(tmp_path, *common, *more)
        assert done.exit_code == 0, done.output
    assert [arguments["online_store"] for arguments in asked] == ["", "redis://cache:6379"]


# -------------------------------------------------------------------------------------- drift and retraining


@pytest.fixture
def drifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose champion `good` was promoted by the middle one of three runs; the log has drifted."""
    home = tmp_path / "home"
    for bundle_id, data in (("older", "toy"), ("good", "/shop"), ("refused", "complete-journey")):
        run = new_run(home, "training", {"data": data, "train_until": "2024-01-01"}, ["promote-bundle"], True)
        run.step("promote-bundle").status = "failed" if bundle_id == "refused" else "done"
        run.step("promote-bundle").parameters = (
            {}
            if bundle_id == "refused"
            else {"Output": {"bundle_id": bundle_id, "version": "1", "changed": True}}
        )
        run.save()
    write_champion(home, Champion("good", "2", "reco", "bundles/good", "2024-01-01", "2024-01-02"))
    verdict = DriftVerdict("drifted", "category PSI 0.3", "answers", Window(), Window(), ())
    monkeypatch.setattr("monitoring.drift.drift_of_log", lambda *_: verdict)
    return home


def retrained(home: Path) -> tuple[int, dict[str, Any]]:
    done = reco(home, "drift", "--quick", "--retrain", "--output", "json")
    return done.exit_code, json.loads(done.stdout)["retrain"] if done.stdout else {"said": done.output}


def test_retraining_asks_for_what_the_champion_was_asked_for(
    drifted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def start(home: Path, given: dict[str, Any], fast: bool, *_: object) -> Run:
        asked.append((given, fast))
        return new_run(home, "training", given, ["promote-bundle"])

    monkeypatch.setattr("pipelines.cli.shell.start_training", start)
    assert retrained(drifted)[1]["started"]
    assert asked == [({"data": "/shop"}, True)]
    code, again = retrained(drifted)
    assert (code, again["started"], "the next may start at" in again["said"]) == (1, False, True)


def test_a_champion_that_no_run_made_is_not_retrained_by_guess(drifted: Path) -> None:
    write_champion(drifted, replace(read_champion(drifted), bundle_id="stranger"))
    code, outcome = retrained(drifted)
    assert (code, outcome["started"]) == (1, False)
    assert "no run recorded here promoted the champion" in outcome["said"]
    assert "reco run --data" in outcome["said"]
    assert not (drifted / "retrain.json").exists(), "nothing was started: the next try is free"


def test_a_run_that_could_not_begin_gives_its_turn_back(
    drifted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(home: Path, *_: object) -> Run:
        new_run(home, "training", {}, [])  # somebody else's
        raise Conflict("process 7 is running a pipeline")

    monkeypatch.setattr("pipelines.cli.shell.start_training", refuse)
    assert retrained(drifted)[0] == 4
    assert not (drifted / "retrain.json").exists()

    def stop(*_: object) -> Run:
        raise ArgumentsInvalid("the pipeline has no parameter 'x'")

    monkeypatch.setattr("pipelines.cli.shell.start_training", stop)
    assert retrained(drifted)[0] == 2
    assert not (drifted / "retrain.json").exists()


def test_a_run_that_began_keeps_its_turn(drifted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(home: Path, *_: object) -> Run:
        run = new_run(home, "training", {}, ["promote-bundle"])
        raise StepFailed(run, "promote-bundle", "GateFailed: ndcg_at_10 is 0.1", 1)

    monkeypatch.setattr("pipelines.cli.shell.start_training", fail)
    code, outcome = retrained(drifted)
    assert (code, outcome["started"], outcome["promoted"]) == (1, True, False)
    assert (drifted / "retrain.json").exists()


def test_a_folder_is_read_anew_each_time(tmp_path: Path) -> None:
    """A run's data set is what the folder held then; rows were appended since."""
    shop = tmp_path / "shop"
    shop.mkdir()
    lines = ["user_id,basket_id,item_id,at"]
    lines += [
        f"u{day % 3},b{day},i{day % 5},2024-{1 + day // 28:02d}-{1 + day % 28:02d}" for day in range(84)
    ]
    (shop / "events.csv").write_text("\n".join(lines) + "\n")
    home = tmp_path / "home"
    run = new_run(home, "training", {"data": str(shop)}, ["ingest-events"])
    ingest_events(str(shop), run.artifacts("ingest-events") / "dataset")
    context = Context(home, "text")
    place = _dataset(context, str(shop))
    assert place == home / "datasets" / "shop"
    with (shop / "events.csv").open("a") as stream:
        stream.write("u1,late,i1,2024-04-02\n")
    assert _dataset(context, str(shop)) == place
    assert json.loads((place / "manifest.json").read_bytes())["rows"] == 85
    assert _dataset(context, str(place)) == place, "a checked data set is taken as it is"
    assert _dataset(context, _newest_data(context)) == run.artifacts("ingest-events") / "dataset"


def test_a_data_set_with_a_name_is_taken_from_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, "training", {"data": "toy"}, ["ingest-events"])
    held = run.artifacts("ingest-events") / "dataset"
    held.mkdir(parents=True)
    (held / "manifest.json").write_text("{}")
    assert _dataset(Context(tmp_path, "text"), "toy") == held


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
def test_a_profile_finds_other_candidates(home: Path) -> None:
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
    assert done == {"file": str(file), "steps": 21}
    assert file.read_text().startswith("# PIPELINE DEFINITION")
    answered(reco(tmp_path, "compile", "--file", str(file), "--volume", "shop", "--output", "json"))
    assert file.read_text().count("mountPath: /mnt/reco\n") == 21


@pytest.mark.slow
def test_the_doctor_finds_the_champion_and_a_flipped_byte(home: Path, tmp_path: Path) -> None:
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


# --------------------------------------------------------------------------------------------- facts


PRICE = (
    '{"fact_id": "f1", "fact": "price", "item_id": "item-001", "value": 2.5, "at": "2024-06-01T00:00:00Z"}'
)
SOLD_OUT = PRICE.replace("price", "stock").replace("2.5", "0")


def standing(home: Path) -> list[tuple[str, Any]]:
    store = open_fact_store(f"sqlite:///{home}/facts.db")
    facts, _ = store.changed_since(0)
    store.close()
    return [(fact.fact, fact.value) for fact in facts]


def test_facts_from_a_file_stand_in_the_store_beside_the_users(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text(f"{PRICE}\n\n{SOLD_OUT}\n")
    checked = reco(tmp_path, "facts", str(file), "--dry-run")
    assert (checked.exit_code, standing(tmp_path)) == (0, [])
    assert "2 facts keep the contract; nothing was written" in checked.output
    written = reco(tmp_path, "facts", str(file), "--output", "json")
    assert json.loads(written.output) == {"facts": 2, "refused": [], "changed": 2}
    assert standing(tmp_path) == [("price", 2.5), ("stock", 0.0)]
    assert "2 facts read, 0 changed what stands" in reco(tmp_path, "facts", str(file)).output


def test_one_bad_line_keeps_the_whole_file_out_and_is_told_by_number(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_text("\n".join([PRICE, "", SOLD_OUT.replace("stock", "stok"), "{"]))
    refused = reco(tmp_path, "facts", str(file))
    assert (refused.exit_code, standing(tmp_path)) == (1, [])
    assert "line 3: fact is not one of price, stock" in refused.output
    assert "line 4: not JSON" in refused.output
    assert "2 lines are no facts: nothing was written" in refused.output


def test_a_fact_store_that_cannot_be_written_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "facts.db").write_bytes(b"no database" * 100)
    (tmp_path / "facts.jsonl").write_text(PRICE)
    refused = reco(tmp_path, "facts", str(tmp_path / "facts.jsonl"))
    assert refused.exit_code == 3
    assert "facts.db cannot be used" in refused.output


@pytest.mark.slow
def test_what_the_file_says_is_honoured_by_the_next_answer(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "shop"
    shutil.copytree(home, place, symlinks=True)
    ask = ("recommend", "--basket", "item-002", "--at", "2024-06-10T00:00:00Z", "--output", "json")
    first, second = (item["item_id"] for item in json.loads(reco(place, *ask).stdout)["items"][:2])
    file = tmp_path / "facts.jsonl"
    file.write_text(SOLD_OUT.replace("item-001", first) + "\n" + PRICE.replace("item-001", second))
    assert reco(place, "facts", str(file)).exit_code == 0
    items = json.loads(reco(place, *ask).stdout)["items"]
    assert first not in {item["item_id"] for item in items}
    assert {item["item_id"]: item["price"] for item in items if "price" in item} == {second: 2.5}


def test_a_shopper_is_forgotten_without_a_word_of_who_it_was(tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    coupon = {**json.loads(PRICE), "fact": "coupon", "value": "TEA", "user_id": "somebody"}
    file.write_text(json.dumps(coupon))
    reco(tmp_path, "facts", str(file))
    counted = reco(tmp_path, "forget", "somebody", "--dry-run")
    assert counted.exit_code == 0
    assert counted.output.startswith("nothing was changed; this would go")
    assert not (tmp_path / "forgotten.json").exists()
    told = reco(tmp_path, "forget", "somebody", "--output", "json")
    assert told.exit_code == 0
    assert "somebody" not in told.output + counted.output
    assert json.loads(told.output)["removed"] == 1
    assert "0 changed what stands" in reco(tmp_path, "facts", str(file)).output  # it does not come back
    assert reco(tmp_path, "forget", "").exit_code == 2


@pytest.mark.slow
def test_a_second_terminal_uses_the_store_of_reco_up(
    tmp_path: Path, valkey: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    from serving.stores.feast_layout import HISTORY_FIELD, PROJECT, entity_key

    row = entity_key("somebody") + PROJECT.encode()
    (tmp_path / "store").mkdir()
    (tmp_path / "facts.jsonl").write_text(PRICE)
    with redis.Redis.from_url(valkey[0]) as client:
        client.hset(row, HISTORY_FIELD, b"whatever")
        alone = reco(tmp_path, "forget", "somebody")
        assert (alone.exit_code, client.exists(row)) == (3, 1)
        assert "start `reco up` and repeat" in alone.output
        running = Running(valkey[0], "127.0.0.1:1", True)
        with locked(tmp_path / "up.lock", "running `reco up`"), announced(tmp_path, running):
            assert reco(tmp_path, "forget", "somebody").exit_code == 0
            assert reco(tmp_path, "facts", str(tmp_path / "facts.jsonl")).exit_code == 0
        assert not client.exists(row)
        assert len(open_fact_store(valkey[0]).changed_since(0)[0]) == 1
        assert standing(tmp_path) == []


def test_a_store_that_is_away_makes_forgetting_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECO_STORE_URL", "redis://127.0.0.1:1/0")
    told = reco(tmp_path, "forget", "somebody")
    assert told.exit_code == 3
    assert "repeat when it is back" in told.output
