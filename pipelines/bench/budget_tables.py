"""Budgeted embeddings: a table in a given number of bytes, more of them for the rows that matter more.

Rows are grouped by how often their item is bought. Each group may keep all columns or fewer, in 16, 8 or 4
bits, or share one vector; what each choice costs in quality is measured on held-out lists, and a solver
takes the choices that lose least within the budget (mixed dimensions after Ginart et al., "Mixed Dimension
Embeddings", arXiv 1909.11810; here they are read off a trained table, without training again).

What is stored, besides the rows in the forms of `table_quantization`:

    order   2 bytes a row, 4 beyond 65,536 rows: where in the tiers a row lies
    axes    2 (d + 1) columns bytes: the mean row and d principal axes, d the largest reduced dimension in use

A reduced row holds its first coordinates on the principal axes of the whole table. The mean is taken off
first: it is most of a trained table's first singular vector, and four bits are too few to hold an offset
beside what differs from row to row. One set of axes, weighted by frequency, serves every group, and groups
begin at multiples of ROWS_A_BLOCK, so that a row is stored alike whatever the other groups chose: bytes and
losses of groups add up exactly. Axes of each group's own would not add up once groups share a tier. On a
64-column item table (before the mean was taken off) they lost 12 % more at 32 columns, 2 % less at 16 and
20 % less at 8.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from components.compression.table_quantization import (
    ROWS_A_BLOCK,
    dequantize_table,
    gather,
    import_operators,
    quantize_table,
    stored_table,
)
from components.data.examples import RankerExamples
from components.ranker.onnx_export import replace_nodes
from components.ranker.scoring import ROWS_AT_ONCE, OnnxRanker, logit

GROUPS = 8
LISTS = 500  # that losses are measured on, at most
TOP = 10
_SHORT = 1 << 16  # rows that two bytes can tell apart
# What the number of columns is divided by, and the bits of each; a shared vector is the ninth option.
_FORMS = ((1, 16), (1, 8), (1, 4), (2, 8), (2, 4), (4, 8), (4, 4), (8, 4))


@dataclass(frozen=True, order=True)
class Option:
    """How a group of rows may be stored: numbers a row, and bits of each. No numbers: one shared vector."""

    dim: int
    bits: int


SHARED = Option(0, 0)


@dataclass(frozen=True)
class Assignment:
    """What a group of rows got."""

    rows: np.ndarray  # (n,) int64 rows of the table
    option: Option
    size: int  # bytes of these rows; order and axes are not any group's
    loss: float  # squared change of logits a list, weighted by closeness to the top ten


def budget_tables(
    model: onnx.ModelProto, table: str, frequency: np.ndarray, budget_bytes: int, held_out: RankerExamples
) -> tuple[onnx.ModelProto, list[Assignment]]:
    """Return a copy of the graph whose table takes at most `budget_bytes`, and what each group of rows got.

    The loss of a choice is the sum over candidates of w (change of logit)^2, where w = exp(-gap) and gap is
    how far the candidate lies below the tenth of its list: a row counts by how often it is looked up and by
    how close to the top it lies. A candidate looks up one row, so that the losses of groups add up, and the
    solver's sum is the loss of the graph returned. A uniform table (`uniform_options`), which needs no
    order, is returned instead where it loses less; it is then the one assignment.

    Args:
        model: a ranker that takes candidates one a row (flat) and looks the table up once.
        table: the initializer, (rows, columns) float32.
        frequency: (rows,) purchases of each row's item, not negative; they decide the groups.
        budget_bytes: for everything that is stored in place of the table (`table_bytes`).
        held_out: lists to measure on; labels are not looked at.

    Raises:
        ValueError: the budget is below the cheapest choice; or the table, its lookup or the frequencies are
            not as described above.
    """
    weight = read_table(model, table)
    rows, columns = weight.shape
    axes = principal_axes(weight, frequency)
    groups, options = frequency_groups(frequency), _options(columns)
    size = np.array([[option_bytes(len(group), columns, option) for option in options] for group in groups])
    loss = np.empty(size.shape)
    meter = _Meter(model, table, held_out)
    for j, option in enumerate(options):  # a candidate sees one group: all can be changed at once
        change = meter.change(
            reconstruct(weight, axes, [Assignment(group, option, 0, 0.0) for group in groups])
        )
        loss[:, j] = [change[group].sum() for group in groups]

    found: list[list[Assignment]] = []
    for width in sorted({option.dim for option in options} - {columns}):  # of the axes that is paid for
        allowed = np.array(
            [j for j, option in enumerate(options) if option.dim in (columns, *range(width + 1))]
        )
        left = budget_bytes - order_bytes(rows) - axes_bytes(width, columns)
        if left < size[:, allowed].min(1).sum():
            continue
        choice = allowed[solve(size[:, allowed], loss[:, allowed], left)]
        found.append(
            [
                Assignment(groups[i], options[j], int(size[i, j]), float(loss[i, j]))
                for i, j in enumerate(choice)
            ]
        )
    every = np.arange(rows)
    for option in uniform_options(rows, columns, budget_bytes):
        one = Assignment(every, option, option_bytes(rows, columns, option), 0.0)
        change = meter.change(reconstruct(weight, axes, [one]))
        found.append([replace(one, loss=float(change.sum()))])
    if not found:
        needed = order_bytes(rows) + int(size[:, -1].sum())
        raise ValueError(
            f"the cheapest way to store {table}, {rows:,} rows that share {len(groups)} vectors, "
            f"takes {needed:,} bytes, the budget is {budget_bytes:,}: raise it"
        )
    best = min(found, key=lambda each: sum(assignment.loss for assignment in each))
    return store(model, table, axes, best), best


def uniform_options(rows: int, columns: int, budget_bytes: int) -> list[Option]:
    """Return, for 16, 8 and 4 bits, the widest uniform table that fits the budget with its axes.

    What a budgeted table has to beat: every row gets the same. Bits that not even one column fits in are
    left out. 32 bits are never among them: 16 hold twice the columns in the same bytes.
    """
    found = []
    for bits in (16, 8, 4):
        for dim in range(columns, 0, -1):
            besides = axes_bytes(dim, columns) if dim < columns else 0
            if option_bytes(rows, columns, Option(dim, bits)) + besides <= budget_bytes:
                found.append(Option(dim, bits))
                break
    return found


def uniform_table(
    model: onnx.ModelProto, table: str, frequency: np.ndarray, option: Option
) -> onnx.ModelProto:
    """Return a copy of the graph with every row of the table stored alike, to compare a budgeted one with.

    Raises:
        ValueError: as `budget_tables` does.
    """
    weight = read_table(model, table)
    rows, columns = weight.shape
    every = Assignment(np.arange(rows), option, option_bytes(rows, columns, option), 0.0)
    return store(model, table, principal_axes(weight, frequency), [every])


def option_bytes(rows: int, columns: int, option: Option) -> int:
    """Return the bytes of some rows as they are stored, scales included, order and axes not."""
    if option == SHARED:
        return 2 * columns
    if option.bits == 16:
        return rows * 2 * option.dim
    if option.bits == 8:
        return rows * (option.dim + 2)
    return -(-rows * option.dim // 2) + 2 * option.dim * -(-rows // ROWS_A_BLOCK)


def axes_bytes(dim: int, columns: int) -> int:
    """Return the bytes of the mean row and the axes that tiers of at most `dim` reduced columns need."""
    return 2 * (dim + 1) * columns if dim else 0


def order_bytes(rows: int) -> int:
    """Return the bytes of the table that says where in the tiers each row lies."""
    return rows * (2 if rows <= _SHORT else 4)


def table_bytes(model: onnx.ModelProto, table: str) -> int:
    """Return the bytes of all that a graph from this module stores in place of a table."""
    return sum(len(t.raw_data) for t in model.graph.initializer if t.name.startswith(f"{table}."))


def read_table(model: onnx.ModelProto, table: str) -> Tensor:
    """Return a table of a graph, (rows, columns) float32.

    Raises:
        ValueError: the graph holds no such float matrix.
    """
    for tensor in model.graph.initializer:
        if tensor.name == table and tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    raise ValueError(f"the graph holds no float32 matrix {table}: name one of its embedding tables")


def principal_axes(weight: Tensor, frequency: np.ndarray) -> Tensor:
    """Return the mean row and below it the principal axes, (1 + columns, columns), the largest first.

    Rows are weighted by frequency: the mean and the first d axes lose least of the rows as they are looked
    up, in squares (Eckart & Young, 1936). They are rounded to fp16, as they are stored.

    Raises:
        ValueError: there is not one frequency, 0 or more, for each row.
    """
    if frequency.shape != weight.shape[:1] or not (frequency >= 0).all():
        raise ValueError(
            f"frequencies are {frequency.shape}, the table has {len(weight):,} rows: "
            "give one number, 0 or more, for each"
        )
    often = torch.from_numpy(
        np.asarray(frequency, np.float64) + 1
    )  # a row never bought still counts a little
    often /= often.sum()
    mean = often @ weight.double()
    centred = weight.double() - mean
    spread = torch.linalg.eigh((centred * often[:, None]).T @ centred).eigenvectors
    return torch.cat([mean[None], spread.flip(1).T]).half().float()


def frequency_groups(frequency: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group, most frequent first; small groups at the head, large in the tail.

    Sizes grow about geometrically, in whole blocks of ROWS_A_BLOCK rows but for the last.
    """
    blocks = -(-len(frequency) // ROWS_A_BLOCK)
    ends = np.unique(np.geomspace(1, blocks, min(GROUPS, blocks)).round().astype(int))
    return np.split(np.argsort(-frequency, kind="stable"), ends[:-1] * ROWS_A_BLOCK)


def solve(size: np.ndarray, loss: np.ndarray, budget: int) -> list[int]:
    """Return the option of each group that together lose least within the budget: the exact optimum.

    A multiple-choice knapsack by the list method of Nemhauser & Ullmann, "Discrete dynamic programming and
    capital allocation" (1969): group by group, of all sums only those are kept that no other beats in both
    bytes and loss. No more than budget + 1 can be, nor more than options ** groups.

    Args:
        size: (groups, options) whole bytes.
        loss: (groups, options).
        budget: bytes.

    Raises:
        ValueError: even the smallest options are over the budget.
    """
    least = size.min(1)
    if least.sum() > budget:
        raise ValueError(
            f"the smallest options take {least.sum():,} bytes, the budget is {budget:,}: raise it"
        )
    spent, lost = np.zeros(1, np.int64), np.zeros(1)
    kept = []  # for each group, the state and the option that each state came from
    for i in range(len(size)):
        now, worse = (spent[:, None] + size[i]).ravel(), (lost[:, None] + loss[i]).ravel()
        order = np.lexsort((worse, now))
        order = order[now[order] <= budget - least[i + 1 :].sum()]
        before = np.minimum.accumulate(np.append(np.inf, worse[order]))[:-1]
        order = order[worse[order] < before]
        kept.append(np.divmod(order, size.shape[1]))
        spent, lost = now[order], worse[order]
    state = len(spent) - 1  # losses fall as bytes rise
    choice = []
    for origin, option in reversed(kept):
        choice.append(int(option[state]))
        state = origin[state]
    return choice[::-1]


def reconstruct(weight: Tensor, axes: Tensor, assignments: Sequence[Assignment]) -> Tensor:
    """Return the table as the graph of `store` reads it, (rows, columns) float32."""
    made = torch.empty_like(weight)
    for a in assignments:
        made[a.rows] = _read_back(weight[a.rows], axes, a.option)
    return made


def store(
    model: onnx.ModelProto, table: str, axes: Tensor, assignments: Sequence[Assignment]
) -> onnx.ModelProto:
    """Return a copy of the graph that holds the rows as assigned instead of the table.

    Groups with the same option become one tier. Each tier is asked for every row, clipped into its range,
    and the answer of the right one is taken: the shapes depend on nothing but the number of rows asked for,
    and each row comes from its own code alone.

    Args:
        model: the graph, with the table.
        table: its name.
        axes: what `principal_axes` returned.
        assignments: which rows get what, all rows of the table once.

    Raises:
        ValueError: the graph does not hold the table, or does not look it up exactly once.
    """
    weight, lookup = read_table(model, table), _lookup(model, table)
    columns = weight.shape[1]
    tiers, begins, place = _tiers(weight, axes, assignments)
    width = max((option.dim for option in tiers if option.dim < columns), default=0)
    stored: list[TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def add(kind: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{table}.step{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(value: int | list[int], kind: type = np.int32) -> str:
        return add("Constant", [], value=numpy_helper.from_array(np.array(value, kind)))

    def widened(reduced: str) -> str:
        for name, values in (("axes", axes[1 : width + 1]), ("mean", axes[0])):
            stored.append(numpy_helper.from_array(values.half().numpy(), f"{table}.{name}"))
        turned = add("MatMul", [reduced, add("Cast", [f"{table}.axes"], to=TensorProto.FLOAT)])
        return add("Add", [turned, add("Cast", [f"{table}.mean"], to=TensorProto.FLOAT)])

    position = lookup.input[1]
    if place is not None:
        stored.append(numpy_helper.from_array(place, f"{table}.order"))
        position = add("Gather", [f"{table}.order", position])
    position = add("Cast", [position], to=TensorProto.INT32)
    found, is_reduced = "", False
    for option in reversed(tiers):  # reduced ones first: what they give is widened once
        local, last = position, len(tiers[option]) - 1
        if len(tiers) > 1:
            local = add("Clip", [add("Sub", [local, constant(begins[option])]), constant(0), constant(last)])
        kept = stored_table(f"{table}.{option.dim}x{option.bits}", tiers[option], option.bits)
        stored.extend(kept)
        taken = f"{kept[0].name}.rows"
        nodes.extend(gather(kept, local, taken))
        if option.dim < width:
            more = constant([0, width - option.dim], np.int64)
            taken = add("Pad", [taken, more, "", constant([-1], np.int64)])
        if is_reduced and option.dim == columns:
            found, is_reduced = widened(found), False
        if found:
            inside = add("Less", [position, constant(begins[option] + last + 1)])
            inside = add("Unsqueeze", [inside, constant([-1], np.int64)])
            found = add("Where", [inside, taken, found])
        else:
            found, is_reduced = taken, option.dim < columns
    if is_reduced:
        widened(found)
    nodes[-1].output[0] = lookup.output[0]
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    graph.initializer.remove(next(t for t in graph.initializer if t.name == table))
    graph.initializer.extend(stored)
    replace_nodes(made, lambda node: nodes if node == lookup else [node])
    import_operators(made)
    return made


class _Meter:
    """Says how far the logits of held-out candidates move when the table's rows change."""

    def __init__(self, model: onnx.ModelProto, table: str, held_out: RankerExamples) -> None:
        self.model, self.table = onnx.ModelProto(), table
        self.model.CopyFrom(model)
        index = _lookup(model, table).input[1]
        self.model.graph.output.append(helper.make_empty_tensor_value_info(index))
        self.tensor = next(t for t in self.model.graph.initializer if t.name == table)
        lists = np.linspace(0, len(held_out.start) - 2, min(LISTS, len(held_out.start) - 1)).astype(int)
        parts = [np.arange(*held_out.start[i : i + 2]) for i in lists]
        self.data, self.rows = held_out, np.concatenate(parts)
        self.logit, self.code = self._run(index)
        cuts = np.cumsum([len(part) for part in parts])[:-1]
        gaps = [np.sort(each)[-TOP:][:1] - each for each in np.split(self.logit, cuts)]
        self.weight = np.exp(-np.maximum(np.concatenate(gaps), 0)) / len(lists)

    def change(self, weight: Tensor) -> np.ndarray:
        """Return the loss that each row of the table causes when it is replaced by the one given, (rows,)."""
        self.tensor.CopyFrom(numpy_helper.from_array(weight.numpy(), self.table))
        moved = self._run()[0] - self.logit
        return np.bincount(self.code, self.weight * moved**2, len(weight))

    def _run(self, *besides: str) -> list[np.ndarray]:
        """Return the logits of the rows, (rows,) float32, and other tensors of the graph."""
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "ranker.onnx"
            onnx.save(self.model, file)
            ranker = OnnxRanker(file)
        if not ranker.is_flat:
            raise ValueError(
                "the ranker looks at whole requests: only one that takes a candidate a row will do"
            )
        found = []
        for begin in range(0, len(self.rows), ROWS_AT_ONCE):
            feed = ranker.feed(self.data, self.rows[begin : begin + ROWS_AT_ONCE], np.empty(0, np.int64))
            found.append([each.ravel() for each in ranker.session.run(["score", *besides], feed)])
        score, *others = (np.concatenate(each) for each in zip(*found, strict=True))
        return [logit(score), *others]


def _tiers(
    weight: Tensor, axes: Tensor, assignments: Sequence[Assignment]
) -> tuple[dict[Option, Tensor], dict[Option, int], np.ndarray | None]:
    """Return the numbers of each tier, full width first, where each begins, and each row's place in them.

    A shared vector is one more row of the widest tier. The place is None when the rows keep their own order.
    """
    rows, columns = weight.shape
    together: dict[Option, list[Assignment]] = {}
    for each in assignments:
        form = Option(columns, 16) if each.option == SHARED else each.option
        together.setdefault(form, []).append(each)
    place = np.empty(rows, np.uint16 if rows <= _SHORT else np.int32)
    tiers, begins, count = {}, {}, 0
    for form in sorted(together, reverse=True):
        begins[form] = count
        parts = []
        for each in together[form]:
            part = weight[each.rows]
            if each.option == SHARED:
                part = part.mean(0, keepdim=True)
            place[each.rows] = count + np.arange(len(part))  # one place for all that share
            parts.append(_within(part, axes, form))
            count += len(part)
        tiers[form] = torch.cat(parts)
    return tiers, begins, None if np.array_equal(place, np.arange(rows)) else place


def _within(rows: Tensor, axes: Tensor, option: Option) -> Tensor:
    """Return the numbers to store for some rows, (n, dim): their own, or coordinates in the axes."""
    return rows if option.dim == rows.shape[1] else (rows - axes[0]) @ axes[1 : option.dim + 1].T


def _read_back(rows: Tensor, axes: Tensor, option: Option) -> Tensor:
    """Return some rows as they are read after they were stored, (n, columns)."""
    if option == SHARED:
        return rows.mean(0, keepdim=True).half().float().expand_as(rows)
    numbers = _within(rows, axes, option)
    if option.bits != 16:
        numbers = dequantize_table(*quantize_table(numbers, option.bits), option.bits)
    numbers = numbers.half().float()
    return numbers if option.dim == rows.shape[1] else axes[0] + numbers @ axes[1 : option.dim + 1]


def _options(columns: int) -> list[Option]:
    """Return what a group may choose from."""
    forms = [Option(columns // share, bits) for share, bits in _FORMS if columns % (2 * share) == 0]
    return [*forms, SHARED]


def _lookup(model: onnx.ModelProto, table: str) -> onnx.NodeProto:
    """Return the one node that looks the table up."""
    users = [node for node in model.graph.node if table in node.input]
    axes = [attribute.i for node in users for attribute in node.attribute if attribute.name == "axis"]
    if len(users) != 1 or users[0].op_type != "Gather" or any(axes):
        raise ValueError(
            f"{table} is used by {', '.join(node.op_type for node in users) or 'no node'}: "
            "it must be looked up by exactly one Gather over its rows"
        )
    return users[0]
