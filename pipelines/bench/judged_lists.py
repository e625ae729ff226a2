"""A bundle and the weeks after its cut -> the candidates it retrieves there, to judge rankers on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from components.data.examples import RankerExamples
from components.data.fit_statistics import Purchases
from components.data.ingest_events import TEST_WINDOW
from components.evaluation.evaluate_bundle import prepared_tasks, tasks_after
from components.evaluation.metrics import Bootstrap, Tally
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task
from components.progress import with_progress
from feature_repo.schema import BASKET_LENGTH, CATEGORICAL, DENSE_NAMES, HISTORY_LENGTH, tower_inputs
from serving.release.bundle import Bundle, RankingSettings
from serving.schemas import MAX_K
from serving.stages.reranking import SlotRules, WeighedCandidates, fill_slots, weigh

VALIDATION = pd.Timedelta(weeks=4)  # before the cut: weights and methods are chosen there


@dataclass(frozen=True)
class JudgedLists:
    """The test baskets as lists of candidates; `examples.label` marks the items hidden and retrieved."""

    tasks: list[Task]
    examples: RankerExamples
    codes: np.ndarray  # (rows,) of the candidates; rankers see a 0 for items that joined after the training
    bought: np.ndarray  # (rows,) bool, candidates that the shopper has bought before
    bundle: Bundle
    bootstrap: Bootstrap

    def shown(self, scores: np.ndarray, settings: RankingSettings, k: int) -> Iterator[np.ndarray]:
        """Yield for each task the rows of its list, best first, as a bundle with these settings shows it.

        Args:
            scores: (rows,) probabilities.
            settings: of re-ranking; those of retrieval are not read.
            k: how many items a list has at most.
        """
        bundle, codes = replace(self.bundle, settings=settings), self.codes
        types = self.examples.categorical[:, 1]
        slots = SlotRules(novel=bundle.novel, novel_loss=settings.novel_loss, spares_new=settings.spares_new)
        for begin, end in pairwise(self.examples.start.tolist()):
            own, bought = codes[begin:end], self.bought[begin:end]
            gain, weights = settings.new_gain, bundle.weights
            worth = weigh(bundle.statistics, own, scores[begin:end], weights, gain, own[bought])
            pool = WeighedCandidates(worth, types[begin:end], bundle.rarity_of(own), bought)
            yield begin + fill_slots(pool, slots, k, settings.type_penalty)[0]

    def judge(self, scores: np.ndarray) -> Tally:
        """Return the tally of lists as they would be served with these scores, (rows,) probabilities."""
        tally, codes = Tally(), self.codes
        served = self.shown(scores, self.bundle.settings, MAX_K)
        for task, rows in zip(self.tasks, served, strict=True):
            tally.add(codes[rows], task.hidden, task.bought_before)
        return tally


def read_judged_lists(
    bundle: Bundle,
    purchases: Purchases,
    scratch: Path,
    start: pd.Timestamp,
    window: pd.Timedelta = TEST_WINDOW,
) -> JudgedLists:
    """Return the lists that `evaluate_bundle` ranks, with every input that a ranker reads.

    Args:
        bundle: its retrieval and statistics are used, its ranker is not.
        purchases: of the whole data set.
        scratch: a directory for the arrays that do not fit in memory: some 380 bytes a candidate.
        start: where the weeks of the test baskets begin: mostly the bundle's cut.
        window: how long they are.

    Raises:
        ValueError: there is no such basket.
    """
    tasks = tasks_after(purchases, bundle.statistics, start, window).hidden
    most = len(tasks) * bundle.settings.quotas.total
    dense = np.lib.format.open_memmap(scratch / "dense.npy", "w+", np.float32, (most, len(DENSE_NAMES)))
    categorical = np.empty((most, len(CATEGORICAL)), np.int32)
    codes, label, bought = np.empty(most, np.int32), np.empty(most, np.int8), np.empty(most, np.bool_)
    history = np.zeros((len(tasks), HISTORY_LENGTH), np.int32)
    weight = np.zeros((len(tasks), HISTORY_LENGTH), np.float16)
    basket = np.zeros((len(tasks), BASKET_LENGTH), np.int32)
    bounds = [0]
    each = prepared_tasks(bundle, tasks, counts=Nightly(bundle, purchases, start))
    for i, (task, prepared) in enumerate(with_progress(each, len(tasks), "baskets prepared")):
        rows = slice(bounds[-1], bounds[-1] + len(prepared.dense))
        dense[rows], categorical[rows] = prepared.dense, prepared.categorical
        codes[rows] = prepared.candidates.codes
        label[rows] = np.isin(codes[rows], task.hidden)
        bought[rows] = np.isin(codes[rows], prepared.query.history.items)
        inputs = tower_inputs(prepared.query)
        history[i], weight[i], basket[i] = inputs["history"], inputs["history_weight"], inputs["basket"]
        bounds.append(rows.stop)
    every = slice(bounds[-1])
    examples = RankerExamples(
        dense[every], categorical[every], label[every], np.array(bounds), history, weight, basket
    )
    boot = Bootstrap([task.user_id for task in tasks])
    return JudgedLists(tasks, examples, codes[every], bought[every], bundle, boot)
