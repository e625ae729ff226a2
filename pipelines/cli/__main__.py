"""The command `reco`, and `python -m pipelines.cli`, by which child processes start it."""

import sys


def start() -> None:
    """Run the command; Ctrl-C ends it without a traceback, also while its modules are imported."""
    try:
        from pipelines.cli.shell import main

        main(prog_name="reco")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    start()
