"""A student -> a smaller one: hidden units that say least are taken out, and the rest is tuned again."""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from components.data.examples import RankerExamples, read_ranker_examples
from components.home import write_json
from components.hyper_parameters import PruneParams, ranker_class
from components.models.ranker import Ranker
from components.parameters import read_params
from components.ranker.certificate import ParityFailed, check
from components.ranker.distill_ranker import TAUGHT, read_taught
from components.ranker.export_ranker import export_ranker
from components.ranker.fitting import Soft, fit, tuning_of
from components.ranker.lineage import Parent
from components.ranker.ranker_artefact import Cost, RankerArtefact, begin_ranker, read_ranker
from components.ranker.train_ranker import calibrate, load_ranker, shape_of

log = logging.getLogger(__name__)

MULTIPLE = 8  # hidden widths a processor's vector units like


def prune_ranker(examples: Path, student: Path, pruned: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Prune a student by each ratio, the largest first, until one is within its tolerance.

    Structured pruning after Li et al., "Pruning Filters for Efficient ConvNets" (arXiv 1608.08710): whole
    hidden units go, those with the smallest product of the norms of incoming and outgoing weights, so
    that the matrices that are left are really smaller. When no ratio holds the tolerance the student
    itself goes on.

    `table.json` in `pruned` has a row for every ratio that was tried.

    Returns:
        The ratio that was kept, 0 for none, and NDCG@10 on the held-out lists for each.
    """
    settings = read_params(PruneParams, params)
    artefact = read_ranker(student)
    cost = Cost([artefact])
    data = read_ranker_examples(examples, "train")
    taught = read_taught(student, data)
    parent = Parent(artefact, read_ranker_examples(examples, "calibration"))
    table: dict[str, Any] = {}
    kept = 0.0
    for ratio in sorted(settings.ratios, reverse=True):
        try:
            certificate = _prune(parent, pruned, ratio, data, taught, settings, cost)
        except ParityFailed as error:  # training diverged: even the exported graph differs from it
            log.warning("%.0f %% pruned: %s", 100 * ratio, error)
            table[f"{ratio:g}"] = {"outside_tolerance": [str(error)]}
            continue
        failed = check(certificate)
        table[f"{ratio:g}"] = {**certificate, "outside_tolerance": failed}
        log.info(
            "%.0f %% pruned: %.4f of NDCG@10 %s", 100 * ratio, certificate["ndcg_at_10"]["ratio"], failed
        )
        if not failed:
            kept = ratio
            break
    if not kept:
        log.warning("no ratio holds the tolerance: the student stays whole")
        shutil.rmtree(pruned)
        shutil.copytree(student, pruned)
    np.save(pruned / TAUGHT, taught, allow_pickle=False)
    write_json(pruned / "table.json", table)
    return {
        "pruned_ratio": kept,
        **{
            f"ndcg_at_10_{ratio}": row["ndcg_at_10"]["child"]
            for ratio, row in table.items()
            if "ndcg_at_10" in row
        },
    }


def _prune(
    parent: Parent,
    place: Path,
    ratio: float,
    data: RankerExamples,
    taught: np.ndarray,
    settings: PruneParams,
    cost: Cost,
) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    model, size = smaller(load_ranker(parent.artefact), parent.artefact, ratio)
    fit(model, data, tuning_of(settings), Soft(taught, settings.soft_weight, 1.0))
    model.eval()
    calibrate(model, parent.held_out)
    begin_ranker(place)
    exported = export_ranker(model, place, parent.held_out)
    certificate = parent.certify("prune_ranker", "prune", place, export=exported, ratio=ratio)
    parent.finish(place, certificate, cost, {"prune": {**asdict(settings), "kept": ratio}}, size=size)
    return certificate


def smaller(model: Ranker, artefact: RankerArtefact, ratio: float) -> tuple[Ranker, dict[str, Any]]:
    """Return a ranker with `1 - ratio` of the hidden units of every MLP, and its size."""
    hidden = artefact.manifest["size"]["hidden"]
    left = min(hidden, max(MULTIPLE, round(hidden * (1 - ratio) / MULTIPLE) * MULTIPLE))
    size = {**artefact.manifest["size"], "hidden": left}
    kind = ranker_class(artefact.manifest["model"])
    small = kind(shape_of(artefact), **size)
    assert isinstance(small, Ranker)
    weights = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            layers = [i for i, layer in enumerate(module) if isinstance(layer, nn.Linear)]
            for first, second in pairwise(layers):
                _drop_units(weights, f"{name}.{first}", f"{name}.{second}", left)
    small.load_state_dict(weights)
    return small, size


def _drop_units(weights: dict[str, Tensor], first: str, second: str, left: int) -> None:
    """Keep the `left` hidden units between two linear layers that carry most."""
    into, out = weights[f"{first}.weight"], weights[f"{second}.weight"]
    keep = torch.sort(torch.topk(into.norm(dim=1) * out.norm(dim=0), left).indices).values
    weights[f"{first}.weight"] = into[keep]
    weights[f"{first}.bias"] = weights[f"{first}.bias"][keep]
    weights[f"{second}.weight"] = out[:, keep]
