"""A shop's events and the bundle that serves -> a verdict: a pipeline for a recurring run.

A run fails when the verdict is `drifted` or `schema_change`, with the reason as its error; the report is kept
by the step before. Retraining is started by `reco drift --retrain`, which knows when the last one was.
"""

from kfp import dsl

from components import steps as component_steps
from components.data.ingest_events import NO_CUT
from monitoring import steps
from pipelines.training import large, small


@dsl.pipeline(
    name="watch",
    description="Purchases against those of a bundle, lists against purchases, and items that jump.",
)
def watch(
    bundle: str,
    since: str = "",
    until: str = "",
    data: str = "complete-journey",
    max_quarantine_ratio: float = 0.01,
    log: str = "",
) -> None:
    """Measure drift of purchases and labels, list items that jump, and raise the alarm if there is reason.

    `since` and `until` are of the purchases that are compared with the bundle's. Labels and jumps are of the
    newest data. Items that jump fail no run. `reco schedule` gives a home as `bundle`: events of the shoppers
    whom the home has forgotten are left out. One bundle's folder holds no such list.
    """
    events = large(
        component_steps.ingest_events(
            data=data, max_quarantine_ratio=max_quarantine_ratio, train_until=NO_CUT, home=bundle
        )
    )
    measured = large(
        steps.measure_drift(bundle=bundle, dataset=events.outputs["dataset"], since=since, until=until)
    )
    labels = large(steps.measure_labels(log=log, bundle=bundle, dataset=events.outputs["dataset"]))
    small(steps.show_jumps(dataset=events.outputs["dataset"]))
    alert = steps.raise_alert(verdict=measured.outputs["Output"], labels=labels.outputs["Output"])
    small(alert).set_retry(0)
