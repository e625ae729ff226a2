"""Every hyper-parameter of the training pipeline: its name, default, meaning, and its valid values.

The steps read them, and so do `reco params` and the check before a run. So nothing slow is imported here: a
wrong name is an error before PyTorch has loaded. The comment beside or above a field is its documentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from inspect import getsource, signature
from typing import TYPE_CHECKING, Any

from components.parameters import (
    overlay,
    read_arguments,
    read_params,
    require_at_least_0,
    require_positive,
    require_share,
)
from serving.schemas import DEFAULT_PROFILE
from serving.stages.retrieval import Quotas

if TYPE_CHECKING:
    from serving.stages.profiles import Profile

SIZES = (1, 100, 500, 1_000)  # numbers of candidates that a ranker's speed is measured with

# ----------------------------------------------------------------------------------------------- examples


@dataclass(frozen=True)
class ExampleParams:
    """How many examples to build; `fast` runs lower the numbers, never the steps."""

    windows: int = 7  # periods of four weeks before the cut whose baskets become examples
    negatives: int = 30  # per list, drawn from the retrieved candidates
    masks: int = 3  # lists made from one basket, each hiding other items; more cost new items
    user_ratio: float = 1.0  # users who give examples; all count in the statistics
    stranger_ratio: float = 0.1  # baskets asked once more without history, with any part of the basket
    calibration_ratio: float = 0.2  # users whose last window is held out of training, all candidates kept
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse parameters that give no examples, no users or no held-out lists."""
        require_positive(self, "windows", "negatives", "masks")
        require_share(self, "stranger_ratio")
        if not 0 < self.calibration_ratio < 1:
            raise TypeError(
                f"ExampleParams.calibration_ratio is {self.calibration_ratio}, expected between 0 and 1"
            )
        if not 0 < self.user_ratio <= 1:
            raise TypeError(
                f"ExampleParams.user_ratio is {self.user_ratio}, expected a share: 0.1, or 1 for all"
            )


# ---------------------------------------------------------------------------------------------- retriever


@dataclass(frozen=True)
class RetrieverParams:
    """Hyper-parameters of the two-tower model."""

    dim: int = 63  # of the vectors; one more dimension holds the item's bias
    hidden: int = 128  # width of each tower's hidden layer
    epochs: int = 4  # passes over the baskets, at least: a small shop's are passed more often
    batch_size: int = 512  # baskets
    learning_rate: float = 4e-3  # the highest; it rises and falls once
    negatives: int = 8_192  # uniform from the catalogue, shared by a batch
    targets: int = 3  # hidden items per basket and epoch
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse a training of nothing."""
        require_positive(
            self, "epochs", "batch_size", "dim", "hidden", "learning_rate", "negatives", "targets"
        )


@dataclass(frozen=True)
class IndexParams:
    """What the index must reach, and how that is measured."""

    target: float = 0.97  # of the k items nearest by exact search, the share that it finds
    k: int = 500  # items that each measured search asks for
    margin: float = 0.25  # share of the time that another type must save; nearer ones count as equally fast
    queries: int = 500  # training baskets that are searched for
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse a measurement of nothing."""
        require_positive(self, "k", "queries", "target")
        require_share(self, "target", "margin")


# ------------------------------------------------------------------------------------------------ rankers


@dataclass(frozen=True)
class RankerParams:
    """How large a ranker is and how it is trained."""

    size: dict[str, Any] = field(default_factory=dict)  # arguments of the model's class
    epochs: int = 2  # passes over the lists, at least: a small shop's few lists are passed more often
    batch_size: int = 64  # lists
    learning_rate: float = 2e-3  # the highest; it rises and falls once
    pointwise_weight: float = 0.1  # of the binary loss beside the loss over each list
    table_decay: float = 0.0  # weight decay of embedding tables: rarely seen rows stay near zero
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse a training of nothing."""
        require_positive(self, "epochs", "batch_size", "learning_rate")
        require_at_least_0(self, "pointwise_weight", "table_decay")


# Adding a ranker: a file in `components/models/` and a line here, with its default parameters.
RANKERS: Mapping[str, tuple[str, RankerParams]] = {
    "dlrm": ("dlrm:Dlrm", RankerParams(epochs=1, size={"items": True, "dim": 16})),
    "wide_deep": ("wide_deep:WideDeep", RankerParams()),
    "dcn_v2": ("dcn_v2:DcnV2", RankerParams()),
    "sequence": ("sequence:SequenceRanker", RankerParams(table_decay=10.0)),
    "graph": ("graph:GraphRanker", RankerParams(epochs=1)),
    "gradient_boosting": ("gradient_boosting:GradientBoosting", RankerParams()),
}


def ranker_class(name: str) -> Any:
    """Import and return the class of a ranker."""
    module, _, kind = RANKERS[name][0].partition(":")
    return getattr(import_module(f"components.models.{module}"), kind)


def reads(name: str) -> tuple[str, ...]:
    """Return the fields of `RankerParams` that a ranker is trained by."""
    return ("size", "seed") if name == "gradient_boosting" else tuple(RankerParams.__annotations__)


def read_ranker_params(given: Mapping[str, Any]) -> dict[str, RankerParams]:
    """Return the parameters of each ranker: those given under its name, defaults for the rest.

    Raises:
        TypeError: there is no such ranker, or it has no such parameter.
    """
    if unknown := sorted(set(given) - set(RANKERS)):
        raise TypeError(f"no ranker {unknown[0]!r}: there is {', '.join(RANKERS)}")
    found = {}
    for name, (_, usual) in RANKERS.items():
        asked = given.get(name, {})
        if not isinstance(asked, Mapping):
            raise TypeError(f'{name} is {asked!r}, expected an object, for example {{"epochs": 1}}')
        if unread := sorted(asked.keys() & RankerParams.__annotations__.keys() - set(reads(name))):
            raise TypeError(f"{name} is not trained by {unread[0]!r}: it reads {' and '.join(reads(name))}")
        settings = read_params(RankerParams, overlay(asdict(usual), asked))
        if "size" in asked:  # else the defaults stand, and the model's libraries need not load
            settings = replace(settings, size=read_arguments(ranker_class(name), settings.size))
        found[name] = settings
    return found


@dataclass(frozen=True)
class StudentParams:
    """The student's size and its sources of learning."""

    hidden: int = 128  # width of the layers
    dim: int = 8  # of each embedding table
    dropout: float = 0.0  # share of hidden units left out at random while learning
    epochs: int = 3  # passes over the lists
    batch_size: int = 64  # lists
    learning_rate: float = 2e-3  # the highest; it rises and falls once
    pointwise_weight: float = 0.1  # of the binary loss beside the loss over each list
    soft_weight: float = 0.4  # of the teachers' scores; purchases have the rest
    temperature: float = 1.0  # above 1 the teachers' scores are softened
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse a student of nothing, and weights that are no shares."""
        require_positive(self, "hidden", "dim", "epochs", "batch_size", "learning_rate", "temperature")
        require_share(self, "dropout", "soft_weight")
        if self.dropout == 1:
            raise TypeError("StudentParams.dropout is 1, expected a share below 1")
        require_at_least_0(self, "pointwise_weight")


# -------------------------------------------------------------------------------------------- compression


@dataclass(frozen=True)
class PruneParams:
    """Which shares of the hidden units may go, and how each is tuned afterwards."""

    ratios: tuple[float, ...] = (0.3, 0.15)  # shares of hidden units, the largest first, until one holds
    epochs: int = 1  # passes over the lists after each share
    batch_size: int = 64  # lists
    learning_rate: float = 1e-3  # the highest; it rises and falls once
    soft_weight: float = 0.7  # of the teachers' scores; purchases have the rest
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse shares that leave nothing or take nothing, and a tuning of nothing."""
        numbers = [ratio for ratio in self.ratios if isinstance(ratio, int | float) and 0 < ratio < 1]
        if not numbers or len(set(numbers)) < len(self.ratios):
            raise TypeError(f"PruneParams.ratios is {self.ratios}, expected different shares between 0 and 1")
        require_positive(self, "epochs", "batch_size", "learning_rate")
        require_share(self, "soft_weight")


@dataclass(frozen=True)
class QuantizeParams:
    """How a ranker is tuned when rounding alone loses more than the tolerance."""

    tune_epochs: int = 1  # 0: rounding alone, whatever it loses
    batch_size: int = 64  # lists
    learning_rate: float = 5e-4  # the highest; it rises and falls once
    soft_weight: float = 0.7  # of the teachers' scores; purchases have the rest
    seed: int = 0  # of every random choice in this step

    def __post_init__(self) -> None:
        """Refuse a tuning that means nothing."""
        if self.tune_epochs < 0:
            raise TypeError(f"QuantizeParams.tune_epochs is {self.tune_epochs}, expected 0 or more")
        require_positive(self, "batch_size", "learning_rate")
        require_share(self, "soft_weight")


@dataclass(frozen=True)
class CompileParams:
    """How the winner is chosen."""

    candidates: int = 500  # the number of candidates whose p50 decides
    near_ratio: float = 1.03  # as good as equally fast: then the smaller file wins

    def __post_init__(self) -> None:
        """Refuse a number of candidates that is not measured."""
        if self.candidates not in SIZES:
            raise TypeError(f"CompileParams.candidates is {self.candidates}, expected one of {SIZES}")
        if self.near_ratio < 1:
            raise TypeError(f"CompileParams.near_ratio is {self.near_ratio}, expected 1 or more")


# ------------------------------------------------------------------------------------------------ release

# Beside the default one: the dearest fifth of the catalogue, and the quarter that is sold at a discount most.
# Both draw more from the tower, which finds as many as it is asked for among the items that pass.
PROFILES: dict[str, dict[str, Any]] = {
    "premium": {"quotas": {"tower": 300}, "items": {"column": "price", "above_quantile": 0.8}},
    "clearance": {"quotas": {"tower": 300}, "items": {"column": "discount_ratio", "above_quantile": 0.75}},
}


@dataclass(frozen=True)
class BundleParams:
    """Settings of the served path that change the answer."""

    history: int = Quotas.history  # candidates from the shopper's own purchases
    together: int = Quotas.together  # candidates often bought with the basket's items
    week: int = Quotas.week  # candidates that sold best in the last 7 days, counted each night
    # Candidates from the two towers' index. The default profile does not ask for them: beside the week's best
    # sellers and enough partners they bring nothing (docs/explanation/retrieval.md). Profiles with a filter
    # ask for 300.
    tower: int = 0
    store: int = Quotas.store  # candidates that sell best in the shopper's store
    candidates: int = Quotas.total  # candidates of all sources that are ranked
    type_penalty: float = 0.95  # factor of an item's worth for each item of its type above it
    # On the test weeks these weights changed NDCG@10 by -0.2 % [-0.5, 0.2]. They showed 11 % more of the
    # catalogue, and 1 % more of the items new to the shopper were found.
    # `reco bench rerank` measures it.
    exposure: float = 0.5  # gain of an item whose manufacturer is new: 0.5 makes it worth half as much again
    novelty: float = 0.2  # gain of rare items in the novel slots: 0.2 is 1.6 times for a tenth of the baskets
    novel_slots: tuple[int, ...] = (10,)  # places in the list where novelty counts
    novel_loss: float = 0.01  # worth, a probability, that a novel slot may lose against the usual choice
    spares_new: bool = True  # items new to the shopper pay no type penalty
    profiles: dict[str, Any] = field(default_factory=lambda: dict(PROFILES))  # other ways to find candidates

    def __post_init__(self) -> None:
        """Refuse weights that mean nothing."""
        if not 0 < self.type_penalty <= 1 or min(self.exposure, self.novelty, self.novel_loss) < 0:
            raise TypeError(
                f"BundleParams has type_penalty {self.type_penalty}, exposure {self.exposure}, novelty "
                f"{self.novelty}, novel_loss {self.novel_loss}: expected a penalty of more than 0 and at "
                "most 1, and 0 or more"
            )
        if min(self.novel_slots, default=1) < 1:
            raise TypeError(f"BundleParams.novel_slots is {self.novel_slots}, expected places from 1")
        require_positive(self, "candidates")
        try:
            _ = self.quotas if self.profiles == PROFILES else self.read_profiles({})
        except ValueError as error:
            raise TypeError(f"BundleParams: {error}") from error

    @property
    def quotas(self) -> Quotas:
        """How many candidates the default profile's sources bring."""
        return Quotas(self.history, self.together, self.week, self.tower, self.store, self.candidates)

    def read_profiles(self, search: Mapping[str, int]) -> dict[str, Profile]:
        """Return the other profiles; each has the default one's quotas, and this search, where it names none.

        Raises:
            ValueError: a profile that cannot be read.
        """
        from serving.stages.profiles import read_profile  # slow: it loads Faiss

        usual = {"quotas": asdict(self.quotas), "search": search, "items": None}
        profiles = {}
        for name, own in self.profiles.items():
            if name == DEFAULT_PROFILE or not isinstance(own, dict) or set(own) - set(usual):
                raise ValueError(
                    f"profile {name!r} is {own!r}: expected a name other than {DEFAULT_PROFILE!r} and an "
                    "object with quotas, search and items, or some of them"
                )
            try:
                profiles[name] = read_profile(overlay(usual, own))
            except (TypeError, KeyError, ValueError) as error:
                raise ValueError(f"profile {name!r}: {error}") from error
        return profiles


@dataclass(frozen=True)
class GateParams:
    """What a challenger must reach; each number stands with its reason."""

    # Times the NDCG@10 of a blend of own purchases and bought-together. The blend needs no training: a model
    # must earn its keep.
    over_blend: float = 1.2
    # Times the NDCG@10 of plain vector search. Below this, candidate sources and ranker add nothing worth
    # their milliseconds.
    over_two_tower: float = 2.0
    # Baskets of the evaluation: on fewer the differences below are chance.
    least_baskets: int = 100
    # Times the champion's NDCG@10. Two trainings on the same data differ by about half a per cent: a loss of
    # one per cent is not noise.
    over_champion: float = 0.99
    # Times the share of the bought lines whose item the champion knows. Test baskets hold the challenger's
    # own items: one that was trained on half of the data has fewer, and its figures do not show it.
    catalogue_of_champion: float = 0.95
    # Times the champion's p99 of an answer, both on the machine of the gate. A tail of one fifth more takes
    # the headroom that the deadline leaves.
    p99_over_champion: float = 1.2
    # Times the teachers' NDCG@10 on the held-out lists, after all steps of compression together.
    over_teachers: float = 0.98
    # Baskets of the test window that the gate asks again. More take longer: 10 ms each, with a champion.
    sample_baskets: int = 4_000
    # Share of the nearest items that the index must find. An index that finds less gives the ranker other
    # candidates than the retriever was trained to find.
    index_recall: float = 0.97
    # Amazon lost 1 % of sales with each 100 ms that a page took longer (Linden, Make Data Useful, 2006).
    sales_lost_per_100_ms: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what would turn a check into its opposite."""
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise TypeError(f"GateParams.{name} is {value!r}, expected 0 (ask for nothing) or more")


GROUPS: Mapping[str, type] = {
    "example_params": ExampleParams,
    "retriever_params": RetrieverParams,
    "ranker_params": RankerParams,
    "student_params": StudentParams,
    "prune_params": PruneParams,
    "quantize_params": QuantizeParams,
    "index_params": IndexParams,
    "compile_params": CompileParams,
    "bundle_params": BundleParams,
    "gate_params": GateParams,
}


@dataclass(frozen=True)
class HyperParameter:
    """One field of a group, as people read about it."""

    name: str  # as `--param` takes it
    default: Any
    kind: str
    meaning: str


def describe(group: str) -> list[HyperParameter]:
    """Return the fields of a group; `ranker_params.NAME` adds the arguments of that ranker's class."""
    outer, _, ranker = group.partition(".")
    usual = RANKERS[ranker][1] if ranker else GROUPS[outer]()
    read = reads(ranker) if ranker else tuple(GROUPS[outer].__annotations__)
    said = _comments(GROUPS[outer])
    found = [
        HyperParameter(f"{group}.{each.name}", getattr(usual, each.name), str(each.type), said[each.name])
        for each in fields(usual)
        if each.name in read and not (ranker and each.name == "size")
    ]
    if ranker:
        kind = ranker_class(ranker)
        for name, argument in signature(kind).parameters.items():
            if argument.default is not argument.empty:
                value = usual.size.get(name, argument.default)
                meaning = f"argument of {kind.__name__}"
                found.append(HyperParameter(f"{group}.size.{name}", value, type(value).__name__, meaning))
    return found


def _comments(group: type) -> dict[str, str]:
    """Return the comment beside each field of a class, or the one above it."""
    found, above = {}, ""
    for line in getsource(group).splitlines():
        if line.lstrip().startswith("# "):
            above += line.strip().removeprefix("#")
        elif match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            found[match[1]] = match[2] or above.strip()
            above = ""
    return found
