import pytest

pytestmark = pytest.mark.slow  # importing kfp takes seconds


def test_each_step_runs_in_the_image_of_the_training_steps() -> None:
    from components import steps as training_steps
    from monitoring import steps

    assert steps.IMAGE == training_steps.IMAGE
    for step in (steps.measure_drift, steps.measure_labels, steps.show_jumps, steps.raise_alert):
        container = step.component_spec.implementation.container
        assert container.image == steps.IMAGE
        assert "pip install" not in " ".join(map(str, container.command))
