"""A ranker's ONNX graph -> the probability of every candidate of every list, whatever the ranker is."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.data.examples import RankerExamples, pad
from components.hyper_parameters import SIZES
from serving.release.bundle import open_session
from serving.stages.onnx_runtime import ort

ROWS_AT_ONCE = 8_192
REPEATS, WARM_UP = 100, 3

Call = Callable[[Any], Any]  # takes what its feed made
Feed = Callable[[RankerExamples, np.ndarray, np.ndarray], Any]
Latency = dict[str, dict[str, float]]  # number of candidates -> p50, p99 in milliseconds


class OnnxRanker:
    """A ranker as it is released: flat graphs take (n, ·) rows, those that look at the request (q, m, ·)."""

    def __init__(self, file: Path, threads: int = 1) -> None:
        """Load the graph.

        Raises:
            BundleInvalid: ONNX Runtime cannot run it.
        """
        self.session: ort.InferenceSession = open_session(file, threads)
        self.uses = [tensor.name for tensor in self.session.get_inputs()]
        self.is_flat = len(self.session.get_inputs()[0].shape) == 2

    def feed(self, data: RankerExamples, rows: np.ndarray, lists: np.ndarray) -> dict[str, np.ndarray]:
        """Return the graph's inputs for lists (q,) of rows (q, m); rows of a flat graph may also be (n,)."""
        picked = rows.ravel() if self.is_flat else rows
        made = {
            "dense": lambda: data.dense[picked],
            "categorical": lambda: data.categorical[picked].astype(np.int64),
            "history": lambda: data.history[lists].astype(np.int64),
            "history_weight": lambda: data.history_weight[lists].astype(np.float32),
            "basket": lambda: data.basket[lists].astype(np.int64),
        }
        return {name: made[name]() for name in self.uses}

    def run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        """Return the probabilities of what `feed` made: (n,), or (q, m) of a graph that looks at requests."""
        scores: np.ndarray = self.session.run(["score"], feed)[0]
        return scores

    def scores(self, data: RankerExamples) -> np.ndarray:
        """Return the probability of every row, (rows,) float32."""
        found = np.empty(len(data.label), np.float32)
        for lists in batches(data.start):
            rows, there = pad(data.start, lists)
            if self.is_flat:
                found[rows[there]] = self.run(self.feed(data, rows[there], lists))
            else:
                found[rows[there]] = self.run(self.feed(data, rows, lists))[there]
        return found


def batches(start: np.ndarray) -> list[np.ndarray]:
    """Return list numbers in batches of about ROWS_AT_ONCE rows, the empty lists left out."""
    lengths = np.diff(start)
    lists = np.flatnonzero(lengths)
    groups = np.cumsum(lengths[lists]) // ROWS_AT_ONCE
    return np.split(lists, np.flatnonzero(np.diff(groups)) + 1) if len(lists) else []


def logit(probability: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)), same shape, float32, kept finite."""
    p = np.clip(probability.astype(np.float64), 1e-12, 1 - 1e-7)
    return np.log(p / (1 - p)).astype(np.float32)


def measure(rankers: Sequence[OnnxRanker], data: RankerExamples) -> list[Latency]:
    """Return the latency of one call of each ranker, for each number of candidates of one request."""
    return measure_calls([ranker.run for ranker in rankers], [ranker.feed for ranker in rankers], data)


def request(feed: Feed, data: RankerExamples, size: int) -> Any:
    """Return one request's inputs: the longest list, repeated or cut to so many candidates."""
    longest = np.array([int(np.argmax(np.diff(data.start)))])
    rows = np.arange(data.start[longest[0]], data.start[longest[0] + 1])
    return feed(data, np.resize(rows, (1, size)), longest)


def measure_calls(calls: Sequence[Call], feeds: Sequence[Feed], data: RankerExamples) -> list[Latency]:
    """Return p50 and p99 of each call in milliseconds, by the number of candidates of one request.

    The calls take turns, so that whatever else the machine does meets all of them. Each turn has another
    order, from a seed: no call always finds the caches that the same other one left.
    """
    found: list[Latency] = [{} for _ in calls]
    rng = np.random.default_rng(0)
    for size in SIZES:
        given = [request(feed, data, size) for feed in feeds]
        took = np.empty((len(calls), REPEATS))
        gc.disable()
        try:
            for repeat in range(-WARM_UP, REPEATS):
                for i in rng.permutation(len(calls)).tolist():
                    call, feed = calls[i], given[i]
                    began = time.perf_counter()
                    call(feed)
                    took[i, max(repeat, 0)] = time.perf_counter() - began
        finally:
            gc.enable()
        for i, each in enumerate(took):
            p50, p99 = np.percentile(each, [50, 99]) * 1e3
            found[i][str(size)] = {"p50": round(float(p50), 4), "p99": round(float(p99), 4)}
    return found
