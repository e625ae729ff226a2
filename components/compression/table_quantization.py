"""Embedding tables in 16, 8 or 4 bits, in forms that ONNX Runtime gathers from without unpacking the table.

What is stored for a table of d columns, in bytes a row:

    fp16   2 d                          Gather, Cast
    int8   d + 2                        GatherBlockQuantized, one scale a row
    int4   d / 2 + 2 d / ROWS_A_BLOCK   GatherBlockQuantized, one scale for a column of ROWS_A_BLOCK rows

A scale for every row of four-bit numbers is what most tools write. It costs two bytes beside d / 2, so that
the promised 8 x becomes 7.5 x at d = 64 and 6.4 x at d = 16; a block of rows shares its scales for 7.9 x at
any d.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from components.ranker.onnx_export import replace_nodes

ROWS_A_BLOCK = 512  # of one scale per column, a power of two
_LEVELS = {8: 127, 4: 7}
_CLIPS = (1.0, 0.9, 7 / 8, 0.8, 0.7, 0.6, 0.5)  # 7 / 8: a table that holds -8 is rounded to itself
_DOMAIN = "com.microsoft"


def quantize_table(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers, (rows, d) int8, and scales: (rows, 1) for 8 bits, (blocks, d) for 4.

    Each scale is the one of a few clipped ranges that leaves the least squared error: at four bits, one
    large value must not cost all others their precision. Rounding is to the nearest, scales are fp16.
    """
    groups = _grouped(weight, bits)  # (groups, members, columns): members of a column share a scale
    top = groups.abs().amax(1, keepdim=True)
    best, least = torch.ones_like(top), torch.full_like(top, torch.inf)
    for clip in _CLIPS if bits == 4 else _CLIPS[:1]:
        scale = (clip * top / _LEVELS[bits]).clamp(min=1e-7).half().float().clamp(min=6e-8)
        error = (_rounded(groups, scale, bits) * scale - groups).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    whole = _rounded(groups, best, bits).to(torch.int8)
    if bits == 8:
        return whole.squeeze(2), best.squeeze(2)
    return whole.flatten(0, 1)[: len(weight)], best.squeeze(1)


def dequantize_table(whole: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the table as the runtime reads it, (rows, d) float32."""
    if bits == 8:
        return whole * scale
    return whole * scale.repeat_interleave(ROWS_A_BLOCK, 0)[: len(whole)]


def _grouped(weight: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return weight[:, :, None]  # (rows, d, 1)
    missing = -len(weight) % ROWS_A_BLOCK
    padded = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    return padded.view(-1, ROWS_A_BLOCK, weight.shape[1])


def _rounded(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (groups / scale).round().clamp(-_LEVELS[bits] - 1, _LEVELS[bits])


def table_names(model: onnx.ModelProto) -> list[str]:
    """Return the embedding tables of a graph: float matrices that a Gather looks rows up in."""
    matrices = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    }
    used = [
        node.input[0] for node in model.graph.node if node.op_type == "Gather" and node.input[0] in matrices
    ]
    return list(dict.fromkeys(used))


def quantize_tables(model: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """Return a copy of the graph with every embedding table in `bits` bits: 16, 8 or 4."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for name in table_names(made):
        tensor = next(t for t in made.graph.initializer if t.name == name)
        weight = torch.from_numpy(numpy_helper.to_array(tensor).copy())
        made.graph.initializer.remove(tensor)
        stored = stored_table(name, weight, bits)
        made.graph.initializer.extend(stored)
        replace_nodes(made, partial(_gather_instead, name, stored))
    import_operators(made)
    return made


def _gather_instead(name: str, stored: list[TensorProto], node: onnx.NodeProto) -> list[onnx.NodeProto]:
    of_table = node.op_type == "Gather" and node.input[0] == name
    return gather(stored, node.input[1], node.output[0]) if of_table else [node]


def stored_table(name: str, weight: Tensor, bits: int) -> list[TensorProto]:
    """Return a table, (rows, d) float32, as the initializers of a graph: the numbers, then any scales."""
    if bits == 16:
        return [numpy_helper.from_array(weight.half().numpy(), f"{name}.fp16")]
    whole, scale = quantize_table(weight, bits)
    scales = numpy_helper.from_array(scale.half().numpy(), f"{name}.scale")
    if bits == 8:  # the runtime's eight-bit form is unsigned, with 128 for zero
        shifted = (whole.to(torch.int16) + 128).to(torch.uint8).numpy()
        return [numpy_helper.from_array(shifted, f"{name}.int8"), scales]
    nibbles = whole.flatten().numpy() & 15
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.int8)).astype(np.uint8)
    packed = TensorProto(name=f"{name}.int4", data_type=TensorProto.INT4, dims=list(weight.shape))
    packed.raw_data = (nibbles[0::2] | (nibbles[1::2] << 4)).tobytes()
    return [packed, scales]


def gather(stored: list[TensorProto], index: str, output: str) -> list[onnx.NodeProto]:
    """Return the nodes that look rows of a stored table up, as float32.

    Args:
        stored: what `stored_table` returned.
        index: name of the row numbers, int32 or int64 of any shape.
        output: name of the rows found, the shape of the row numbers and d behind it.
    """
    data, names, half = stored[0], [tensor.name for tensor in stored], f"{output}.half"
    if data.data_type == TensorProto.FLOAT16:
        found = helper.make_node("Gather", [names[0], index], [half], axis=0)
    else:
        how: dict[str, Any] = (
            {"quantize_axis": 1, "block_size": _block(data.dims[1]), "bits": 8}
            if data.data_type == TensorProto.UINT8
            else {"quantize_axis": 0, "block_size": ROWS_A_BLOCK}
        )
        found = helper.make_node(
            "GatherBlockQuantized", [names[0], index, names[1]], [half], domain=_DOMAIN, gather_axis=0, **how
        )
    return [found, helper.make_node("Cast", [half], [output], to=TensorProto.FLOAT)]


def import_operators(model: onnx.ModelProto) -> None:
    """Declare in a graph the operators and types that stored tables need."""
    if any(node.domain == _DOMAIN for node in model.graph.node):
        _import(model, _DOMAIN, 1)
    _import(model, "", 21)
    model.ir_version = max(model.ir_version, 10)


def _block(width: int) -> int:
    """Return the smallest block that the runtime takes and that holds a row: a power of two, 16 or more."""
    return max(16, 1 << (width - 1).bit_length())


def _import(model: onnx.ModelProto, domain: str, version: int) -> None:
    for known in model.opset_import:
        if known.domain == domain:
            known.version = max(known.version, version)
            return
    model.opset_import.append(helper.make_opsetid(domain, version))
