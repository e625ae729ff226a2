"""The choice by hand; missing inputs are reported; the compiled graph scores like its variant."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from components.compression.compile_ranker import (
    COMPILED,
    EAGER,
    PROVIDERS,
    SERVED,
    TORCH,
    EngineMissing,
    choose,
    compile_ranker,
    open_engine,
    open_torch,
    optimise,
)
from components.data.examples import read_ranker_examples
from components.home import write_json
from components.hyper_parameters import SIZES, CompileParams
from components.ranker.certificate import check_chain
from components.ranker.ranker_artefact import CERTIFICATES, GRAPH, read_ranker
from components.ranker.scoring import OnnxRanker

# ------------------------------------------------------------------------------------------ the choice


def arm(variant: str, p50: float, engine: str = "cpu", *outside: str) -> dict[str, Any]:
    return {
        "variant": variant,
        "engine": engine,
        "is_served": engine in SERVED,
        "outside_tolerance": list(outside),
        "latency_ms": {"500": {"p50": p50, "p99": 2 * p50}},
    }


SIZES_OF = {"fp32": 400, "fp16": 300, "int8": 200, "int4": 100}


EQUAL = [arm("fp32", 1.0), arm("int8", 1.02), arm("int4", 1.029), arm("fp16", 1.0)]


@pytest.mark.parametrize(
    ("arms", "settings", "chosen"),
    [
        ([arm("fp32", 1.0), arm("int8", 0.8), arm("int4", 0.9)], {}, "int8"),
        (EQUAL, {}, "int4"),
        (EQUAL, {"near_ratio": 1.0}, "fp16"),
        ([arm("int4", 0.1, "cpu", "ndcg_at_10 is 0.9"), arm("fp32", 1.0)], {}, "fp32"),
        # A fast arm that may not win must not push those that may out of its reach.
        ([arm("fp16", 0.1, "cpu", "outside"), arm("fp32", 1.0), arm("int4", 1.01)], {}, "int4"),
        # The endpoint runs on a processor, without PyTorch: other engines are reported, never chosen.
        ([arm("int8", 0.1, "cuda"), arm("int4", 0.1, "torch_compile"), arm("fp32", 1.0)], {}, "fp32"),
    ],
)
def test_the_smallest_of_the_fastest_that_may_serve_wins(
    arms: list[dict[str, Any]], settings: dict[str, float], chosen: str
) -> None:
    assert choose(arms, SIZES_OF, CompileParams(**settings))["variant"] == chosen  # type: ignore[arg-type]


def test_nothing_within_its_tolerance_is_said() -> None:
    with pytest.raises(ValueError, match="no variant that may serve is within its tolerance"):
        choose([arm("fp32", 1.0, "cpu", "outside")], SIZES_OF, CompileParams())


# ----------------------------------------------------------------------------------------- the engines


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in PROVIDERS if name != "cpu"])
def test_a_missing_engine_is_reported_with_its_reason(tmp_path: Path, engine: str) -> None:
    if PROVIDERS[engine] in ort.get_available_providers():
        pytest.skip(f"this build of onnxruntime has {PROVIDERS[engine]}")
    with pytest.raises(EngineMissing, match=f"this build of onnxruntime has no {PROVIDERS[engine]}"):
        open_engine(tmp_path / "unread.onnx", engine)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [name for name in PROVIDERS if name != "cpu"])
def test_a_gpu_scores_like_the_processor(teacher: Path, shop: Path, engine: str) -> None:
    if PROVIDERS[engine] not in ort.get_available_providers():
        pytest.skip(f"this build of onnxruntime has no {PROVIDERS[engine]}")
    data = read_ranker_examples(shop / "examples", "calibration")
    reference = OnnxRanker(teacher / GRAPH)
    call = open_engine(teacher / GRAPH, engine)
    for count in (30, 5, 30):  # a recorded launch must take other inputs the second time
        for first in (0, 600):
            feed = reference.feed(data, np.arange(first, first + count)[None, :], np.array([0]))
            expected = reference.session.run(["score"], feed)[0]
            np.testing.assert_allclose(np.asarray(call(feed)).squeeze(), expected, atol=2e-3)


@pytest.mark.slow
def test_optimising_fuses_operators_and_changes_no_answer(toy_line: Path, tmp_path: Path) -> None:
    import onnx

    teacher = toy_line / "teacher"
    data = read_ranker_examples(toy_line / "examples", "calibration")
    file = optimise(teacher / GRAPH, tmp_path / "optimised.onnx")
    np.testing.assert_allclose(
        OnnxRanker(file).scores(data), OnnxRanker(teacher / GRAPH).scores(data), atol=1e-5
    )
    assert len(onnx.load(file).graph.node) <= len(onnx.load(teacher / GRAPH).graph.node)
    feed = OnnxRanker(file).feed(data, np.arange(30)[None, :], np.array([0]))
    np.testing.assert_allclose(
        np.asarray(open_engine(file, "cpu")(feed)).squeeze(), OnnxRanker(file).scores(data)[:30], atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", TORCH)
def test_pytorch_scores_like_the_graph_eager_and_compiled(toy_line: Path, engine: str) -> None:
    data = read_ranker_examples(toy_line / "examples", "calibration")
    reference = OnnxRanker(toy_line / "pruned" / GRAPH)
    ranker = read_ranker(toy_line / "pruned")
    if engine == COMPILED and shutil.which("g++") is None:
        with pytest.raises(EngineMissing, match=r"g\+\+ is not installed"):
            open_torch(ranker, engine, data)
        return
    feed = reference.feed(data, np.arange(30)[None, :], np.array([0]))
    from torch._inductor import config  # a second of imports, of which no other test needs any

    # To try out vector units and to prepare headers takes compilers ten seconds, and our code knows neither.
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        said = np.asarray(open_torch(ranker, engine, data)(feed)).squeeze()
    np.testing.assert_allclose(said, reference.scores(data)[:30], atol=1e-5)


# -------------------------------------------------------------------------------------------- the step


@pytest.mark.slow
def test_the_winner_is_a_ranker_with_its_chain(toy_line: Path) -> None:
    found = read_ranker(toy_line / "ranker")
    assert check_chain(found.certificates, found.id) == []
    last = found.certificates[-1]
    assert last["step"] == "compile_ranker"
    assert last["engine"] == found.manifest["engine"]
    assert found.manifest["params"]["compile"]["candidates"] == CompileParams().candidates
    known = [read_ranker(graph.parent) for graph in toy_line.glob(f"variants/*/{GRAPH}")]
    [source] = [one for one in (read_ranker(toy_line / "pruned"), *known) if [one.id] == last["parents"]]
    assert found.manifest["parents"] == [source.id]
    data = read_ranker_examples(toy_line / "examples", "calibration")
    np.testing.assert_allclose(
        OnnxRanker(found.graph).scores(data), OnnxRanker(source.graph).scores(data), atol=1e-3
    )


@pytest.mark.slow
def test_a_variant_outside_its_tolerance_is_measured_and_not_chosen(
    toy_line: Path, tmp_path: Path, few_repeats: None
) -> None:
    shutil.copytree(toy_line / "variants" / "int4", tmp_path / "variants" / "int4")
    spoilt = read_ranker(tmp_path / "variants" / "int4")
    spoilt.certificates[-1]["ndcg_at_10"]["child"] = spoilt.certificates[-1]["ndcg_at_10"]["parent"] / 2
    write_json(tmp_path / "variants" / "int4" / CERTIFICATES, spoilt.certificates)
    place = tmp_path / "compiled"
    told = compile_ranker(
        toy_line / "examples", toy_line / "pruned", tmp_path / "variants", place, {"candidates": 100}
    )
    assert told["variant"] == "fp32"
    assert told["engine"] == read_ranker(place).manifest["engine"]
    assert {path.name for path in place.iterdir()} == {GRAPH, CERTIFICATES, "manifest.json", "engines.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"variants", "compiled"}
    arms = json.loads((place / "engines.json").read_text())["arms"]
    [measured] = [one for one in arms if (one["variant"], one["engine"]) == ("int4", "cpu")]
    assert measured["outside_tolerance"][0].startswith("ndcg_at_10 is 0.5000 of the parent's")
    assert set(measured["latency_ms"]) == {str(size) for size in SIZES}


@pytest.mark.slow
def test_a_ranker_that_eager_pytorch_refuses_is_compiled_without_a_speedup(
    toy_line: Path, tmp_path: Path, few_repeats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(f"no kernel here, {'but many words ' * 20}")

    monkeypatch.setattr("components.compression.compile_ranker.open_torch", refuse)
    (tmp_path / "variants").mkdir()
    where = (toy_line / "examples", toy_line / "pruned", tmp_path / "variants", tmp_path / "compiled")
    assert compile_ranker(*where, {"candidates": 100}).keys() == {"variant", "engine", "p50_ms"}
    skipped = json.loads((tmp_path / "compiled" / "engines.json").read_text())["skipped"]
    assert skipped[f"{EAGER}, fp32"].startswith("RuntimeError: no kernel here")
    assert len(skipped[f"{EAGER}, fp32"]) == 200, "the model card shows it"


@pytest.mark.slow
def test_every_engine_is_measured_or_skipped_with_a_reason(toy_line: Path) -> None:
    told = json.loads((toy_line / "ranker" / "engines.json").read_text())
    engines = [one["engine"] for one in told["arms"]]
    assert {one["variant"] for one in told["arms"]} >= {"fp32", "fp16", "fp16_dense", "int8", "int4"}
    assert set(engines) | set(told["skipped"]) == {*PROVIDERS, EAGER}
    assert set(engines).isdisjoint(told["skipped"])
    assert engines.count(EAGER) == 1, "of fp32 alone, for comparison"
    assert set(told["arms"][-1]["latency_ms"]) == {str(size) for size in SIZES}
