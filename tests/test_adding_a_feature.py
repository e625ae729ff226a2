"""The tutorial's way to add a feature, step by step: with a function and its line, every part has it."""

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, copy_packages, run_python

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
[FUNCTION] = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
[LINE] = re.findall(r"```text\n(.*?)```", TUTORIAL, re.DOTALL)
# A shop through the steps that fill the stores: Feast returns the value of the function.
PUBLISH = """
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from components.data.fit_statistics import fit_statistics
from components.data.materialize_features import materialize_features
from components.data.feast_store import feature_store, quiet_feast
from components.release.publish_features import publish_features
from feature_repo.aggregates import unpack
from feature_repo.events import write_dataset
from feature_repo.toy_shop import toy_dataset
from feature_repo.transforms import user_items_per_basket_90d
from feature_repo.queries import User
from serving.stores.online_features import open_store

root, cut = Path(sys.argv[1]), "2024-06-10T00:00:00Z"
write_dataset(root / "dataset", toy_dataset(users=6, weeks=28))
fit_statistics(root / "dataset", root / "statistics", cut)
materialize_features(root / "dataset", root / "statistics", root / "features", cut)
publish_features(root / "features", cut, {"bundle_id": "x"}, str(root / "home"))
name, users = "user_history:user_items_per_basket_90d", [f"user-{code:03d}" for code in range(6)]
asked = pd.DataFrame({"user_id": users, "event_timestamp": pd.Timestamp("2024-08-01", tz="UTC")})
with quiet_feast():
    store = feature_store(root / "home")
    online = store.get_online_features([name], [{"user_id": user} for user in users]).to_dict()
    joined = store.get_historical_features(asked, [name]).to_df().set_index("user_id")
ours = open_store(f"sqlite:///{root / 'home' / 'online_store.db'}")
for position, user in enumerate(users):
    row = ours.read(user)
    expected = np.float32(user_items_per_basket_90d(User(unpack(row.history), row.written_at)))
    found = online["user_items_per_basket_90d"][position], joined["user_items_per_basket_90d"][user]
    assert expected > 1 and [np.float32(one) for one in found] == [expected] * 2, (user, expected, found)
"""
# Over the statistics of that shop, a row of 3 distinct items in 2 baskets; a third basket is too old.
CHECK = """
from feature_repo.aggregates import DAY_S, KINDS, make_events, pack, unpack
from feature_repo.schema import DENSE_NAMES, USER, model_inputs, schema_hash
from feature_repo.snapshots import USER_COLUMNS, USER_VIEW, user_table
from feature_repo.statistics import read_statistics
from feature_repo.queries import Rows
from serving.stages.retrieval import build_query

NAME, at = "user_items_per_basket_90d", 1_718_000_000.0
statistics = read_statistics(root / "statistics")
items = [str(statistics.item_ids[code]) for code in (0, 0, 1, 2, 3)]
days, basket = np.array([3, 5, 5, 5, 91]), np.array([1, 2, 2, 2, 3], np.uint32)
row = make_events(
    items, at - days * DAY_S, np.zeros(5, np.uint8), basket, np.arange(5, dtype=np.uint64),
    np.ones(5, np.float32), np.zeros(5, np.float32),
)
query = build_query(statistics, (), unpack(pack(row)), at)
dense, _ = model_inputs(Rows(query, np.arange(4)))
assert dense.shape == (4, len(DENSE_NAMES)) and DENSE_NAMES.count(NAME) == 1
column = dense[:, DENSE_NAMES.index(NAME)]
assert column.tolist() == [1.5] * 4, column
assert USER_COLUMNS.names.count(NAME) == 1
[snapshot] = user_table([("ann", row)], at).to_pylist()
assert snapshot[NAME] == 1.5, snapshot

from feature_repo.feature_definitions import user_history

assert user_history.name == USER_VIEW
[field] = [field for field in user_history.schema if field.name == NAME]
assert field.description == "Distinct items per basket of the last 90 days."
print(schema_hash())
"""


def test_the_second_training_is_not_compared_with_a_champion_that_this_code_cannot_read() -> None:
    """The gate refuses the comparison and names this way: tests/components/release/test_promote_bundle.py."""
    after = TUTORIAL.split(LINE)[1]
    [again] = re.findall(r"^\.venv/bin/reco .* run (.*)$", after, re.MULTILINE)
    assert again == "--data toy --fast --param gate_params.over_champion=0"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with the feature added: two files changed, a function and a line."""
    clone = tmp_path_factory.mktemp("clone")
    copy_packages(clone, "feature_repo", "serving", "components")
    transforms, schema = (clone / "feature_repo" / f"{name}.py" for name in ("transforms", "schema"))
    transforms.write_text(f"{transforms.read_text('utf-8')}\n\n{FUNCTION}", "utf-8")
    before, after = schema.read_text("utf-8").split("ITEM: tuple", 1)
    last = before.rindex(")\n")  # the end of USER
    schema.write_text(before[:last] + LINE + before[last:] + "ITEM: tuple" + after, "utf-8")
    return clone


def last_line(program: str, argument: Path, clone: Path) -> str:
    """Run a program on the packages of a clone and return its last line."""
    return run_python("-W", "ignore", "-c", program, argument, root=clone, timeout_s=300).split()[-1]


@pytest.mark.slow
def test_models_view_snapshot_and_both_stores_have_the_value_of_the_function(
    clone: Path, tmp_path: Path
) -> None:
    from feature_repo.schema import schema_hash

    assert last_line(PUBLISH + CHECK, tmp_path, clone) != schema_hash(), "an older bundle is refused"
