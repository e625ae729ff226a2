"""A result names the machine, software and commit it was measured with."""

import json

import pytest

from components.measurement import measured_on


@pytest.mark.slow
def test_a_measurement_names_its_machine_and_software() -> None:
    origin = measured_on()
    assert origin["machine"]["cores"] >= 1
    assert origin["machine"]["cpu"]
    assert origin["software"]["numpy"]
    json.dumps(origin)
