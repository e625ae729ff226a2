"""Fixtures of the packages that the benches measure."""

from tests.monitoring.conftest import bundle, bundle_id, dataset, day, events, log, records
from tests.serving.conftest import toy_bundle, toy_store

__all__ = ["bundle", "bundle_id", "dataset", "day", "events", "log", "records", "toy_bundle", "toy_store"]
