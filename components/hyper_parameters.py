"""Every hyper-parameter of the training pipeline: its name, default, meaning, and its valid values.

The steps read them, and so do `reco params` and the check before a run. So nothing slow is imported here: a
wrong name is an error before PyTorch has loaded. The comment beside or above a field is its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from inspect import getsource, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from msgspec import Meta

from components.parameters import (
    AtLeast0,
    Count,
    Dropout,
    Inside,
    Part,
    Positive,
    Share,
    Whole,
    overlay,
    read_arguments,
    read_params,
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

    windows: Count = 7  # periods of four weeks before the cut whose baskets become examples
    negatives: Count = 30  # per list, drawn from the retrieved candidates
    masks: Count = 3  # lists made from one basket, each hiding other items; more find fewer new items
    user_ratio: Part = 1.0  # share of users who give examples; all count in the statistics
    stranger_ratio: Share = 0.1  # share of baskets asked again without history, with any part of the basket
    calibration_ratio: Inside = 0.2  # share of users whose last window is held out, with all candidates
    seed: Whole = 0  # of every random choice in this step


# ---------------------------------------------------------------------------------------------- retriever


@dataclass(frozen=True)
class RetrieverParams:
    """Hyper-parameters of the two-tower model."""

    dim: Count = 63  # of the vectors; one more dimension holds the item's bias
    hidden: Count = 128  # width of each tower's hidden layer
    epochs: Count = 4  # passes over the baskets, at least: a small shop's are passed more often
    batch_size: Count = 512  # baskets
    learning_rate: Positive = 4e-3  # the highest; it rises and falls once
    negatives: Count = 8_192  # uniform from the catalogue, shared by a batch
    targets: Count = 3  # hidden items per basket and epoch
    seed: Whole = 0  # of every random choice in this step


@dataclass(frozen=True)
class IndexParams:
    """What the index must reach, and how that is measured."""

    target: Part = 0.97  # of the k items nearest by exact search, the share that it finds
    k: Count = 500  # items that each measured search asks for
    margin: Share = 0.25  # share of the time that another type must save; nearer ones count as equally fast
    queries: Count = 500  # training baskets that are searched for
    seed: Whole = 0  # of every random choice in this step


# ------------------------------------------------------------------------------------------------ rankers


@dataclass(frozen=True)
class RankerParams:
    """How large a ranker is and how it is trained."""

    size: dict[str, Any] = field(default_factory=dict)  # arguments of the model's class
    epochs: Count = 2  # passes over the lists, at least: a small shop's few lists are passed more often
    batch_size: Count = 64  # lists
    learning_rate: Positive = 2e-3  # the highest; it rises and falls once
    pointwise_weight: AtLeast0 = 0.1  # of the binary loss beside the loss over each list
    table_decay: AtLeast0 = 0.0  # weight decay of embedding tables: rarely seen rows stay near zero
    seed: Whole = 0  # of every random choice in this step


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

    hidden: Count = 128  # width of the layers
    dim: Count = 8  # of each embedding table
    dropout: Dropout = 0.0  # share of hidden units left out at random while learning
    epochs: Count = 5  # passes over the lists
    batch_size: Count = 64  # lists
    learning_rate: Positive = 2e-3  # the highest; it rises and falls once
    pointwise_weight: AtLeast0 = 0.1  # of the binary loss beside the loss over each list
    soft_weight: Share = 0.4  # of the teachers' scores; purchases have the rest
    temperature: Positive = 1.0  # above 1 the teachers' scores are softened
    seed: Whole = 0  # of every random choice in this step


# -------------------------------------------------------------------------------------------- compression


@dataclass(frozen=True)
class PruneParams:
    """Which shares of the hidden units may go, and how each is tuned afterwards."""

    # Shares of hidden units, the largest first, until one holds.
    ratios: Annotated[tuple[Inside, ...], Meta(min_length=1)] = (0.3, 0.15)
    epochs: Count = 1  # passes over the lists after each share
    batch_size: Count = 64  # lists
    learning_rate: Positive = 1e-3  # the highest; it rises and falls once
    soft_weight: Share = 0.7  # of the teachers' scores; purchases have the rest
    seed: Whole = 0  # of every random choice in this step


@dataclass(frozen=True)
class QuantizeParams:
    """How a ranker is tuned when rounding alone loses more than the tolerance."""

    tune_epochs: Whole = 1  # passes with the rounding in the loop; 0: rounding alone, whatever it loses
    batch_size: Count = 64  # lists
    learning_rate: Positive = 5e-4  # the highest; it rises and falls once
    soft_weight: Share = 0.7  # of the teachers' scores; purchases have the rest
    seed: Whole = 0  # of every random choice in this step


@dataclass(frozen=True)
class CompileParams:
    """How the winner is chosen."""

    candidates: int = 500  # the number of candidates whose p50 decides
    # Times the shortest p50: up to this, forms count as equally fast, and the smallest file wins.
    near_ratio: Annotated[float, Meta(ge=1)] = 1.03

    def __post_init__(self) -> None:
        """Refuse a number of candidates that is not measured."""
        if self.candidates not in SIZES:
            raise TypeError(f"CompileParams.candidates is {self.candidates}, expected one of {SIZES}")


# ------------------------------------------------------------------------------------------------ release

# Beside the default one: the dearest fifth of the catalogue, and the quarter that is sold at a discount most.
# Both draw more from the tower, which finds as many as it is asked for among the items that pass.
PROFILES: dict[str, dict[str, Any]] = {
    "premium": {"quotas": {"tower": 300}, "items": {"column": "price", "above_quantile": 0.8}},
    "clearance": {"quotas": {"tower": 300}, "items": {"column": "discount_ratio", "above_quantile": 0.75}},
}


class Usual(int):
    """A quota that was not given: it keeps its share of another number of candidates. A given one stands."""


@dataclass(frozen=True)
class BundleParams:
    """Settings of the served path that change the answer.

    Sources whose quotas are not given keep their shares of another number of candidates.
    """

    history: int = Usual(Quotas.history)  # candidates from the shopper's own purchases
    together: int = Usual(Quotas.together)  # candidates often bought with the basket's items
    week: int = Usual(Quotas.week)  # candidates that sold best in the last 7 days, counted each night
    # Candidates from the two towers' index. The default profile does not ask for them: beside the week's best
    # sellers and enough partners they bring nothing (docs/explanation/retrieval.md). Profiles with a filter
    # ask for 300.
    tower: int = Usual(0)
    store: int = Usual(Quotas.store)  # candidates that sell best in the shopper's store
    candidates: Count = Quotas.total  # candidates of all sources that are ranked
    type_penalty: Part = 0.95  # factor of an item's worth for each item of its type above it
    # On the test weeks these weights changed NDCG@10 by -0.2 % [-0.6, 0.1]. They showed 11 % more of the
    # catalogue, and 2 % more of the items new to the shopper were found.
    # `reco bench rerank` measures it.
    exposure: AtLeast0 = 0.5  # gain of an item whose manufacturer is new: with 0.5, worth half as much again
    novelty: AtLeast0 = 0.2  # gain of rare items in novel slots: 0.2 is 1.6 times for a tenth of the baskets
    novel_slots: tuple[Count, ...] = (10,)  # places in the list where novelty counts
    novel_loss: AtLeast0 = 0.01  # worth, a probability, that a novel slot may lose against the usual choice
    spares_new: bool = True  # items new to the shopper pay no type penalty
    profiles: dict[str, Any] = field(default_factory=lambda: dict(PROFILES))  # other ways to find candidates

    def __post_init__(self) -> None:
        """Refuse quotas and profiles that cannot be read."""
        try:
            _ = self.quotas
            if self.profiles != PROFILES:
                self.read_profiles({})
        except ValueError as error:
            raise TypeError(f"BundleParams: {error}") from error

    @property
    def quotas(self) -> Quotas:
        """How many candidates the default profile's sources bring."""
        return self._quotas(self.candidates)

    def _quotas(self, total: int) -> Quotas:
        """Return the quotas of `total` candidates: given ones stand, of the others the usual share."""
        usual = Quotas(tower=BundleParams.tower)
        quotas = {name: getattr(self, name) for name in ("history", "together", "week", "tower", "store")}
        given = {name: quota for name, quota in quotas.items() if not isinstance(quota, Usual)}
        return replace(usual.of(total), **given)

    def read_profiles(self, search: Mapping[str, int]) -> dict[str, Profile]:
        """Return the other profiles; each has the default one's quotas, and this search, where it names none.

        The numbers of a profile are taken as they stand. If it names a total, quotas are shares of that.

        Raises:
            ValueError: a profile that cannot be read.
        """
        from serving.stages.profiles import read_profile  # slow: it loads Faiss

        usual = {"search": search, "items": None, "quotas": {}}
        profiles = {}
        for name, own in self.profiles.items():
            if name == DEFAULT_PROFILE or not isinstance(own, dict) or set(own) - set(usual):
                raise ValueError(
                    f"profile {name!r} is {own!r}: expected a name other than {DEFAULT_PROFILE!r} and an "
                    "object with quotas, search and items, or some of them"
                )
            try:
                profile = overlay(usual, own)
                quotas = self._quotas(profile["quotas"].get("total", self.candidates))
                profiles[name] = read_profile(overlay({"quotas": asdict(quotas)}, profile))
            except (AttributeError, TypeError, KeyError, ValueError) as error:
                raise ValueError(f"profile {name!r}: {error}") from error
        return profiles


@dataclass(frozen=True)
class GateParams:
    """What a challenger must reach; each number stands with its reason."""

    # Times the NDCG@10 of a blend of own purchases and bought-together. The blend needs no training: a model
    # must earn its keep.
    over_blend: AtLeast0 = 1.2
    # Times the NDCG@10 of plain vector search. Below this, candidate sources and ranker add nothing worth
    # their milliseconds.
    over_two_tower: AtLeast0 = 2.0
    # Baskets of the evaluation: on fewer the differences below are chance.
    least_baskets: Whole = 100
    # Times the champion's NDCG@10. Two trainings on the same data differ by about half a per cent: a loss of
    # one per cent is not noise.
    over_champion: AtLeast0 = 0.99
    # Times the share of the bought lines whose item the champion knows. Test baskets hold the challenger's
    # own items: one that was trained on half of the data has fewer, and its figures do not show it.
    catalogue_of_champion: AtLeast0 = 0.95
    # Times the champion's p99 of an answer, both on the machine of the gate. A tail of one fifth more takes
    # the headroom that the deadline leaves.
    p99_over_champion: AtLeast0 = 1.2
    # Times the teachers' NDCG@10 on the held-out lists, after all steps of compression together.
    over_teachers: AtLeast0 = 0.98
    # Baskets of the test window that the gate asks again. More take longer: 10 ms each, with a champion.
    sample_baskets: Whole = 4_000
    # Share of the nearest items that the index must find. An index that finds less gives the ranker other
    # candidates than the retriever was trained to find.
    index_recall: AtLeast0 = 0.97
    # Amazon lost 1 % of sales with each 100 ms that a page took longer (Linden, Make Data Useful, 2006).
    sales_lost_per_100_ms: AtLeast0 = 0.01


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
    kind = GROUPS[outer]
    usual, read = (RANKERS[ranker][1], reads(ranker)) if ranker else (kind(), tuple(kind.__annotations__))
    said, types = _comments(kind), get_type_hints(kind)
    found = [
        HyperParameter(f"{group}.{name}", getattr(usual, name), _word(types[name]), said[name])
        for name in read
        if not (ranker and name == "size")
    ]
    if ranker:
        model = ranker_class(ranker)
        for name, argument in signature(model).parameters.items():
            if argument.default is not argument.empty:
                value = usual.size.get(name, argument.default)
                meaning = f"argument of {model.__name__}"
                found.append(HyperParameter(f"{group}.size.{name}", value, type(value).__name__, meaning))
    return found


def _word(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


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
