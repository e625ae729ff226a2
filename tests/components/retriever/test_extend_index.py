"""A bundle with a new item finds it, one without an item never shows it, and the models stay as they are."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from components.data.examples import ContractViolation
from components.models.two_tower import TwoTower
from components.privacy.erased_files import names_user
from components.retriever.extend_index import codes_of, cold_vectors, extend_index, read_new_items
from components.retriever.train_retriever import load_retriever, write_retriever
from feature_repo.queries import Rows
from feature_repo.schema import model_inputs
from feature_repo.stream.erasure import Forgotten, forget
from serving.answer.recommender import Recommender, open_recommender
from serving.release.bundle import load_bundle
from serving.release.golden import read_golden
from serving.release.manifest import read_manifest
from serving.schemas import Request
from serving.stages.item_index import FaissTower
from serving.stores.online_features import MemoryStore

NONE = pd.DataFrame({"item_id": pd.Series(dtype=str)})
AT = 1_718_000_000.0


def test_a_cold_items_vector_leaves_its_own_embedding_out() -> None:
    torch.manual_seed(0)
    model = TwoTower(torch.tensor([[1, 1, 1], [1, 2, 1], [2, 2, 1]]), [4, 3, 3], dim=8, hidden=16)
    with torch.no_grad():
        model.bias.weight[1:, 0] = torch.tensor([0.1, 0.3, 0.8])
    found = cold_vectors(model, np.array([[1, 1, 1], [3, 2, 1], [0, 0, 0]]))
    with torch.no_grad():
        model.item.weight.zero_()
        expected = model.item_vectors(model.content(torch.tensor([1])), torch.tensor([1])).numpy()
    assert np.allclose(found[0, :-1], expected[0, :-1], atol=1e-6)
    # Of its type; of its category, since nothing of that type is known; of all.
    assert found[:, -1] == pytest.approx([0.2, 0.55, 0.4])


def test_a_file_of_items_keeps_ids_as_text(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,type,manufacturer,price\n007,milk,069,1.5\n008,,,\n")
    items = read_new_items(tmp_path / "items.csv")
    assert items["item_id"].tolist() == ["007", "008"]
    assert items["manufacturer"].tolist() == ["069", ""]
    assert items["type"].tolist() == ["milk", ""]
    assert items["price"].tolist()[0] == 1.5
    (tmp_path / "items.csv").write_text("item_id,type\n007,milk,\n008,beer,\n")
    with pytest.raises(ValueError, match="more fields than its header"):
        read_new_items(tmp_path / "items.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="no CSV file of items"):
        read_new_items(tmp_path / "empty.csv")


@pytest.mark.parametrize("ending", ["zip", "tar", "gz", "bz2", "xz"])
def test_a_broken_archive_of_items_is_named(tmp_path: Path, ending: str) -> None:
    whole, broken = tmp_path / f"whole.{ending}", tmp_path / f"items.csv.{ending}"
    items = pd.DataFrame({"item_id": [f"item-{number}" for number in range(500)]})
    items.to_csv(whole, index=False)
    assert len(read_new_items(whole)) == 500
    content = whole.read_bytes()
    for half in (b"", b"no archive", content[: len(content) // 3]):
        broken.write_bytes(half)
        with pytest.raises(ValueError, match=rf"items\.csv\.{ending} is no CSV file of items"):
            read_new_items(broken)
    with pytest.raises(FileNotFoundError):
        read_new_items(tmp_path / f"nowhere.{ending}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"), [("price", -3.0), ("price", 1e39), ("price", "dear"), ("is_private", 0.5)]
)
def test_a_number_that_cannot_be_is_refused(
    toy_line: Path, tmp_path: Path, column: str, value: float | str
) -> None:
    items = pd.DataFrame({"item_id": ["new-1", "new-2"], column: [1.0, value]})
    with pytest.raises(ValueError, match=re.escape(f"item new-2 has {column} {value}: expected")):
        extend_index(toy_line / "evaluated", toy_line / "retriever", tmp_path / "extended", items, [])


@pytest.fixture
def new(toy_line: Path) -> pd.DataFrame:
    """One item that is like item-002, and one of which nothing is known."""
    items = pd.read_parquet(toy_line / "dataset" / "items.parquet").set_index("item_id")
    like = items.loc["item-002"]
    levels = {level: [like[level], "never heard of"] for level in ("type", "category", "department")}
    return pd.DataFrame(
        {
            "item_id": ["new-1", "a much longer id than others"],
            **levels,
            "manufacturer": ["MAKER 2", "a new maker"],
            "price": [2.5, None],
        }
    )


@pytest.mark.slow
def test_new_items_are_found_and_removed_ones_are_not(
    toy_line: Path, new: pd.DataFrame, tmp_path: Path
) -> None:
    place = tmp_path / "extended"
    bundle_id = extend_index(toy_line / "evaluated", toy_line / "retriever", place, new, ["item-004"])
    before, recommender = load_bundle(toy_line / "evaluated"), open_recommender(place, MemoryStore())
    after = recommender.bundle
    assert after.bundle_id == bundle_id != before.bundle_id
    assert read_manifest(place)["made_from"]["parent"] == before.bundle_id
    assert after.cardinality == before.cardinality, "the ranker knows the ids it knew"
    code = after.statistics.code_of["new-1"]
    assert (code, after.statistics.code_of["a much longer id than others"]) == (80, 81)
    assert after.statistics.price[code] == 2.5
    makers = [after.vocabulary["manufacturer"][maker] for maker in after.statistics.manufacturer[code:]]
    assert makers == ["maker 2", "a new maker"], "a ban of a manufacturer holds for new items, too"
    assert after.statistics.interval_days[code] == np.median(before.statistics.interval_days) > 1
    request = Request(("item-002", "new-1"), AT, k=100)
    prepared = recommender.prepare(request)
    found = FaissTower(after.query_tower, after.index).search(prepared.query, 82).tolist()
    gone = after.statistics.code_of["item-004"]
    assert sorted([*found, gone]) == list(range(82))
    dense, categorical = model_inputs(Rows(prepared.query, np.array([code, 2])))
    assert categorical[:, 0].tolist() == [0, 3]
    assert categorical[0, 1:].tolist() == categorical[1, 1:].tolist()
    assert np.isfinite(dense).all()
    answer = recommender.recommend(replace(request, basket=("item-002",)))
    assert answer.degraded is False
    shown = {item.item_id for item in answer.items}
    assert "new-1" in shown
    assert "item-004" not in shown
    assert "item-004" in {i.item_id for i in Recommender(before, MemoryStore()).recommend(request).items}
    assert "item-004" not in {item.item_id for item in recommender.fallback(request, "test").items}


def test_a_name_is_known_in_any_case_and_by_its_exact_spelling_first() -> None:
    vocabulary = ["", "BEERS/ALES", "Wine", "wine"]
    assert codes_of(["beers/ales", "Wine", "wine", "WINE", "ale", ""], vocabulary) == [1, 2, 3, 3, 0, 0]


@pytest.mark.slow
def test_names_that_the_bundle_does_not_know_are_logged(
    toy_line: Path, new: pd.DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new["category"] = new["category"].str.upper()
    with caplog.at_level(logging.WARNING):
        extend_index(toy_line / "evaluated", toy_line / "retriever", tmp_path / "extended", new, [])
    statistics = load_bundle(tmp_path / "extended").statistics
    codes = statistics.categorical[[2, 80, 81]].tolist()
    assert codes == [codes[0], codes[0], [0, 0, 0]]
    never = "never heard of, category NEVER HEARD OF, department never heard of"
    assert caplog.messages == [f"new items lose 3 names that the bundle does not know: type {never}"]


@pytest.mark.slow
def test_an_extended_bundle_can_be_extended_again(toy_line: Path, new: pd.DataFrame, tmp_path: Path) -> None:
    first, second, whole = tmp_path / "1", tmp_path / "2", tmp_path / "whole"
    retriever = toy_line / "retriever"
    extend_index(toy_line / "evaluated", retriever, first, new[:1], ["item-004"])
    extend_index(first, retriever, second, new[1:], ["item-006"])
    with pytest.raises(ValueError, match="item-004 was removed from this bundle: the next training, or"):
        extend_index(first, retriever, second, pd.DataFrame({"item_id": ["item-004"]}), [])
    extend_index(toy_line / "evaluated", retriever, whole, new, ["item-006", "item-004"])
    files = [read_manifest(place)["files"] for place in (second, whole)]
    assert files[0] == files[1]
    again = json.loads((second / "golden.jsonl").read_text().splitlines()[0])
    assert again["expected"]


@pytest.mark.slow
def test_a_forgotten_shopper_is_not_in_the_new_bundle(
    toy_line: Path, new: pd.DataFrame, tmp_path: Path
) -> None:
    evaluated, home = toy_line / "evaluated", tmp_path / "home"
    shoppers = {golden.request["user_id"] for golden in read_golden(evaluated) if golden.history is not None}
    gone = next(user for user in sorted(shoppers) if names_user(evaluated, user) > 1)
    home.mkdir()
    forget(home, gone, 2**52)
    place, forgotten = tmp_path / "extended", Forgotten.load(home)
    extend_index(evaluated, toy_line / "retriever", place, new, [], forgotten=forgotten)
    assert names_user(place, gone) == 0
    left = {golden.request.get("user_id") for golden in read_golden(place)}
    assert left == {None, *shoppers} - {gone}
    load_bundle(place)


@pytest.mark.slow
def test_items_that_do_not_fit_are_refused(toy_line: Path, new: pd.DataFrame, tmp_path: Path) -> None:
    def extend(rows: pd.DataFrame, removed: tuple[str, ...] = (), retriever: Path | None = None) -> None:
        given = retriever or toy_line / "retriever"
        extend_index(toy_line / "evaluated", given, tmp_path / "refused", rows, removed)

    with pytest.raises(ValueError, match="item-002 is no new one"):
        extend(pd.DataFrame({"item_id": ["item-002"]}))
    with pytest.raises(ValueError, match="comes twice"):
        extend(pd.concat([new, new]))
    with pytest.raises(ValueError, match="expected item_id"):
        extend(new.rename(columns={"item_id": "sku"}))
    with pytest.raises(ValueError, match="no item id"):
        extend(pd.DataFrame({"item_id": [""]}))
    with pytest.raises(ValueError, match="cannot be removed"):
        extend(NONE, ("nothing",))
    model = load_retriever(toy_line / "retriever")
    assert len(model.categorical) == 81
    assert not (tmp_path / "refused").exists()
    own = model.categorical[1:]
    cardinality = (own.max(0).values + 1).tolist()
    for categorical, dim in ((torch.ones_like(own), 63), (own, 63), (own, 31)):
        write_retriever(tmp_path / "other", TwoTower(categorical, cardinality, dim, 128), {})
        with pytest.raises(ContractViolation, match=r"trained on other items .* or is of another training"):
            extend(NONE, ("item-004",), tmp_path / "other")
