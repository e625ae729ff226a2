"""CONTRACT the parity certificate: how far a ranker's scores are from those of its parent.

Every step that turns one ranker into another writes a certificate, on the same held-out lists of candidates.
It holds measurements, not a verdict: each reader compares them with `tolerances.toml` again.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.data.examples import RankerExamples
from feature_repo.errors import RecoError
from feature_repo.schema import DENSE_NAMES

TOLERANCES = Path(__file__).with_name("tolerances.toml")
LEAST_LISTS = 100  # a segment of fewer lists with a purchase proves nothing
LONG_BASKET = 10  # items
TOP = 10
DRAWS = 300
_DISCOUNT = 1 / np.log2(np.arange(2, TOP + 2))


# What a step may be measured against; the certificate says which, this table says whether it may.
MAY_BE_HELD_AGAINST = {
    "export_ranker": ("train",),
    "train_ranker": ("train",),
    "distill_ranker": ("distill",),
    "prune_ranker": ("prune",),
    "quantize_ranker": ("fp16", "int8", "int4"),
    "compile_ranker": ("compile",),
}


# In the order in which they may follow each other. The last four come once at most.
STEPS = ("train_ranker", "distill_ranker", "prune_ranker", "quantize_ranker", "compile_ranker")
EXPORTS = ("distill_ranker", "prune_ranker")  # make new weights, whose graph is proven within


class ParityFailed(RecoError):
    """A ranker is too far from the one it was made from."""


def certify(
    step: str,
    tolerance: str,
    child: tuple[str, np.ndarray],
    parents: Sequence[str],
    parent_scores: np.ndarray,
    lists: RankerExamples,
    **measured: Any,
) -> dict[str, Any]:
    """Return the certificate of one step.

    Args:
        step: the name of the step, for example "quantize_ranker".
        tolerance: the section of `tolerances.toml` it is held against.
        child: id and probabilities, (rows,), of the ranker that was made.
        parents: the ids it was made from; several for an ensemble.
        parent_scores: (rows,) probabilities of the parent (an ensemble's are its own, combined).
        lists: the held-out lists both have scored.
        measured: what else was measured: bytes, latency_ms.
    """
    child_id, scores = child
    ours, theirs = _per_list(scores, lists), _per_list(parent_scores, lists)
    masks = _segments(lists)
    return {
        "step": step,
        "tolerance": tolerance,
        "id": child_id,
        "parents": list(parents),
        "lists": len(ours["ndcg_at_10"]),
        "lists_hash": _hash(lists),
        **_compare(scores, parent_scores, ours, theirs, lists, np.ones(len(lists.start) - 1, bool)),
        "segments": {
            name: _compare(scores, parent_scores, ours, theirs, lists, mask)
            for name, mask in masks.items()
            if mask.any()
        },
        **measured,
    }


def check(certificate: Mapping[str, Any]) -> list[str]:
    """Return the measurements outside their tolerance, in words; an empty list if all are within."""
    try:
        tolerances = tomllib.loads(TOLERANCES.read_text())
        failed = _check(certificate, tolerances)
        if certificate["step"] in EXPORTS:
            failed += [f"its graph: {reason}" for reason in _check_export(certificate, tolerances)]
        return failed
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"it is no certificate ({type(error).__name__}: {error})"]


def _check(certificate: Mapping[str, Any], tolerances: Mapping[str, Any]) -> list[str]:
    step, named = certificate["step"], certificate["tolerance"]
    if named not in MAY_BE_HELD_AGAINST.get(step, ()):
        return [f"a certificate of {step!r} cannot be held against the tolerance {named!r}"]
    if step == "quantize_ranker" and certificate["variant"].split("_")[0] != named:
        return [f"the variant {certificate['variant']!r} cannot be held against the tolerance {named!r}"]
    allowed = tolerances[named]
    judged = _number(certificate["lists_with_purchase"], 0, math.inf)
    failed = [] if judged else ["it was measured on no list with a purchase"]
    for metric in ("ndcg_at_10", "auc"):
        need, ratio = allowed[f"{metric.split('_')[0]}_ratio"], _ratio(certificate[metric], 1.0)
        if not ratio >= need:
            failed.append(f"{metric} is {ratio:.4f} of the parent's, needed {need:g}")
    least = allowed["segment_ratio"]
    for name, segment in certificate["segments"].items():
        ratio = _ratio(segment["ndcg_at_10"], 1.0)
        if _number(segment["lists_with_purchase"], 0, math.inf) >= LEAST_LISTS and not ratio >= least:
            failed.append(f"ndcg_at_10 of segment {name} is {ratio:.4f} of the parent's, needed {least:g}")
    ratio, most = _ratio(certificate["logloss"], math.inf), allowed["logloss_ratio"]
    if not ratio <= most:
        failed.append(f"logloss is {ratio:.4f} of the parent's, allowed {most:g}")
    moved = _number(certificate["difference"]["max"], 0, 1)
    if not moved <= allowed["difference"]:
        failed.append(f"a score moved by {moved:.4g}, allowed {allowed['difference']:g}")
    return failed


def _check_export(certificate: Mapping[str, Any], tolerances: Mapping[str, Any]) -> list[str]:
    """Return the faults of the graph's certificate, which lies inside the one of its new weights."""
    export = certificate.get("export", {})
    if not export:
        return ["there is no certificate of it"]
    same = all(export[key] == certificate[key] for key in ("id", "lists_hash"))
    if export["step"] != "export_ranker" or not same:
        return ["its certificate is of another graph, other lists or another step"]
    return _check(export, tolerances)


def _number(value: Any, least: float, most: float) -> float:
    """Return a measured number; raises ValueError if it is missing or impossible."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"found {value!r}, expected a number from {least:g} to {most:g}")
    return float(value)


def _ratio(measured: Mapping[str, Any], most: float) -> float:
    """Return child / parent from the two numbers themselves, each from 0 to `most`."""
    child, parent = (_number(measured[who], 0, most) for who in ("child", "parent"))
    if math.isinf(child) or math.isinf(parent):
        raise ValueError("found infinity, expected a measured number")
    return child / parent if parent else 1.0 if child == 0 else math.inf


def enforce(certificate: Mapping[str, Any]) -> None:
    """Raise `ParityFailed` when a certificate lies outside its tolerance."""
    if failed := check(certificate):
        raise ParityFailed(
            f"{certificate['step']} made {certificate['id']} too far from its parent "
            f"({certificate['tolerance']} in {TOLERANCES.name}): {'; '.join(failed)}"
        )


def check_chain(certificates: Sequence[Mapping[str, Any]], served: str) -> list[str]:
    """Return the faults of a chain that should lead to the graph with the id `served`.

    A chain begins with trained rankers, which alone have no parent. The steps after them come once at most,
    in the order of STEPS. Each step names parents before it, and begins with the quality that its parent
    ended with. Each leads to the last one, and all were measured on the same lists. The certificate of an
    export lies inside that of the exporting step, never alone.
    """
    if not certificates:
        return ["there is no certificate at all"]
    try:
        return _check_links(certificates, served)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"it is no chain of certificates ({type(error).__name__}: {error})"]


def _check_links(certificates: Sequence[Mapping[str, Any]], served: str) -> list[str]:
    faults: list[str] = []
    earlier: dict[str, Mapping[str, Any]] = {}
    last_place = -1
    for certificate in certificates:
        name = f"{certificate['step']} -> {certificate['id']}"
        place = STEPS.index(certificate["step"]) if certificate["step"] in STEPS else -1
        reasons = [
            *_check_order(place, last_place),
            *_check_parents(certificate, place, earlier),
            *_check_lists(certificate, certificates[0]),
            *check(certificate),
        ]
        faults += [f"{name}: {reason}" for reason in reasons]
        last_place = max(last_place, place)
        earlier[str(certificate["id"])] = certificate
    if not faults:  # in a broken chain, links without a successor only repeat the break
        faults = _check_successors(certificates)
    if certificates[-1]["id"] != served:
        faults.append(f"the last certificate is of {certificates[-1]['id']}, the graph is {served}")
    return faults


def _check_order(place: int, last_place: int) -> list[str]:
    """Return a fault if the step comes too early or a second time; `place` is its index in STEPS, or -1."""
    if place < max(last_place, 0) or place == last_place > 0:
        return [f"it cannot stand after {STEPS[max(last_place, 0)]}, the order is {', '.join(STEPS)}"]
    return []


def _check_parents(
    certificate: Mapping[str, Any], place: int, earlier: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return the faults of a link's id and parents; `earlier` holds the certificates before it, by id."""
    faults, parents = [], certificate["parents"]
    if str(certificate["id"]) in earlier:
        faults.append("it stands there twice")
    if (place == 0) != (not parents):
        faults.append("a trained ranker has no parent, and nothing else has none")
    if place > 1 and len(parents) > 1:
        faults.append(f"it names {len(parents)} parents, and only a student has several")
    if missing := [parent for parent in parents if parent not in earlier]:
        faults.append(f"no certificate of its parent {missing[0]}")
    elif len(parents) == 1 and place > 1:
        faults += _check_joint(certificate, earlier[parents[0]])
    return faults


def _check_lists(certificate: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Return a fault if a link was measured on other lists or segments than the first link."""
    faults = []
    if any(certificate[key] != first[key] for key in ("lists", "lists_hash")):
        faults.append("it was measured on other lists than the first")
    if _counts(certificate) != _counts(first):
        faults.append("its segments are not those of the first")
    return faults


def _check_successors(certificates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a fault for each link that does not lead to the last one."""
    leading, faults = {str(certificates[-1]["id"])}, []
    for certificate in reversed(certificates):
        if certificate["id"] in leading:
            leading.update(certificate["parents"])
        else:
            faults.append(f"{certificate['step']} -> {certificate['id']}: nothing was made from it")
    return faults


def _check_joint(certificate: Mapping[str, Any], parent: Mapping[str, Any]) -> list[str]:
    """Return where a link's parent is not as good as the link before says that it is."""
    pairs = [(metric, certificate[metric], parent[metric]) for metric in ("ndcg_at_10", "auc", "logloss")]
    for segment in certificate["segments"].keys() & parent["segments"].keys():
        ours, theirs = (one["segments"][segment]["ndcg_at_10"] for one in (certificate, parent))
        pairs.append((f"ndcg_at_10 of segment {segment}", ours, theirs))
    return [
        f"{name} of its parent is {after['parent']}, the parent's own certificate says {before['child']}"
        for name, after, before in pairs
        if not math.isclose(after["parent"], before["child"], rel_tol=1e-6)
    ]


def _counts(certificate: Mapping[str, Any]) -> dict[str, int]:
    """Return how many lists with a purchase there are, in all and in each segment."""
    segments = {name: one["lists_with_purchase"] for name, one in certificate["segments"].items()}
    return {"": certificate["lists_with_purchase"], **segments}


def _hash(lists: RankerExamples) -> str:
    """Return a hash of the purchases by list: all certificates of one chain must share it."""
    digest = hashlib.sha256(np.ascontiguousarray(lists.start).tobytes())
    digest.update(np.ascontiguousarray(lists.label).tobytes())
    return digest.hexdigest()[:16]


def _per_list(scores: np.ndarray, lists: RankerExamples) -> dict[str, np.ndarray]:
    """Return NDCG@10, AUC (NaN without a purchase) and log loss of each list, (lists,) each.

    The ideal list holds the purchases that were retrieved: a ranker cannot find others.
    """
    count = len(lists.start) - 1
    ndcg, auc = np.full(count, np.nan), np.full(count, np.nan)
    p = np.clip(scores.astype(np.float64), 1e-6, 1 - 1e-6)
    label = np.asarray(lists.label, bool)
    losses = -np.where(label, np.log(p), np.log1p(-p))
    for i, (begin, end) in enumerate(zip(lists.start[:-1].tolist(), lists.start[1:].tolist(), strict=True)):
        bought = label[begin:end]
        wanted = int(bought.sum())
        if not 0 < wanted < end - begin:
            continue
        order = np.lexsort((bought, -scores[begin:end]))  # among equal scores, purchases come last
        hits = bought[order]
        ndcg[i] = _DISCOUNT[: len(hits[:TOP])] @ hits[:TOP] / _DISCOUNT[: min(TOP, wanted)].sum()
        places = np.flatnonzero(hits)  # others ranked above each purchase, counted from the places
        above = (places - np.arange(wanted)).sum()
        auc[i] = 1 - above / (wanted * (end - begin - wanted))
    lengths = np.maximum(np.diff(lists.start), 1)
    summed = np.add.reduceat(np.r_[losses, 0.0], lists.start[:-1]) if count else np.empty(0)
    return {
        "ndcg_at_10": ndcg,
        "auc": auc,
        "logloss": np.where(np.diff(lists.start) > 0, summed / lengths, 0.0),
    }


def _segments(lists: RankerExamples) -> dict[str, np.ndarray]:
    """Return which lists are of new users, of tail items bought, and of long baskets, (lists,) bool each."""
    filled = np.flatnonzero(np.diff(lists.start))
    long = np.zeros(len(lists.start) - 1, bool)
    long[filled] = lists.dense[lists.start[filled], DENSE_NAMES.index("basket_size")] >= LONG_BASKET
    owner = np.repeat(np.arange(len(lists.start) - 1), np.diff(lists.start))
    label = np.asarray(lists.label, bool)
    sold = np.asarray(lists.dense[label][:, DENSE_NAMES.index("item_purchases_13w")])
    tail = np.zeros(len(lists.start) - 1, bool)
    tail[owner[label][sold <= np.quantile(sold, 0.25)] if len(sold) else []] = True
    return {
        "new users": (lists.history == 0).all(1),
        "tail items": tail,
        "long baskets": long,
    }


def _compare(
    scores: np.ndarray,
    parent: np.ndarray,
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    lists: RankerExamples,
    mask: np.ndarray,
) -> dict[str, Any]:
    rows = np.repeat(mask, np.diff(lists.start))
    apart = np.abs(scores[rows].astype(np.float64) - parent[rows])
    judged = mask & ~np.isnan(ours["ndcg_at_10"])
    found: dict[str, Any] = {
        "lists_with_purchase": int(judged.sum()),
        "difference": {
            "max": float(apart.max(initial=0.0)),
            "mean": float(apart.mean()) if len(apart) else 0.0,
        },
        "top_10_overlap": _overlap(scores, parent, lists, mask),
        "calibration_error": _calibration_error(scores[rows], np.asarray(lists.label)[rows]),
    }
    for metric in ours:
        chosen = judged if metric != "logloss" else mask
        found[metric] = _delta(ours[metric][chosen], theirs[metric][chosen])
    return found


def _delta(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Return both means, their ratio, and the difference with its paired 95 % bootstrap interval."""
    if not len(ours):
        return {"child": 0.0, "parent": 0.0, "ratio": 1.0, "delta": 0.0, "interval": [0.0, 0.0]}
    gap = ours - theirs
    draws = np.random.default_rng(0).integers(0, len(gap), (DRAWS, len(gap)))
    low, high = np.percentile(gap[draws].mean(1), [2.5, 97.5])
    child, parent = float(ours.mean()), float(theirs.mean())
    return {
        "child": child,
        "parent": parent,
        "ratio": child / parent if parent > 0 else 1.0,
        "delta": child - parent,
        "interval": [float(low), float(high)],
    }


def _overlap(scores: np.ndarray, parent: np.ndarray, lists: RankerExamples, mask: np.ndarray) -> float:
    """Return the mean share of the ten best candidates that both name."""
    shares = []
    for i in np.flatnonzero(mask & (np.diff(lists.start) > 0)):
        begin, end = lists.start[i], lists.start[i + 1]
        best = [set(np.argsort(-s[begin:end], kind="stable")[:TOP].tolist()) for s in (scores, parent)]
        shares.append(len(best[0] & best[1]) / len(best[0]))
    return float(np.mean(shares)) if shares else 1.0


def _calibration_error(scores: np.ndarray, label: np.ndarray) -> float:
    """Return the expected calibration error over ten bins of equal size."""
    if not len(scores):
        return 0.0
    order = np.argsort(scores, kind="stable")
    gaps = [
        abs(float(scores[part].mean()) - float(label[part].mean())) * len(part) / len(scores)
        for part in np.array_split(order, 10)
        if len(part)
    ]
    return float(sum(gaps))
