"""Recent times of the stages -> whether, and with how many candidates, the rest of an answer is in time.

Features (the shopper's row), retrieval and re-ranking take their time once for each request. Ranking
(candidates' features and the ranker) takes a time for each request, and one for each candidate.

A stage that runs in this process cannot be stopped half way: it does not begin if it would end too late.
A stage's budget is the time that it needs in nineteen of twenty cases. The budget follows the stage by steps,
each a share of its present value: up when a stage took longer, else down by a nineteenth of that. So a pause
of a second counts no more than any late stage. Of a stage's times only two numbers are stored. The same steps
find the fixed part and the part per candidate, as soon as requests with different numbers of candidates come.
This is the gradient of quantile regression (Koenker and Bassett, 1978).
"""

from __future__ import annotations

import math
from statistics import median

from serving.metrics import STAGE_BUDGET_SECONDS

FIRST = 16  # times of a stage, of which the median is where its budget begins: the first few are slow
QUANTILE = 0.95
STEP = 0.1
# After so many in a row that were quicker (one in twenty times by chance) it falls this much with each: what
# made the stage slow is over.
QUICK, FALL = 60, 0.05
# A budget that kept all requests from its stage for so long is believed that much less: else no request
# would find out that the stage is quick again.
UNSEEN_S, BELIEVED, LEAST_BELIEVED = 0.1, 0.8, 1e-3
LEAST_S = 1e-5
SCALE = 500  # candidates, so that both parts of a budget are of one size
MARGIN_S = 0.002  # that ranking elsewhere leaves for making the list, even if re-ranking is quicker
SHOWN_EVERY = 64  # times of a stage, between two changes of its gauge


class Budget:
    """What one stage keeps to nineteen times in twenty; nothing until it was seen a few times."""

    __slots__ = ("_believed", "_each_s", "_first", "_fixed_s", "_gauge", "_quick", "_seen_at", "_to_show")

    def __init__(self, stage: str) -> None:
        self._gauge = STAGE_BUDGET_SECONDS.labels(stage)
        # Seconds, of SCALE candidates if it has any; None as soon as the budget begins.
        self._first: list[float] | None = []
        self._fixed_s, self._each_s = 0.0, 0.0  # of a request, and of SCALE of its candidates
        self._believed = 1.0  # share of both
        self._quick = 0  # times in a row that were within it
        self._seen_at = -math.inf
        self._to_show = 1

    def learn(self, took_s: float, now: float, candidates: int = 0) -> None:
        """Learn from the time that the stage took.

        Args:
            took_s: seconds; of one that was given up, those until then.
            now: seconds of the clock of `believe_less`.
            candidates: of a stage whose time depends on them.
        """
        self._seen_at = now
        scaled = candidates / SCALE
        if self._first is not None:
            self._first.append(took_s / scaled if scaled else took_s)
            if len(self._first) == FIRST:
                begin_s = median(self._first)
                self._fixed_s, self._each_s = (0.0, begin_s) if scaled else (begin_s, 0.0)
                self._first = None
            return
        budget_s = max(self._fixed_s + self._each_s * scaled, LEAST_S)
        if self._believed < 1:
            if took_s <= budget_s * self._believed:  # it was right to doubt
                budget_s *= self._believed
                self._fixed_s *= self._believed
                self._each_s *= self._believed
            self._believed = 1.0
        if took_s > budget_s:
            self._quick = 0
            step_s = STEP * QUANTILE * budget_s
        else:
            self._quick += 1
            step_s = -(FALL if self._quick > QUICK else STEP * (1 - QUANTILE)) * budget_s
        part_s = step_s / (1 + scaled * scaled)
        fixed_s, each_s = self._fixed_s + part_s, self._each_s + part_s * scaled
        # Neither is below 0: the missing part is taken from the other, so that the step keeps its length.
        if fixed_s < 0 < scaled:
            fixed_s, each_s = 0.0, each_s + fixed_s / scaled
        elif each_s < 0:
            fixed_s, each_s = fixed_s + each_s * scaled, 0.0
        self._fixed_s, self._each_s = max(fixed_s, 0.0), max(each_s, 0.0)
        self._to_show -= 1
        if not self._to_show:
            self._to_show = SHOWN_EVERY
            self._gauge.set(self.of(candidates))

    def of(self, candidates: int = 0) -> float:
        """Return the seconds that a request with so many candidates keeps to; 0 while that is not known."""
        return (self._fixed_s + self._each_s * candidates / SCALE) * self._believed

    def most(self, left_s: float) -> int:
        """Return how many candidates the time is enough for, where it is not for all: below 1 for none."""
        if not self._each_s:
            return 0
        return math.floor((left_s / self._believed - self._fixed_s) / self._each_s * SCALE)

    def believe_less(self, now: float) -> None:
        """Note that the budget has kept a request from the stage."""
        if now - self._seen_at > UNSEEN_S:
            self._seen_at = now
            self._believed = max(self._believed * BELIEVED, LEAST_BELIEVED)


class Budgets:
    """Those of all stages, of one event loop; times come in, no clock is read."""

    def __init__(self, margin_s: float = 0.0) -> None:
        """Take the least time that ranking must leave."""
        self._margin_s = margin_s
        self.features, self.retrieval = Budget("features"), Budget("retrieval")
        self.ranking, self.reranking = Budget("ranking"), Budget("reranking")

    def after_ranking_s(self) -> float:
        """Return the seconds that must be left when the candidates are ranked."""
        return max(self.reranking.of(), self._margin_s)

    def after_retrieval_s(self, candidates: int) -> float:
        """Return the seconds that must be left when so many candidates are found."""
        return self.ranking.of(candidates) + self.after_ranking_s()

    def after_features_s(self, candidates: int) -> float:
        """Return the seconds that must be left when the shopper's row is read."""
        return self.retrieval.of() + self.after_retrieval_s(candidates)

    def has_room(self, left_s: float, candidates: int, is_read: bool) -> bool:
        """Say whether an answer out of so many candidates would be in time, with the row read or before."""
        return (0.0 if is_read else self.features.of()) + self.after_features_s(candidates) <= left_s

    def believe_less(self, now: float) -> None:
        """Note that a request was not begun because its time was too short."""
        for budget in (self.features, self.retrieval, self.ranking, self.reranking):
            budget.believe_less(now)

    def most(self, left_s: float, found: int, fewest: int, now: float) -> int:
        """Return how many of the candidates that were found there is time to rank: all, some or none.

        Args:
            left_s: seconds until the answer is to be there.
            found: candidates.
            fewest: below this the answer is 0.
            now: seconds of the clock.
        """
        if self.after_retrieval_s(found) <= left_s:
            return found
        most = min(self.ranking.most(left_s - self.after_ranking_s()), found)
        if most >= fewest:
            return most
        self.ranking.believe_less(now)
        return 0
