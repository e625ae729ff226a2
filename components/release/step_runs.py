"""A training step -> a run of MLflow with its parameters, numbers and curves; a failed one, too."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from components.pages import flat, is_curve
from components.release.registry import Registry

log = logging.getLogger(__name__)

Curve = list[tuple[str, float, int]]  # name, value, point from 0


def recorded(
    tracking_uri: str,
    model_name: str,
    step: str,
    params: Mapping[str, Any],
    work: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Do the work of a step, record it, and return its report.

    A tracking server that is away, or refuses the run, costs the record, with a warning, and never the work.

    Args:
        tracking_uri: of MLflow.
        model_name: the run is in the experiment of this name with `-steps` behind it.
        step: name of the run.
        params: of the step.
        work: returns the step's report.
    """
    began, error = time.time(), ""
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
    return report


def numbers_of(report: Mapping[str, Any]) -> Curve:
    """Return the numbers of a report; a curve gives one for each of its points."""
    found: Curve = []
    for name, value in flat(report):
        if is_curve(value):
            for place, point in enumerate(value):
                found += [(f"{name}.{key}", one, place) for key, one in flat(point) if _is_number(one)]
        elif _is_number(value):
            found.append((name, float(value), 0))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
