"""`reco`: its groups of commands, and what an error means for the exit code.

A command imports the heavy libraries it needs when it runs, so that `reco --help` answers at once.
"""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from components.home import MODEL_NAME, pasteable
from feature_repo.errors import USAGE
from feature_repo.ids import closest
from pipelines.cli import ask, bench, events, release, rollout, rules, serve, train, watch
from pipelines.cli.options import HOME, HOME_HELP
from pipelines.run.exit_codes import exit_code


class Reco(click.Group):
    """Turns errors into one line and an exit code, and an unknown word into a suggestion."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of use."""
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command; for an unknown one, suggest the closest."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {args[0]!r}: {closest(args[0], self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print an expected error as one line."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # a pipe whose reader has ended: Click ends the command without a word
        except KeyboardInterrupt:
            ctx.exit(130)
        except ModuleNotFoundError as error:
            package = (error.name or "pipelines").partition(".")[0]
            if ctx.find_root().meta.get("debug") or find_spec(package):
                raise  # a module that an installed package lacks, or one of ours, is a bug
            _say(ctx, f"{package} is not installed: `reco doctor` looks at each package, --debug shows where")
            ctx.exit(USAGE)
        except Exception as error:
            code = exit_code(error)
            if code is None or ctx.find_root().meta.get("debug"):
                raise
            _say(ctx, str(error))
            ctx.exit(code)


def _say(ctx: click.Context, text: str) -> None:
    home = ctx.meta.get("home")  # none before the command began
    click.echo(f"reco: {pasteable(home, text) if home else text}", err=True)


@click.group(cls=Reco, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--home", type=HOME, help=HOME_HELP)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name=MODEL_NAME, prog_name="reco")
def main(home: Path | None, debug: bool) -> None:
    """Recommend items that go with a basket: train, release, serve, watch and retrain."""
    os.umask(0o077)  # files may name shoppers: other users of the machine cannot read them
    # Full collections while a command imports took a sixth of its time. Later each 2,000,000 new objects.
    gc.set_threshold(10_000, 10, 20)


main.add_command(ask.try_toy_shop)
for group in (train, release, rollout, serve, ask, rules, events, watch, bench):
    for command in group.COMMANDS:
        main.add_command(command)
