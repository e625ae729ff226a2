import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from serving.stores.online_features import JOIN_KEY, PROJECT
from tests.programs import run_python

FEATURE_REPO = Path(__file__).parents[2] / "feature_repo"


def test_feature_store_yaml_agrees_with_the_code_that_reads_the_store() -> None:
    text = (FEATURE_REPO / "feature_store.yaml").read_text()
    settings = yaml.safe_load(text)
    assert settings["project"] == PROJECT
    assert settings["entity_key_serialization_version"] == 3
    assert settings["offline_store"]["type"] == "duckdb"
    assert settings["online_store"]["type"] == "sqlite"
    line = next(line for line in text.splitlines() if "connection_string" in line)
    assert "socket_timeout=0.01,socket_connect_timeout=0.01,retry=null" in line


def test_feastignore_skips_every_module_but_the_definitions() -> None:
    lines = (line.split("#")[0].strip() for line in (FEATURE_REPO / ".feastignore").read_text().splitlines())
    ignored = {path.name for pattern in lines if pattern for path in FEATURE_REPO.glob(pattern)}
    modules = {path.name for path in FEATURE_REPO.glob("*.py")}
    assert modules - ignored == {"feature_definitions.py"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_views_agree_with_serving_and_the_snapshots() -> None:
    from feature_repo.feature_definitions import checkout, item_statistics, user_history
    from feature_repo.schema import ITEM, USER
    from feature_repo.snapshots import ITEM_COLUMNS, USER_COLUMNS

    assert user_history.name == "user_history"  # serving's HISTORY_FIELD is a hash of both names
    assert user_history.join_keys == [JOIN_KEY]
    assert "history" in {feature.name for feature in user_history.features}
    for view, columns in ((user_history, USER_COLUMNS), (item_statistics, ITEM_COLUMNS)):
        declared = [*view.join_keys, "event_timestamp", *(feature.name for feature in view.features)]
        assert declared == columns.names
        assert all(feature.description for feature in view.features)
    for view, functions in ((user_history, USER), (item_statistics, ITEM)):
        described = {feature.name: feature.description for feature in view.features}
        for function in functions:
            assert described[function.__name__] == (function.__doc__ or "").splitlines()[0]
        assert view.owner == "ml-team@shop.example"
        assert view.stream_source is not None
        assert view.stream_source.name == f"{view.name}_push"
    assert user_history.tags["personal_data"] == "yes"
    names = [projection.name for projection in checkout.feature_view_projections]
    assert names == ["user_history", "item_statistics"]


@pytest.mark.slow
def test_feast_is_imported_without_its_checks_of_types() -> None:
    program = (
        "import feature_repo.feature_definitions, feast\n"
        "assert 'TypeCheckMemo' not in feast.FeatureView.__init__.__code__.co_names"
    )
    run_python("-W", "ignore", "-c", program)
    feast = find_spec("feast")  # imports nothing
    assert feast
    assert feast.origin
    views = Path(feast.origin).with_name("feature_view.py").read_text()
    assert "@typechecked\nclass FeatureView" in views, "Feast needs our help no longer"


@pytest.mark.slow
def test_feast_works_without_pytorch_which_others_may_import_afterwards(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path

from components.data.feast_store import open_feature_store, quiet_feast
from feature_repo.schema import FRESH, ITEM

with quiet_feast():
    store = open_feature_store(Path(sys.argv[1]))
import pandas as pd

row = {"item_id": "tea", "event_timestamp": pd.Timestamp.now("UTC")}
row |= {feature.__name__: 1.0 for feature in (*ITEM, *FRESH)}
store.write_to_online_store("item_statistics", pd.DataFrame([row]))
read = store.get_online_features(
    features=[f"item_statistics:{ITEM[0].__name__}"], entity_rows=[{"item_id": "tea"}]
).to_dict()
assert read == {"item_id": ["tea"], ITEM[0].__name__: [1.0]}, read
assert "torch" not in sys.modules
import torch
"""
    run_python("-W", "ignore", "-c", program, tmp_path)


@pytest.mark.slow
def test_a_failed_import_of_feast_leaves_nothing_changed() -> None:
    program = """
import sys, typeguard

sys.modules["feast"] = None
before = typeguard.typechecked
try:
    import feature_repo.feature_definitions
except ImportError:
    assert "torch" not in sys.modules
    assert typeguard.typechecked is before
else:
    raise AssertionError
"""
    run_python("-c", program)


@pytest.mark.slow
def test_feast_apply_works_on_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "feature_repo"
    shutil.copytree(FEATURE_REPO, clone)
    feast = Path(sys.executable).with_name("feast")
    told = []
    for _ in range(2):  # the second run finds the registry of the first
        applied = subprocess.run(
            [feast, "apply"],
            cwd=clone,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert applied.returncode == 0, applied.stderr
        told.append(applied.stdout)
    assert {path.name for path in (tmp_path / ".reco").iterdir()} == {"registry.db", "online_store.db"}
    for view in ("user_history", "item_statistics"):
        assert f"Created feature view {view}" in told[0]
        assert view not in told[1], "nothing is left to change"
