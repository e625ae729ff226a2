"""Every monitoring step: KFP artifacts in -> one call of the step's plain function -> artifacts out.

KFP ships only a function's own source to its container, so a step imports the plain function in its body. The
plain modules must not import this module: inside a step KFP hides `dsl.component`.
"""

from functools import partial
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Input, Markdown, Metrics, Output

# The image of the training steps; `reco compile --image` puts another name into the IR.
IMAGE = "checkout-pipeline"
step = partial(dsl.component, base_image=IMAGE, install_kfp_package=False)


@step
def measure_drift(
    bundle: str,
    dataset: Input[Dataset],
    since: str,
    until: str,
    drift: Output[Artifact],
    numbers: Output[Metrics],
    page: Output[HTML],
) -> dict[str, Any]:
    """Compare a window of purchases with the bundle's training data."""
    from pathlib import Path

    from monitoring.drift import measure_drift

    places = Path(drift.path), numbers, Path(page.path)
    return measure_drift(Path(bundle), Path(dataset.path), since, until, *places)


@step
def measure_labels(
    log: str, bundle: str, dataset: Input[Dataset], numbers: Output[Metrics]
) -> dict[str, Any]:
    """Compare how well lists fitted the baskets that followed with the weeks before."""
    from pathlib import Path

    from monitoring.kpi import measure_labels

    return measure_labels(log, Path(dataset.path), Path(bundle), numbers)


@step
def show_jumps(dataset: Input[Dataset], numbers: Output[Metrics], page: Output[Markdown]) -> int:
    """Count and list the items whose share of the small baskets jumped in the last week."""
    from pathlib import Path

    from monitoring.jumps import show_jumps

    return show_jumps(Path(dataset.path), numbers, Path(page.path))


@step
def raise_alert(verdict: dict[str, Any], labels: dict[str, Any]) -> str:
    """Fail the run if a verdict needs a person's attention."""
    from monitoring.drift import raise_alert

    return raise_alert(verdict, labels)
