import pytest

from pipelines.run.graph import read_spec, step_names


@pytest.mark.slow  # importing kfp takes seconds
def test_the_alarm_is_raised_once_after_the_report_on_a_bundle_or_a_home() -> None:
    from pipelines.watch import watch

    spec = read_spec(watch)
    names = step_names(spec)
    assert names == ["ingest-events", "measure-drift", "measure-labels", "show-jumps", "raise-alert"]
    given = spec["root"]["inputDefinitions"]["parameters"]
    assert {name for name, kind in given.items() if not kind.get("isOptional")} == {"bundle"}
    tasks = spec["root"]["dag"]["tasks"]
    home = tasks["ingest-events"]["inputs"]["parameters"]["home"]
    assert home == {"componentInputParameter": "bundle"}, "its list of forgotten shoppers counts"
    task = tasks["raise-alert"]
    assert task.get("retryPolicy", {}).get("maxRetryCount", 0) == 0
