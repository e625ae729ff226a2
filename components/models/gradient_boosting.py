"""Gradient-boosted trees that learn to rank: LightGBM's lambdarank."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, parser

from components.data.examples import RankerExamples
from components.models.ranker import FLAT, Shape
from components.progress import with_progress

OPSET = 20


class GradientBoosting:
    """Scores a candidate with LightGBM trees fitted by lambdarank.

    Burges, "From RankNet to LambdaRank to LambdaMART: An Overview" (MSR-TR-2010-82); Ke et al., "LightGBM"
    (NeurIPS 2017). Item ids are left out: a tree would memorise them. Categorical inputs go in as numbers,
    so that the exported graph needs comparisons only.
    """

    def __init__(
        self,
        shape: Shape,
        trees: int = 200,
        leaves: int = 63,
        learning_rate: float = 0.08,
    ) -> None:
        self.shape, self.trees, self.calibration = shape, trees, (1.0, 0.0)
        self.params = {
            "objective": "lambdarank",
            "num_leaves": leaves,
            "learning_rate": learning_rate,
            "min_data_in_leaf": 100,
            "lambda_l2": 5.0,
            "feature_fraction": 0.7,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "lambdarank_truncation_level": 20,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }

    def fit(self, data: RankerExamples, seed: int, threads: int) -> None:
        """Train on lists, each with a purchase."""
        import lightgbm  # here: it loads scikit-learn, a second of each step that only asks for the class

        rows = lightgbm.Dataset(
            _rows(data), label=np.asarray(data.label), group=np.diff(data.start), free_raw_data=True
        )
        params = {**self.params, "seed": seed, "num_threads": threads}
        progress = with_progress(range(self.trees), self.trees, "trees")
        trained = lightgbm.train(params, rows, self.trees, callbacks=[lambda _: next(progress)])
        self.booster = lightgbm.Booster(model_str=_in_float32(trained.model_to_string()))

    def logits_of(self, data: RankerExamples) -> np.ndarray:
        """Return the raw score of each row, (rows,) float32, computed by LightGBM itself."""
        return np.asarray(self.booster.predict(_rows(data), raw_score=True), np.float32)

    def probabilities(self, data: RankerExamples) -> np.ndarray:
        """Return the calibrated probability of each row, (rows,) float32, computed by LightGBM itself."""
        slope, intercept = self.calibration
        z = np.clip(slope * self.logits_of(data).astype(np.float64) + intercept, -FLAT, FLAT)
        return (1 / (1 + np.exp(-z))).astype(np.float32)

    def calibrate(self, slope: float, intercept: float) -> None:
        """Set how a raw score becomes a probability."""
        self.calibration = (slope, intercept)

    def save(self, checkpoint: Path) -> None:
        """Write the trees in LightGBM's own text format, for people."""
        self.booster.save_model(checkpoint / "trees.txt")

    def export(self, file: Path) -> None:
        """Write the graph: concatenation, trees (TreeEnsembleRegressor), calibration, sigmoid."""
        from onnxmltools import convert_lightgbm
        from onnxmltools.convert.common.data_types import FloatTensorType

        trees = convert_lightgbm(
            self.booster, initial_types=[("rows", FloatTensorType([None, self.booster.num_feature()]))]
        )
        node = next(node for node in trees.graph.node if node.op_type == "TreeEnsembleRegressor")
        slope, intercept = self.calibration
        model = parser.parse_model(f"""
            <ir_version: 9, opset_import: ["": {OPSET}, "ai.onnx.ml": 1]>
            gradient_boosting (float[rows, {self.shape.dense}] dense, int64[rows, 4] categorical)
                => (float[rows] score)
            <int64[1] first = {{1}}, int64[1] end = {{4}}, int64[1] axis = {{1}},
             float slope = {{{slope}}}, float intercept = {{{intercept}}},
             float least = {{{-FLAT}}}, float most = {{{FLAT}}}>
            {{
                levels = Slice (categorical, first, end, axis)
                numbers = Cast <to = {TensorProto.FLOAT}> (levels)
                together = Concat <axis = 1> (dense, numbers)
                scaled = Mul (raw, slope)
                moved = Add (scaled, intercept)
                clipped = Clip (moved, least, most)
                column = Sigmoid (clipped)
                score = Squeeze (column, axis)
            }}
        """)
        node.input[:], node.output[:] = ["together"], ["raw"]
        model.graph.node.insert(3, node)  # behind Concat, which makes its input
        onnx.checker.check_model(model)
        onnx.save(model, file)


def _in_float32(trees: str) -> str:
    """Return the trees with each threshold as the largest float32 not above it.

    The graph compares in float32. Rounded to the nearest, a threshold could pass its neighbour; rounded
    down, every float32 falls on the same side as before.
    """

    def rounded(line: re.Match[str]) -> str:
        exact = np.array(line.group(1).split(), np.float64)
        near = exact.astype(np.float32)
        below = np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
        return "threshold=" + " ".join(repr(float(value)) for value in below)

    unsized = re.sub(r"^tree_sizes=.*\n", "", trees, flags=re.MULTILINE)  # lengths that no longer hold
    return re.sub(r"^threshold=(.+)$", rounded, unsized, flags=re.MULTILINE)


def _rows(data: RankerExamples) -> np.ndarray:
    return np.concatenate([data.dense, data.categorical[:, 1:].astype(np.float32)], axis=1)
