"""A shop's events, its log and the bundle that serves -> verdicts: the pipelines that run on a schedule.

A run fails when the verdict is `drifted` or `schema_change`, with the reason as its error; the report is kept
by the step before. Retraining is started by `reco drift --retrain`, which knows when the last one was.
"""

from kfp import dsl

from components import steps as component_steps
from monitoring import steps
from pipelines.training import large, small


@dsl.pipeline(name="watch", description="Purchases of a window against those a bundle was made from.")
def watch(
    bundle: str,
    since: str,
    until: str = "",
    data: str = "complete-journey",
    max_quarantine_ratio: float = 0.01,
) -> None:
    """Measure drift, keep the report, and raise the alarm if there is reason to."""
    events = large(
        component_steps.ingest_events(data=data, max_quarantine_ratio=max_quarantine_ratio, train_until="")
    )
    measured = large(
        steps.measure_drift(bundle=bundle, dataset=events.outputs["dataset"], since=since, until=until)
    )
    small(steps.raise_alert(verdict=measured.outputs["Output"])).set_retry(0)


@dsl.pipeline(name="watch-skew", description="Logged answers against their features, computed again.")
def watch_skew(home: str, bundle: str, last: int = 1_000) -> None:
    """Replay the latest answers of an endpoint's log; fail if the archive gives other features.

    Args:
        home: the endpoint's folder of state, on a volume that the step sees.
        bundle: the bundle that answered.
        last: how many answers.
    """
    small(steps.check_skew(home=home, bundle=bundle, last=last)).set_retry(0)
