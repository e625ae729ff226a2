"""Rankers in several precisions -> the one that this machine runs fastest, optimised ahead of time."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.data.examples import RankerExamples, read_ranker_examples
from components.home import write_json
from components.hyper_parameters import SIZES, CompileParams
from components.parameters import read_params
from components.ranker.certificate import check, enforce
from components.ranker.export_ranker import sample_inputs
from components.ranker.lineage import Parent
from components.ranker.ranker_artefact import ENGINES, GRAPH, Cost, RankerArtefact, begin_ranker, read_ranker
from components.ranker.scoring import Call, OnnxRanker, measure_calls, request
from components.ranker.train_ranker import load_ranker
from serving.stages.onnx_runtime import ort

log = logging.getLogger(__name__)

# Engines of ONNX Runtime by the provider they need, in the order of preference among equals.
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
SERVED = ("cpu",)  # the endpoint's engine; the others are measured for comparison
EAGER, COMPILED = "torch_eager", "torch_compile"  # for comparison: the endpoint has no PyTorch
TORCH = (EAGER, COMPILED)


class EngineMissing(Exception):
    """An engine cannot run here; the message says why."""


def compile_ranker(
    examples: Path, ranker: Path, variants: Path, compiled: Path, params: dict[str, Any]
) -> dict[str, Any]:
    """Optimise every variant ahead of time, measure all engines of this machine, keep the best.

    Only variants within their tolerance may win, and only engines that the endpoint has: eager PyTorch is
    measured beside them for comparison.

    The pruned ranker takes part as the variant fp32. ENGINES in `compiled` has a row for every engine and
    variant.

    Returns:
        The winner's variant and engine, its p50 and, where eager PyTorch runs, how many times faster it is.

    Raises:
        ParityFailed: the optimised graph does not say what its variant says.
    """
    settings = read_params(CompileParams, params)
    held_out = read_ranker_examples(examples, "calibration")
    parent = read_ranker(ranker)
    cost = Cost([parent])
    known = {"fp32": parent}
    known |= {place.name: read_ranker(place) for place in sorted(variants.iterdir()) if place.is_dir()}
    with tempfile.TemporaryDirectory() as scratch:
        graphs = {name: optimise(one.graph, Path(scratch) / f"{name}.onnx") for name, one in known.items()}
        arms, skipped = _measure(known, graphs, held_out)
        sizes = {name: graph.stat().st_size for name, graph in graphs.items()}
        winner = choose(arms, sizes, settings)
        begin_ranker(compiled)
        write_json(compiled / ENGINES, {"arms": arms, "skipped": skipped})
        shutil.copyfile(graphs[winner["variant"]], compiled / GRAPH)
    source, engine = Parent(known[winner["variant"]], held_out), winner["engine"]
    certificate = source.certify("compile_ranker", "compile", compiled, engine=engine)
    enforce(certificate)
    source.finish(compiled, certificate, cost, {"compile": asdict(settings)}, engine=engine)
    size = str(settings.candidates)
    p50 = winner["latency_ms"][size]["p50"]
    report = {"variant": winner["variant"], "engine": engine, "p50_ms": p50}
    if eager := next((arm for arm in arms if arm["engine"] == EAGER), None):
        report["speedup_over_eager"] = round(eager["latency_ms"][size]["p50"] / p50, 2)
    return report


def _measure(
    known: Mapping[str, RankerArtefact], graphs: Mapping[str, Path], held_out: RankerExamples
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the latency of every variant on every engine, and why an engine, or one variant, was skipped."""
    arms: list[dict[str, Any]] = []
    calls: list[Call] = []
    skipped: dict[str, str] = {}
    feed = OnnxRanker(known["fp32"].graph).feed
    trial = request(feed, held_out, SIZES[0])

    def add(variant: str, engine: str, failed: list[str], open_call: Callable[[], Call]) -> None:
        try:
            call = open_call()
            call(trial)
        except EngineMissing as reason:
            skipped[engine] = str(reason)
        except Exception as reason:
            if engine in SERVED:
                raise
            # Engines refuse a graph with errors of many kinds; one that is only compared stops no release.
            skipped[f"{engine}, {variant}"] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
        else:
            calls.append(call)
            served = engine in SERVED
            arms.append(
                {"variant": variant, "engine": engine, "is_served": served, "outside_tolerance": failed}
            )

    for name, artefact in known.items():
        failed = check(artefact.certificates[-1])
        for engine in PROVIDERS:
            # A GPU has no kernels for operators that were fused for a CPU: its engines fuse for themselves.
            graph = graphs[name] if engine in SERVED else artefact.graph
            add(name, engine, failed, partial(open_engine, graph, engine))
    add("fp32", EAGER, [], partial(open_torch, known["fp32"], EAGER, held_out))
    feeds = [feed] * len(calls)
    for arm, latency in zip(arms, measure_calls(calls, feeds, held_out), strict=True):
        arm["latency_ms"] = latency
    return arms, skipped


def choose(arms: list[dict[str, Any]], sizes: dict[str, int], settings: CompileParams) -> dict[str, Any]:
    """Return the fastest arm that may serve; among those as good as equally fast, the smallest.

    Raises:
        ValueError: no variant was measured.
    """
    size = str(settings.candidates)
    fit = [arm for arm in arms if arm["is_served"] and not arm["outside_tolerance"]]
    if not fit:
        raise ValueError("no variant that may serve is within its tolerance: look at its certificate")
    fastest = min(arm["latency_ms"][size]["p50"] for arm in fit)
    near = [arm for arm in fit if arm["latency_ms"][size]["p50"] <= settings.near_ratio * fastest]
    return min(near, key=lambda arm: (sizes[arm["variant"]], arm["latency_ms"][size]["p50"]))


def optimise(graph: Path, file: Path) -> Path:
    """Write a graph with its operators fused; the runtime need not do it again whenever a process starts."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(file)
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return file


def open_engine(file: Path, engine: str) -> Call:
    """Return a call of a graph on an engine: feed in, scores out.

    Raises:
        EngineMissing: this machine, or this build of ONNX Runtime, lacks the engine.
    """
    provider = PROVIDERS[engine]
    if provider not in ort.get_available_providers():
        raise EngineMissing(f"this build of onnxruntime has no {provider}")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(file), options, providers=[provider])
    if session.get_providers()[0] != provider:
        raise EngineMissing(f"{provider} could not start here: no GPU, or not the libraries it needs")
    return lambda feed: session.run(["score"], feed)


def open_torch(artefact: RankerArtefact, engine: str, held_out: RankerExamples) -> Call:
    """Return a call of a ranker in PyTorch: feed in, scores out, one thread as in ONNX Runtime.

    `compile_ranker` measures EAGER; `reco bench compression` also measures COMPILED.

    Raises:
        EngineMissing: there is no C++ compiler, which torch.compile needs.
    """
    model: Any = load_ranker(artefact)
    given = sample_inputs(model, held_out)[0]
    names = list(given)
    torch.set_num_threads(1)
    if engine == COMPILED:
        if shutil.which("g++") is None:
            raise EngineMissing("torch.compile needs a C++ compiler: g++ is not installed")
        with warnings.catch_warnings(), torch.inference_mode():
            # The compiler warns of its own internals, nothing a user can mend.
            warnings.simplefilter("ignore")
            model = torch.compile(model, dynamic=True)
            model(*given.values())

    def call(feed: dict[str, np.ndarray]) -> Any:
        with torch.inference_mode():
            return model(*(torch.from_numpy(feed[name]) for name in names))

    return call
