"""CONTRACT the release bundle: a released model on disk, and the only way to read one.

    manifest.json       written last: a SHA-256 for each file, settings that change the answer, origin
    query_tower.onnx    history + basket -> query vector
    ranker.onnx         dense + categorical -> purchase probability
    index.faiss         item vectors, row number = item code; index.json says why this type of index
    statistics/         item table, bought-together, popularity (feature_repo.statistics)
    new_items.npy       vectors of items that came after the training, the statistics' last rows; optional
    removed_items.npy   codes of items that are not sold any more; optional
    golden.jsonl        requests with the answers this bundle must give
    certificates.json, parity.json, evaluation.json, reference_log.parquet, reference_events.parquet
    bundle.sig, provenance.sig   by `reco sign`, after the bundle was made; see `serving.release.signatures`

Bundles are immutable; the id is a hash over the files and settings, so two bundles with one id answer
alike. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from feature_repo.atomic_files import is_part, sha256_of, write_file
from feature_repo.ids import is_id, is_path
from feature_repo.schema import (
    BASKET_LENGTH,
    DENSE_NAMES,
    HISTORY_LENGTH,
    LEVELS,
    schema_hash,
)
from feature_repo.statistics import Statistics, read_statistics, read_vocabulary
from serving.errors import BundleInvalid
from serving.release.manifest import bundle_id_of, read_manifest
from serving.schemas import DEFAULT_PROFILE
from serving.stages.item_index import ItemIndex, read_item_index
from serving.stages.onnx_runtime import ort
from serving.stages.profiles import OpenProfile, Profile, open_profile, read_profile
from serving.stages.reranking import NO_RARITY, UNBOUNDED, exposure_weights, item_rarity
from serving.stages.retrieval import Quotas

INDEX_REPORT = "index.json"
SIGNATURE_FILES = SIGNATURE_FILE, PROVENANCE_FILE = "bundle.sig", "provenance.sig"
NEW_VECTORS, REMOVED_ITEMS = "new_items.npy", "removed_items.npy"
REQUIRED = (
    "query_tower.onnx",
    "ranker.onnx",
    "index.faiss",
    "statistics/item_ids.npy",
    "golden.jsonl",
    "certificates.json",
)


@dataclass(frozen=True)
class RankingSettings:
    """Settings that change the answer; they live in the manifest, never in the environment."""

    quotas: Quotas
    type_penalty: float  # what each earlier item of the same type leaves of a score
    exposure: float = 0.0  # gain of an item whose manufacturer is new, see `serving.stages.reranking`
    novelty: float = 0.0  # how much the rare counts in the novel slots, see there
    novel_slots: tuple[int, ...] = ()  # from 1
    novel_loss: float = UNBOUNDED  # worth that such a slot may lose; earlier bundles set no bound
    spares_new: bool = False  # items new to the shopper pay no type penalty; in earlier bundles they do
    search: Mapping[str, int] = field(default_factory=dict)  # of the index
    profiles: Mapping[str, Profile] = field(default_factory=dict)  # beside the default one
    new_gain: float = 1.0  # factor for the score of an item new to the shopper; strangers have none


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path
    bundle_id: str
    manifest: dict[str, Any]
    settings: RankingSettings
    statistics: Statistics
    vocabulary: dict[str, list[str]]
    query_tower: ort.InferenceSession
    ranker: ort.InferenceSession
    index: ItemIndex
    removed: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # codes that never come back

    @cached_property
    def profiles(self) -> dict[str, OpenProfile]:
        """Every profile, ready to answer."""
        settings = self.settings
        profiles = {DEFAULT_PROFILE: Profile(settings.quotas, settings.search), **settings.profiles}
        return {
            name: open_profile(profile, self.statistics, self.query_tower, self.index, self.removed)
            for name, profile in profiles.items()
        }

    @cached_property
    def weights(self) -> np.ndarray | None:
        """What each item's score is multiplied with, (n,) float64; None where nothing changes."""
        return exposure_weights(self.statistics, self.settings.exposure)

    @cached_property
    def rarity(self) -> np.ndarray | None:
        """What each item's worth is multiplied with in a novel slot, (n,) float64; None without novelty."""
        return item_rarity(self.statistics, self.settings.novelty)

    @cached_property
    def novel(self) -> np.ndarray:
        """The novel slots, (m,) int64 counted from 0; none without novelty."""
        slots = self.settings.novel_slots if self.settings.novelty else ()
        return np.array(sorted(slots), np.int64) - 1

    def rarity_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the rarity of some items, (n,) float64; nothing without novelty."""
        return NO_RARITY if self.rarity is None else self.rarity[codes]

    def name_of(self, code: int) -> str:
        """Return an item's name: its type, or the next wider level that has a name; empty without any."""
        levels = zip(LEVELS, self.statistics.categorical[code].tolist(), strict=True)
        return next((name for level, number in levels if (name := self.vocabulary[level][number])), "")

    @property
    def cardinality(self) -> list[int]:
        """How many values each categorical input of the ranker has, the unknown one included."""
        return [self.statistics.known_items + 1, *(len(self.vocabulary[level]) for level in LEVELS)]


def seal_bundle(path: Path, *, cut: str, settings: RankingSettings, made_from: dict[str, Any]) -> str:
    """Hash the files of a directory, write its manifest last and return the bundle id.

    Args:
        path: the directory with the bundle's files.
        cut: ISO 8601 time before which all training data lies.
        settings: what changes the answer besides the files.
        made_from: data hash, parameters and parent: kept for the record, part of the id.
    """
    for outdated in ("manifest.json", *SIGNATURE_FILES):
        (path / outdated).unlink(missing_ok=True)
    files = {
        file.relative_to(path).as_posix(): sha256_of(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and not is_part(file)
    }
    body = {
        "kind": "bundle",
        "cut": cut,
        "schema_hash": schema_hash(),
        "settings": asdict(settings),
        "made_from": made_from,
        "files": files,
    }
    bundle_id = bundle_id_of(body)
    write_file(path / "manifest.json", json.dumps({"bundle_id": bundle_id, **body}, indent=1, sort_keys=True))
    return bundle_id


def verify_files(path: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with the manifest.

    Raises:
        BundleInvalid: a file is missing, changed, unexpected, a link, or outside the bundle.
    """
    files: dict[str, str] = manifest["files"]
    held = [file for file in path.rglob("*") if not is_part(file)]
    if links := [file for file in held if file.is_symlink()]:
        raise BundleInvalid(f"{links[0]} is a link, and could change after it was checked: refuse the bundle")
    for name, expected in files.items():
        file = path / name
        if not is_path(name):
            raise BundleInvalid(f"the manifest of {path} names {name!r}, outside the bundle: refuse it")
        if not file.is_file():
            raise BundleInvalid(f"{file} is missing: fetch the bundle again")
        if (found := sha256_of(file)) != expected:
            raise BundleInvalid(
                f"{file} has SHA-256 {found[:12]}…, the manifest says {expected[:12]}…: "
                "fetch the bundle again"
            )
    present = {file.relative_to(path).as_posix() for file in held if not file.is_dir()}
    if extra := sorted(present - set(files) - {"manifest.json", *SIGNATURE_FILES}):
        raise BundleInvalid(f"{path} holds files its manifest does not know: {', '.join(extra[:5])}")
    if missing := [name for name in REQUIRED if name not in files]:
        raise BundleInvalid(f"{path} lacks {', '.join(missing)}: assemble the bundle again")


def load_bundle(path: Path) -> Bundle:
    """Return the bundle at `path` after checking manifest, hashes, shapes and schema.

    Golden requests are asked by `serving.answer.recommender.open_recommender`, which needs the whole path.

    Raises:
        BundleInvalid: naming the found value, the expected one and the remedy.
    """
    manifest = read_manifest(path)
    if manifest["schema_hash"] != schema_hash():
        raise BundleInvalid(
            f"bundle {manifest['bundle_id']} was built for feature schema {manifest['schema_hash']}, "
            f"this code computes {schema_hash()}: serve it with the code it was built with, or train again "
            "with the command that `reco doctor` gives"
        )
    verify_files(path, manifest)
    try:
        statistics = read_statistics(path / "statistics")
        index, removed = _open_index(path, statistics)
        bundle = Bundle(
            path,
            manifest["bundle_id"],
            manifest,
            _read_settings(manifest["settings"]),
            statistics,
            read_vocabulary(path / "statistics"),
            open_session(path / "query_tower.onnx"),
            open_session(path / "ranker.onnx"),
            index,
            removed,
        )
        _check_index(bundle)
        _check_statistics(bundle)
        _check_graphs(bundle)
    except BundleInvalid:
        raise
    except Exception as error:  # readers of .npy, JSON, Faiss and ONNX raise any error, SyntaxError too
        found = f"{error.__class__.__name__}: {error}"
        raise BundleInvalid(f"bundle {path} can't be read ({found[:300]})") from error
    return bundle


def _open_index(path: Path, statistics: Statistics) -> tuple[ItemIndex, np.ndarray]:
    """Return the index with new items beside it and without removed ones, and the codes of those."""
    new, gone = path / NEW_VECTORS, path / REMOVED_ITEMS
    codes = np.arange(statistics.known_items, len(statistics.item_ids))
    added = (codes, np.load(new, allow_pickle=False)) if new.is_file() else None
    removed = np.load(gone, allow_pickle=False) if gone.is_file() else np.empty(0, np.int64)
    return read_item_index(path / "index.faiss", added, removed), removed


def _read_settings(given: Mapping[str, Any]) -> RankingSettings:
    rest = dict(given)
    profiles = {name: read_profile(profile) for name, profile in rest.pop("profiles", {}).items()}
    rest["novel_slots"] = tuple(rest.get("novel_slots", ()))  # JSON has lists alone
    return RankingSettings(Quotas(**rest.pop("quotas")), profiles=profiles, **rest)


def _check_index(bundle: Bundle) -> None:
    if bundle.index.rows != (known := bundle.statistics.known_items):
        raise BundleInvalid(
            f"index.faiss holds {bundle.index.rows} vectors, expected {known}: build the index again"
        )
    for name, profile in bundle.profiles.items():
        try:
            profile.tower.check()
        except ValueError as error:
            raise BundleInvalid(f"profile {name!r}: {error}; assemble the bundle again") from error


def _check_statistics(bundle: Bundle) -> None:
    statistics = bundle.statistics
    ids = statistics.item_ids.tolist()
    if len(set(ids)) != len(ids) or not all(map(is_id, ids)):
        raise BundleInvalid("statistics/item_ids.npy holds an id twice, or one that is none: fit it again")
    for column, level in enumerate(LEVELS):
        most = int(statistics.categorical[:, column].max(initial=0))
        if most >= len(bundle.vocabulary[level]):
            raise BundleInvalid(
                f"statistics/vocabulary.json names {len(bundle.vocabulary[level])} of level {level}, "
                f"the items have codes up to {most}: fit it again"
            )
    for name in ("basket_count", "together_count", "total_baskets"):
        if not np.isfinite(np.sum(getattr(statistics, name), dtype=np.float64)):
            raise BundleInvalid(f"statistics/{name}.npy holds a number that is not finite: fit it again")


def _check_graphs(bundle: Bundle) -> None:
    """Let both graphs look up the last code of each table of theirs: one that does not fit says so now."""
    last = [size - 1 for size in bundle.cardinality]
    history, basket = (np.full((1, n), last[0], np.int64) for n in (HISTORY_LENGTH, BASKET_LENGTH))
    weight = np.ones((1, HISTORY_LENGTH), np.float32)
    dense, categorical = np.zeros((1, len(DENSE_NAMES)), np.float32), np.array([last], np.int64)
    try:
        inputs = {"history": history, "history_weight": weight, "basket": basket}
        vectors = bundle.query_tower.run(["vector"], inputs)[0]
        scores = bundle.ranker.run(["score"], {"dense": dense, "categorical": categorical})[0]
    except Exception as error:  # ONNX Runtime's errors share no base class of their own
        raise BundleInvalid(
            f"a graph does not take all features, or all that the item table holds ({str(error)[:200]}): "
            "assemble the bundle again"
        ) from error
    found = [(array.dtype.name, array.shape) for array in (vectors, scores)]
    expected = [("float32", (1, bundle.index.dimension)), ("float32", (1,))]
    if found != expected:
        raise BundleInvalid(
            f"the graphs give a vector and a score of {found}, expected {expected}: export them again"
        )


def open_session(file: Path, threads: int = 1) -> ort.InferenceSession:
    """Return a graph ready to run on this machine's processor.

    One thread a call: requests run beside each other, and idle ORT threads would spin on their cores.

    Raises:
        BundleInvalid: ONNX Runtime cannot run it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    # A graph comes whole: weights in a file beside it would be read from wherever its author says.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    try:
        # Without a second attempt, of which ONNX Runtime would speak on stdout.
        providers = ["CPUExecutionProvider"]
        session = ort.InferenceSession(file.read_bytes(), options, providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's errors share no base class of their own
        raise BundleInvalid(f"{file} is not a graph that ONNX Runtime can run: {str(error)[:200]}") from error
    session._model_bytes = None  # else it holds the file for as long, beside the weights that it has read
    return session
