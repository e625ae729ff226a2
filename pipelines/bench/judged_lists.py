"""A bundle and the weeks after its cut -> the candidates it retrieves there, to judge rankers on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from components.data.examples import RankerExamples
from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, window_s
from components.evaluation.metrics import Bootstrap, Tally
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task, read_tasks
from feature_repo.events import Dataset
from feature_repo.schema import BASKET_LENGTH, CATEGORICAL, DENSE_NAMES, HISTORY_LENGTH, tower_inputs
from serving.release.bundle import Bundle
from serving.schemas import MAX_K
from serving.stages.reranking import SlotRules, WeighedCandidates, fill_slots, weigh


@dataclass(frozen=True)
class JudgedLists:
    """The test baskets as lists of candidates; `examples.label` marks the items hidden and retrieved."""

    tasks: list[Task]
    examples: RankerExamples
    bought: np.ndarray  # (rows,) bool, candidates that the shopper has bought before
    bundle: Bundle
    bootstrap: Bootstrap

    def judge(self, scores: np.ndarray) -> Tally:
        """Return the tally of lists as they would be served with these scores, (rows,) probabilities."""
        tally = Tally.empty()
        start, categorical = self.examples.start, self.examples.categorical
        for i, task in enumerate(self.tasks):
            rows = slice(int(start[i]), int(start[i + 1]))
            codes = categorical[rows, 0] - 1
            rare, settings = self.bundle.rarity_of(codes), self.bundle.settings
            bought, weights = codes[self.bought[rows]], self.bundle.weights
            worth = weigh(self.bundle.statistics, codes, scores[rows], weights, settings.new_gain, bought)
            slots = SlotRules(
                novel=self.bundle.novel, novel_loss=settings.novel_loss, spares_new=settings.spares_new
            )
            pool = WeighedCandidates(worth, categorical[rows, 1], rare, self.bought[rows])
            shown, _ = fill_slots(pool, slots, MAX_K, settings.type_penalty)
            tally.add(codes[shown], task.hidden, task.bought_before)
        return tally


def read_judged_lists(bundle: Bundle, data: Dataset, scratch: Path) -> JudgedLists:
    """Return the lists that `evaluate_bundle` ranks, with every input that a ranker reads.

    Args:
        bundle: its retrieval, statistics and cut are used, its ranker is not.
        data: the data set that holds the weeks after the cut.
        scratch: a directory for the arrays that do not fit in memory: some 220 bytes a candidate.
    """
    start = pd.Timestamp(bundle.manifest["cut"])
    purchases = purchases_of(data.events)
    tasks = read_tasks(purchases, bundle.statistics, *window_s(start)).hidden
    most = len(tasks) * bundle.settings.quotas.total
    dense = np.lib.format.open_memmap(scratch / "dense.npy", "w+", np.float32, (most, len(DENSE_NAMES)))
    categorical = np.empty((most, len(CATEGORICAL)), np.int32)
    label, bought = np.empty(most, np.int8), np.empty(most, np.bool_)
    history = np.zeros((len(tasks), HISTORY_LENGTH), np.int32)
    weight = np.zeros((len(tasks), HISTORY_LENGTH), np.float16)
    basket = np.zeros((len(tasks), BASKET_LENGTH), np.int32)
    bounds = [0]
    counts = Nightly(bundle, purchases)
    for i, (task, prepared) in enumerate(prepared_tasks(bundle, tasks, counts=counts)):
        end = bounds[-1] + len(prepared.dense)
        rows = slice(bounds[-1], end)
        dense[rows], categorical[rows] = prepared.dense, prepared.categorical
        label[rows] = np.isin(prepared.candidates.codes, task.hidden)
        bought[rows] = np.isin(prepared.candidates.codes, prepared.query.history.items)
        inputs = tower_inputs(prepared.query)
        history[i], weight[i], basket[i] = inputs["history"], inputs["history_weight"], inputs["basket"]
        bounds.append(end)
    end = bounds[-1]
    examples = RankerExamples(
        dense[:end], categorical[:end], label[:end], np.array(bounds), history, weight, basket
    )
    boot = Bootstrap([task.user_id for task in tasks])
    return JudgedLists(tasks, examples, bought[:end], bundle, boot)
