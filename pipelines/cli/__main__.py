"""`python -m pipelines.cli` -> the command `reco`; so its child processes start it."""

from pipelines.cli.shell import main

if __name__ == "__main__":
    main(prog_name="reco")
