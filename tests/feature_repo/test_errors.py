"""Each expected error has one of the documented exit codes."""

import pytest

from feature_repo.errors import RecoError, without_password
from feature_repo.stream.kafka import KafkaSettingInvalid


def test_an_error_keeps_its_python_base_and_its_exit_code() -> None:
    error = KafkaSettingInvalid("no broker")
    assert isinstance(error, RecoError)
    assert isinstance(error, ValueError)
    assert (error.exit_code, str(error)) == (2, "no broker")


@pytest.mark.parametrize(
    ("given", "shown"),
    [("http://u:p@127.0.0.1:9/x", "http://127.0.0.1:9/x"), ("http://u:p@/w@host", "http://host"), ("h", "h")],
)
def test_a_message_shows_no_password(given: str, shown: str) -> None:
    assert without_password(given) == shown


def test_the_default_exit_code_is_that_of_a_failed_check() -> None:
    assert RecoError("x").exit_code == 1
