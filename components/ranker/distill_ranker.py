"""Teachers -> one small student that learns from their score of every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.data.examples import ContractViolation, RankerExamples, read_manifest, read_ranker_examples
from components.hyper_parameters import StudentParams
from components.models.dlrm import Dlrm
from components.parameters import read_params
from components.progress import with_progress
from components.ranker.certificate import enforce
from components.ranker.export_ranker import export_ranker
from components.ranker.fitting import Soft, fit, sample_rows, tuning_of
from components.ranker.lineage import certify_child
from components.ranker.ranker_artefact import (
    Cost,
    RankerArtefact,
    begin_ranker,
    finish_ranker,
    read_ranker,
)
from components.ranker.scoring import OnnxRanker, logit
from components.ranker.train_ranker import calibrate, platt, read_shape

TAUGHT = "taught.npy"  # beside a student: the ensemble's logit of every training row, for later tuning


@dataclass(frozen=True)
class Ensemble:
    """Several teachers that speak with one voice: the mean of their calibrated logits, calibrated again."""

    teachers: tuple[RankerArtefact, ...]
    slope: float
    intercept: float

    @classmethod
    def of(cls, teachers: Sequence[RankerArtefact], held_out: RankerExamples) -> Ensemble:
        """Combine distinct teachers and calibrate their scores on the held-out lists."""
        distinct = tuple({teacher.id: teacher for teacher in teachers}.values())
        raw = cls(distinct, 1.0, 0.0)
        if len(distinct) == 1:
            return raw
        return cls(distinct, *platt(raw.logits(held_out), held_out.label))

    def logits(self, data: RankerExamples) -> np.ndarray:
        """Return the logit of every row, (rows,) float32."""
        total = np.zeros(len(data.label), np.float32)
        for teacher in with_progress(self.teachers, len(self.teachers), "teachers have scored all rows"):
            total += logit(OnnxRanker(teacher.graph, threads=2).scores(data))
        return self.slope * total / len(self.teachers) + self.intercept

    def scores(self, data: RankerExamples) -> np.ndarray:
        """Return the probability of every row, (rows,) float64."""
        return 1 / (1 + np.exp(-self.logits(data).astype(np.float64)))


def distill_ranker(
    examples: Path, statistics: Path, teachers: Sequence[Path], student: Path, params: dict[str, Any]
) -> dict[str, Any]:
    """Train a student on purchases and on the ensemble's scores of each list.

    The soft loss is the cross-entropy between the ensemble's and the student's softmax over each list
    (Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531).

    Examples and statistics are of the same cut. There is at least one teacher; one that is named twice counts
    once.

    Returns:
        NDCG@10 on the held-out lists of the student and of the ensemble, the seconds used, and the loss of
        each epoch.

    Raises:
        ParityFailed: the student is too far from the ensemble.
    """
    certificate, spent = train_student(examples, statistics, teachers, student, params)
    enforce(certificate)
    own = certificate["ndcg_at_10"]
    return {"student_ndcg_at_10": own["child"], "ensemble_ndcg_at_10": own["parent"], **spent}


def train_student(
    examples: Path, statistics: Path, teachers: Sequence[Path], student: Path, params: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Do what `distill_ranker` does, however good the student gets; return certificate, cost and curve."""
    settings = read_params(StudentParams, params)
    if not teachers:
        raise ValueError("no teachers are named: a student needs one or more of what train_ranker wrote")
    data = read_ranker_examples(examples, "train")
    held_out = read_ranker_examples(examples, "calibration")
    ensemble = Ensemble.of([read_ranker(teacher) for teacher in teachers], held_out)
    cost = Cost(ensemble.teachers)
    taught = ensemble.logits(data)
    torch.manual_seed(settings.seed)
    size = {"hidden": settings.hidden, "dim": settings.dim, "dropout": settings.dropout}
    shape = read_shape(examples, statistics)
    model = Dlrm(shape, **size)  # type: ignore[arg-type]
    model.fit_scale(sample_rows(data))
    soft = Soft(taught, settings.soft_weight, settings.temperature)
    curve = fit(model, data, tuning_of(settings), soft)
    model.eval()
    calibrate(model, held_out)
    spent = cost.spent()
    begin_ranker(student)
    np.save(student / TAUGHT, taught, allow_pickle=False)
    exported = export_ranker(model, student, held_out)
    scores = ensemble.scores(held_out).astype(np.float32)
    certificate = certify_child(
        "distill_ranker", "distill", student, ensemble.teachers, scores, held_out, export=exported
    )
    own = [one for teacher in ensemble.teachers for one in teacher.certificates]
    finish_ranker(
        student,
        [*own, certificate],
        step="distill_ranker",
        parents=[teacher.id for teacher in ensemble.teachers],
        model="dlrm",
        shape=asdict(shape),
        size=size,
        params={"student": asdict(settings), "examples": read_manifest(examples)["params"]},
        cost=spent,
    )
    return certificate, {**spent, "curve": curve}


def read_taught(student: Path, data: RankerExamples) -> np.ndarray:
    """Return the ensemble's logit of each training row, (rows,), as it lies beside a student.

    Raises:
        ContractViolation: the file belongs to other rows.
    """
    file = student / TAUGHT
    taught: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    if len(taught) != len(data.label):
        raise ContractViolation(
            f"{file} speaks of {len(taught)} rows, the examples hold {len(data.label)}: "
            "pass the examples that the student learnt from"
        )
    return taught
