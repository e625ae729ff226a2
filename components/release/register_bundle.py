"""An evaluated bundle -> a version in the registry, with the alias `challenger`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from components.pages import flat
from components.ranker.certificate import ParityFailed, check_chain
from components.ranker.ranker_artefact import CERTIFICATES, GRAPH, graph_id
from components.release.model_card import model_card
from components.release.registry import CHALLENGER, Registry
from feature_repo.atomic_files import read_json, read_regular
from serving.errors import BundleInvalid
from serving.release.bundle import verify_files
from serving.release.golden import read_golden
from serving.release.manifest import read_manifest

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 24  # of an evaluation, or of certificates


def register_bundle(bundle: Path, tracking_uri: str, model_name: str) -> str:
    """Store a bundle in the registry and call it the challenger.

    A bundle that is registered already keeps its version: running the step again changes nothing.

    Args:
        bundle: what `evaluate_bundle` wrote.
        tracking_uri: sqlite:///PATH or http(s)://HOST:PORT.
        model_name: the registered model's name.

    Returns:
        The version.

    Raises:
        BundleInvalid: the bundle is broken or was not evaluated.
        ParityFailed: its ranker has no certificate for a step, or one outside its tolerance.
        RegistryUnreachable: nothing was stored.
    """
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    evaluation = read_evaluation(bundle)
    certificates = read_certificates(bundle)
    if wrong := check_chain(certificates, graph_id(bundle / GRAPH)):
        raise ParityFailed(f"{bundle / GRAPH} is not proven to say what its teachers say: {'; '.join(wrong)}")
    registry = Registry(tracking_uri, model_name)
    version = registry.version_of(manifest["bundle_id"])
    if version is None:
        version = registry.add(
            bundle,
            _tags(bundle, manifest, evaluation),
            _params(manifest),
            _metrics(evaluation),
            model_card(bundle, manifest, evaluation, certificates),
            read_golden(bundle)[0].request,
        )
        log.info("bundle %s is version %s of %s", manifest["bundle_id"], version, model_name)
    else:
        log.info("bundle %s was registered before, as version %s", manifest["bundle_id"], version)
    registry.point(CHALLENGER, version)
    return version


def read_evaluation(bundle: Path) -> dict[str, Any]:
    """Return the results that `evaluate_bundle` sealed into a bundle.

    Raises:
        BundleInvalid: the bundle holds no evaluation, or one that can't be read.
    """
    file = bundle / "evaluation.json"
    if not file.is_file():
        raise BundleInvalid(f"{bundle} holds no evaluation.json: run evaluate_bundle on it first")
    try:
        evaluation = read_json(read_regular(file, MAX_BYTES))
        if not isinstance(evaluation, dict):
            raise TypeError("not an object")
    except (OSError, ValueError, TypeError) as error:
        raise BundleInvalid(f"{file} is no evaluation ({error}): run evaluate_bundle again") from error
    return evaluation


def read_certificates(bundle: Path) -> list[dict[str, Any]]:
    """Return the certificates of a bundle's ranker, from its teachers to the file that is served.

    Raises:
        BundleInvalid: they can't be read.
    """
    try:
        certificates: list[dict[str, Any]] = read_json(read_regular(bundle / CERTIFICATES, MAX_BYTES))
        if not all(isinstance(one, dict) for one in certificates):
            raise TypeError("not a list of objects")
    except (OSError, ValueError, TypeError) as error:
        raise BundleInvalid(
            f"{bundle / CERTIFICATES} holds no certificates ({error}): run compile_ranker again"
        ) from error
    return certificates


def _tags(bundle: Path, manifest: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, str]:
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    headline = {
        f"metric.{name}": f"{value:.5f}" for name, value in _metrics(evaluation).items() if "/" not in name
    }
    return {
        "bundle_id": manifest["bundle_id"],
        "cut": manifest["cut"],
        "schema_hash": manifest["schema_hash"],
        "data_hash": str(manifest["made_from"].get("data_hash", "")),
        "test_window": str(evaluation.get("test_window", {}).get("hash", "")),
        "size_bytes": str(size),
        **headline,
    }


def _params(manifest: dict[str, Any]) -> dict[str, str]:
    given = manifest["settings"], manifest["made_from"].get("params", {})
    params = {name: json.dumps(value) for one in given for name, value in flat(one)}
    return {**params, "cut": manifest["cut"]}


def _metrics(evaluation: dict[str, Any]) -> dict[str, float]:
    """Return the served path's metrics by their names, the baselines' as name/metric."""
    rows = {"": evaluation.get("served", {})}
    rows |= {f"{name}/": row for name, row in evaluation.get("baselines", {}).items()}
    return {
        f"{before}{name}": float(value)
        for before, row in rows.items()
        for name, value in row.items()
        if isinstance(value, int | float)
    }
