"""The index finds the items of a full scan, without removed items and with added ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import no_events
from serving.release.bundle import load_bundle
from serving.stages import item_index
from serving.stages.item_index import FaissTower, ItemIndex, Search, read_item_index
from serving.stages.retrieval import build_query

ITEMS, WIDTH = 2_000, 16
TYPES = {
    "Flat": {},
    "IVF16,SQ8": {"nprobe": 16},
    "IVF16,PQ4x4,Refine(SQ8)": {"nprobe": 16, "k_factor": 4},
    "HNSW32": {"efSearch": 400},
}


def planted(items: int = ITEMS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(items, WIDTH)).astype(np.float32)


def faiss_index(description: str, vectors: np.ndarray) -> faiss.Index:
    index = faiss.index_factory(WIDTH, description, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return index


@pytest.fixture(scope="module")
def indexes() -> dict[str, faiss.Index]:
    return {description: faiss_index(description, planted()) for description in TYPES}


@pytest.mark.parametrize("description", TYPES)
def test_other_items_replace_removed_ones(indexes: dict[str, faiss.Index], description: str) -> None:
    query, search = planted(1, seed=2), Search(TYPES[description])
    best = ItemIndex(indexes[description]).search(query, 50, search)[1][0]
    index = ItemIndex(indexes[description], removed=best[:30])
    left = index.search(query, 50, search)[1][0]
    assert len(set(left.tolist())) == 50
    assert not set(left.tolist()) & set(best[:30].tolist())
    everything = index.search(query, ITEMS, search)[1][0]
    assert not set(everything.tolist()) & set(best[:30].tolist())


@pytest.mark.parametrize("description", ["IVF16,SQ8", "IVF16,PQ4x4,Refine(SQ8)", "HNSW32"])
def test_too_few_items_in_the_searched_lists_widen_the_search(
    indexes: dict[str, faiss.Index], description: str
) -> None:
    """All but 20 items are removed: a search of one list, or 16 nodes, would hardly find any of them."""
    keep = np.arange(0, ITEMS, ITEMS // 20)
    index = ItemIndex(indexes[description], removed=np.setdiff1d(np.arange(ITEMS), keep))
    little = Search({name: {"nprobe": 1, "efSearch": 16}.get(name, 1) for name in TYPES[description]})
    found = index.search(planted(3, seed=3), 30, little)[1]
    assert all(sorted(row[row >= 0].tolist()) == keep.tolist() for row in found)


@pytest.mark.parametrize("description", TYPES)
def test_only_allowed_items_are_found(indexes: dict[str, faiss.Index], description: str) -> None:
    allowed = np.arange(ITEMS) % 5 == 0
    found = ItemIndex(indexes[description]).search(
        planted(3, seed=4), 40, Search(TYPES[description], allowed)
    )[1]
    assert allowed[found].all()
    assert (found >= 0).all()


def test_an_added_item_is_found_if_it_is_allowed(indexes: dict[str, faiss.Index]) -> None:
    query = planted(1, seed=5)
    index = ItemIndex(indexes["Flat"], (np.array([ITEMS]), 100 * query))
    only = np.zeros(ITEMS + 1, bool)
    only[[3, ITEMS]] = True
    assert index.search(query, 2, Search(allowed=only))[1][0].tolist() == [ITEMS, 3]
    short = np.ones(ITEMS, bool)  # of the main index's items: it does not allow the other
    assert index.search(query, 1, Search(allowed=short))[1][0, 0] < ITEMS


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 39), max_size=12, unique=True), st.lists(st.integers(0, 39), max_size=12))
def test_additions_and_removals_give_the_items_of_a_dict(added: list[int], removed: list[int]) -> None:
    """A new vector replaces the old one, and a removed item stays away though it was added."""
    held, vectors = dict(enumerate(planted(30))), planted(len(added), seed=100)
    held |= dict(zip(added, vectors, strict=True))
    gone = [code for code in removed if code in held]
    index = ItemIndex(faiss_index("Flat", planted(30)), (np.array(added), vectors), np.array(gone))
    held = {code: vector for code, vector in held.items() if code not in gone}
    query = planted(1, seed=7)
    codes = index.search(query, 40)[1][0]
    expected = sorted(held, key=lambda code: -float(query[0] @ held[code]))
    assert codes[: len(held)].tolist() == expected
    assert (codes[len(held) :] == -1).all()


def test_codes_and_vectors_that_do_not_fit_are_refused(indexes: dict[str, faiss.Index]) -> None:
    flat = indexes["Flat"]
    for vectors in (planted(2), planted(1)[:, :3], np.full((1, WIDTH), np.nan)):
        with pytest.raises(ValueError, match="expected 1 of 16 finite numbers"):
            ItemIndex(flat, (np.array([1]), vectors))
    added = np.array([ITEMS]), planted(1)
    ItemIndex(flat, added, np.array([0, ITEMS]))
    for removed in (-1, ITEMS + 1):
        with pytest.raises(ValueError, match=f"expected from 0 to {ITEMS}"):
            ItemIndex(flat, added, np.array([7, removed]))
    with pytest.raises(ValueError, match="has no search parameter 'nprobe': it has none"):
        ItemIndex(flat).search(planted(1), 3, Search({"nprobe": 3}))
    with pytest.raises(ValueError, match="expected Flat, IVF"):
        ItemIndex(faiss.IndexLSH(WIDTH, 8))


@pytest.mark.parametrize("description", TYPES)
def test_a_file_is_mapped_and_answers_as_the_index_that_was_written(
    indexes: dict[str, faiss.Index], description: str, tmp_path: Path
) -> None:
    faiss.write_index(indexes[description], str(tmp_path / "index.faiss"))
    before = anonymous_kb()
    read = read_item_index(tmp_path / "index.faiss")
    assert anonymous_kb() - before < 1_000
    queries, search = planted(4, seed=9), Search(TYPES[description])
    expected = ItemIndex(indexes[description]).search(queries, 20, search)[1]
    assert read.search(queries, 20, search)[1].tolist() == expected.tolist()


def test_many_lists_of_a_product_quantizer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large catalogue: their table for distances is larger than the file's size allows."""
    monkeypatch.setattr(item_index, "FAISS_LEAST", 1)
    vectors, file = planted(), tmp_path / "index.faiss"
    index = faiss_index("IVF512,PQ16x4", vectors)
    faiss.write_index(index, str(file))
    assert 2 * file.stat().st_size < 512 * 16 * 16 * 4
    search = Search({"nprobe": 512})
    expected = ItemIndex(index).search(vectors[:4], 20, search)[1]
    assert read_item_index(file).search(vectors[:4], 20, search)[1].tolist() == expected.tolist()


def anonymous_kb() -> int:
    """Return the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("number", [ITEMS, ITEMS * WIDTH])
def test_a_file_that_claims_more_than_it_holds_is_refused(
    indexes: dict[str, faiss.Index], number: int, tmp_path: Path
) -> None:
    """Of vectors, or of numbers in them."""
    file = tmp_path / "index.faiss"
    faiss.write_index(indexes["Flat"], str(file))
    content = bytearray(file.read_bytes())
    at = content.find(number.to_bytes(8, "little"))
    content[at : at + 8] = (1 << 40).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(RuntimeError):
        read_item_index(file)


def test_codes_outside_the_catalogue_never_reach_the_ranker() -> None:
    flat = faiss_index("Flat", planted(30))
    index = ItemIndex(flat)
    index._main = SimpleNamespace(
        ntotal=30, search=lambda vectors, k, params: (np.zeros((1, 5)), np.array([[3, -1, 30, 10**12, 5]]))
    )
    assert index.search(planted(1), 5)[1].tolist() == [[3, -1, -1, -1, 5]]


def test_an_empty_query_finds_nothing(toy_bundle: Path) -> None:
    bundle = load_bundle(toy_bundle)
    tower = FaissTower(bundle.query_tower, bundle.index)
    baskets = [("1000005",), (), ("1000001", "1000002"), ("no such item",), ("1000030",)]
    queries = [build_query(bundle.statistics, basket, no_events(), 1_511_740_800) for basket in baskets]
    assert [len(tower.search(query, 7)) for query in queries] == [7, 0, 7, 0, 7], "best sellers say it better"
    assert not any(len(tower.search(query, 0)) for query in queries), "a profile without this source"


@pytest.mark.gpu
@pytest.mark.skipif(faiss.get_num_gpus() == 0, reason="no GPU, or a Faiss without GPU support")
@pytest.mark.parametrize("description", ["Flat", "IVF16,SQ8"])
def test_gpu_search_equals_cpu_search(description: str) -> None:
    main = faiss_index(description, planted())
    index, queries = ItemIndex(main), planted(4, seed=10)
    assert index._twin is not None
    search = Search({"nprobe": 16} if "IVF" in description else {})
    cpu = ItemIndex(main)
    cpu._twin = None
    found, expected = index.search(queries, 20, search)[1], cpu.search(queries, 20, search)[1]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(found, expected, strict=True)]) > 0.95
    fewer = ItemIndex(main, removed=found[0])
    assert not np.isin(fewer.search(queries, 20, search)[1][0], found[0]).any()


def test_a_gpu_that_fails_is_replaced_by_the_index_on_the_cpu() -> None:
    class Failing:
        asked = 0

        def search(self, *_: Any, **__: Any) -> None:
            self.asked += 1
            raise RuntimeError("Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory")

    main, queries, failing = faiss_index("Flat", planted()), planted(4, seed=10), Failing()
    index = ItemIndex(main)
    expected = index.search(queries, 20, Search())[1]
    index._twin = (failing, None)
    for _ in range(2):
        assert (index.search(queries, 20, Search())[1] == expected).all()
    assert failing.asked == 1


@pytest.mark.parametrize("description", TYPES)
def test_a_truncated_file_is_refused_at_any_length(
    indexes: dict[str, faiss.Index], description: str, tmp_path: Path
) -> None:
    """Faiss's own reader of mapped files crashes the process for some of these lengths."""
    file = tmp_path / "index.faiss"
    faiss.write_index(indexes[description], str(file))
    whole = file.read_bytes()
    assert read_item_index(file).rows == ITEMS
    for length in (*range(0, 420, 7), *range(25, 32), *range(420, len(whole), len(whole) // 20)):
        file.write_bytes(whole[:length])
        with pytest.raises((RuntimeError, ValueError, MemoryError)):
            read_item_index(file)
