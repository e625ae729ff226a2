import pytest

from components import steps
from pipelines.arguments import PARAMS, complete_arguments
from pipelines.graph import read_spec, step_names
from pipelines.training import FAST, training

SPEC = read_spec(training)


def test_every_step_is_in_the_pipeline_under_its_own_name() -> None:
    ours = [name.replace("_", "-") for name, value in vars(steps).items() if hasattr(value, "python_func")]
    assert sorted(step_names(SPEC)) == sorted(ours)
    for name, task in SPEC["root"]["dag"]["tasks"].items():
        assert task["componentRef"]["name"] == f"comp-{name}"


def test_it_begins_with_events_and_ends_with_a_champion_and_its_users() -> None:
    names = step_names(SPEC)
    assert names[0] == "ingest-events"
    assert names[-3:] == ["register-bundle", "promote-bundle", "publish-features"]


def test_nothing_in_it_is_conditional() -> None:
    """The local runner would skip a condition without a word."""
    for task in SPEC["root"]["dag"]["tasks"].values():
        assert not task.keys() & {"triggerPolicy", "parameterIterator", "artifactIterator"}


@pytest.mark.slow
def test_fast_names_parameters_that_exist() -> None:
    assert FAST.keys() <= PARAMS.keys() <= SPEC["root"]["inputDefinitions"]["parameters"].keys()
    complete_arguments(SPEC, {"home": "x", "tracking_uri": "y", **FAST})
