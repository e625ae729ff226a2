"""Options that several commands share -> decorators; each command gets a `Context`."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from components.home import MODEL_NAME, pasteable, read_running
from serving.schemas import MAX_K
from serving.settings import Settings, configured_home, configured_keys

if TYPE_CHECKING:
    from feature_repo.stream.kafka import KafkaSettings

Command = TypeVar("Command", bound=Callable[..., Any])
PORT = click.IntRange(0, 65_535)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
DATA = "complete-journey, toy, or a folder."


class Context:
    """The state folder and the output format of a command."""

    def __init__(self, home: Path, output: str) -> None:
        self.home, self.output = home, output

    def settings(self, **given: Any) -> Settings:
        """Return the endpoint's settings for this home; while `reco up` runs here, with its store."""
        chosen = {name: value for name, value in given.items() if value is not None}
        settings = replace(Settings.from_env(), home=self.home, **chosen)
        if not settings.store_url and (running := read_running(self.home)):
            settings = replace(settings, store_url=running.store_url)
        return settings

    def kafka(self) -> KafkaSettings:
        """Return the broker's address and options; while `reco up` runs here, those of its broker."""
        from feature_repo.stream.kafka import KafkaSettings

        running = read_running(self.home)
        return KafkaSettings.from_env(None, **({"bootstrap": running.bootstrap} if running else {}))

    def answer(self, document: Any, text: str, exit_code: int = 0) -> None:
        """Write the answer to stdout, as JSON or as text; an exit code other than 0 ends the command."""
        is_json = self.output == "json"
        click.echo(json.dumps(document, indent=1, default=str) if is_json else pasteable(self.home, text))
        if exit_code:
            click.get_current_context().exit(exit_code)

    def say(self, text: str) -> None:
        """Write a line to stderr."""
        click.echo(pasteable(self.home, text), err=True)


def read_token(file: Path | None) -> str:
    """Return the bearer token in a file, "" without a file.

    Raises:
        ValueError: the file holds something else, which no message must show.
    """
    try:
        token = file.read_text(encoding="utf-8").strip() if file else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} holds no token: expected text, found other bytes") from error
    if not token.isprintable() or " " in token:
        raise ValueError(f"{file} holds no token: expected one word, found spaces or line breaks in it")
    return token


class FiniteRange(click.FloatRange):
    """A range of numbers: Click's own takes NaN, and infinity where there is no upper bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is no finite number", param, ctx)


class Home(click.Path):
    """The type of --home: an empty one would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("it is empty, expected a folder; without --home it is .reco or RECO_HOME", param, ctx)
        return super().convert(value, param, ctx)


HOME = Home(file_okay=False, path_type=Path)
HOME_HELP = "Folder of all state.  [default: .reco or RECO_HOME]"


def home_of(ctx: click.Context) -> Path:
    """Return the state folder: the command's --home, else that of `reco`, else RECO_HOME or .reco."""
    home = ctx.params.get("home") or ctx.find_root().params.get("home")
    return Path(home or configured_home()).absolute()


def common_options(command: Command) -> Command:
    """Add --home, --output and --debug to a command and pass it a `Context`."""

    # Eager: the defaults of other options lie under the home.
    @click.option("--home", type=HOME, is_eager=True, help=HOME_HELP)
    @click.option(
        "--output", type=click.Choice(["text", "json"]), default="text", help="One JSON document on stdout."
    )
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @click.pass_context
    @functools.wraps(command)
    def wrapped(ctx: click.Context, /, home: Path | None, output: str, debug: bool, **options: Any) -> Any:
        root = ctx.find_root()
        root.meta["debug"] = debug or root.params.get("debug")
        home = root.meta["home"] = home_of(ctx)
        return command(Context(home, output), **options)

    return wrapped  # type: ignore[return-value]


def stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator that adds several options, listed by --help in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


registry_options: Callable[[Command], Command] = stacked(
    click.option(
        "--tracking-uri", default="", help="MLflow: sqlite:///PATH or http(s)://…  [default: under home]"
    ),
    click.option("--model-name", default=MODEL_NAME, show_default=True, help="Registered model."),
)

trusted_keys_option: Callable[[Command], Command] = click.option(
    "--trusted-keys",
    type=FOLDER,
    default=configured_keys,
    help="Folder of public keys; one of them must have signed.  [default: RECO_TRUSTED_KEYS]",
)

train_until_option: Callable[[Command], Command] = click.option(
    "--train-until", default="", help="The cut, a date or time.  [default: five weeks before the end]"
)

training_options: Callable[[Command], Command] = stacked(
    train_until_option,
    click.option("--fast", is_flag=True, help="The same steps with fewer examples and an easier gate."),
    click.option(
        "--param", "params", multiple=True, metavar="NAME=VALUE", help="e.g. student_params.epochs=2"
    ),
)


def question_options(command: Command) -> Command:
    """Add the options that describe one request; the command gets them as `line`, a request's fields."""

    @click.option("--user", help="The shopper's id.")
    @click.option("--basket", default="", help="Item ids, separated by commas.")
    @click.option("--store", help="The store's id.")
    @click.option("--at", help="Time of the request, e.g. 2017-12-05T18:30:00Z.  [default: now]")
    @click.option("-k", type=click.IntRange(0, MAX_K), default=10, show_default=True, help="How many items.")
    @click.option(
        "--profile", help="How candidates are found: default, premium, clearance, or the bundle's own."
    )
    @functools.wraps(command)
    def wrapped(
        *arguments: Any,
        user: str | None,
        basket: str,
        store: str | None,
        at: str | None,
        k: int,
        profile: str | None,
        **options: Any,
    ) -> Any:
        fields = {"user_id": user, "store_id": store, "at": at, "k": k, "profile": profile}
        line: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        line["basket"] = [item.strip() for item in basket.split(",") if item.strip()]
        return command(*arguments, line=line, **options)

    return wrapped  # type: ignore[return-value]


def check_alone(option: str, reason: str, *beside: str) -> None:
    """Refuse all options that this command would ignore beside `option`; those named in `beside` may come."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(str(parameter.name)) not in (None, ParameterSource.DEFAULT)
        alike = option in parameter.opts or parameter.name in (*beside, "home", "output", "debug")
        if given and not alike and isinstance(parameter, click.Option):
            raise click.UsageError(f"{parameter.opts[0]} means nothing with {option}: {reason}")


def results_folder(name: str) -> Callable[[Command], Command]:
    """Add --out, the folder of the results; its default is `name` under the home."""

    def under_home(ctx: click.Context, _: click.Parameter, value: Path | None) -> Path:
        return value or home_of(ctx) / name

    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        callback=under_home,
        help=f"Folder of the results.  [default: {name} under home]",
    )
