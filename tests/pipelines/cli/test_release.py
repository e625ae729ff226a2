"""Commands that release, by their exit codes."""

import json
import shutil
from pathlib import Path

import pytest

from components.home import command, default_tracking_uri, locked
from components.release.history import Promotion
from components.release.registry import Registry
from serving.release.manifest import read_manifest
from serving.release.signatures import check_signed
from tests.pipelines.cli.conftest import reco
from tests.serving.signed import sealed, write_keys


@pytest.mark.parametrize(
    "arguments", [["models"], ["models", "2"], ["promote"], ["rollback"], ["history"]], ids=" ".join
)
@pytest.mark.parametrize("left", [None, b""], ids=["nothing", "an empty file"])
def test_a_missing_registry_is_not_created(tmp_path: Path, arguments: list[str], left: bytes | None) -> None:
    database = tmp_path / "lost" / "mlflow.db"
    if left is not None:
        database.parent.mkdir()
        database.write_bytes(left)
    done = reco(tmp_path / "home", *arguments, "--tracking-uri", f"sqlite:///{database}")
    assert done.exit_code == 2
    assert f"{database} is no registry: train with `reco --home " in done.output
    assert (database.read_bytes() if database.exists() else None) == left


@pytest.mark.parametrize("arguments", [["extend", "--remove", "a"], ["refresh"]], ids=" ".join)
def test_one_update_of_the_champion_at_a_time(
    shop: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Two would build in one folder, and register each other's bundle."""
    monkeypatch.setattr("pipelines.cli.release.champions_retriever", lambda context: shop)
    monkeypatch.setattr("pipelines.cli.release.existing_registry", lambda *_: "sqlite:///registry.db")
    with locked(shop / "update.lock", "extending the champion"):
        done = reco(shop, *arguments)
    assert (done.exit_code, "is extending the champion" in done.output) == (4, True), done.output


def test_a_file_without_items_makes_no_version(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.cli.release.champions_retriever", lambda context: shop)
    (tmp_path / "items.csv").write_text("item_id,type\n")
    done = reco(shop, "extend", str(tmp_path / "items.csv"))
    assert (done.exit_code, "items.csv holds no item" in done.output) == (2, True), done.output


def test_items_that_wait_for_a_name_are_counted(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = {"bundle_id": "b1", "until": "2024-06-03", "joined": 1, "waiting": 2}
    steps = {
        "pipelines.cli.release.champions_retriever": shop,
        "pipelines.cli.release.existing_registry": "sqlite:///registry.db",
        "components.data.ingest_events.ingest_events": "",
        "components.retriever.refresh_counts.refresh_counts": done,
        "components.release.register_bundle.register_bundle": "7",
    }
    for step, result in steps.items():
        monkeypatch.setattr(step, lambda *_, result=result: result)
    *_, last = reco(shop, "refresh").stdout.splitlines()
    assert last.startswith(
        "2 more items will join with a type, category and department that the champion knows"
    )
    assert f"the table of items in {shop / 'offline_store'}" in last
    done["waiting"] = 0
    *_, last = reco(shop, "refresh").stdout.splitlines()
    assert last == f"send it through the gate: {command(shop, 'promote')}"


def test_a_refresh_names_the_command_that_lists_refused_rows(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quarantine lies in a folder that the refresh removes."""
    monkeypatch.setattr("pipelines.cli.release.champions_retriever", lambda context: shop)
    monkeypatch.setattr("pipelines.cli.release.existing_registry", lambda *_: "sqlite:///registry.db")
    lines = ["user_id,basket_id,item_id,at", "u1,b1,tea,never", "u2,b2,tea,2024-01-01"]
    (tmp_path / "events.csv").write_text("\n".join(lines))
    done = reco(shop, "refresh", "--data", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert "1 of 2 rows (50.0%) break the event contract" in done.output
    assert (
        f": mend these rows, `{command(shop, f'check {tmp_path} --output json')}` lists them" in done.output
    )
    assert "--param" not in done.output


@pytest.mark.parametrize("update", [["refresh"], ["extend", "--remove", "a"]], ids=" ".join)
def test_an_update_goes_through_the_gate_of_its_own_registry(
    shop: Path, monkeypatch: pytest.MonkeyPatch, update: list[str]
) -> None:
    done = {"bundle_id": "b1", "until": "2024-06-03", "joined": 1, "waiting": 0}
    steps = {
        "pipelines.cli.release.champions_retriever": shop,
        "components.data.ingest_events.ingest_events": "",
        "components.retriever.refresh_counts.refresh_counts": done,
        "components.retriever.extend_index.extend_index": "b1",
        "components.release.register_bundle.register_bundle": "7",
    }
    for step, result in steps.items():
        monkeypatch.setattr(step, lambda *_, result=result, **__: result)
    registry = ["--tracking-uri", "https://ann:hunter2@mlflow.example", "--model-name", "shop"]
    *_, last = reco(shop, *update, *registry).stdout.splitlines()
    promote = command(shop, "promote --tracking-uri https://mlflow.example --model-name shop")
    assert last == f"send it through the gate: {promote}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["models"], 0, "no versions yet"),
        (["models", "3"], 2, "has no version '3'"),
        (["history"], 0, "0 lines"),
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
    tmp_path: Path, migrated: Path, arguments: list[str], code: int, says: str
) -> None:
    shutil.copyfile(migrated, tmp_path / "mlflow.db")
    done = reco(tmp_path, *arguments)
    assert done.exit_code == code, done.output
    assert says in done.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_version_is_shown_in_tables_for_people(tmp_path: Path, migrated: Path) -> None:
    shutil.copyfile(migrated, tmp_path / "mlflow.db")
    (tmp_path / "bundle").mkdir()
    measured = {"child": 0.25, "ratio": 0.998}
    trained = {"step": "train_ranker", "model": "dcn_v2", "id": "a" * 16, "parents": [], "bytes": 4_000}
    (tmp_path / "bundle" / "certificates.json").write_text(
        json.dumps([{**trained, "ndcg_at_10": measured, "top_10_overlap": 0.97}])
    )
    registry = Registry(default_tracking_uri(tmp_path), "checkout-recommender")
    registry.add(tmp_path / "bundle", {"bundle_id": "b1"}, {}, {})
    registry.intend(Promotion(1, "promote", "1", "b1", "", "2026-01-01T00:00:00Z"))
    registry.point("champion", "1")
    registry.complete()
    printed = reco(tmp_path, "history")
    assert (printed.exit_code, printed.output.endswith("\n1 line\n")) == (0, True)
    shown = reco(tmp_path, "models", "champion").output
    assert "promote 2026-01-01T00:00:00Z  the first" in shown
    assert "train_ranker dcn_v2  aaaaaaaa  its weights  0.2500" in shown
    assert "NDCG@10 held out" in shown, "another figure than ndcg_at_10 of the whole catalogue"
    assert "|" not in shown
    assert "version 1 was champion already" in reco(tmp_path, "promote", "champion", "--dry-run").output
    before = ["--home", str(tmp_path), "champion"]
    assert reco(tmp_path / "elsewhere", "models", *before).output == shown, "an option counts at each place"
    registry.add(tmp_path / "bundle", {"bundle_id": "b2"}, {}, {})
    registry.point("champion", "2")
    for name in ("history", "promote"):
        moved = reco(tmp_path, name)
        assert (moved.exit_code, "promoted was 1: the alias was moved by hand" in moved.output) == (4, True)
    registry._client.set_registered_model_tag("checkout-recommender", "promotion.000001", "{}")
    broken = reco(tmp_path, "history")
    assert (broken.exit_code, "line 1 of the history cannot be read" in broken.output) == (1, True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", ["{", "[{}]", '{"a": 1}', "3"])
def test_damaged_certificates_are_a_line_beside_the_version(
    tmp_path: Path, migrated: Path, text: str
) -> None:
    shutil.copyfile(migrated, tmp_path / "mlflow.db")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "certificates.json").write_text(text)
    registry = Registry(default_tracking_uri(tmp_path), "checkout-recommender")
    registry.add(tmp_path / "bundle", {"bundle_id": "b1"}, {}, {})
    done = reco(tmp_path, "models", "1", "--output", "json")
    assert (done.exit_code, json.loads(done.stdout)["certificates"]) == (0, [])
    assert "certificates.json of version 1 is damaged (" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_two_releases_at_once_are_a_conflict(tmp_path: Path, command: str) -> None:
    (tmp_path / "mlflow.db").write_text("not read: the lock comes first")
    with locked(tmp_path / "promote.lock", "promoting checkout-recommender 7"):
        done = reco(tmp_path, command)
    assert done.exit_code == 4
    assert "is promoting checkout-recommender 7" in done.output


def test_a_bundle_is_signed_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, (key, public) = sealed(tmp_path / "bundle"), write_keys(tmp_path, "ours")
    monkeypatch.chdir(tmp_path)
    trusted = ["--trusted-keys", str(public.parent)]
    assert reco(tmp_path, "verify", str(bundle)).exit_code == 2
    assert reco(tmp_path, "verify", str(bundle), *trusted).exit_code == 1
    assert reco(tmp_path, "sign", str(bundle), "--key", str(key)).exit_code == 0
    assert "as ours.pem signed it" in reco(tmp_path, "verify", str(bundle), *trusted).output
    (tmp_path / ".env").write_text(f"RECO_TRUSTED_KEYS={public.parent.name}\n")
    assert "as ours.pem signed it" in reco(tmp_path, "verify", str(bundle)).output
    (bundle / "ranker.onnx").write_text("another graph")
    refused = reco(tmp_path, "verify", str(bundle), *trusted)
    assert (refused.exit_code, "ranker.onnx differ" in refused.output) == (1, True)
    broken = reco(tmp_path, "sign", str(bundle), "--key", str(key))
    assert (broken.exit_code, "ranker.onnx has SHA-256" in broken.output) == (1, True)


@pytest.mark.slow
def test_a_version_is_signed_in_the_registry(tmp_path: Path, migrated: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    home = tmp_path / "home"
    home.mkdir()
    shutil.copyfile(migrated, home / "mlflow.db")
    registry = Registry(default_tracking_uri(home), "checkout-recommender")
    bundle = sealed(tmp_path / "bundle")
    registry.add(bundle, {"bundle_id": str(read_manifest(bundle)["bundle_id"])}, {}, {})
    assert "1 is signed" in reco(home, "sign", "1", "--key", str(key)).output
    fetched = registry.download(registry.version("1"), tmp_path)
    assert check_signed(fetched, public.parent).key == public
