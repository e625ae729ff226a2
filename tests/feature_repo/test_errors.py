"""Each expected error has one of the documented exit codes."""

from feature_repo.errors import RecoError
from feature_repo.stream.kafka import KafkaSettingInvalid


def test_an_error_keeps_its_python_base_and_its_exit_code() -> None:
    error = KafkaSettingInvalid("no broker")
    assert isinstance(error, RecoError)
    assert isinstance(error, ValueError)
    assert (error.exit_code, str(error)) == (2, "no broker")


def test_the_default_exit_code_is_that_of_a_failed_check() -> None:
    assert RecoError("x").exit_code == 1
