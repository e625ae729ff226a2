"""Row numbers of the index are item codes, and the search is exact."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from components.train_retriever import load_retriever

pytestmark = pytest.mark.slow


def test_the_index_finds_what_a_full_scan_finds(toy_line: Path) -> None:
    index = faiss.read_index(str(toy_line / "index" / "index.faiss"))
    model = load_retriever(toy_line / "retriever")
    with torch.no_grad():
        vectors = model.item_vectors(model.content(model.every), model.every)[1:].numpy()
    query = np.random.default_rng(0).normal(size=(5, vectors.shape[1])).astype(np.float32)
    _, found = index.search(query, 10)
    expected = np.argsort(-(query @ vectors.T), axis=1)[:, :10]
    assert found.tolist() == expected.tolist()
