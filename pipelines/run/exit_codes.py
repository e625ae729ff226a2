"""An error, or the name of a failed step's error -> the exit code of the command."""

from __future__ import annotations

import builtins
import re
from importlib import import_module

from feature_repo.errors import CHECK_FAILED, UNREACHABLE, USAGE, RecoError

# Errors of libraries that are not imported here: a registry that does not answer, or is not a database.
_UNREACHABLE = {"mlflow.exceptions.MlflowException", "sqlalchemy.exc.DatabaseError"}
_OURS = re.compile(r"(feature_repo|serving|components|monitoring|pipelines)(\.\w+)+")


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error in this process; None for a bug, which deserves its traceback."""
    if isinstance(error, RecoError):
        return error.exit_code
    if isinstance(error, ValueError | TypeError):
        return USAGE
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    return UNREACHABLE if isinstance(error, OSError) or bases & _UNREACHABLE else None


def exit_code_of_step(name: str) -> int:
    """Return the exit code of a failed step, from the last line of its traceback.

    Args:
        name: the error's class with its module, as Python prints it; what follows a colon is ignored.
    """
    qualified = name.partition(":")[0]
    module, _, kind = qualified.rpartition(".")
    if _OURS.fullmatch(qualified):
        error = getattr(import_module(module), kind, None)
        return error.exit_code if isinstance(error, type) and issubclass(error, RecoError) else CHECK_FAILED
    # Python's own, and those of the Redis client: the online store cannot be reached.
    error = getattr(builtins, kind, None)
    unreachable = isinstance(error, type) and issubclass(error, ConnectionError | TimeoutError)
    return UNREACHABLE if unreachable else CHECK_FAILED


def message_of_step(cause: str) -> str:
    """Return a failed step's error as a person reads it: our own errors explain themselves without a name."""
    name, _, message = cause.partition(": ")
    # The gate's refusal is no fault of the run: its name separates the two.
    if _OURS.fullmatch(name) and not name.endswith(".GateFailed"):
        return message
    return re.sub(r"^[\w.]*\.(?=\w)", "", cause)
