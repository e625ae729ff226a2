"""Bundles that lie or are broken -> the gate refuses each, and the endpoint opens none; an honest one passes.

The toy bundle is made once. A forger knows our code: certificates, golden answers and hashes are made to fit.
The files get into the registry without the checks of `register_bundle`.
"""

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import faiss
import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper

from components.evaluation.protocol import Task
from components.home import default_tracking_uri
from components.ranker.ranker_artefact import graph_id
from components.release.assemble_bundle import seal_with_golden
from components.release.examination import (
    ExaminationFailed,
    MemoryShort,
    examine,
    examine_apart,
    free_memory,
    index_recall,
    known_share,
)
from components.release.promote_bundle import promote_bundle
from components.release.registry import Registry
from feature_repo.aggregates import no_events
from feature_repo.errors import UNREACHABLE
from feature_repo.schema import DENSE_NAMES
from feature_repo.statistics import read_statistics
from serving.answer.recommender import open_recommender
from serving.errors import BundleInvalid
from serving.release.bundle import Bundle, load_bundle
from serving.release.champion import read_champion
from serving.release.golden import GoldenRequest, read_golden, write_golden
from serving.release.manifest import read_manifest
from serving.stores.online_features import MemoryStore
from tests.serving.conftest import CUT, build_bundle

pytestmark = pytest.mark.slow

NAME = "recommender"
SAMPLE = 60
# The toy shop's blend is good, and its latency is a fraction of a millisecond.
GATE = {"over_blend": 1.0, "over_two_tower": 1.0, "least_baskets": 1, "sample_baskets": SAMPLE}
Forge = Callable[[Path], object]


def reseal(bundle: Path, settings: dict[str, Any] | None = None, **fields: str) -> None:
    """Make hashes and id fit the files; the forger's bundle has an id of its own."""
    body = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").unlink()
    body |= {"made_from": {**body["made_from"], "by": "a forger"}, **fields}
    body["settings"] |= settings or {}
    del body["bundle_id"]
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    body["files"] = {
        file.relative_to(bundle).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    bundle_id = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    (bundle / "manifest.json").write_text(json.dumps({"bundle_id": bundle_id, **body}))


def record(bundle: Path) -> None:
    """Make certificates and golden answers fit the ranker, then seal."""
    chain = json.loads((bundle / "certificates.json").read_text())
    chain[-1]["id"] = graph_id(bundle / "ranker.onnx")
    (bundle / "certificates.json").write_text(json.dumps(chain))
    reseal(bundle)
    loaded = load_bundle(bundle)
    manifest = loaded.manifest
    seal_with_golden(
        bundle,
        read_golden(bundle),
        cut=manifest["cut"],
        settings=loaded.settings,
        made_from=manifest["made_from"],
    )


def edit_json(name: str, change: Callable[[Any], object], bundle: Path) -> None:
    document = json.loads((bundle / name).read_text())
    change(document)
    (bundle / name).write_text(json.dumps(document))
    reseal(bundle)


def edit_ranker(add: Callable[[onnx.GraphProto, str], list[onnx.NodeProto]], bundle: Path) -> None:
    """Put nodes behind the ranker; they get the name of its own score and give "score"."""
    file = bundle / "ranker.onnx"
    model = onnx.load(file)
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["own" if name == "score" else name for name in node.output]
        node.input[:] = ["own" if name == "score" else name for name in node.input]
    graph.node.extend(add(graph, "own"))
    onnx.save(model, file)
    record(bundle)


def constant(graph: onnx.GraphProto, name: str, value: Any) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def worse(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Sub", [constant(graph, "one", np.float32(1)), own], ["score"])]


def same_for_all(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    half = constant(graph, "half", np.float32(0.5))
    return [
        helper.make_node("Mul", [own, constant(graph, "zero", np.float32(0))], ["nought"]),
        helper.make_node("Add", ["nought", half], ["score"]),
    ]


def nan_for_one_item(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    """NaN for one item beside a basket of RARE_SIZE, which no golden request has."""
    column = constant(graph, "column", np.int64(0))
    size = constant(graph, "size", np.int64(DENSE_NAMES.index("basket_size")))
    return [
        helper.make_node("Gather", ["categorical", column], ["item"], axis=1),
        helper.make_node("Equal", ["item", constant(graph, "last", np.int64(LAST_CODE))], ["is_last"]),
        helper.make_node("Gather", ["dense", size], ["items"], axis=1),
        helper.make_node("Equal", ["items", constant(graph, "rare", np.float32(RARE_SIZE))], ["is_rare"]),
        helper.make_node("And", ["is_last", "is_rare"], ["is_both"]),
        helper.make_node("Where", ["is_both", constant(graph, "nan", np.float32(np.nan)), own], ["score"]),
    ]


def slower(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    """Multiply matrices for some ten milliseconds, and add nothing to the score."""
    matrix = constant(graph, "matrix", np.full((600, 600), 1e-3, np.float32))
    nodes = [helper.make_node("ReduceMean", [own], ["mean"], keepdims=0)]
    nodes.append(helper.make_node("Mul", [matrix, "mean"], ["m0"]))  # so that it cannot be folded
    nodes += [helper.make_node("MatMul", [f"m{n}", matrix], [f"m{n + 1}"]) for n in range(2)]
    nodes.append(helper.make_node("ReduceMean", ["m2"], ["rest"], keepdims=0))
    nodes.append(helper.make_node("Mul", ["rest", constant(graph, "nothing", np.float32(0))], ["none"]))
    return [*nodes, helper.make_node("Add", [own, "none"], ["score"])]


def two_axes(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    graph.output[0].type.tensor_type.shape.dim.add().dim_value = 1
    return [helper.make_node("Unsqueeze", [own, constant(graph, "axis", np.array([1]))], ["score"])]


def memory_bomb(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    shape = constant(graph, "shape", np.array([1 << 36]))  # 256 GiB
    zero = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
    return [
        helper.make_node("ConstantOfShape", [shape], ["much"], value=zero),
        helper.make_node("ReduceSum", ["much"], ["sum"], keepdims=0),
        helper.make_node("Add", [own, "sum"], ["score"]),
    ]


def above_one(graph: onnx.GraphProto, own: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Mul", [own, constant(graph, "many", np.float32(1e6))], ["score"])]


def without_record(add: Callable[[onnx.GraphProto, str], list[onnx.NodeProto]], bundle: Path) -> None:
    """As `edit_ranker`, for a graph that cannot answer golden requests; the old answers stay."""
    try:
        edit_ranker(add, bundle)
    except Exception:  # noqa: BLE001 - it broke where our own reader refuses it
        shutil.copyfile(ORIGINAL["golden"], bundle / "golden.jsonl")
        reseal(bundle)


def coarse_index(bundle: Path) -> None:
    file = str(bundle / "index.faiss")
    index = faiss.read_index(file)
    vectors = np.random.default_rng(0).normal(size=(index.ntotal, index.d)).astype(np.float32)
    quantizer = faiss.IndexFlatIP(index.d)
    poor = faiss.IndexIVFFlat(quantizer, index.d, 16, faiss.METRIC_INNER_PRODUCT)
    poor.train(vectors)
    poor.add(index.reconstruct_n(0, index.ntotal))
    poor.nprobe = 1
    faiss.write_index(poor, file)
    quotas = json.loads((bundle / "manifest.json").read_text())["settings"]["quotas"]
    reseal(bundle, {"quotas": {**quotas, "tower": 3}})  # a search for more looks at more lists
    record(bundle)


def truncate(name: str, bundle: Path) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[: len(content) // 2])
    reseal(bundle)


def flip(name: str, bundle: Path) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)


def another_answer(bundle: Path) -> None:
    golden = [GoldenRequest(one.request, one.history, [["nothing", 0.5]]) for one in read_golden(bundle)]
    write_golden(bundle, golden)
    reseal(bundle)


def flatter(evaluation: dict[str, Any]) -> None:
    evaluation["served"]["ndcg_at_10"] = 1.2  # so few baskets have a standard error of 0.04


def poor_student(chain: list[dict[str, Any]]) -> None:
    """Each step is within its own tolerance; all together are not within .98."""
    # Where the pruned ranker itself is the fastest, as on a busy machine, no quantised one follows.
    ends = [(0.975, 1.0), (0.97, 0.975), (0.97, 0.97), (0.97, 0.97)]
    assert 3 <= len(chain) - 1 <= len(ends)
    for link, (child, parent) in zip(chain[1:], ends, strict=False):
        link["ndcg_at_10"] |= {"child": 0.7 * child, "parent": 0.7 * parent}
        if "export" in link:
            link["export"]["ndcg_at_10"] |= {"child": 0.7 * child, "parent": 0.7 * child}


LAST_CODE = 80  # of the toy shop's items, shifted by one
RARE_SIZE = 6
ORIGINAL: dict[str, Path] = {}

BAD: dict[str, tuple[Forge, str]] = {
    "forged evaluation": (
        partial(edit_json, "evaluation.json", flatter),
        "ndcg_at_10 beside evaluation.json",
    ),
    "evaluation without its data": (
        partial(edit_json, "evaluation.json", lambda e: e.pop("test_window")),
        "readable",
    ),
    "wrong hash": (partial(flip, "ranker.onnx"), "files"),
    "truncated ranker": (partial(truncate, "ranker.onnx"), "readable"),
    "wrong shape": (partial(without_record, two_axes), "readable"),
    "golden request mismatch": (another_answer, "golden requests"),
    "certificates of another graph": (
        partial(edit_json, "certificates.json", lambda c: c[-1].update(id="0" * 16)),
        "certificates",
    ),
    "far from its teachers": (
        partial(edit_json, "certificates.json", poor_student),
        "quality of the teachers",
    ),
    "one item is NaN": (partial(edit_ranker, nan_for_one_item), "finite scores"),
    "scores above one": (partial(edit_ranker, above_one), "finite scores"),
    "constant score": (partial(edit_ranker, same_for_all), "scores that differ"),
    "worse": (partial(edit_ranker, worse), "ndcg_at_10 against champion"),
    "slower": (partial(edit_ranker, slower), "p99_ms against champion"),
    "an index that finds little": (coarse_index, "index_recall"),
}
# An endpoint opens what passes these checks; it reads no evaluation.
OPENED = ("files", "readable", "golden requests")


@pytest.fixture(scope="module")
def shop(toy_line: Path, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose champion is the toy bundle, made once, copied for each test. Version 2 is honest, too."""
    home = tmp_path_factory.mktemp("shop")
    shutil.copyfile(migrated, home / "mlflow.db")
    registry = Registry(default_tracking_uri(home), NAME)
    honest, again = home / "honest", home / "again"
    ORIGINAL["golden"] = honest / "golden.jsonl"
    shutil.copytree(toy_line / "evaluated", honest)
    shutil.copytree(toy_line / "evaluated", again)
    reseal(again, {"novelty": 0.0})  # another id
    record(again)
    add(registry, honest)
    promote(home, toy_line, "1")
    add(registry, again)
    return home


@pytest.fixture
def home(shop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop, tmp_path / "home"))


def add(registry: Registry, bundle: Path) -> str:
    """Put a bundle into the registry as a forger does: without any check."""
    version = registry.add(bundle, {"bundle_id": read_manifest(bundle)["bundle_id"], "cut": ""}, {}, {})
    registry.point("challenger", version)
    return version


def promote(
    home: Path, toy_line: Path, version: str, gate: dict[str, float] | None = None, **options: Any
) -> dict[str, Any]:
    options = {"examine": examine, "params": GATE | (gate or {}), **options}
    return promote_bundle(
        version, [toy_line / "dataset"], default_tracking_uri(home), NAME, str(home), **options
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_bundle_is_refused_by_the_name_of_its_check(
    kind: str, home: Path, toy_line: Path, tmp_path: Path
) -> None:
    forge, named = BAD[kind]
    bad = tmp_path / "bad"
    shutil.copytree(home / "honest", bad)
    reseal(bad)
    forge(bad)
    registry, before = Registry(default_tracking_uri(home), NAME), read_champion(home)
    version = add(registry, bad)
    refused = promote(home, toy_line, version, dry_run=True)
    assert named in [check["metric"] for check in refused["checks"] if not check["passed"]]
    assert not refused["changed"]
    assert (registry.alias("champion"), read_champion(home), len(registry.history())) == ("1", before, 1)

    if named in OPENED and kind != "evaluation without its data":
        with pytest.raises(BundleInvalid):
            open_recommender(bad, MemoryStore())


def test_an_honest_bundle_passes_beside_a_champion(home: Path, toy_line: Path) -> None:
    gate = {"p99_over_champion": 100.0}  # no assertion on time
    assert promote(home, toy_line, "2", gate=gate)["changed"]


def test_what_takes_too_much_is_refused_by_the_child_process(
    home: Path, toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb"
    shutil.copytree(home / "honest", bomb)
    without_record(memory_bomb, bomb)
    monkeypatch.setattr("components.release.examination.MEMORY_BYTES", 4 << 30)
    measured = examine_apart(bomb, None, toy_line / "dataset", 5)
    assert measured["verdicts"]["readable"] or measured["verdicts"]["golden requests"]
    monkeypatch.setattr("components.release.examination.WALL_S", 0.01)
    late = examine_apart(home / "honest", None, toy_line / "dataset", 5)
    assert "took more than 0.01 s" in late["verdicts"]["readable"]


def test_a_machine_without_free_memory_says_nothing_about_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 << 20))
    with pytest.raises(
        MemoryShort, match=r"^64 MiB of memory are too few to examine the bundle, expected 3072 or more: "
    ) as short:
        examine_apart(tmp_path / "not opened", None, tmp_path, 5)
    assert short.value.exit_code == UNREACHABLE


def test_a_data_set_that_was_changed_says_nothing_about_the_bundle(toy_line: Path, tmp_path: Path) -> None:
    dataset = shutil.copytree(toy_line / "dataset", tmp_path / "dataset")
    (dataset / "events.parquet").unlink()
    with pytest.raises(ExaminationFailed, match=r"not the bundle: EventsInvalid: .*ingest it") as failed:
        examine_apart(toy_line / "evaluated", None, dataset, 5)
    assert failed.value.exit_code == UNREACHABLE


@pytest.mark.parametrize("kind", ["MemoryError", "_ArrayMemoryError", "ArrowMemoryError"])
def test_memory_that_runs_out_says_nothing_about_the_bundle(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, stdout: BinaryIO, **__: object) -> SimpleNamespace:
        stdout.write(json.dumps({"error": f"{kind}: 8 GiB"}).encode())
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("components.release.examination.free_memory", lambda: 4 << 30)
    with pytest.raises(MemoryShort, match=r"^4096 MiB of memory are too few to examine the bundle, "):
        examine_apart(tmp_path / "challenger", None, tmp_path, 5)


@pytest.mark.parametrize("code", [-6, -9])
def test_a_process_that_memory_ended_is_the_bundle_s_fault_only_with_all_of_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ aborts without memory, and the kernel kills."""
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=code))
    monkeypatch.setattr("components.release.examination.free_memory", lambda: 4 << 30)
    with pytest.raises(MemoryShort, match=r"^4096 MiB of memory are too few"):
        examine_apart(tmp_path / "challenger", None, tmp_path, 5)
    monkeypatch.setattr("components.release.examination.free_memory", lambda: 9 << 30)
    measured = examine_apart(tmp_path / "challenger", None, tmp_path, 5)
    assert f"ended with {code}, allowed 8192 MiB" in measured["verdicts"]["readable"]


@pytest.mark.parametrize("opened", ["challenger", "champion"])
def test_only_with_all_of_its_memory_is_a_bundle_judged_by_what_it_takes(
    opened: str, toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> Bundle:
        if path.name == opened:
            raise BundleInvalid("it can't be read") from MemoryError("8 GiB")
        return load_bundle(path)

    monkeypatch.setattr("components.release.examination.load_bundle", load)
    challenger, champion = tmp_path / "challenger", tmp_path / "champion"
    for bundle in (challenger, champion):
        bundle.symlink_to(toy_line / "evaluated")
    monkeypatch.setattr("resource.getrlimit", lambda _: (4 << 30, 4 << 30))
    with pytest.raises(MemoryError):
        examine(challenger, champion, toy_line / "dataset", 5)
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 30, 8 << 30))
    measured = examine(challenger, champion, toy_line / "dataset", 5)
    assert "it can't be read" in (measured["verdicts"]["readable"], measured.get("champion_fault"))


def test_the_free_memory_is_that_of_the_tightest_control_group(tmp_path: Path) -> None:
    def limit(group: str, most: str, used: int, cached: int) -> None:
        place = tmp_path / "sys/fs/cgroup" / group
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{most}\n")
        (place / "memory.current").write_text(f"{used << 20}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {cached << 20}\nactive_file 1\n")

    limit("pods/one/endpoint", "max", 90, 0)
    limit("pods/one", str(100 << 20), 90, 30)
    limit("pods", str(300 << 20), 100, 0)
    (tmp_path / "proc/self").mkdir(parents=True)
    own = tmp_path / "proc/self/cgroup"
    own.write_text("4:memory:/elsewhere\n0::/pods/one/endpoint\n")
    assert free_memory(tmp_path) == 40 << 20
    own.write_text("0::/\n")  # in a namespace of its own, where the root has the limit
    limit("", str(50 << 20), 20, 0)
    assert free_memory(tmp_path) == 30 << 20
    assert free_memory() > 0


def test_the_child_process_measures_what_the_evaluation_did(toy_line: Path) -> None:
    bundle = toy_line / "evaluated"
    measured = examine_apart(bundle, bundle, toy_line / "dataset", 10_000)
    stated = json.loads((bundle / "evaluation.json").read_text())
    assert measured["baskets"] == measured["sampled"] == stated["baskets"]
    for name in ("ndcg_at_10", "recall_at_20"):
        assert measured["served"][name] == pytest.approx(stated["served"][name], abs=1e-5)
        assert measured["blend"][name] == pytest.approx(stated["baselines"]["blend"][name], abs=1e-5)
    assert measured["champion"] == {**measured["served"], "interval": [1.0, 1.0]}
    assert measured["known"]["challenger"] == measured["known"]["champion"] > 0.9
    assert len(read_statistics(bundle / "statistics").item_ids) == LAST_CODE
    assert read_manifest(bundle)["bundle_id"] == measured["latency"]["challenger"]["bundle_id"]


def test_a_catalogue_knows_the_share_of_the_lines_whose_items_are_old_enough() -> None:
    start = pd.Timestamp("2024-06-01T00:00:00Z")
    begin = start.timestamp()
    # Items 0 and 1 were sold before the cut, 2 was not; the last line lies behind the test weeks.
    sold = [(0, -10.0), (1, -5.0), (0, 1.0), (0, 2.0), (0, 3.0), (1, 4.0), (2, 5.0), (1, 86_400 * 90.0)]
    purchases = SimpleNamespace(
        item=np.array([item for item, _ in sold]),
        at=np.array([begin + at for _, at in sold]),
        item_ids=np.array(["a", "b", "c"]),
    )

    def known(*ids: str) -> float:
        return known_share(SimpleNamespace(item_ids=np.array(ids)), purchases, start)  # type: ignore[arg-type]

    assert known("a", "b") == known("a", "b", "c") == 1.0, "no training until the cut can know c"
    assert known("a") == 0.75
    assert known("b", "c") == 0.25


def test_the_recall_of_a_large_index_takes_memory_for_one_query(tmp_path: Path) -> None:
    """Scores of two million items for 200 queries take 1.6 GB, and sorting them twice as much again."""
    items, at = 20_000, CUT.timestamp()
    bundle = load_bundle(build_bundle(tmp_path / "large", items))
    hidden = np.array([0]), np.array([False]), no_events()
    tasks = [Task(n, f"u{n}", f"b{n}", "", at, (f"{1_000_000 + n}",), *hidden) for n in range(100)]
    assert index_recall(bundle, tasks) == 1.0
    tracemalloc.start()
    index_recall(bundle, tasks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < items * len(tasks) * np.dtype(np.float32).itemsize
