"""A training step -> a run of MLflow with parameters, numbers and curves, if it failed, too; and its page."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from components.pages import flat, is_curve, is_number, show
from components.release.registry import Registry

log = logging.getLogger(__name__)

Curve = list[tuple[str, float, int]]  # name, value, point from 0


def recorded(
    work: partial[dict[str, Any]],
    params: Mapping[str, Any],
    tracking_uri: str,
    model_name: str,
    numbers: Any,
    page: Any,
) -> dict[str, Any]:
    """Do the work of a step, record and show it, and return its report.

    A tracking server that is away, or refuses the run, costs the record, with a warning, and never the work.

    Args:
        work: the step's function, which gives the run its name, with its arguments; returns the report.
        params: of the step.
        tracking_uri: of MLflow.
        model_name: the run is in the experiment of this name with `-steps` behind it.
        numbers: as of `show`.
        page: as of `show`.
    """
    step, began, error = work.func.__name__, time.time(), ""
    report: dict[str, Any] = {}
    try:
        report = work()
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        try:
            texts = {name: str(value) for name, value in flat(params)}
            Registry(tracking_uri, model_name).record_step(step, texts, numbers_of(report), began, error)
        except Exception as away:  # noqa: BLE001 - the edge of a step: its work must not be lost with the record
            log.warning("%s is not recorded in MLflow: %s", step, away)
    return show(report, numbers, page)


def numbers_of(report: Mapping[str, Any]) -> Curve:
    """Return the numbers of a report; a curve gives one for each of its points."""
    found: Curve = []
    for name, value in flat(report):
        if is_curve(value):
            for place, point in enumerate(value):
                found += [(f"{name}.{key}", one, place) for key, one in flat(point) if is_number(one)]
        elif is_number(value):
            found.append((name, float(value), 0))
    return found
