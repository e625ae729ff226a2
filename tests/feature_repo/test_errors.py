"""Each expected error has one of the documented exit codes."""

from feature_repo.errors import RecoError
from feature_repo.stream.outbox import OutboxInUse


def test_an_error_keeps_its_python_base_and_its_exit_code() -> None:
    error = OutboxInUse("another process sends")
    assert isinstance(error, RecoError)
    assert isinstance(error, RuntimeError)
    assert (error.exit_code, str(error)) == (4, "another process sends")


def test_without_a_code_of_its_own_a_check_failed() -> None:
    assert RecoError("x").exit_code == 1
