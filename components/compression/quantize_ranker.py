"""A ranker -> the same ranker in fewer bits, several ways, each with its certificate."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper, version_converter
from torch import nn
from torch.nn.utils import parametrize

from components.compression.smooth_quant import smooth
from components.compression.table_quantization import dequantize_table, quantize_table, quantize_tables
from components.data.examples import RankerExamples, read_ranker_examples
from components.home import write_json
from components.hyper_parameters import SIZES, QuantizeParams
from components.parameters import read_params
from components.ranker.certificate import ParityFailed, check
from components.ranker.distill_ranker import TAUGHT, read_taught
from components.ranker.export_ranker import export_ranker
from components.ranker.fitting import Soft, fit, tuning_of
from components.ranker.lineage import Parent
from components.ranker.onnx_export import replace_nodes
from components.ranker.ranker_artefact import GRAPH, Cost, RankerArtefact, begin_ranker, read_ranker
from components.ranker.scoring import OnnxRanker, batches
from components.ranker.train_ranker import calibrate, load_ranker

log = logging.getLogger(__name__)

CALIBRATION_BATCHES = 8  # of about 8,000 rows: what ranges of activations are read from
WEIGHT_BLOCK = 32
TUNED = ("fp32", "int8_weights", "int4_weights")  # forms whose rounding is known before the data comes in


@dataclass(frozen=True)
class Variant:
    """One way to spend fewer bits."""

    table_bits: int
    dense: str = "fp32"  # or fp16, int8_weights, int4_weights, int8_static, int8_smooth
    tolerance: str = ""  # section of tolerances.toml


# Dynamic INT8 is not among them: its scale comes from the whole batch, so that one shopper's outlier moves
# the scores of all shoppers in the same batch (by up to 0.4, measured).
VARIANTS: Mapping[str, Variant] = {
    "fp16": Variant(16, tolerance="fp16"),
    # A GPU computes in 16 bits, a CPU in float32 with weights read from them.
    "fp16_dense": Variant(16, "fp16", "fp16"),
    "int8": Variant(8, tolerance="int8"),
    "int4": Variant(4, tolerance="int4"),
    "int8_weights": Variant(8, "int8_weights", "int8"),
    "int4_weights": Variant(4, "int4_weights", "int4"),
    "int8_static": Variant(8, "int8_static", "int8"),
    "int8_smooth": Variant(8, "int8_smooth", "int8"),
}


def quantize_ranker(examples: Path, ranker: Path, variants: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Write one ranker per variant of `VARIANTS` into `variants`.

    Rounding comes first (post-training quantisation). Where tables or weights lose more than their tolerance
    that way, they are tuned with the rounding in the loop (quantisation-aware training, straight-through
    gradients: Jacob et al., arXiv 1712.05877) and rounded again.

    Any ranker of PyTorch can be quantised. `table.json` in `variants` has a row for every variant.

    Returns:
        NDCG@10 on the held-out lists of each variant as a share of the parent's; and a table with its size,
        its milliseconds for the longest list, and the reasons why it is outside its tolerance.
    """
    settings = read_params(QuantizeParams, params)
    logging.getLogger("onnxruntime.quantization").setLevel(logging.ERROR)  # a line for every node
    artefact = read_ranker(ranker)
    parent = Parent(artefact, read_ranker_examples(examples, "calibration"))
    train = read_ranker_examples(examples, "train")
    begin_ranker(variants)
    table = {}
    for name, variant in VARIANTS.items():
        cost, place = Cost([artefact]), variants / name
        certificate = _write(parent, artefact.graph, name, place, train, cost, {})
        failed = check(certificate)
        if failed and variant.dense in TUNED and settings.tune_epochs:
            log.info("%s: %s; tuning with the rounding in the loop", name, "; ".join(failed))
            # A tuning that diverges, so that even its graph differs from it, leaves what rounding made.
            with tempfile.TemporaryDirectory() as scratch, suppress(ParityFailed):
                tuned = tune(artefact, variant, Path(scratch), train, parent.held_out, settings)
                certificate = _write(parent, tuned, name, place, train, cost, asdict(settings))
            failed = check(certificate)
        table[name] = {**certificate, "outside_tolerance": failed}
        log.info("%s: %.4f of NDCG@10 %s", name, certificate["ndcg_at_10"]["ratio"], "; ".join(failed))
    write_json(variants / "table.json", table)
    ratios = {name: row["ndcg_at_10"]["ratio"] for name, row in table.items()}
    return {**ratios, "table": [_row(name, row) for name, row in table.items()]}


def _row(name: str, certificate: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements by which variants are compared."""
    return {
        "variant": name,
        "ndcg_at_10": certificate["ndcg_at_10"]["child"],
        "of_parent": certificate["ndcg_at_10"]["ratio"],
        "bytes": certificate["bytes"],
        "p99_ms": certificate["latency_ms"][str(max(SIZES))]["p99"],
        "tuned": certificate["tuned"],
        "outside_tolerance": "; ".join(certificate["outside_tolerance"]),
    }


def _write(
    parent: Parent,
    source: Path,
    name: str,
    place: Path,
    train: RankerExamples,
    cost: Cost,
    tuned: dict[str, Any],
) -> dict[str, Any]:
    """Write a graph, the parent's or a tuned one, as a variant, and return its certificate."""
    variant = VARIANTS[name]
    begin_ranker(place)
    model = quantize_dense(onnx.load(source), variant.dense, source, train)
    onnx.save(quantize_tables(model, variant.table_bits), place / GRAPH)
    certificate = parent.certify("quantize_ranker", variant.tolerance, place, variant=name, tuned=bool(tuned))
    params = {"quantize": {**asdict(variant), "tuned": tuned}}
    parent.finish(place, certificate, cost, params, variant=name)
    return certificate


def quantize_dense(model: onnx.ModelProto, how: str, file: Path, train: RankerExamples) -> onnx.ModelProto:
    """Return the graph with its linear layers in the given form.

    fp32 is unchanged, fp16 has weights and inputs in 16 bits. int8_weights and int4_weights have blocks of
    weights, and inputs stay float. int8_static has activations, too, whose ranges come from training lists by
    the graph in `file`. int8_smooth is the same after SmoothQuant. The graph that is given may be changed.
    """
    # Here, not above: `serving.stages.onnx_runtime` must load the library first.
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    if how == "fp32":
        return model
    if how == "fp16":
        replace_nodes(model, partial(_half_gemm, model))
        return model
    if how.endswith("_weights"):
        replace_nodes(model, partial(_gemm_to_matmul, model))
        quantizer = MatMulNBitsQuantizer(
            model,
            bits=int(how[3]),
            block_size=WEIGHT_BLOCK,
            is_symmetric=True,
            accuracy_level=0,
        )
        quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        return made
    feeds = list(_some(OnnxRanker(file), train))
    if how == "int8_smooth":
        model = smooth(model, feeds)
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "fp32.onnx", Path(scratch) / "int8.onnx"
        onnx.save(version_converter.convert_version(model, 21), source)
        quantize_static(
            source,
            target,
            SimpleNamespace(get_next=partial(next, iter(feeds), None)),  # a reader of calibration data
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Gemm"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(target)


def tune(
    parent: RankerArtefact,
    variant: Variant,
    place: Path,
    train: RankerExamples,
    held_out: RankerExamples,
    settings: QuantizeParams,
) -> Path:
    """Train a ranker so that it bears a variant's rounding; write it into `place`, return its float32 graph.

    A student goes on learning from its teachers; a ranker without teachers, from purchases alone.
    """
    taught = read_taught(parent.path, train) if (parent.path / TAUGHT).is_file() else None
    torch.manual_seed(settings.seed)
    model = load_ranker(parent)
    rounded: list[nn.Module] = []
    for module in list(model.modules()):
        if isinstance(module, nn.Embedding):
            how = partial(round_table, bits=variant.table_bits)
        elif isinstance(module, nn.Linear) and variant.dense != "fp32":
            how = partial(round_blocks, bits=int(variant.dense[3]))
        else:
            continue
        parametrize.register_parametrization(module, "weight", _Rounding(how))
        rounded.append(module)
    soft = None if taught is None else Soft(taught, settings.soft_weight, 1.0)
    fit(model, train, tuning_of(settings, epochs=settings.tune_epochs), soft)
    for module in rounded:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    model.eval()
    calibrate(model, held_out)
    begin_ranker(place)
    export_ranker(model, place, held_out)
    return place / GRAPH


class _Rounding(nn.Module):
    """Rounds a matrix on its way in and lets gradients pass as if it had not."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rounded = self.how(weight)
        return weight + (rounded - weight).detach()


def round_table(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a table, (rows, d) float32, as 16, 8 or 4 bits hold it."""
    if bits == 16:
        return weight.half().float()
    return dequantize_table(*quantize_table(weight, bits), bits)


def round_blocks(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a layer's weights, (out, in) float32, as 8 or 4 bits in blocks of WEIGHT_BLOCK inputs hold them.

    As ONNX Runtime's MatMulNBits does it: the largest of a block, sign and all, is the lowest level.
    """
    lowest = -(2 ** (bits - 1))
    missing = -weight.shape[1] % WEIGHT_BLOCK
    blocks = nn.functional.pad(weight, (0, missing)).unflatten(1, (-1, WEIGHT_BLOCK))
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scale = largest / lowest
    whole = (blocks / torch.where(scale == 0, 1.0, scale)).round().clamp(lowest, -lowest - 1)
    return (whole * scale).flatten(1)[:, : weight.shape[1]]


def _some(ranker: OnnxRanker, data: RankerExamples) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs of lists of equal length, spread over the data."""
    every = batches(data.start)
    for lists in every[:: max(1, len(every) // CALIBRATION_BATCHES)][:CALIBRATION_BATCHES]:
        length = int(np.diff(data.start)[lists].min())
        yield ranker.feed(data, data.start[lists][:, None] + np.arange(length)[None, :], lists)


def _half_gemm(model: onnx.ModelProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a linear layer in 16 bits; logarithms and sums of features stay in 32."""
    if node.op_type != "Gemm":
        return [node]
    given, output = node.input[0], node.output[0]
    for tensor in model.graph.initializer:
        if tensor.name in node.input[1:]:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    node.input[0], node.output[0] = f"{output}.given", f"{output}.half"
    return [
        helper.make_node("Cast", [given], [node.input[0]], to=TensorProto.FLOAT16),
        node,
        helper.make_node("Cast", [node.output[0]], [output], to=TensorProto.FLOAT),
    ]


def _gemm_to_matmul(model: onnx.ModelProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a linear layer as MatMul and Add, the form that weight quantisation knows."""
    if node.op_type != "Gemm":
        return [node]
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    x, w, b = node.input
    if given.get("transB"):
        [weight] = (tensor for tensor in model.graph.initializer if tensor.name == w)
        w = f"{w}.turned"
        model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), w))
        model.graph.initializer.remove(weight)
    product = f"{node.output[0]}.product"
    return [
        helper.make_node("MatMul", [x, w], [product], name=f"{product}.node"),
        helper.make_node("Add", [product, b], list(node.output)),
    ]
