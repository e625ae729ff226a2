"""The prediction log and the archive -> whether the model got the same features in serving as in training.

Each logged answer keeps the features of its items and the version of the user's row. This module rebuilds the
row from the archive's events up to that version and computes the features again as of the request's time. It
compares both bit by bit, and then the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.aggregates import UserEvents, no_events
from feature_repo.queries import Rows
from feature_repo.schema import DENSE_NAMES, model_inputs
from feature_repo.stream.archive import EVENTS, read_archive, rows_of
from feature_repo.stream.publication import FILE, read_publication
from serving.prediction_log import feature_names, feature_rows, join_segments, read_log, read_segments
from serving.release.bundle import Bundle, load_bundle
from serving.settings import Settings
from serving.stages.ranking import rank
from serving.stages.retrieval import build_query

SCORE_TOLERANCE = 1e-6
SETTLED_S = 10.0  # the stream archives events within seconds; younger answers wait for the next check


@dataclass(frozen=True)
class Difference:
    """One logged value that differs from the recomputed value."""

    request_id: str
    item_id: str
    feature: str  # or "score"
    logged: float
    recomputed: float


@dataclass(frozen=True)
class Skew:
    """The result of a replay; `skipped` counts the requests that were not compared, by reason."""

    compared: int  # requests
    equal: int  # of these
    values: int  # features compared
    score_error: float  # largest difference of a score
    first: Difference | None
    features: dict[str, int] = field(default_factory=dict)  # of requests in which each feature differs
    skipped: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)


def replay(
    log: Path, offline_store: Path, bundle: Path, last: int, published_at: datetime | None = None
) -> Skew:
    """Compute the features of logged answers again and compare them with the logged features.

    Args:
        log: directory of the prediction log.
        offline_store: its `events` are the archive.
        bundle: the bundle that answered; answers of others are skipped.
        last: how many of the latest answers to compare.
        published_at: when the archive's base was written; earlier answers used another base.
    """
    loaded = load_bundle(bundle)
    skipped: dict[str, int] = {}
    until = datetime.now(UTC) - timedelta(seconds=SETTLED_S)
    # Of one segment after the other the times alone: a long log fits no memory.
    segments = [one.select(["answered_at"]) for one in read_segments(log, until=until, features=False)]
    times = join_segments(segments, features=False)["answered_at"]
    since = times[max(len(times) - last, 0)].as_py() if len(times) else None
    records = read_log(log, since, until)
    records = records.slice(max(len(records) - last, 0))
    if len(records) and feature_names(records) != list(DENSE_NAMES):
        raise ValueError(
            f"the log in {log} holds {len(feature_names(records))} features, this code computes "
            f"{len(DENSE_NAMES)} others: replay it with the code it was written with"
        )
    counts = pc.list_value_length(records["features"]).to_numpy() // len(DENSE_NAMES)
    seen_rows = np.split(feature_rows(records), np.cumsum(counts)[:-1]) if len(records) else []
    answers = zip(records.drop_columns(["features"]).to_pylist(), seen_rows, strict=True)
    chosen = []
    for answer, seen in answers:
        if why := _uncomparable(answer, seen, loaded, published_at):
            skipped[why] = skipped.get(why, 0) + 1
        else:
            chosen.append((answer, seen))
    users = {answer["user_id"] for answer, _ in chosen if answer["row_version"] is not None}
    archive = read_archive(offline_store / EVENTS, users)
    return _compare(chosen, _by_user(archive), loaded, skipped)


def replay_home(home: Path, bundle: Path, last: int) -> Skew:
    """Replay the log that an endpoint of this home keeps, in RECO_LOG_DIR if that is set.

    Raises:
        FileNotFoundError: nothing was published to this home yet, or its archive is gone.
        PublicationDamaged: the note of the publication is damaged.
    """
    if (published := read_publication(home)) is None:
        raise FileNotFoundError(
            f"{home / FILE} is not there: train with `reco run --data DIR`, which publishes them"
        )
    if not any((home / "offline_store" / EVENTS).glob("*.parquet")):
        raise FileNotFoundError(
            f"{home / 'offline_store' / EVENTS} holds no events to compute from: "
            "`reco run --data DIR` publishes them"
        )
    log = replace(Settings.from_env(), home=home).prediction_log_dir
    return replay(log, home / "offline_store", bundle, last, datetime.fromisoformat(published.created_at))


def describe(skew: Skew) -> str:
    """Return the result of a replay in one line."""
    skipped = ", ".join(f"{count} {why}" for why, count in skew.skipped.items())
    if not skew.compared:
        found = (
            f"not compared: {skipped}"
            if skipped
            else f"what is written of the log holds no answer older than {SETTLED_S:g} s"
        )
        return f"nothing to compare: {found}; let the endpoint answer known shoppers, then repeat this"
    text = (
        f"{skew.equal} of {skew.compared} answers equal in all features, scores within {skew.score_error:.1g}"
    )
    if skew.first is not None:
        f = skew.first
        text += (
            f"; first difference: {f.feature} of item {f.item_id} in request {f.request_id} "
            f"was {f.logged!r}, is {f.recomputed!r}"
        )
    return f"{text}; not compared: {skipped}" if skipped else text


def _uncomparable(
    answer: Mapping[str, Any], seen: np.ndarray, bundle: Bundle, published_at: datetime | None
) -> str | None:
    if answer["bundle_id"] != bundle.bundle_id:
        return "of another bundle"
    if len(seen) == 0:
        return "without features (a fallback, a cached list, or nothing to recommend)"
    if published_at is not None and answer["answered_at"] < published_at:
        return "from before the features were published"
    return None


def _by_user(events: pa.Table) -> dict[str, pa.Table]:
    """Return each user's events, in the order of arrival."""
    if not len(events):
        return {}
    order = pc.sort_indices(events, [("user_id", "ascending"), ("version", "ascending")])
    events = events.take(order).combine_chunks()
    users = events["user_id"].combine_chunks().dictionary_encode()
    codes = users.indices.to_numpy()
    bounds = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1], True])
    names = users.dictionary.to_pylist()
    return {names[codes[a]]: events.slice(a, b - a) for a, b in pairwise(bounds)}


def _row(events: pa.Table | None, version: int) -> UserEvents:
    """Return the user's row as it was when it had this version."""
    if events is None:
        return no_events()
    past = events.filter(pc.less_equal(events["version"], version))
    return next((row for _, row in rows_of(past)), no_events())


def _compare(
    answers: list[tuple[dict[str, Any], np.ndarray]],
    archive: Mapping[str, pa.Table],
    bundle: Bundle,
    skipped: dict[str, int],
) -> Skew:
    equal, values, error, first = 0, 0, 0.0, None
    features: dict[str, int] = {}
    for answer, seen in answers:
        version = answer["row_version"]
        events = no_events() if version is None else _row(archive.get(answer["user_id"]), version)
        query = build_query(bundle.statistics, tuple(answer["basket"]), events, answer["at"].timestamp())
        dense, categorical = model_inputs(Rows(query, bundle.statistics.codes(answer["item_ids"])))
        differs = dense.view(np.uint32) != seen.astype(np.float32).view(np.uint32)
        scores = rank(bundle.ranker, dense, categorical)
        off = np.abs(scores - np.array(answer["scores"], np.float32))
        error = max(error, float(off.max()))
        values += dense.size
        for column in np.flatnonzero(differs.any(0)):
            features[DENSE_NAMES[column]] = features.get(DENSE_NAMES[column], 0) + 1
        if not differs.any() and off.max() <= SCORE_TOLERANCE:
            equal += 1
        elif first is None:
            first = _first(answer, seen, dense, differs, scores)
    return Skew(len(answers), equal, values, error, first, features, skipped)


def _first(
    answer: Mapping[str, Any], seen: np.ndarray, dense: np.ndarray, differs: np.ndarray, scores: np.ndarray
) -> Difference:
    worst = int(np.abs(scores - answer["scores"]).argmax())
    item, column = (int(i) for i in np.argwhere(differs)[0]) if differs.any() else (worst, -1)
    logged = seen[item, column] if column >= 0 else answer["scores"][item]
    again = dense[item, column] if column >= 0 else scores[item]
    name = DENSE_NAMES[column] if column >= 0 else "score"
    return Difference(answer["request_id"], answer["item_ids"][item], name, float(logged), float(again))
