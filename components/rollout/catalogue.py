"""The registry's part of a release: check and publish a version before, move the alias after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from components.home import write_json
from components.release.bundle_copies import fetch_bundle, renew_signatures
from components.release.examination import Examine, examine_apart
from components.release.gate import Check, enforce
from components.release.history import stack
from components.release.promote_bundle import any_left, promote_bundle, rollback
from components.release.registry import CHALLENGER, CHAMPION, Registry, RegistryRefused
from components.rollout.plan import ROLLBACK, Release
from components.rollout.publishing import publish_bundle
from feature_repo.errors import without_password
from serving.errors import BundleInvalid, NoChampion
from serving.release.champion import read_champion


class Versions(Protocol):
    """Versions, and the alias that names the champion."""

    def place(self, bundle_id: str) -> str:
        """Return where pods load a bundle from."""

    def find(self, version: str) -> tuple[str, str]:
        """Return number and bundle id of a version."""

    def previous(self) -> tuple[str, str]:
        """Return number and bundle id of the champion before this one."""

    def bundle(self, record: Release) -> Path:
        """Return a copy of the version's bundle on this machine."""

    def check(self, record: Release) -> None:
        """Send the version through the gate; change nothing."""

    def publish(self, record: Release) -> None:
        """Put the bundle where pods load it from."""

    def seal(self, record: Release) -> None:
        """Make the version the champion."""

    def undo(self, record: Release) -> None:
        """Take the alias challenger from the version; from a new one champion, too, and refuse it."""


class ModelCatalogue:
    """Versions in MLflow; the gate's measurements are kept under home until the alias moves."""

    def __init__(
        self,
        home: Path,
        registry: Callable[[], str],
        model_name: str,
        datasets: Callable[[], Sequence[Path]],
        bundles: str,
        trusted_keys: Path | None = None,
        key: Path | None = None,
        examine: Examine = examine_apart,
    ) -> None:
        """Take the registry, and where pods load bundles from.

        Args:
            home: the state folder; it keeps the gate's measurements until the alias moves.
            registry: returns its URI, or raises where it is missing; called when it is needed.
            model_name: the registered model's name.
            datasets: returns those of `promote_bundle`: another one may come while a watch runs.
            bundles: URI of the store of bundles.
            trusted_keys: as of `promote_bundle`.
            key: private key that signs the way back, as of `rollback`.
            examine: measures challenger and champion.
        """
        self._home, self._uri, self._model, self._datasets = home, registry, model_name, datasets
        self._bundles, self._trusted, self._key, self._examine = bundles, trusted_keys, key, examine

    def place(self, bundle_id: str) -> str:
        """Return where pods load a bundle from."""
        return f"{self._bundles}/{bundle_id}"

    def find(self, version: str) -> tuple[str, str]:
        """Return number and bundle id of a version, or of an alias."""
        found = self._registry().version(version)
        return found.version, found.bundle_id

    def challenger(self) -> str | None:
        """Return the version that the alias challenger names."""
        return self._registry().alias(CHALLENGER)

    def previous(self) -> tuple[str, str]:
        """Return number and bundle id of the champion before this one.

        Raises:
            NoChampion: there was none.
        """
        result = rollback(self._uri(), self._model, str(self._home), dry_run=True)
        if not result["version"]:
            raise NoChampion(f"version {result['previous']} was never promoted: nothing to go back to")
        return result["version"], result["bundle_id"]

    def bundle(self, record: Release) -> Path:
        """Return a copy of the version's bundle under home."""
        registry = self._registry()
        return fetch_bundle(registry, self._home, registry.version(record.version))

    def check(self, record: Release) -> None:
        """Measure the version beside the champion, and check its signature where keys are trusted.

        Raises:
            GateFailed: the version is worse, or no trusted key signed it.
        """
        if record.kind == ROLLBACK:
            return  # it was champion: its gate let it through
        result = self._promote(record, self._examine, dry_run=True)
        rows = [{name: value for name, value in row.items() if name != "passed"} for row in result["checks"]]
        enforce([Check(**row) for row in rows])
        champion = self.find(result["previous"])[1] if result["previous"] else ""
        write_json(self._measured(record), {"champion": champion, "measured": result["measured"]})

    def publish(self, record: Release) -> None:
        """Copy the bundle to where pods load it from, with the newest signatures of the registry."""
        if self._trusted:  # the copy under home may be older than they are
            registry = self._registry()
            renew_signatures(registry, self._home, registry.version(record.version), self._trusted)
        publish_bundle(self.bundle(record), record.source)

    def seal(self, record: Release) -> None:
        """Move the alias champion, with its line of the history, and this home's pointer.

        The gate measures again if another version became champion since `check`.

        Raises:
            GateFailed: the version is worse than that one.
            RegistryUnreachable: nothing was changed; `reco release --resume` does it later.
        """
        if record.kind == ROLLBACK:
            if self._registry().alias(CHAMPION) != record.version:
                self._go_back()
            else:
                self._follow()  # the deployer may have been killed right after it moved the alias
            return
        file = self._measured(record)
        # The deployer before this one may have had another disk, and the champion may be another by now:
        # then the gate measures again.
        kept = json.loads(file.read_bytes()) if file.is_file() else {}

        def examine(challenger: Path, champion: Path | None, *rest: Any) -> dict[str, Any]:
            is_of_now = kept.get("champion") == (champion.name if champion else "")
            return kept["measured"] if is_of_now else self._examine(challenger, champion, *rest)

        self._promote(record, examine)

    def undo(self, record: Release) -> None:
        """Move the alias back if it names this version; take challenger from it, and tag it as refused.

        A version that was champion before, by a rollback or `again`, only loses challenger. One that another
        promotion made champion stays it.

        Raises:
            RegistryRefused: it is another registry than the one that this release began with.
        """
        registry, keeps = self._registry(), record.kind == ROLLBACK or record.again
        _check_registry(registry, record)
        if not keeps and record.sealed:
            others = [version for version in stack(registry.history()) if version != record.version]
            if registry.alias(CHAMPION) == record.version and any_left(registry, others):
                self._go_back()
            else:
                with suppress(BundleInvalid):  # the pointer is for the watch: it holds up no abort
                    self._follow()  # as in `seal`
        registry.unpoint(CHALLENGER, record.version)
        if not keeps:
            with suppress(RegistryRefused):  # a person deleted the version
                registry.refuse(record.version, record.reason)

    def follow_end(self, record: Release) -> None:
        """Let this home's champion follow a release that is over: its deployer may have had another home."""
        with suppress(NoChampion):  # a home without a champion follows none
            champion = read_champion(self._home)
            is_its = champion.bundle_id == record.bundle_id
            contradicts = (record.state, is_its) in (("done", False), ("aborted", True))
            if contradicts and champion.version != self._registry().alias(CHAMPION):
                self._follow()

    def _promote(self, record: Release, examine: Examine, dry_run: bool = False) -> dict[str, Any]:
        return promote_bundle(
            record.version,
            self._datasets(),
            self._uri(),
            self._model,
            str(self._home),
            dry_run=dry_run,
            examine=examine,
            trusted_keys=self._trusted,
        )

    def _follow(self) -> None:
        """Complete the last move of the alias, in the history and in this home; one by hand stays."""
        registry, home = self._registry(), str(self._home)
        if registry.alias(CHAMPION) in [line.version for line in registry.history()[-1:]]:
            promote_bundle(CHAMPION, [], self._uri(), self._model, home, trusted_keys=self._trusted)

    def _go_back(self) -> None:
        rollback(self._uri(), self._model, str(self._home), False, self._key, self._trusted)

    def _registry(self) -> Registry:
        return Registry(self._uri(), self._model)

    def _measured(self, record: Release) -> Path:
        return self._home / "releases" / f"{record.bundle_id}.json"


def _check_registry(registry: Registry, record: Release) -> None:
    """Refuse a registry that never had a release's version; a person may have deleted it.

    Raises:
        RegistryRefused: it has the number for another bundle, or has not given it yet.
    """
    ours = (record.version, record.bundle_id)
    versions = [(version.version, version.bundle_id) for version in registry.versions()]
    if ours in versions:
        return
    is_deleted = record.version not in dict(versions) and any(
        int(number) > int(record.version) for number, _ in versions
    )
    if not is_deleted and ours not in [(line.version, line.bundle_id) for line in registry.history()]:
        raise RegistryRefused(
            f"{without_password(registry.tracking_uri)} has no version {record.version} with the bundle "
            f"{record.bundle_id}: give --tracking-uri, the registry that the release began with"
        )
