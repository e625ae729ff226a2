import pytest

from pipelines.run.graph import read_spec, step_names

pytestmark = pytest.mark.slow  # importing kfp takes seconds


def test_the_alarm_is_raised_after_the_report() -> None:
    from pipelines.watch import watch

    assert step_names(read_spec(watch)) == [
        "ingest-events",
        "measure-drift",
        "measure-labels",
        "raise-alert",
        "show-jumps",
    ]


def test_it_needs_a_bundle_or_a_home() -> None:
    from pipelines.watch import watch

    given = read_spec(watch)["root"]["inputDefinitions"]["parameters"]
    assert {name for name, kind in given.items() if not kind.get("isOptional")} == {"bundle"}


def test_an_alarm_is_not_retried() -> None:
    from pipelines.watch import watch

    task = read_spec(watch)["root"]["dag"]["tasks"]["raise-alert"]
    assert task.get("retryPolicy", {}).get("maxRetryCount", 0) == 0
