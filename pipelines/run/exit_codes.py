"""An error -> the exit code of the command, where it was raised here or in a step."""

from __future__ import annotations

from feature_repo.errors import CHECK_FAILED, UNREACHABLE, USAGE, RecoError

# Errors of libraries that are not imported here: a registry that does not answer, or is not a database.
_UNREACHABLE = {"mlflow.exceptions.MlflowException", "sqlalchemy.exc.DatabaseError"}


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error in this process; None for a bug, which deserves its traceback."""
    if isinstance(error, RecoError):
        return error.exit_code
    if isinstance(error, ValueError | TypeError):
        return USAGE
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    return UNREACHABLE if isinstance(error, OSError) or bases & _UNREACHABLE else None


def exit_code_of_step(error: BaseException) -> int:
    """Return the exit code of a step that failed with this error."""
    if isinstance(error, RecoError):
        return error.exit_code
    # Python's own, and those of the Redis client: the online store cannot be reached.
    names = {base.__name__ for base in type(error).__mro__}
    return UNREACHABLE if names & {"ConnectionError", "TimeoutError"} else CHECK_FAILED


def message_of_step(error: BaseException) -> str:
    """Return a step's error as a person reads it: our own errors explain themselves without a name."""
    kind = type(error).__name__
    # The gate's refusal is no fault of the run: its name separates the two.
    if isinstance(error, RecoError) and kind != "GateFailed":
        return str(error)
    return f"{kind}: {error}"
