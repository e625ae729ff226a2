"""Calls of the command, and a home with the toy champion."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipelines.cli.shell import main
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest
from serving.shop.fact_store import open_fact_store
from tests.conftest import make_row
from tests.pipelines.conftest import toy_home
from tests.serving.conftest import build_bundle, write_users


def reco(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), *arguments])


def answered(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def home(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same home for all tests of the commands, which must not change it."""
    return toy_home(tmp_path_factory.mktemp("home"), toy_line)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose champion is the small bundle of the serving tests; it takes no training."""
    home = tmp_path_factory.mktemp("shop")
    manifest = read_manifest(build_bundle(home / "bundles" / "small"))
    write_champion(home, Champion(manifest["bundle_id"], "1", "small", "bundles/small", manifest["cut"], ""))
    write_users(home / "online_store.db", make_row)
    return home


PRICE = (
    '{"fact_id": "f1", "fact": "price", "item_id": "item-001", "value": 2.5, "at": "2024-06-01T00:00:00Z"}'
)


SOLD_OUT = PRICE.replace("price", "stock").replace("2.5", "0")


def standing(home: Path) -> list[tuple[str, Any]]:
    store = open_fact_store(f"sqlite:///{home}/facts.db")
    facts, _ = store.changed_since(0)
    store.close()
    return [(fact.fact, fact.value) for fact in facts]
