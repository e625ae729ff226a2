"""Shoppers of even and odd items are two behaviours; each brings its own requests."""

from pathlib import Path

import numpy as np
import pytest

from components.evaluation.cluster_users import cluster_users, user_vectors, warming_asks, write_warming
from components.evaluation.traffic import Ask
from feature_repo.aggregates import no_events
from serving.answer.warming import read_warming
from serving.release.bundle import load_bundle


def ask(user: int, *items: str, store: str = "s") -> Ask:
    return Ask(0.0, user, 0, items, store)


def test_two_heaps_are_two_clusters() -> None:
    rng = np.random.default_rng(0)
    centre = np.where(np.arange(100) % 2, 5.0, -5.0)[:, None]
    vectors = (centre + rng.normal(0, 0.1, (100, 8))).astype(np.float32)
    found = cluster_users(vectors, 2)
    assert len(set(found[::2].tolist())) == len(set(found[1::2].tolist())) == 1
    assert found[0] != found[1]
    assert (cluster_users(vectors, 2) == found).all()


@pytest.mark.parametrize("users", [0, 1, 3])
def test_there_are_never_more_clusters_than_users(users: int) -> None:
    found = cluster_users(np.eye(8, dtype=np.float32)[:users], 16)
    assert len(found) == users
    assert len(set(found.tolist())) == users


def test_each_cluster_brings_its_share_its_most_frequent_first() -> None:
    cluster = np.array([0, 1, -1])
    asks = [
        *[ask(0, "a")] * 6, *[ask(0, "b", "c")] * 3, ask(0, "c", "b"), *[ask(0, "d")] * 2,
        *[ask(1, "x")] * 3, ask(1, "y"),
        *[ask(2, "nobody")] * 50,
    ]  # fmt: skip
    found = [one.items for one in warming_asks(asks, cluster, 4)]
    assert found == [("a",), ("b", "c"), ("x",), ("d",)], "three of four from the cluster with 12 of 16"
    assert [one.items for one in warming_asks(asks, cluster, 100)][-1] == ("y",)
    assert warming_asks([], cluster, 4) == []


def test_what_is_written_is_read_back_without_users(tmp_path: Path) -> None:
    file = tmp_path / "warming.jsonl"
    write_warming(file, [ask(0, "a", "b"), ask(1, "c", store="")])
    first, second = read_warming(file, 1.0)
    assert (first.basket, first.store_id, first.user_id) == (("a", "b"), "s", None)
    assert (second.basket, second.store_id) == (("c",), None)


@pytest.mark.slow
def test_a_vector_for_each_user(toy_line: Path) -> None:
    bundle = load_bundle(toy_line / "evaluated")
    vectors = user_vectors(bundle, [no_events(), no_events()], 1.7e9)
    assert vectors.shape == (2, bundle.index.dimension)
    assert (vectors[0] == vectors[1]).all()
    assert user_vectors(bundle, [], 1.7e9).shape == (0, bundle.index.dimension)
