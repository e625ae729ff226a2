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
from components.evaluation.metrics import DISCOUNT
from feature_repo.errors import RecoError
from feature_repo.schema import DENSE_NAMES

TOLERANCES = Path(__file__).with_name("tolerances.toml")
LEAST_LISTS = 100  # a segment of fewer lists with a purchase proves nothing
LONG_BASKET = 10  # items
TOP = 10
DRAWS = 300
# Scores this close are the same but for rounding: only candidates with scores as good as equal can change
# places. One such pair at the top of one of 1,231 lists moved NDCG@10 by 0.02 % where no score moved by 1e-6.
ROUNDING = 1e-5
# Steps that make new weights: their certificate holds that of the exported graph, as `export`.
EXPORTS = ("distill_ranker", "prune_ranker")


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
    """Return the measurements outside their tolerance, in words; an empty list if all are within.

    NaN, as a training that diverged leaves it, is within none. Where no score moved by more than `ROUNDING`,
    the order of candidates is not judged. The certificate of an export lies inside the one of its new
    weights, and is checked with it.
    """
    allowed = tomllib.loads(TOLERANCES.read_text())[certificate["tolerance"]]
    failed = [] if certificate["lists_with_purchase"] else ["it was measured on no list with a purchase"]
    moved = certificate["difference"]["max"]
    if not moved <= ROUNDING:
        failed += _losses_of_order(certificate, allowed)
    ratio, most = _ratio(certificate["logloss"]), allowed["logloss_ratio"]
    if not ratio <= most:
        failed.append(f"logloss is {ratio:.4f} of the parent's, allowed {most:g}")
    if not moved <= allowed["difference"]:
        failed.append(f"a score moved by {moved:.4g}, allowed {allowed['difference']:g}")
    if "export" in certificate:
        failed += [f"its graph: {reason}" for reason in check(certificate["export"])]
    return failed


def _losses_of_order(certificate: Mapping[str, Any], allowed: Mapping[str, float]) -> list[str]:
    """Return the metrics of the candidates' order, of all lists and of segments, that lie outside."""
    failed = []
    for metric in ("ndcg_at_10", "auc"):
        need, ratio = allowed[f"{metric.split('_')[0]}_ratio"], _ratio(certificate[metric])
        if not ratio >= need:
            failed.append(f"{metric} is {ratio:.4f} of the parent's, needed {need:g}")
    least = allowed["segment_ratio"]
    for name, segment in certificate["segments"].items():
        ratio, highest = _ratio(segment["ndcg_at_10"]), segment["ndcg_at_10"]["interval"][1]
        may_be_chance = segment["lists_with_purchase"] < LEAST_LISTS or highest >= 0
        if not may_be_chance and not ratio >= least:
            failed.append(f"ndcg_at_10 of segment {name} is {ratio:.4f} of the parent's, needed {least:g}")
    return failed


def _ratio(measured: Mapping[str, float]) -> float:
    """Return child / parent from the two numbers themselves."""
    child, parent = measured["child"], measured["parent"]
    if parent or math.isnan(child):
        return child / parent if parent else math.nan
    return 1.0 if child == 0 else math.inf


def enforce(certificate: Mapping[str, Any]) -> None:
    """Raise `ParityFailed` when a certificate lies outside its tolerance."""
    if failed := check(certificate):
        raise ParityFailed(
            f"{certificate['step']} made {certificate['id']} too far from its parent "
            f"({certificate['tolerance']} in {TOLERANCES.name}): {'; '.join(failed)}"
        )


def check_chain(certificates: Sequence[Mapping[str, Any]], served: str) -> list[str]:
    """Return the faults of a chain that should lead to the graph with the id `served`.

    Each link is within its tolerance, names parents that stand before it, and was measured on the lists of
    the first. A chain finds a mix-up, not a forgery: the gate measures the bundle itself.
    """
    if not certificates:
        return ["there is no certificate at all"]
    faults: list[str] = []
    earlier: set[str] = set()
    try:
        for certificate in certificates:
            missing = [parent for parent in certificate["parents"] if parent not in earlier]
            reasons = [f"no certificate of its parent {parent}" for parent in missing]
            if (certificate["step"] == "train_ranker") == bool(certificate["parents"]):
                reasons.append("a trained ranker has no parent, and every other one has some")
            if certificate["lists_hash"] != certificates[0]["lists_hash"]:
                reasons.append("it was measured on other lists than the first")
            reasons += check(certificate)
            faults += [f"{certificate['step']} -> {certificate['id']}: {reason}" for reason in reasons]
            earlier.add(certificate["id"])
    except (AttributeError, LookupError, TypeError) as error:
        return [f"it is no chain of certificates ({type(error).__name__}: {error})"]
    if certificates[-1]["id"] != served:
        faults.append(f"the last certificate is of {certificates[-1]['id']}, the graph is {served}")
    return faults


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
        ndcg[i] = DISCOUNT[: len(hits[:TOP])] @ hits[:TOP] / DISCOUNT[: min(TOP, wanted)].sum()
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
    random = np.random.default_rng(0)
    # One draw at a time: all together take gigabytes for a million lists.
    means = [gap[random.integers(0, len(gap), len(gap))].mean() for _ in range(DRAWS)]
    low, high = np.percentile(means, [2.5, 97.5])
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
