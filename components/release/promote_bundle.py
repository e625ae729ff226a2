"""A registered version -> champion, if the gate lets it through; and back to the one before.

Order of a promotion, so that a stop at any point leaves the old champion or the new one, and running it
again completes it:

    lock under home -> gate -> bundle verified and copied under home -> history (intent) -> alias -> pointer

The alias in the registry is the truth; a last line of the history that the alias does not confirm never
came to pass, and `champion.json` follows the alias. The alias is moved only if it still points where it
did when the gate compared.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.home import Conflict, locked
from components.hyper_parameters import GateParams
from components.parameters import read_params
from components.release.gate import compare, enforce
from components.release.register_bundle import read_evaluation
from components.release.registry import CHALLENGER, CHAMPION, Promotion, Registry, RegistryRefused, Version
from feature_repo.errors import USAGE, RecoError
from feature_repo.ids import is_name
from serving.errors import BundleInvalid, NoChampion
from serving.release.bundle import read_manifest, verify_files
from serving.release.champion import Champion, read_champion, write_champion

log = logging.getLogger(__name__)


class NothingToCompare(RecoError):
    """Champion and challenger cannot be measured on the same baskets with the data given."""

    exit_code = USAGE


def promote_bundle(
    version: str,
    dataset: Path | None,
    tracking_uri: str,
    model_name: str,
    home: str,
    params: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Send a version through the gate and make it the champion.

    Args:
        version: a version's number, or an alias.
        dataset: needed when the champion was evaluated on other weeks than the challenger.
        tracking_uri: the registry.
        model_name: the registered model's name.
        home: the state folder that gets the bundle and the pointer.
        params: fields of `GateParams`.
        dry_run: compare and report; neither raise nor change anything but the copies under `home`.

    Returns:
        Version, bundle id, the version before, whether anything changed, the gate's checks, and the latency
        of challenger and champion with the machine it was measured on, empty where it was not.

    Raises:
        GateFailed: naming metric, got, needed; nothing was changed.
        NothingToCompare: the champion must be measured again, and the data set for it is missing or wrong.
        Conflict: another process promotes, or moved the champion meanwhile.
        RegistryUnreachable: nothing was changed.
    """
    gate = read_params(GateParams, params or {})
    root = Path(home)
    with locked(root / "promote.lock", f"promoting {model_name} {version}"):
        registry = Registry(tracking_uri, model_name)
        before = registry.alias(CHAMPION)
        challenger = registry.version(version)
        result: dict[str, Any] = {
            "version": challenger.version,
            "bundle_id": challenger.bundle_id,
            "previous": before or "",
        }
        if challenger.version == before:
            if not dry_run:
                _install(registry, root, challenger)  # its pointer or its copy under home may be gone
            return {**result, "changed": False, "checks": [], "latency": {}}
        bundle = _fetch(registry, root, challenger)
        evaluation = read_evaluation(bundle)
        champion = _champion_evaluation(registry, root, before, bundle, evaluation, dataset)
        latency = _latency(registry, root, before, bundle)
        checks = compare(evaluation, champion, gate, latency.get("added_ms"))
        result["latency"] = latency
        rows = [{**asdict(check), "passed": check.passed} for check in checks]
        if dry_run:
            return {**result, "changed": False, "checks": rows}
        enforce(checks)
        _move(registry, root, challenger, before, "promote")
        if registry.alias(CHALLENGER) == challenger.version:
            registry.unpoint(CHALLENGER)
    return {**result, "changed": True, "checks": rows}


def rollback(tracking_uri: str, model_name: str, home: str, dry_run: bool = False) -> dict[str, Any]:
    """Make the champion before this one the champion again.

    Rolling back twice goes back two promotions: the history is read as a stack.

    Raises:
        NoChampion: there was no champion before this one.
        Conflict: another process promotes.
        RegistryUnreachable: nothing was changed.
    """
    root = Path(home)
    with locked(root / "promote.lock", f"rolling back {model_name}"):
        registry = Registry(tracking_uri, model_name)
        now = registry.alias(CHAMPION)
        stack = _stack(registry.history())
        if now is not None and stack[-1:] != [now]:
            stack.append(now)  # the alias was moved by hand
        if now is None or len(stack) < 2:
            raise NoChampion(
                f"{model_name} has no champion before {now or 'the first'}: there is nothing to go back to"
            )
        try:
            target = registry.version(stack[-2])
        except RegistryRefused as error:
            raise NoChampion(
                f"the champion before, version {stack[-2]}, was deleted: promote another one"
            ) from error
        _fetch(registry, root, target)
        if not dry_run:
            _move(registry, root, target, now, "rollback")
    return {"version": target.version, "bundle_id": target.bundle_id, "previous": now, "changed": not dry_run}


def _stack(history: list[Promotion]) -> list[str]:
    """Return the versions that one can go back through, the champion last."""
    stack: list[str] = []
    for entry in history:
        if entry.action == "rollback":
            stack.pop()
        else:
            stack.append(entry.version)
    return stack


def _move(registry: Registry, home: Path, version: Version, before: str | None, action: str) -> None:
    now = registry.alias(CHAMPION)
    if now != before:
        raise Conflict(
            f"champion is version {now} by now, it was {before} when the gate compared: promote again"
        )
    history = registry.history()
    number = history[-1].number + 1 if history else 1
    registry.write(Promotion(number, action, version.version, version.bundle_id, before or "", _now()))
    registry.point(CHAMPION, version.version)
    _install(registry, home, version)
    log.info(
        "champion of %s is version %s (%s), before: %s", registry.model_name, version.version, action, before
    )


def _install(registry: Registry, home: Path, version: Version) -> None:
    """Let the home's pointer follow the registry's alias."""
    path = _fetch(registry, home, version).relative_to(home)
    try:
        now = read_champion(home)
        if (now.version, now.bundle_id, now.model_name) == (
            version.version,
            version.bundle_id,
            registry.model_name,
        ):
            return
    except NoChampion:
        pass
    champion = Champion(
        version.bundle_id, version.version, registry.model_name, str(path), version.cut, _now()
    )
    write_champion(home, champion)


def _fetch(registry: Registry, home: Path, version: Version) -> Path:
    """Return the version's bundle under home, copied there and verified if it is not yet.

    Raises:
        BundleInvalid: the registry's files are not those of the registered bundle.
    """
    if not is_name(version.bundle_id):  # the registry is not ours alone, and this becomes a folder
        raise BundleInvalid(
            f"version {version.version} is no bundle's: its tag bundle_id is no id; register it again"
        )
    place = home / "bundles" / version.bundle_id
    try:
        _verify(place, version)
        return place
    except BundleInvalid as error:
        if place.exists():
            log.warning("%s; fetching it from the registry again", error)
    incoming = home / "bundles" / f".{version.bundle_id}.part"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    fetched = registry.download(version, incoming)
    _verify(fetched, version)
    shutil.rmtree(place, ignore_errors=True)
    fetched.rename(place)
    shutil.rmtree(incoming, ignore_errors=True)
    return place


def _verify(path: Path, version: Version) -> None:
    manifest = read_manifest(path)
    if manifest["bundle_id"] != version.bundle_id:
        raise BundleInvalid(
            f"{path} is bundle {manifest['bundle_id']}, "
            f"version {version.version} was registered as {version.bundle_id}"
        )
    verify_files(path, manifest)


def _champion_evaluation(
    registry: Registry,
    home: Path,
    champion: str | None,
    bundle: Path,
    evaluation: Mapping[str, Any],
    dataset: Path | None,
) -> Mapping[str, Any] | None:
    """Return the champion's evaluation on the challenger's test window."""
    if champion is None:
        return None
    path = _fetch(registry, home, registry.version(champion))
    recorded = read_evaluation(path)
    if recorded.get("test_window", {}).get("hash") == evaluation.get("test_window", {}).get("hash"):
        return recorded
    log.info("champion %s was evaluated on another test window: evaluating it on this one", champion)
    return _evaluate_on(path, bundle, evaluation, dataset)


def _latency(registry: Registry, home: Path, champion: str | None, bundle: Path) -> dict[str, Any]:
    """Return what an answer of challenger and champion takes here; nothing where one of them cannot be asked.

    Never None: a pipeline step cannot return it.
    """
    from components.release.served_latency import served_latency

    if champion is None:
        return {}
    try:
        return served_latency(bundle, _fetch(registry, home, registry.version(champion)))
    except BundleInvalid as error:
        log.warning("latency is not compared: %s", error)  # e.g. a champion of an older feature schema
        return {}


def _evaluate_on(
    champion: Path, challenger: Path, evaluation: Mapping[str, Any], dataset: Path | None
) -> Mapping[str, Any]:
    """Evaluate the champion on the challenger's weeks, baskets and hidden items."""
    from components.evaluation.evaluate_bundle import evaluate_served
    from feature_repo.events import read_dataset

    cuts = [str(read_manifest(path)["cut"]) for path in (champion, challenger)]
    if cuts[0] > cuts[1]:
        raise NothingToCompare(
            f"the champion was trained until {cuts[0]} and has seen the weeks after {cuts[1]} that the "
            f"challenger was tested on: train the challenger until {cuts[0]} or later"
        )
    wanted = evaluation.get("test_window", {}).get("data_hash")
    advice = "give the data set the challenger was evaluated on (reco promote --dataset DIR)"
    if dataset is None:
        raise NothingToCompare(f"the champion was evaluated on another test window: {advice}")
    data = read_dataset(dataset)
    if data.manifest["data_hash"] != wanted:
        raise NothingToCompare(
            f"{dataset} is data set {data.manifest['data_hash']}, the challenger was evaluated on {wanted}: "
            f"{advice}"
        )
    return evaluate_served(champion, challenger, data)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
