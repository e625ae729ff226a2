"""Tracking URI + model name -> registered versions, their aliases and the history of promotions.

MLflow's alias is last-writer-wins and keeps no history: every promotion is also written down as a tag of
the registered model. `promote_bundle` says how the two are kept in step.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from components.release.history import INTENT_TAG, Promotion, line_tag, read_history, read_line
from components.release.pyfunc import write_flavour
from feature_repo.errors import UNREACHABLE, USAGE, RecoError, without_password
from feature_repo.ids import is_name, is_path

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CHALLENGER, CHAMPION = "challenger", "champion"
REFUSED_TAG, HEALTH_S = "refused", 5.0
ARTIFACT = "bundle"  # where a bundle lies among its run's artifacts
STORES = ("mlflow-artifacts:/", "s3://", "gs://")  # of a server's files; the first is the server itself
CREDENTIALS = {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"}  # variables of MLflow's client
# MLflow is configured through its environment alone, and reads part of it while it is imported.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the default of 7 waits minutes for a registry that is down
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}


class RegistryRefused(RecoError, ValueError):
    """A tracking URI, model name or version that this registry does not take."""

    exit_code = USAGE


class RegistryUnreachable(RecoError):
    """The registry does not answer; nothing was changed, and the same call may be made again."""

    exit_code = UNREACHABLE


@dataclass(frozen=True)
class Version:
    """One registered bundle."""

    version: str
    bundle_id: str
    aliases: tuple[str, ...]
    cut: str
    created_at: float  # seconds since the epoch
    size_bytes: int
    metrics: Mapping[str, float]
    run_id: str
    refused: str  # why its last release ended; empty: it did not, or a promotion followed


class Registry:
    """The versions of one model."""

    def __init__(self, tracking_uri: str, model_name: str) -> None:
        """Connect.

        Raises:
            RegistryRefused: the name or URI is not one we take.
            RegistryUnreachable: nothing answers there.
        """
        database = check_registry(tracking_uri, model_name)
        self.model_name = model_name
        self.tracking_uri = tracking_uri if database is None else f"sqlite:///{database}"
        self._artifacts = None if database is None else (database.parent / "mlflow").as_uri()
        self._client = _client(tracking_uri, database)
        if database is not None:
            with _reached(tracking_uri):
                _follow_move(database, model_name, str(self._artifacts))

    # ------------------------------------------------------------------------------------- versions

    def versions(self) -> list[Version]:
        """Return every version, newest first."""
        with _reached(self.tracking_uri):
            _, aliases = self._state()
            found = []
            token = None
            while True:
                page = self._client.search_model_versions(f"name = '{self.model_name}'", page_token=token)
                found += [_version(entry, aliases) for entry in page]
                if not (token := page.token):
                    return sorted(found, key=lambda version: -int(version.version))

    def version(self, name: str) -> Version:
        """Return a version by its number or its alias.

        Raises:
            RegistryRefused: there is no such version; the message names those there are.
        """
        known = self.versions()
        for version in known:
            if name == version.version or name in version.aliases:
                return version
        some = ", ".join([version.version for version in known[:8]]) or "none: run `reco run`"
        aliases = ", ".join(sorted({alias for version in known for alias in version.aliases})) or "none"
        message = f"{self.model_name} has no version {name!r}; versions: {some}; aliases: {aliases}"
        waits = "; nothing waits for promotion: `reco refresh` makes a challenger"
        raise RegistryRefused(message + (waits if known and name == CHALLENGER else ""))

    def version_of(self, bundle_id: str) -> str | None:
        """Return the version that holds a bundle, if it is registered."""
        return next((version.version for version in self.versions() if version.bundle_id == bundle_id), None)

    def add(
        self,
        bundle: Path,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        metrics: Mapping[str, float],
        card: str = "",
        example: Mapping[str, Any] | None = None,
    ) -> str:
        """Store a bundle with its metrics and tags, and return its new version.

        The run is found again by its bundle id when an earlier attempt stopped between run and version.

        Args:
            bundle: the folder.
            tags: of run and version; a `data_hash` among them also names the run's data set.
            params: of the run.
            metrics: of the run.
            card: description of the version.
            example: a request that the bundle can answer; None: one with an empty basket.
        """
        with _reached(self.tracking_uri):
            run_id = self._run(bundle, tags, params, metrics, example or {"basket": []})
            if not self._client.search_registered_models(f"name = '{self.model_name}'"):
                self._client.create_registered_model(self.model_name)
            version = self._client.create_model_version(
                self.model_name,
                f"runs:/{run_id}",  # the bundle, and beside it what makes it a model of MLflow
                run_id,
                tags=dict(tags),
                description=card if len(card) <= 5_000 else f"{card[:4_997]}...",  # PostgreSQL's limit
                await_creation_for=0,
            )
        return str(version.version)

    def download(self, version: Version, destination: Path, file: str = "") -> Path:
        """Copy a version's bundle, or one file of it, to `destination` and return where it lies.

        Raises:
            RegistryRefused: the registry says that it lies somewhere else than its files do.
            RegistryUnreachable: the artifact store does not give it.
        """
        from mlflow.artifacts import download_artifacts

        with self._files_of(version):
            found = download_artifacts(
                run_id=version.run_id,
                artifact_path=f"{ARTIFACT}/{file}".rstrip("/"),
                dst_path=str(destination),
                tracking_uri=_mlflow_uri(self.tracking_uri),
            )
        return Path(found)

    def names(self, version: Version) -> set[str]:
        """Return the names of the files and folders of a version's bundle.

        Raises:
            RegistryRefused: as of `download`.
            RegistryUnreachable: as of `download`.
        """
        with self._files_of(version):
            return {Path(one.path).name for one in self._client.list_artifacts(version.run_id, ARTIFACT)}

    def attach(self, version: Version, files: Iterable[Path]) -> None:
        """Put files beside those of a version's bundle; one of the same name is replaced."""
        with _reached(self.tracking_uri):
            for file in files:
                self._client.log_artifact(version.run_id, str(file), ARTIFACT)

    def record_step(
        self,
        step: str,
        params: Mapping[str, str],
        numbers: Iterable[tuple[str, float, int]],
        began: float,
        error: str,
    ) -> None:
        """Record a step that has ended as a run; `error` is empty, or says why it failed.

        Args:
            step: name of the run.
            params: by name.
            numbers: name, value, and point of a curve from 0.
            began: seconds since the epoch.
            error: of the step.
        """
        from mlflow.entities import Metric, Param

        at = int(time.time() * 1e3)
        with _reached(self.tracking_uri):
            experiment, tags = self._experiment(f"{self.model_name}-steps"), {"error": error[:5_000]}
            run = self._client.create_run(experiment, int(began * 1e3), tags if error else {}, step)
            metrics = [Metric(_name(name, "/"), value, at, place) for name, value, place in numbers]
            kept = [Param(_name(name), value[:6_000]) for name, value in params.items()]
            self._client.log_batch(run.info.run_id, metrics, kept)
            self._client.set_terminated(run.info.run_id, "FAILED" if error else "FINISHED")

    # ------------------------------------------------------------------------- aliases and history

    def alias(self, name: str) -> str | None:
        """Return the version an alias points at."""
        return self._state()[1].get(name)

    def point(self, alias: str, version: str) -> None:
        """Let an alias point at a version."""
        with _reached(self.tracking_uri):
            self._client.set_registered_model_alias(self.model_name, alias, version)

    def unpoint(self, alias: str, version: str) -> None:
        """Remove an alias if it points at a version."""
        with _reached(self.tracking_uri):
            if self._state()[1].get(alias) == version:
                self._client.delete_registered_model_alias(self.model_name, alias)

    def refuse(self, version: str, reason: str) -> None:
        """Note on a version why it was refused; with an empty reason it is no longer."""
        with _reached(self.tracking_uri):
            self._client.set_model_version_tag(self.model_name, version, REFUSED_TAG, reason)

    def history(self) -> list[Promotion]:
        """Return all promotions and rollbacks, oldest first.

        Raises:
            HistoryBroken: a line is not as it was written.
        """
        tags, aliases = self._state()
        return read_history(tags, aliases.get(CHAMPION))

    def intend(self, entry: Promotion) -> None:
        """Write the line of a promotion that begins: its alias moves next, then `complete` follows."""
        with _reached(self.tracking_uri):
            self._client.set_registered_model_tag(self.model_name, INTENT_TAG, json.dumps(asdict(entry)))

    def intent(self) -> Promotion | None:
        """Return the line of a promotion that began and did not end."""
        text = self._state()[0].get(INTENT_TAG)
        return None if text is None else read_line(text)

    def complete(self, line: Promotion | None = None) -> None:
        """Add a line to the history, by default the intent if its alias moved; forget the intent."""
        history, intent = self.history(), self.intent()
        if line is None and intent in history[-1:]:
            line = intent
        with _reached(self.tracking_uri):
            if line is not None:
                text = json.dumps(asdict(line))
                self._client.set_registered_model_tag(self.model_name, line_tag(line), text)
            if intent is not None:
                self._client.delete_registered_model_tag(self.model_name, INTENT_TAG)

    # --------------------------------------------------------------------------------------- inside

    @contextmanager
    def _files_of(self, version: Version) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        with _reached(self.tracking_uri):
            place = str(self._client.get_run(version.run_id).info.artifact_uri)
        if not is_own_place(place, self._artifacts):
            raise RegistryRefused(
                f"the files of version {version.version} are said to lie outside the registry's own store: "
                "nothing was fetched; register the bundle again"
            )
        try:
            yield
        except (MlflowException, OSError) as error:
            raise RegistryUnreachable(
                f"the files of version {version.version} cannot be fetched from the artifact store of "
                f"{without_password(self.tracking_uri)} ({str(error).splitlines()[0]}); nothing was changed"
            ) from error

    def _state(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the model's tags and aliases as they are now; none before its first version."""
        with suppress(RegistryRefused), _reached(self.tracking_uri):
            model = self._client.get_registered_model(self.model_name)
            return dict(model.tags), {str(alias): str(version) for alias, version in model.aliases.items()}
        return {}, {}

    def _run(
        self,
        bundle: Path,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        metrics: Mapping[str, float],
        example: Mapping[str, Any],
    ) -> str:
        from mlflow.entities import Metric, Param

        experiment = self._experiment(self.model_name)
        done = self._client.search_runs(
            [experiment],
            f"tags.bundle_id = '{tags['bundle_id']}' and attributes.status = 'FINISHED'",
            max_results=1,
        )
        if done:
            return str(done[0].info.run_id)
        run = self._client.create_run(experiment, tags=dict(tags), run_name=tags["bundle_id"])
        run_id, at = str(run.info.run_id), run.info.start_time
        kept = [Param(_name(name), value[:6_000]) for name, value in params.items()]
        self._client.log_batch(run_id, [Metric(name, value, at, 0) for name, value in metrics.items()], kept)
        if tags.get("data_hash"):
            self._client.log_inputs(run_id, [_training_data(tags)])
        self._client.log_artifacts(run_id, str(bundle), ARTIFACT)
        with TemporaryDirectory() as folder:
            write_flavour(Path(folder), run_id, ARTIFACT, example)
            self._client.log_artifacts(run_id, folder)
        self._client.set_terminated(run_id)
        return run_id

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        # The default experiment of a fresh database points at the working directory of the moment.
        return str(self._client.create_experiment(name, artifact_location=self._artifacts))


def _name(text: str, kept: str = "") -> str:
    """Replace the characters that MLflow refuses: names of profiles and items are free text."""
    return re.sub(rf"[^\w. {kept}-]", "_", text)[:250]


def _training_data(tags: Mapping[str, str]) -> Any:
    """Return the data set of a bundle as MLflow shows it: the hash of its files, and the cut."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"made_by": "ingest_events", "cut": tags.get("cut", "")})
    data = Dataset("events", tags["data_hash"], "reco", source)
    return DatasetInput(data, [InputTag("mlflow.data.context", "training")])


def is_own_place(uri: str, artifacts: str | None) -> bool:
    """Say whether a run's files lie where its registry keeps files, before anything is opened.

    A registry that others write to can name any file and any host, the cloud's metadata service included.

    Args:
        uri: of the run's artifacts, as the registry says.
        artifacts: where this registry's own files lie; None: it is a server with a store behind it.
    """
    if artifacts is not None:
        return uri.startswith(f"{artifacts}/") and is_path(uri.removeprefix(f"{artifacts}/"))
    return any(uri.startswith(store) and is_path(uri.removeprefix(store)) for store in STORES)


def check_registry(tracking_uri: str, model_name: str) -> Path | None:
    """Refuse a URI or a name before anything starts; else return the file of the registry, if it is one."""
    if not is_name(model_name):
        expected = "expected lower-case letters, digits and '-', at most 63"
        raise RegistryRefused(f"model name {model_name!r}: {expected}")
    return _database(tracking_uri)


def _database(tracking_uri: str) -> Path | None:
    """Return the file of a SQLite registry, whose artifacts lie beside it; None for a server."""
    if tracking_uri.startswith("sqlite:///") and len(tracking_uri) > len("sqlite:///"):
        return Path(tracking_uri.removeprefix("sqlite:///")).absolute()
    if tracking_uri.startswith(("http://", "https://")):
        return None
    scheme, expected = tracking_uri.partition(":")[0], "expected sqlite:///PATH or http(s)://HOST:PORT"
    raise RegistryRefused(f"tracking URI with scheme {scheme!r}: {expected}")


def _mlflow_uri(tracking_uri: str) -> str:
    """Return the URI for MLflow: in ours a path is literal, SQLAlchemy decodes it and ends it at a '?'.

    The driver's name in it keeps MLflow from creating the folders of the encoded path.
    """
    if (database := _database(tracking_uri)) is None:
        return tracking_uri
    return "sqlite+pysqlite:///" + str(database).replace("%", "%25").replace("?", "%3F")


def _follow_move(database: Path, model_name: str, artifacts: str) -> None:
    """Record where the artifacts lie now: MLflow keeps absolute paths, and a home may be moved or copied."""
    with closing(sqlite3.connect(database)) as connection, connection:
        query = "SELECT experiment_id, artifact_location FROM experiments WHERE name = ?"
        experiment, before = connection.execute(query, [model_name]).fetchone() or ("", artifacts)
        if before == artifacts or not before.endswith("/mlflow"):
            return  # its own place, or one that this module did not choose
        moved = "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
        moved += "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?"
        length = len(before) + 1
        connection.execute(moved, [artifacts, length, experiment, length, f"{before}/"])
        moved = "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?"
        connection.execute(moved, [artifacts, experiment])


def _client(tracking_uri: str, database: Path | None) -> MlflowClient:
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if database is None:
        _ask_health(tracking_uri)
        with suppress(ImportError):  # MLflow's first request loads Feast's plugin: this way without PyTorch
            import feature_repo.feature_definitions  # noqa: F401
    else:
        database.parent.mkdir(parents=True, exist_ok=True)
    from mlflow.tracking import MlflowClient

    uri = _mlflow_uri(tracking_uri)
    alone = nullcontext() if database is None else FileLock(f"{database}.lock")  # one makes the tables
    with _reached(tracking_uri), alone:
        return MlflowClient(uri, uri)


def _ask_health(tracking_uri: str) -> None:
    """Fail in seconds when nothing answers; MLflow's own client would go on trying for minutes."""
    try:
        health = without_password(tracking_uri).rstrip("/") + "/health"
        urllib.request.urlopen(health, timeout=HEALTH_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        # A proxy before the server may want them for this address, too; MLflow's client will send them.
        given = without_password(tracking_uri) != tracking_uri or CREDENTIALS & os.environ.keys()
        if error.code in (401, 403) and not given:
            raise RegistryRefused(
                f"MLflow at {without_password(tracking_uri)} answers {error.code}: give credentials in "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; "
                "403 also means that it does not know the host name in the URI"
            ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last two: it is no URL
        raise _unreachable(tracking_uri, error) from error


@contextmanager
def _reached(tracking_uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import DatabaseError, OperationalError

    try:
        yield
    except (DatabaseError, sqlite3.DatabaseError, MlflowException) as error:
        lost = (OSError, OperationalError, sqlite3.DatabaseError)  # another of a database: a broken rule
        code, causes = getattr(error, "error_code", ""), (error, error.__context__)
        is_lost = any(isinstance(one, lost) or type(one) is DatabaseError for one in causes)
        if code == "TEMPORARILY_UNAVAILABLE" or is_lost:
            raise _unreachable(tracking_uri, error) from error
        if code == "RESOURCE_DOES_NOT_EXIST":
            raise RegistryRefused(without_password(f"MLflow at {tracking_uri}: {error}")) from error
        raise


def _unreachable(tracking_uri: str, error: Exception) -> RegistryUnreachable:
    cause = without_password(str(getattr(error, "reason", None) or error).splitlines()[0])
    return RegistryUnreachable(
        f"no registry at {without_password(tracking_uri)} ({cause}): start it, correct the tracking "
        "URI, or restore a damaged file; nothing was changed, so the same command may simply be run again"
    )


def _numbers(tags: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yield the tags that are only shown: a spoilt one must not stop a rollback."""
    for name, text in tags.items():
        with suppress(ValueError):
            if math.isfinite(number := float(text)):
                yield name, number


def _version(entry: Any, aliases: Mapping[str, str]) -> Version:
    tags, numbers = entry.tags, dict(_numbers(entry.tags))
    return Version(
        version=str(entry.version),
        bundle_id=tags.get("bundle_id", ""),
        aliases=tuple(sorted(alias for alias, version in aliases.items() if version == str(entry.version))),
        cut=tags.get("cut", ""),
        created_at=entry.creation_timestamp / 1e3,
        size_bytes=int(numbers.get("size_bytes", 0)),
        metrics={name[7:]: number for name, number in numbers.items() if name.startswith("metric.")},
        run_id=entry.run_id,
        refused=tags.get(REFUSED_TAG, ""),
    )
