"""A bundle matches its manifest, or it is refused with the reason."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest
from onnx import TensorProto, parser

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.answer.recommender import open_recommender
from serving.errors import BundleInvalid
from serving.release.bundle import RankingSettings, load_bundle, open_session, seal_bundle
from serving.release.manifest import bundle_id_of, read_manifest
from serving.stages.retrieval import Quotas
from serving.stores.online_features import MemoryStore
from tests.serving.conftest import ITEMS, WIDTH

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE


@pytest.fixture
def bundle(toy_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_bundle, tmp_path / "bundle"))


def reseal(bundle: Path) -> None:
    """Give a changed bundle true hashes again, as an attacker or a buggy step would."""
    seal_bundle(bundle, cut="2024-06-10T00:00:00Z", settings=RankingSettings(Quotas(), 0.95), made_from={})


def test_the_id_depends_on_content_alone(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    reseal(bundle)
    reseal(copy)
    assert read_manifest(bundle)["bundle_id"] == read_manifest(copy)["bundle_id"]


def test_every_file_with_one_flipped_bit_is_refused(bundle: Path) -> None:
    names = [*json.loads((bundle / "manifest.json").read_text())["files"], "manifest.json"]
    rng = np.random.default_rng(0)
    for name in names:
        file = bundle / name
        whole = file.read_bytes()
        broken = bytearray(whole)
        broken[int(rng.integers(len(whole)))] ^= 1
        file.write_bytes(broken)
        with pytest.raises(BundleInvalid):
            load_bundle(bundle)
        file.write_bytes(whole)
    load_bundle(bundle)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: (b / "manifest.json").unlink(), "half-written"),
        (shutil.rmtree, "is not there, expected the folder of a bundle"),
        (lambda b: (b / "ranker.onnx").unlink(), "missing"),
        (lambda b: (b / "extra.bin").write_text("x"), "does not know"),
        (lambda b: (b / "link").symlink_to("/etc/passwd"), "is a link"),
        (lambda b: (b / "manifest.json").write_text("{"), "not a bundle manifest"),
        (lambda b: (b / "manifest.json").write_text("[]"), "not a bundle manifest"),
    ],
)
def test_a_spoilt_directory_is_refused(bundle: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(bundle)
    with pytest.raises(BundleInvalid, match=message):
        load_bundle(bundle)


def test_a_file_that_a_killed_writer_left_is_passed_over(bundle: Path) -> None:
    (bundle / ".bundle.sig.14806-9a859b17.part").write_text("half")
    load_bundle(bundle)


def test_a_link_to_a_bundle_is_valid_and_a_link_inside_is_not(bundle: Path, tmp_path: Path) -> None:
    """A volume mount may be reached through links; a linked file could change after it was checked."""
    (tmp_path / "current").symlink_to(bundle)
    assert load_bundle(tmp_path / "current").bundle_id == load_bundle(bundle).bundle_id
    (bundle / "ranker.onnx").rename(tmp_path / "ranker.onnx")
    (bundle / "ranker.onnx").symlink_to(tmp_path / "ranker.onnx")
    with pytest.raises(BundleInvalid, match=r"ranker\.onnx is a link"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("width", "output", "kind", "opset", "message"),
    [
        (len(DENSE_NAMES), "float[n] probability", FLOAT, 17, "a graph does not take all features"),
        (len(DENSE_NAMES), "double[n] score", DOUBLE, 17, r"\('float64', \(1,\)\)\], expected"),
        (len(DENSE_NAMES), "float[n,1] score", FLOAT, 17, r"\('float32', \(1, 1\)\)\], expected"),
        (7, "float[n] score", FLOAT, 17, "a graph does not take all features"),
        (
            len(DENSE_NAMES),
            "float[n] score",
            FLOAT,
            99,
            "ranker.onnx is not a graph that ONNX Runtime can run",
        ),
    ],
    ids=["name", "dtype", "axes", "width", "opset"],
)
def test_a_ranker_of_another_form_is_refused(
    bundle: Path, width: int, output: str, kind: int, opset: int, message: str
) -> None:
    model = parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        ranker (float[n,{width}] dense, int64[n,{len(CATEGORICAL)}] categorical) => ({output}) {{
            mean = ReduceMean<axes=[1], keepdims={int("n,1" in output)}>(dense)
            {output.split()[1]} = Cast<to={kind}>(mean)
        }}
        """
    )
    (bundle / "ranker.onnx").write_bytes(model.SerializeToString())
    reseal(bundle)
    with pytest.raises(BundleInvalid, match=message):
        load_bundle(bundle)


def test_an_index_with_other_vectors_fails_the_golden_requests(bundle: Path) -> None:
    golden = [json.loads(line) for line in (bundle / "golden.jsonl").read_text().splitlines()]
    golden[0]["expected"][0][1] += 0.1
    (bundle / "golden.jsonl").write_text("".join(json.dumps(line) + "\n" for line in golden))
    reseal(bundle)
    with pytest.raises(BundleInvalid, match="golden request"):
        open_recommender(bundle, MemoryStore())


def test_another_feature_schema_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.release.bundle.schema_hash", lambda: "other")
    with pytest.raises(BundleInvalid, match="feature schema"):
        load_bundle(bundle)


def test_the_index_and_the_item_table_stay_in_their_files(toy_bundle: Path) -> None:
    """The processes of one machine share one copy of them."""
    opened = load_bundle(toy_bundle)
    mapped = Path("/proc/self/maps").read_text()
    for file in ("index.faiss", "statistics/neighbours.npy", "statistics/item_ids.npy"):
        assert str(toy_bundle / file) in mapped
    whole = faiss.read_index(str(toy_bundle / "index.faiss"))
    queries = np.random.default_rng(0).normal(size=(5, whole.d)).astype(np.float32)
    assert (opened.index.search(queries, 20)[1] == whole.search(queries, 20)[1]).all()


def test_a_bundle_without_weights_of_re_ranking_has_none(toy_bundle: Path) -> None:
    plain = load_bundle(toy_bundle)
    codes = np.array([3, 1])
    assert (plain.weights, plain.rarity, len(plain.rarity_of(codes)), len(plain.novel)) == (None, None, 0, 0)
    weighed = replace(plain, settings=replace(plain.settings, novelty=0.3, novel_slots=(10, 9)))
    assert weighed.novel.tolist() == [8, 9]
    assert len(weighed.rarity_of(codes)) == 2


# ------------------------------------------------------------------------- true hashes, untrue content


class Runs:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.mark, "it ran")


@pytest.mark.parametrize("name", ["ranker.onnx", "index.faiss", "statistics/price.npy", "golden.jsonl"])
def test_a_pickle_is_refused_and_never_runs(bundle: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    (bundle / name).write_bytes(pickle.dumps(Runs(mark)))
    reseal(bundle)
    with pytest.raises(BundleInvalid):
        open_recommender(bundle, MemoryStore())
    np.save(bundle / "statistics" / "price.npy", np.array([Runs(mark)], object), allow_pickle=True)
    reseal(bundle)
    with pytest.raises(BundleInvalid):
        load_bundle(bundle)
    assert not mark.exists()


@pytest.mark.parametrize(
    "location", ["weights.bin", "../weights.bin", "/proc/self/environ", "link.bin", "./weights.bin"]
)
def test_a_graph_whose_weights_lie_in_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for place in (folder, tmp_path):
        (place / "weights.bin").write_bytes(np.ones(4, np.float32).tobytes())
    (folder / "link.bin").symlink_to("/etc/passwd")
    monkeypatch.chdir(folder)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> leaks (float[4] x) => (float[4] y) { y = Add(x, w) }'
    )
    weight = model.graph.initializer.add(name="w", data_type=FLOAT, dims=[4])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    (folder / "ranker.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleInvalid, match="not a graph that ONNX Runtime can run"):
        open_session(folder / "ranker.onnx")


def test_a_loaded_graph_does_not_hold_its_file_as_well(toy_bundle: Path) -> None:
    """Its weights are in memory once: of a large catalogue they are hundreds of MB in each process."""
    file = toy_bundle / "query_tower.onnx"
    assert file.read_bytes() not in vars(open_session(file)).values()


def with_index(kind: Callable[[int], faiss.Index], rows: int, width: int) -> Callable[[Path], None]:
    def spoil(bundle: Path) -> None:
        index = kind(width)
        index.add(np.zeros((rows, width), np.float32))
        faiss.write_index(index, str(bundle / "index.faiss"))

    return spoil


def swap_graphs(bundle: Path) -> None:
    tower, ranker = bundle / "query_tower.onnx", bundle / "ranker.onnx"
    content = tower.read_bytes()
    tower.write_bytes(ranker.read_bytes())
    ranker.write_bytes(content)


def with_table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def spoil(bundle: Path) -> None:
        file = bundle / "statistics" / f"{name}.npy"
        np.save(file, change(np.load(file)), allow_pickle=False)

    return spoil


def without_last_type(bundle: Path) -> None:
    file = bundle / "statistics" / "vocabulary.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["type"].pop()
    file.write_text(json.dumps(vocabulary))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_table("price", lambda a: a.astype(np.float64)), "price.npy holds float64"),
        (with_table("price", lambda a: a.astype(">f4")), "price.npy holds >f4"),
        (with_table("price", lambda a: a[:-1]), "price.npy holds float32 of the shape"),
        (with_table("together_count", lambda a: a[:, :-1]), "together_count.npy holds float32 of the shape"),
        (with_table("neighbours", lambda a: a + len(a)), "neighbours.npy holds codes"),
        (with_table("popular", lambda a: a - 2), "popular.npy holds codes from -2"),
        (with_table("store_popular", lambda a: a[0]), "store_popular.npy holds int32 of the shape"),
        (with_table("categorical", lambda a: a - a.max()), "categorical.npy holds codes from -"),
        (
            with_table("basket_count", lambda a: a * np.float32("nan")),
            "basket_count.npy holds a number that is",
        ),
        (with_table("item_ids", lambda a: np.resize(a[:1], len(a))), "statistics/item_ids.npy"),
        (with_table("item_ids", lambda a: np.char.add(a, "\n")), "statistics/item_ids.npy"),
        (without_last_type, "vocabulary.json names"),
        (with_index(faiss.IndexFlatIP, 3, WIDTH), f"holds 3 vectors, expected {ITEMS}"),
        (with_index(faiss.IndexFlatL2, ITEMS, WIDTH), "inner product"),
        (
            with_index(faiss.IndexFlatIP, ITEMS, 32),
            r"'float32', \(1, 8\)\).* expected .*'float32', \(1, 32\)",
        ),
        (swap_graphs, "a graph does not take all features"),
    ],
)
def test_an_invalid_file_is_named(bundle: Path, spoil: Callable[[Path], None], message: str) -> None:
    with np.errstate(all="ignore"):
        spoil(bundle)
    reseal(bundle)
    with pytest.raises(BundleInvalid, match=message):
        load_bundle(bundle)


@pytest.mark.parametrize(
    "files", [[], {"a": 1}, {"../x": "y"}, {"/etc/passwd": "y"}, {"a\n": "y"}, {"": "y"}]
)
def test_a_manifest_of_strange_files_is_refused(bundle: Path, files: object) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    body = {**manifest, "files": files}
    del body["bundle_id"]
    (bundle / "manifest.json").write_text(json.dumps({**body, "bundle_id": bundle_id_of(body)}))
    with pytest.raises(BundleInvalid, match=r"not a bundle manifest|outside the bundle|says it is"):
        load_bundle(bundle)
