"""Commands that release a model: models, promote, rollback, history, sign, verify, extend, refresh."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.home import UPDATE_LOCK, command, locked, read_running, registry_command
from feature_repo.atomic_files import read_json
from pipelines.cli.options import (
    FILE,
    FOLDER,
    Context,
    common_options,
    registry_options,
    trusted_keys_option,
)
from pipelines.cli.rollout import roll_back_traffic
from pipelines.run.launch import (
    absolute,
    allowed_ratio,
    check_data,
    existing_registry,
    run_datasets,
)
from pipelines.run.runs import champions_run
from serving.release.champion import read_champion

if TYPE_CHECKING:
    from components.release.registry import Registry, Version


@click.command()
@click.argument("version", required=False, metavar="[VERSION]")
@registry_options
@common_options
def models(context: Context, version: str | None, tracking_uri: str, model_name: str) -> None:
    """List model versions, or show one with its certificates.

    VERSION is a number or an alias. Of it: metrics, history, and the certificates from its teachers to its
    file.
    """
    registry = _registry(context, tracking_uri, model_name)
    if version:
        _show_model(context, registry, version)
    else:
        _list_models(context, registry.versions())


def _list_models(context: Context, versions: list[Version]) -> None:
    from pipelines.tables import moment, size, table

    cells = [
        [
            v.version,
            ", ".join(v.aliases),
            v.bundle_id,
            *(v.metrics.get(metric, "") for metric in ("ndcg_at_10", "recall_at_20")),
            size(v.size_bytes),
            v.cut[:10],
            moment(v.created_at),
        ]
        for v in versions
    ]
    columns = ["version", "aliases", "bundle", "ndcg_at_10", "recall_at_20", "size"]
    text = table([*columns, "trained until", "registered"], cells)
    context.answer(
        [asdict(v) for v in versions],
        text if versions else f"no versions yet: {command(context.home, 'run')}",
    )


def _show_model(context: Context, registry: Registry, version: str) -> None:
    from components.release.model_card import CHAIN, chain_rows
    from components.release.registry import RegistryUnreachable
    from pipelines.tables import size, table

    shown = registry.version(version)
    lines = [asdict(entry) for entry in registry.history() if entry.version == shown.version]
    certificates: list[Any] = []
    chain: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            file = registry.download(shown, Path(scratch), "certificates.json")
            certificates = read_json(file.read_bytes())
            chain = chain_rows(certificates)
        except RegistryUnreachable as error:  # an older bundle has none, or its files were removed
            context.say(f"no certificates: {error}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            certificates, fault = [], f"{type(error).__name__}: {error}"
            context.say(
                f"no certificates: certificates.json of version {shown.version} is damaged ({fault:.200}): "
                "restore the file, or train again; the gate refuses the version as it is"
            )
    rows: list[list[Any]] = [
        ["bundle", shown.bundle_id],
        ["trained until", shown.cut],
        ["aliases", ", ".join(shown.aliases)],
        ["size", size(shown.size_bytes)],
        *([name, value] for name, value in sorted(shown.metrics.items())),
        *(
            [f"{e['action']} {e['at']}", f"after version {e['previous']}" if e["previous"] else "the first"]
            for e in lines
        ),
    ]
    text = f"{table(['version', shown.version], rows)}\n\n{table(CHAIN, chain)}"
    context.answer({**asdict(shown), "history": lines, "certificates": certificates}, text)


def _registry(context: Context, tracking_uri: str, model_name: str) -> Registry:
    from components.release.registry import Registry

    return Registry(existing_registry(context.home, tracking_uri), model_name)


@click.command()
@click.argument("version", default="challenger", metavar="[VERSION]")
@click.option("--dataset", type=FOLDER, help="Data set of its evaluation.  [default: the runs']")
@click.option("--gate", "gate", multiple=True, metavar="NAME=VALUE", help="e.g. over_blend=1.1")
@click.option("--dry-run", is_flag=True, help="Compare and report; change nothing.")
@trusted_keys_option
@registry_options
@common_options
def promote(
    context: Context,
    version: str,
    dataset: Path | None,
    gate: tuple[str, ...],
    dry_run: bool,
    trusted_keys: Path | None,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Send the challenger, or VERSION, through the gate.

    The gate measures quality and latency itself, on the data set that the version was evaluated on.
    """
    from components.release.promote_bundle import promote_bundle
    from pipelines.run.arguments import parse_params
    from pipelines.tables import table

    thresholds = parse_params(gate, "--gate")
    uri = existing_registry(context.home, tracking_uri)
    datasets = [dataset] if dataset else run_datasets(context.home)
    result = promote_bundle(
        version,
        datasets,
        uri,
        model_name,
        str(context.home),
        thresholds,
        dry_run,
        trusted_keys=trusted_keys,
    )
    checks = result["checks"]
    rows = [["yes" if c["passed"] else "NO", c["metric"], c["got"], c["need"], c["reason"]] for c in checks]
    text = table(["passed", "metric", "got", "needed", "why"], rows) + "\n" if rows else ""
    if result["changed"]:
        verb = "is champion now"
    else:
        verb = "was compared, nothing was changed" if rows else "was champion already"
    refused = dry_run and not all(check["passed"] for check in checks)
    context.answer(result, f"{text}version {result['version']} {verb}", int(refused))


@click.command()
@click.option("--dry-run", is_flag=True, help="Name the version that would come back; change nothing.")
@click.option("--key", type=FILE, help="Private key: signs the way back.")
@click.option("--cluster", default="", metavar="URL", help="Its traffic goes back.  [default: of `reco up`]")
@click.option("--gateway", default="", metavar="URL", help="For golden requests.  [default: the route's]")
@trusted_keys_option
@registry_options
@common_options
def rollback(
    context: Context,
    dry_run: bool,
    key: Path | None,
    cluster: str,
    gateway: str,
    trusted_keys: Path | None,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Go back to the previous champion.

    On a cluster the weights go first: at once while the old slot still runs, else when it has pods again.
    An alias that was moved by hand is moved back. With trusted keys, a bundle that was signed earlier needs
    a new signature: give the private key.
    """
    from components.release.promote_bundle import rollback as go_back

    running = read_running(context.home)
    if not dry_run and (cluster or (running and running.cluster)):
        roll_back_traffic(context, cluster, gateway, (tracking_uri, model_name), trusted_keys, key)
        return
    uri = existing_registry(context.home, tracking_uri)
    result = go_back(uri, model_name, str(context.home), dry_run, key, trusted_keys)
    if not result["version"]:
        verb = "would be removed" if dry_run else "is removed"
        context.answer(result, f"alias champion {verb}: version {result['previous']} was never promoted")
        return
    verb = "would be champion again" if dry_run else "is champion again"
    context.answer(result, f"version {result['version']} {verb} (was: {result['previous']})")


@click.command()
@registry_options
@common_options
def history(context: Context, tracking_uri: str, model_name: str) -> None:
    """Print promotions and rollbacks; verify their chain.

    Each line holds the SHA-256 of the one before. Exit code 1 names a line that was changed, dropped or
    moved; 4 means that the alias champion was moved by hand.
    """
    from components.release.promote_bundle import champion_line, verified_history
    from pipelines.tables import counted, table

    registry = _registry(context, tracking_uri, model_name)
    lines = verified_history(registry, context.home)
    rows = [[x.number, x.at, x.action, x.version, x.bundle_id, x.previous, x.hash[:12]] for x in lines]
    columns = ["line", "at", "action", "version", "bundle", "after", "SHA-256"]
    chain = "" if len(lines) < 2 else ", each follows the one before"
    text = f"{table(columns, rows)}\n{counted(len(lines), 'line')}{chain}"
    context.answer([asdict(x) | {"hash": x.hash} for x in lines], text)
    champion_line(registry, context.home)  # the lines are on the screen when it raises


@click.command()
@click.argument("bundle", metavar="BUNDLE|VERSION")
@click.option("--key", type=FILE, required=True, help="Private key: PEM, P-256, without a password.")
@click.option("--image", default="", metavar="DIGEST", help="Image that trained it, for the provenance.")
@registry_options
@common_options
def sign(context: Context, bundle: str, key: Path, image: str, tracking_uri: str, model_name: str) -> None:
    """Sign a bundle, or a version in the registry.

    Two files come into its folder. bundle.sig has the form of OpenSSF model-signing, whose command verifies
    it, too. provenance.sig names the sources of the bundle.
    """
    from components.release.signing import sign as sign_bundle
    from serving.release.bundle import SIGNATURE_FILES, verify_files
    from serving.release.manifest import read_manifest

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(bundle)
        in_registry = not path.is_dir()
        if in_registry:
            registry = _registry(context, tracking_uri, model_name)
            version = registry.version(bundle)
            path = registry.download(version, Path(scratch))
        verify_files(path, read_manifest(path))
        sign_bundle(path, key, image)
        if in_registry:
            registry.attach(version, [path / name for name in SIGNATURE_FILES])
    context.answer({"bundle": bundle, "files": list(SIGNATURE_FILES)}, f"{bundle} is signed")


@click.command()
@click.argument("bundle", type=FOLDER)
@trusted_keys_option
@common_options
def verify(context: Context, bundle: Path, trusted_keys: Path | None) -> None:
    """Check that a trusted key signed a bundle as it is."""
    from serving.release.signatures import check_signed

    if trusted_keys is None:
        raise click.UsageError("name the folder of public keys: --trusted-keys DIR, or RECO_TRUSTED_KEYS")
    signed = check_signed(bundle, trusted_keys)
    text = f"{bundle} is as {signed.key.name} signed it at {signed.at:%FT%TZ}"
    context.answer({"bundle": str(bundle), "key": str(signed.key), "at": f"{signed.at:%FT%TZ}"}, text)


@click.command()
@click.argument("items", type=FILE, required=False, metavar="[ITEMS.csv]")
@click.option("--remove", default="", metavar="ID,ID", help="Items that are no longer sold.")
@registry_options
@common_options
def extend(context: Context, items: Path | None, remove: str, tracking_uri: str, model_name: str) -> None:
    """Add or remove the champion's items, without training.

    The result is registered as the challenger. ITEMS.csv has a header: item_id, and as far as known type,
    category, department, manufacturer, price, is_private.
    """
    import pandas as pd

    from components.release.register_bundle import register_bundle
    from components.release.registry import check_registry
    from components.retriever.extend_index import extend_index, read_new_items
    from feature_repo.stream.erasure import Forgotten
    from pipelines.tables import counted

    removed = [item.strip() for item in remove.split(",") if item.strip()]
    if items is None and not removed:
        raise click.UsageError("nothing to change: give ITEMS.csv, or --remove ID,ID")
    champion, retriever = read_champion(context.home), champions_retriever(context)
    new = read_new_items(items) if items else pd.DataFrame({"item_id": pd.Series(dtype=str)})
    if new.empty and not removed:
        raise click.UsageError(f"{items} holds no item: give each a line, or --remove ID,ID")
    folder, uri = context.home / "extended", existing_registry(context.home, tracking_uri)
    check_registry(uri, model_name)
    with locked(context.home / UPDATE_LOCK, "extending the champion"):
        forgotten = Forgotten.load(context.home)
        bundle_id = extend_index(
            champion.bundle(context.home), retriever, folder, new, removed, forgotten=forgotten
        )
        version = register_bundle(folder, uri, model_name)
    document = {"version": version, "bundle_id": bundle_id, "new": len(new), "removed": len(removed)}
    gate = registry_command(context.home, tracking_uri, model_name, "promote")
    counts = f"{counted(len(new), 'new item')}, {len(removed)} removed"
    text = f"version {version} (bundle {bundle_id}) is challenger: {counts}"
    context.answer(document, f"{text}\nsend it through the gate: {gate}")


def champions_retriever(context: Context) -> Path:
    """Return the checkpoint of the towers that the champion, or its ancestor, was made from.

    Raises:
        UsageError: no run holds it.
    """
    origin = champions_run(context.home)
    retriever = origin.artifacts("train-retriever") / "checkpoint" if origin else None
    if retriever is None or not retriever.is_dir():
        resume, train = (command(context.home, words) for words in ("run --resume RUN", "run"))
        raise click.UsageError(
            f"no run kept here promoted the champion: `{resume}` goes on with the one whose bundle was "
            f"promoted by hand, `{train}` makes a new one"
        )
    return retriever


@click.command()
@click.option("--data", default="", help="Where the purchases are.  [default: the home's archive]")
@registry_options
@common_options
def refresh(context: Context, data: str, tracking_uri: str, model_name: str) -> None:
    """Count the recent sales of all items again.

    This is for each night; nothing is trained. Items that were bought five times by now join, if the
    champion knows their type, category and department. The result is registered as the challenger.
    """
    import pandas as pd

    from components.data.ingest_events import NO_CUT, TooManyRefused, ingest_events
    from components.release.register_bundle import register_bundle
    from components.release.registry import check_registry
    from components.retriever.refresh_counts import refresh_counts
    from feature_repo.events import EventsInvalid
    from feature_repo.stream.erasure import Forgotten
    from pipelines.tables import counted

    if data:
        check_data(data)
    champion, retriever = read_champion(context.home), champions_retriever(context)
    folder, uri = context.home / "refreshed", existing_registry(context.home, tracking_uri)
    check_registry(uri, model_name)
    with (
        locked(context.home / UPDATE_LOCK, "refreshing the champion"),
        tempfile.TemporaryDirectory(dir=context.home, prefix=".refresh-") as scratch,  # `forget` looks there
    ):
        dataset = Path(scratch) / "dataset"
        source = absolute(data) if data else str(context.home / "offline_store")
        try:
            ingest_events(source, dataset, allowed_ratio(context.home, source), NO_CUT, str(context.home))
        except TooManyRefused as error:  # the file that it names is removed here
            check = f"`reco check {shlex.quote(source)} --output json` lists them"
            raise EventsInvalid(f"{error.found}: mend these rows, {check}") from error
        bundle, forgotten = champion.bundle(context.home), Forgotten.load(context.home)
        now = pd.Timestamp.now("UTC")
        done = refresh_counts(bundle, retriever, dataset, folder, now, forgotten)
        version = register_bundle(folder, uri, model_name)
    gate = registry_command(context.home, tracking_uri, model_name, "promote")
    text = (
        f"version {version} (bundle {done['bundle_id']}) is challenger: items counted until {done['until']}, "
        f"{done['joined']} joined\nsend it through the gate: {gate}"
    )
    if done["waiting"]:
        text += (
            f"\n{counted(int(done['waiting']), 'more item')} will join with a type, category and department "
            f"that the champion knows: add them to the table of items in {source}, or train again"
        )
    context.answer({"version": version, **done}, text)


COMMANDS = (models, promote, rollback, history, sign, verify, extend, refresh)
