"""A registry of its own for each test, sealed bundles without a model, and a shop whose answer is known."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from components.data.examples import RankerExamples, write_arrays, write_manifest
from components.ranker.certificate import certify
from components.ranker.ranker_artefact import CERTIFICATES, GRAPH, graph_id
from components.release.promote_bundle import promote_bundle
from components.release.register_bundle import register_bundle
from components.release.registry import Registry
from feature_repo.schema import BASKET_LENGTH, DENSE_NAMES, HISTORY_LENGTH
from feature_repo.statistics import write_statistics
from serving.release.bundle import REQUIRED, RankingSettings, seal_bundle
from serving.release.golden import GoldenRequest, write_golden
from serving.stages.retrieval import Quotas
from tests.operators import read_operators_once

SIGNAL = DENSE_NAMES.index("together_sum")  # the feature that decides the purchase
ITEMS, TYPES, CATEGORIES, DEPARTMENTS = 60, 9, 5, 3  # without the unknown one, which is 0


def whole_events(lines: pd.DataFrame, **given: Any) -> pd.DataFrame:
    """Return lines with all columns of events: `given` first, else those of a purchase for 1.00."""
    usual = {
        "event_id": [f"e{number}" for number in range(len(lines))],
        "event_type": "purchase",
        "user_id": "u",
        "quantity": 1,
        "price": 1.0,
        "discount": 0.0,
        "store_id": "",
    }
    missing = {name: value for name, value in usual.items() if name not in lines}
    return lines.assign(**missing | given)


@pytest.fixture(scope="session")
def promoted(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Homes with so many champions, each better than the one before; read-only."""
    root = tmp_path_factory.mktemp("promoted")
    dataset = write_dataset(root)

    @cache
    def make(count: int) -> Path:
        home = root / str(count)
        if not count:
            home.mkdir()
            shutil.copyfile(migrated, home / "mlflow.db")
            return home
        shutil.copytree(make(count - 1), home)
        uri, bundle = f"sqlite:///{home / 'mlflow.db'}", make_evaluated(root, f"b{count}", 0.15 + count / 100)
        register_bundle(bundle, uri, "recommender")
        promote_bundle("challenger", [dataset], uri, "recommender", str(home), examine=as_planned)
        return home

    return make


def champions(count: int) -> pytest.MarkDecorator:
    """Let a test begin with a home with so many champions."""
    return pytest.mark.parametrize("home", [count], indirect=True)


@pytest.fixture
def home(
    promoted: Callable[[int], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    made = promoted(getattr(request, "param", 0))
    # MLflow remembers where files of a run lie; a run is in several of these homes, from now on in this one.
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._artifact_repos_cache", OrderedDict())
    return Path(shutil.copytree(made, tmp_path / "state"))


@pytest.fixture
def uri(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@pytest.fixture
def registry(uri: str) -> Registry:
    return Registry(uri, "recommender")


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., Path]:
    """Make a sealed bundle with an evaluation and empty models."""
    return partial(make_evaluated, tmp_path)


def make_evaluated(
    folder: Path,
    name: str,
    ndcg: float = 0.16,
    window: str = "w1",
    cut: str = "2017-11-27T05:00:00Z",
    **evaluation: Any,
) -> Path:
    path = folder / "made" / name
    for file in REQUIRED:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(name)
    write_golden(path, [GoldenRequest({"basket": ["i01"], "user_id": "u1", "k": 5}, None)])
    proven = [certificate_of(graph_id(path / GRAPH))]
    (path / CERTIFICATES).write_text(json.dumps(proven))
    results = {
        "test_window": {"hash": window, "data_hash": "d1"},
        "baskets": 8_000,
        "served": {"ndcg_at_10": ndcg, "recall_at_20": 0.29, "interval": {"ndcg_at_10": [0.1, 0.2]}},
        "baselines": {"blend": {"ndcg_at_10": 0.13}, "two_tower": {"ndcg_at_10": 0.07}},
        "index": {"recall": 1.0},
        **evaluation,
    }
    (path / "evaluation.json").write_text(json.dumps(results))
    settings = RankingSettings(Quotas(), 0.95)
    seal_bundle(path, cut=cut, settings=settings, made_from={"data_hash": "d1", "params": {}})
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path)


def write_dataset(folder: Path) -> Path:
    """What the gate sees of a data set before it is measured on: its hash."""
    (folder / "dataset").mkdir()
    (folder / "dataset" / "manifest.json").write_text('{"data_hash": "d1"}')
    return folder / "dataset"


def as_planned(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
    """Measure bundles of `evaluated`, which hold no model, as good as each was planned to be."""
    plan = json.loads((challenger / "evaluation.json").read_text())
    measured = {name: plan[name] for name in ("baskets", "served")} | plan["baselines"]
    measured |= {"verdicts": {}, "index_recall": 1.0}
    measured["latency"] = {"challenger": {"p99_ms": plan.get("p99_ms", 2.0)}}
    if champion is not None:
        theirs = json.loads((champion / "evaluation.json").read_text())
        # An examination has one paired interval there, not those of the bundle's own evaluation.
        measured["champion"] = {n: value for n, value in theirs["served"].items() if n != "interval"}
        measured["latency"] |= {"champion": {"p99_ms": theirs.get("p99_ms", 2.0)}}
        measured["latency"]["added_ms"] = plan.get("added_ms", 0.0)
        measured["known"] = {"challenger": 1.0, "champion": 1.0}
    return measured


@cache
def certificate_of(graph: str) -> dict[str, Any]:
    """A certificate of a graph that says exactly what its parent says."""
    lists = planted_lists(5, 6, seed=0, always=True)
    scores = np.linspace(0.1, 0.9, len(lists.label), dtype=np.float32)
    latency = {"500": {"p50": 0.4, "p99": 0.6}}
    return certify("train_ranker", "train", (graph, scores), [], scores, lists, bytes=1, latency_ms=latency)


@pytest.fixture(scope="session")
def plant() -> Callable[..., RankerExamples]:
    """Make lists in which one feature is large for one candidate, which is bought nine times in ten.

    Everything else is noise, so that the right ranking and the right probabilities are known.
    """
    return planted_lists


def planted_lists(lists: int, length: int, seed: int, always: bool = False) -> RankerExamples:
    """Return `lists` lists; with `always` those without a purchase get one, as in training."""
    rng = np.random.default_rng(seed)
    rows = lists * length
    dense = rng.exponential(1.0, (rows, len(DENSE_NAMES))).astype(np.float32)
    dense[:, DENSE_NAMES.index("basket_size")] = np.repeat(rng.integers(0, 20, lists), length)
    signal = rng.integers(length, size=lists)
    at = np.arange(lists) * length + signal
    dense[:, SIGNAL] = rng.uniform(0, 1, rows)
    dense[at, SIGNAL] = rng.uniform(6, 9, lists)
    label = np.zeros(rows, np.int8)
    label[at] = rng.random(lists) < 0.9
    other = np.arange(lists) * length + (signal + rng.integers(1, length, lists)) % length
    label[other] |= rng.random(lists) < 0.1
    if always:
        label[at] |= label.reshape(lists, length).sum(1) == 0
    history = rng.integers(1, ITEMS + 1, (lists, HISTORY_LENGTH)).astype(np.int32)
    known = rng.integers(0, HISTORY_LENGTH, lists)
    known[::7] = 0  # new users
    history[np.arange(HISTORY_LENGTH)[None, :] >= known[:, None]] = 0
    basket = rng.integers(1, ITEMS + 1, (lists, BASKET_LENGTH)).astype(np.int32)
    basket[np.arange(BASKET_LENGTH)[None, :] >= rng.integers(0, 12, lists)[:, None]] = 0
    items = rng.integers(1, ITEMS + 1, rows)
    levels = [items % size + 1 for size in (TYPES, CATEGORIES, DEPARTMENTS)]
    return RankerExamples(
        dense=dense,
        categorical=np.column_stack([items, *levels]).astype(np.int32),
        label=label,
        start=np.arange(lists + 1, dtype=np.int64) * length,
        history=history,
        history_weight=((history > 0) * rng.exponential(1.0, history.shape)).astype(np.float16),
        basket=basket,
    )


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planted shop on disk: examples/ as `build_examples` writes them, statistics/ of its catalogue."""
    from tests.serving.conftest import build_statistics  # not above: programs of tests import this module

    root = tmp_path_factory.mktemp("shop")
    write_arrays(root / "examples" / "ranker_train", planted_lists(500, 20, seed=1, always=True))
    write_arrays(root / "examples" / "ranker_calibration", planted_lists(300, 30, seed=2))
    rng = np.random.default_rng(0)
    weights = rng.exponential(1.0, (ITEMS + 1, 20))
    weights[0] = 0
    neighbours = rng.integers(1, ITEMS + 1, (ITEMS + 1, 20)).astype(np.int32)
    np.save(root / "examples" / "graph_neighbours.npy", neighbours)
    weights = (weights / np.maximum(weights.sum(1, keepdims=True), 1e-9)).astype(np.float32)
    np.save(root / "examples" / "graph_weights.npy", weights)
    write_manifest(root / "examples", cut="2024-06-01", params={"windows": 1})
    vocabulary = {
        level: ["", *(f"{level}{i}" for i in range(size))]
        for level, size in (("type", TYPES), ("category", CATEGORIES), ("department", DEPARTMENTS))
    }
    statistics = replace(build_statistics(ITEMS)[0], categorical=np.ones((ITEMS, 3), np.int32))
    write_statistics(root / "statistics", statistics, vocabulary)
    return root


def write_opinion(file: Path, column: int, slope: float) -> None:
    """Write a ranker whose logit is one dense feature times a slope."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["dense", "column"], ["feature"], axis=1),
            helper.make_node("Mul", ["feature", "slope"], ["logit"]),
            helper.make_node("Sigmoid", ["logit"], ["score"]),
        ],
        "opinion",
        [helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["rows", len(DENSE_NAMES)])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["rows"])],
        [
            helper.make_tensor("column", TensorProto.INT64, [], [column]),
            helper.make_tensor("slope", TensorProto.FLOAT, [], [slope]),
        ],
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)


@pytest.fixture(scope="session")
def few_repeats() -> Iterator[None]:
    """Less work where a test asserts nothing about time: a latency of three calls, operators read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.ranker.scoring.REPEATS", 3)
        read_operators_once(patch)
        yield


def made_once(tmp_path_factory: pytest.TempPathFactory, place: Path, train: Callable[[Path], object]) -> Path:
    """Train a ranker once for all workers, and copy it to this worker's `place`."""
    from tests.conftest import of_all_workers  # not above: programs of tests import this module

    with of_all_workers(tmp_path_factory, f"planted_{place.name}") as made:
        if not (made / "manifest.json").exists():  # the last file
            train(made)
    shutil.copytree(made, place)
    return place


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, shop: Path, few_repeats: None) -> Path:
    """A small DLRM that has found the planted signal."""
    from components.ranker.train_ranker import train_ranker

    params = {"dlrm": {"size": {"hidden": 32}, "epochs": 4, "batch_size": 16, "learning_rate": 0.01}}
    return made_once(
        tmp_path_factory,
        shop / "teacher",
        lambda place: train_ranker(shop / "examples", shop / "statistics", place, "dlrm", params),
    )


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory, shop: Path, teacher: Path) -> Path:
    """What was distilled from the teacher."""
    from components.ranker.distill_ranker import distill_ranker

    params = {"hidden": 32, "epochs": 4, "batch_size": 16, "learning_rate": 0.01}
    return made_once(
        tmp_path_factory,
        shop / "student",
        lambda place: distill_ranker(shop / "examples", shop / "statistics", [teacher], place, params),
    )
