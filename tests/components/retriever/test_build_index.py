"""Row numbers of the index are item codes, and its measurements lie beside it."""

import json
from pathlib import Path

import faiss
import numpy as np
import onnxruntime as ort
import pytest
import torch

from components.data.examples import read_retriever_examples
from components.hyper_parameters import IndexParams
from components.retriever.build_index import item_vectors, query_vectors
from components.retriever.export_retriever import TOLERANCE
from components.retriever.train_retriever import load_retriever
from feature_repo.schema import BASKET_LENGTH

pytestmark = pytest.mark.slow


def test_the_index_finds_the_same_as_a_full_scan(toy_line: Path) -> None:
    index = faiss.read_index(str(toy_line / "index" / "index.faiss"))
    model = load_retriever(toy_line / "retriever")
    with torch.no_grad():
        vectors = model.item_vectors(model.content(model.every), model.every)[1:].numpy()
    query = np.random.default_rng(0).normal(size=(5, vectors.shape[1])).astype(np.float32)
    _, found = index.search(query, 10)
    expected = np.argsort(-(query @ vectors.T), axis=1)[:, :10]
    assert found.tolist() == expected.tolist()


def test_the_report_names_the_choice_and_its_reason(toy_line: Path) -> None:
    report = json.loads((toy_line / "index" / "index.json").read_text())
    assert (report["kind"], report["search"], report["recall"]) == ("flat", {}, 1.0)
    assert (report["items"], report["k"], report["target"]) == (80, 80, 0.97)
    assert [row["kind"] for row in report["curve"]] == ["flat"], "a small catalogue is scanned"
    assert report["bytes"] == (toy_line / "index" / "index.faiss").stat().st_size
    assert sorted(file.name for file in (toy_line / "index").iterdir()) == ["index.faiss", "index.json"]


def test_the_queries_are_those_of_the_exported_tower(toy_line: Path) -> None:
    model, rows = load_retriever(toy_line / "retriever"), read_retriever_examples(toy_line / "examples")
    every = IndexParams(queries=len(rows.basket))
    session = ort.InferenceSession(str(toy_line / "graphs" / "query_tower.onnx"))
    inputs: dict[str, np.ndarray] = {
        "history": rows.history.astype(np.int64),
        "history_weight": rows.history_weight.astype(np.float32),
        "basket": rows.basket[:, :BASKET_LENGTH].astype(np.int64),
    }
    expected = query_vectors(model, toy_line / "examples", every)
    for count in (1, 7, len(expected)):
        some = {name: array[:count] for name, array in inputs.items()}
        np.testing.assert_allclose(session.run(["vector"], some)[0], expected[:count], atol=1e-5)
    parity = json.loads((toy_line / "graphs" / "parity.json").read_text())
    assert 0 <= parity["query_tower_max_difference"] <= TOLERANCE
    assert item_vectors(model).shape == (80, expected.shape[1])
