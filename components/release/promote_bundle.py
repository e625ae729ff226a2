"""A registered version -> champion, if the gate lets it through; and back to the one before.

Order of a promotion, so that a stop at any point leaves the old champion or the new one, and running it
again completes it:

    lock under home -> bundle copied under home -> gate -> intent -> alias -> line of the history -> pointer

The history says which version was promoted. An alias that names another one was moved by hand: that is a
conflict, and never followed. The gate believes no statement of a bundle: `examination` measures again. One
figure it must take from the bundle: the quality of the teachers, which are not in it. Only a signature
protects that one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.home import Conflict, locked
from components.hyper_parameters import GateParams
from components.parameters import read_params
from components.ranker.certificate import EXPORTS, check_chain
from components.ranker.ranker_artefact import GRAPH, graph_id
from components.release.bundle_copies import (
    command_of,
    fetch_bundle,
    fetch_signatures,
    linked,
    place_under,
    renew_signatures,
    take_signatures,
)
from components.release.examination import Examine, examine_apart
from components.release.gate import HEADLINE, Check, compare, enforce, verdict
from components.release.history import Promotion, check_head, is_head, model_of, next_line, stack, write_head
from components.release.register_bundle import read_certificates, read_evaluation
from components.release.registry import CHALLENGER, CHAMPION, Registry, RegistryRefused, Version
from components.release.signing import sign
from feature_repo.errors import USAGE, RecoError
from serving.errors import BundleInvalid, NoChampion
from serving.release.bundle import SIGNATURE_FILES
from serving.release.champion import Champion, read_champion, write_champion
from serving.release.manifest import read_manifest
from serving.release.signatures import SignatureInvalid, check_signed

log = logging.getLogger(__name__)


class NothingToCompare(RecoError):
    """The gate lacks the data set, or a champion, that it needs to measure the challenger."""

    exit_code = USAGE


def promote_bundle(
    version: str,
    datasets: Sequence[Path],
    tracking_uri: str,
    model_name: str,
    home: str,
    params: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    examine: Examine = examine_apart,
    trusted_keys: Path | None = None,
) -> dict[str, Any]:
    """Send a version through the gate and make it the champion.

    Args:
        version: a version's number, or an alias.
        datasets: one of them must be that of the challenger's evaluation.
        tracking_uri: the registry.
        model_name: the registered model's name.
        home: the state folder that gets the bundle and the pointer.
        params: fields of `GateParams`.
        dry_run: compare and report; neither raise nor change anything but the copies under `home`.
        examine: measures challenger and champion.
        trusted_keys: folder of public keys; one must have signed the bundle. None: unsigned ones pass.

    Returns:
        Version, bundle id, the version before, whether anything changed, the gate's checks, and the
        measurements: baskets, quality and latency, with the machine. Empty without any.

    Raises:
        GateFailed: naming metric, got, needed; nothing was changed.
        NothingToCompare: a data set or a champion to measure with is missing.
        Conflict: another process promotes, or the alias was moved by hand.
        HistoryBroken: a line of the history is not as it was written.
        RegistryUnreachable: nothing was changed.
    """
    gate = read_params(GateParams, params or {})
    root = Path(home)
    with locked(root / "promote.lock", f"promoting {model_name} {version}"):
        registry = Registry(tracking_uri, model_name)
        before = champion_line(registry, root)
        challenger = registry.version(version)
        result: dict[str, Any] = {
            "version": challenger.version,
            "bundle_id": challenger.bundle_id,
            "previous": before.version if before else "",
        }
        if before and challenger.version == before.version:
            challenger = _promoted(registry, before)
            if not dry_run:
                _follow(registry, root, before, challenger)  # its pointer or copy under home may be gone
                _accept(registry, challenger)
                if trusted_keys:  # it may have been signed after its promotion
                    renew_signatures(registry, root, challenger, trusted_keys)
            return {**result, "changed": False, "checks": [], "measured": {}}
        checks, result["measured"] = [], {}
        if trusted_keys:  # first: nothing of an unsigned bundle is opened
            checks.append(_signature(registry, root, challenger, before, trusted_keys))
        if all(check.passed for check in checks):
            judged, result["measured"] = _judge(registry, root, challenger, before, datasets, gate, examine)
            checks += judged
        rows = [{**asdict(check), "passed": check.passed} for check in checks]
        if dry_run:
            return {**result, "changed": False, "checks": rows}
        enforce(checks)
        _move(registry, root, challenger, before.version if before else None, "promote")
        _accept(registry, challenger)
    return {**result, "changed": True, "checks": rows}


def _accept(registry: Registry, champion: Version) -> None:
    """Take from a champion the alias challenger, and the refusal of an earlier release."""
    registry.unpoint(CHALLENGER, champion.version)
    if champion.refused:
        registry.refuse(champion.version, "")


def rollback(
    tracking_uri: str,
    model_name: str,
    home: str,
    dry_run: bool = False,
    key: Path | None = None,
    trusted_keys: Path | None = None,
) -> dict[str, Any]:
    """Make the champion before this one the champion again.

    Rolling back twice goes back two promotions: the history is read as a stack. A version that was deleted is
    passed over. An alias that was moved or removed by hand returns to the champion; one that was set by hand
    before any promotion is removed. A rollback that was killed after it changed the registry is completed,
    and goes no further.

    Args:
        tracking_uri: the registry.
        model_name: the registered model's name.
        home: the state folder that gets the pointer.
        dry_run: name the version and change nothing but the copies under `home`.
        key: private key that signs the version again: an older signature must not follow a newer one.
        trusted_keys: as of `promote_bundle`.

    Raises:
        SignatureInvalid: no trusted key signed the way back.
        NoChampion: there was no champion before this one.
        Conflict: another process promotes.
        HistoryBroken: a line of the history is not as it was written.
        RegistryUnreachable: nothing was changed.
    """
    root = Path(home)
    with locked(root / "promote.lock", f"rolling back {model_name}"):
        registry = Registry(tracking_uri, model_name)
        history = verified_history(registry, root)
        now, versions = registry.alias(CHAMPION), stack(history)
        if history and history[-1].version == now and _was_killed(registry, root, history):
            return _complete(registry, root, history[-1], dry_run)
        if now is not None and not any_left(registry, versions):
            if not dry_run:
                registry.unpoint(CHAMPION, now)
            return {"version": "", "bundle_id": "", "previous": now, "changed": not dry_run}
        # With deleted versions between them, the champion may come up once more: it is no way back.
        earlier = [one for one in versions[:-1] if one != now] if versions[-1:] == [now] else versions
        if not earlier:
            raise NoChampion(
                f"{model_name} has no champion before {now or 'the first'}: there is nothing to go back to"
            )
        target = _newest(registry, history, earlier)
        action = "restore" if target.version == versions[-1] else "rollback"
        fetch_bundle(registry, root, target)
        if not dry_run:
            last = history[-1] if action == "rollback" else None
            _sign_way_back(registry, root, target, last, key, trusted_keys)
            _move(registry, root, target, now, action)
    went = {"version": target.version, "bundle_id": target.bundle_id, "previous": now or ""}
    return {**went, "changed": not dry_run}


def _was_killed(registry: Registry, home: Path, history: Sequence[Promotion]) -> bool:
    """Say whether the last line is a way back that has not ended, in the registry or in this home.

    If this home wrote the line, its pointer is older then, and names an earlier champion of this history.
    """
    if (last := history[-1]).action == "promote":
        return False
    if registry.intent() == last:
        return True
    if not is_head(home, model_of(home, registry.tracking_uri, registry.model_name), last):
        return False
    try:
        pointer = read_champion(home)
    except NoChampion:
        return True
    earlier = {(line.version, line.bundle_id) for line in history} - {(last.version, last.bundle_id)}
    return pointer.promoted_at <= last.at and (pointer.version, pointer.bundle_id) in earlier


def _complete(registry: Registry, home: Path, last: Promotion, dry_run: bool) -> dict[str, Any]:
    target = _promoted(registry, last)
    if not dry_run:
        _follow(registry, home, last, target)
    went = {"version": target.version, "bundle_id": target.bundle_id, "previous": last.previous}
    return {**went, "changed": not dry_run}


def _sign_way_back(
    registry: Registry,
    home: Path,
    target: Version,
    last: Promotion | None,
    key: Path | None,
    trusted_keys: Path | None,
) -> None:
    """Sign a fetched version again, or take its newer signatures, and check that it may follow the last one.

    Raises:
        SignatureInvalid: it may not; its signatures in the registry stay as they were.
    """
    place = place_under(home, target.bundle_id)
    if last and trusted_keys:  # another home may have promoted it
        with suppress(BundleInvalid, RegistryRefused):  # a changed tag of the champion blocks no way back
            fetch_bundle(registry, home, replace(registry.version(last.version), bundle_id=last.bundle_id))
    after = place_under(home, last.bundle_id) if last else None
    if key is None:
        if trusted_keys:
            try:
                check_signed(place, trusted_keys, after)
            except SignatureInvalid:  # it may have been signed after it was copied here
                renew_signatures(registry, home, target, trusted_keys)
                check_signed(place, trusted_keys, after)
        return
    with linked(place, home) as copy:
        sign(copy, key)
        if trusted_keys:
            check_signed(copy, trusted_keys, after)
        registry.attach(target, [copy / name for name in SIGNATURE_FILES])
        take_signatures(copy, place)


def verified_history(registry: Registry, home: Path) -> list[Promotion]:
    """Return the history after checking it against the last line that this home wrote.

    Raises:
        HistoryBroken: a line is not as it was written.
    """
    history = registry.history()
    check_head(home, model_of(home, registry.tracking_uri, registry.model_name), history)
    return history


def champion_line(registry: Registry, home: Path) -> Promotion | None:
    """Return the line that made the champion; None before the first, or if no version is left to go back to.

    Raises:
        Conflict: the alias names another version.
    """
    history = verified_history(registry, home)
    last, alias = history[-1] if history else None, registry.alias(CHAMPION)
    promoted = last.version if last else None
    if alias is None and not any_left(registry, stack(history)):
        return None  # MLflow deletes the alias with its version
    if alias != promoted:
        back, again = (command_of(registry, home, words) for words in ("rollback", "promote VERSION"))
        raise Conflict(
            f"the alias champion names version {alias or 'none'}, promoted was {promoted or 'none'}: the "
            f"alias was moved by hand, past the gate; nothing was installed. `{back}` moves it back, then "
            f"`{again}` sends a version through the gate"
        )
    return last


def any_left(registry: Registry, versions: Sequence[str]) -> bool:
    """Say whether any of some versions was not deleted."""
    return not {one.version for one in registry.versions()}.isdisjoint(versions)


def _promoted(registry: Registry, line: Promotion) -> Version:
    """Return the version of a line.

    Raises:
        NoChampion: it was deleted.
        Conflict: another bundle is registered under its number now.
    """
    try:
        version = registry.version(line.version)
    except RegistryRefused as error:
        raise NoChampion(f"version {line.version} was deleted: promote another one") from error
    if version.bundle_id != line.bundle_id:
        raise Conflict(
            f"version {line.version} is bundle {version.bundle_id!r:.40} now, {line.bundle_id} was promoted: "
            "its tag bundle_id was changed by hand; restore it"
        )
    return version


def _newest(registry: Registry, history: Sequence[Promotion], versions: Sequence[str]) -> Version:
    """Return the last of some versions that was not deleted.

    Raises:
        NoChampion: all were.
        Conflict: as of `_promoted`.
    """
    gone: list[NoChampion] = []
    for number in reversed(versions):
        line = next(line for line in reversed(history) if line.version == number)
        try:
            return _promoted(registry, line)
        except NoChampion as error:
            gone.append(error)
    raise gone[0]


def _move(registry: Registry, home: Path, version: Version, before: str | None, action: str) -> None:
    now = registry.alias(CHAMPION)
    if now != before:
        raise Conflict(
            f"champion is version {now} by now, it was {before} when the gate compared: promote again"
        )
    registry.complete()
    history = registry.history()
    line = next_line(history, action, version.version, version.bundle_id, before or "", _now())
    registry.intend(line)
    registry.point(CHAMPION, version.version)
    _follow(registry, home, line, version)
    log.info(
        "champion of %s is version %s (%s), before: %s", registry.model_name, version.version, action, before
    )


def _follow(registry: Registry, home: Path, line: Promotion, version: Version) -> None:
    """Let the registry's alias, and the home's record and pointer, follow a line of the history.

    Raises:
        Conflict: another home promoted at the same moment; this home does not remember the line.
    """
    last = registry.history()[-1:]
    if last != [line]:  # the lock covers one home; MLflow knows no compare-and-swap
        if last and registry.alias(CHAMPION) == line.version:
            registry.point(CHAMPION, last[0].version)
        raise Conflict(
            f"another home promotes in {registry.model_name} at this moment, and version {line.version} is "
            f"not in its history: see `{command_of(registry, home, 'history')}`, then promote again"
        )
    write_head(home, model_of(home, registry.tracking_uri, registry.model_name), line)
    registry.complete(line)
    path = fetch_bundle(registry, home, version).relative_to(home)
    champion = Champion(
        version.bundle_id, version.version, registry.model_name, str(path), version.cut, _now()
    )
    with suppress(NoChampion):
        if replace(read_champion(home), promoted_at=champion.promoted_at) == champion:
            return
    write_champion(home, champion)


def _signature(
    registry: Registry, home: Path, version: Version, before: Promotion | None, trusted: Path
) -> Check:
    """Return the check of a version's signatures, which the registry may have got after its files.

    Raises:
        RegistryUnreachable: the registry does not give them.
    """
    last = before or next(reversed(registry.history()), None)
    try:
        after = fetch_bundle(registry, home, _promoted(registry, last)) if last else None
    except NoChampion:  # deleted from the registry; this home may still have its copy
        after = place_under(home, last.bundle_id) if last else None
    except BundleInvalid:  # as with a champion that no trusted key signed: there is no order to keep
        after = None
    try:
        fetch_signatures(registry, home, version, trusted, after)
    except BundleInvalid as error:
        return verdict("signature", str(error))
    return verdict("signature")


def _judge(
    registry: Registry,
    home: Path,
    challenger: Version,
    before: Promotion | None,
    datasets: Sequence[Path],
    gate: GateParams,
    examine: Examine,
) -> tuple[list[Check], dict[str, Any]]:
    """Return the gate's checks of a version, and the measurements."""
    try:
        bundle = fetch_bundle(registry, home, challenger)
    except BundleInvalid as error:
        return [verdict("files", str(error))], {}
    try:
        stated = read_evaluation(bundle)
        wanted = str(stated["test_window"]["data_hash"])
        certificates = read_certificates(bundle)
    except (BundleInvalid, KeyError, TypeError) as error:
        return [verdict("files"), verdict("readable", f"its own account: {error}")], {}
    champion = None if before is None else _comparable(registry, home, before, bundle, gate)
    measured = examine(bundle, champion, _dataset(datasets, wanted), gate.sample_baskets)
    faults = check_chain(certificates, graph_id(bundle / GRAPH))
    measured["verdicts"]["certificates"] = "; ".join(faults)
    measured["stated"] = stated.get("served")
    measured["chain"] = None if faults else chain_quality(certificates)
    if fault := measured.get("champion_fault"):
        alone = command_of(registry, home, f"promote {challenger.version} --gate over_champion=0")
        raise NothingToCompare(
            f"the champion cannot be measured beside the challenger ({fault}); to judge the challenger by "
            f"its own figures alone: `{alone}`"
        )
    return [verdict("files"), *compare(measured, gate)], measured


def chain_quality(certificates: Sequence[Mapping[str, Any]]) -> float:
    """Return the NDCG@10 of the last link over that of the teachers; `check_chain` passed the chain.

    Both are the bundle's own figures: a forger can write others.
    """
    made = [link for link in certificates if link["step"] in EXPORTS]
    first = (made or certificates)[0][HEADLINE]["parent"]
    return float(certificates[-1][HEADLINE]["child"] / first) if first else 0.0


def _dataset(datasets: Sequence[Path], wanted: str) -> Path:
    """Return the data set that has a hash, or had it before users were forgotten.

    Raises:
        NothingToCompare: none of them has it.
    """
    there = [one for one in datasets if len(datasets) == 1 or (one / "manifest.json").is_file()]
    hashes = {dataset: _data_hashes(dataset) for dataset in there}  # others may be replaced at this moment
    if known := [dataset for dataset, held in hashes.items() if wanted in held]:
        return min(known, key=lambda dataset: hashes[dataset][0] != wanted)  # as it is before as it was
    found = ", ".join(f"{path} is {held[0]}" for path, held in hashes.items()) or "there is none"
    raise NothingToCompare(
        f"the gate measures the challenger again on data set {wanted!r:.40}, and {found}: give the data set "
        "it was evaluated on (`reco promote --dataset DIR`); without it nothing is promoted"
    )


def _data_hashes(dataset: Path) -> list[str]:
    """Return the hash of a data set, and those that it had before users were forgotten."""
    try:
        manifest = json.loads((dataset / "manifest.json").read_bytes())
        return [str(manifest["data_hash"]), *map(str, manifest.get("was", ()))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NothingToCompare(
            f"{dataset} is no checked data set ({error}): give another --dataset"
        ) from error


def _comparable(
    registry: Registry, home: Path, before: Promotion, challenger: Path, gate: GateParams
) -> Path | None:
    """Return the champion's bundle if it can be measured beside the challenger; None if it need not be.

    Raises:
        NothingToCompare: it has seen the test weeks.
    """
    if not gate.over_champion:
        return None
    path = fetch_bundle(registry, home, _promoted(registry, before))
    cuts = [str(read_manifest(one)["cut"]) for one in (path, challenger)]
    if datetime.fromisoformat(cuts[0]) > datetime.fromisoformat(cuts[1]):
        raise NothingToCompare(
            f"the champion was trained until {cuts[0]} and has seen the weeks after {cuts[1]} that the "
            f"challenger is tested on: train the challenger until {cuts[0]} or later"
        )
    return path


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
