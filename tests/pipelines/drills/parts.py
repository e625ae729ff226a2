"""A system of the parts that a test gives."""

from types import SimpleNamespace
from typing import Any, cast

from pipelines.drills.system import System


def system_of(**parts: Any) -> System:
    return cast(System, SimpleNamespace(**parts))
