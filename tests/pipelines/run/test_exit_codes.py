"""0 done, 1 a check failed, 2 wrong usage, 3 a service cannot be reached, 4 conflict; None: a bug."""

import mlflow.exceptions
import pytest
import redis
import sqlalchemy.exc

from components.data.examples import ContractViolation
from components.home import Conflict
from components.release.gate import Check, GateFailed
from components.release.promote_bundle import NothingToCompare
from components.release.registry import RegistryUnreachable
from feature_repo.events import EventsInvalid
from pipelines.live.ports import PortInUse
from pipelines.run.exit_codes import exit_code, exit_code_of_step, message_of_step
from serving.errors import BundleInvalid, FactsUnavailable, FeaturesUnavailable, InvalidRequest, NoChampion
from serving.settings import SettingInvalid


@pytest.mark.parametrize(
    ("error", "code", "of_step"),
    [
        (GateFailed(Check("ndcg_at_10", 0.1, 0.2, "floor")), 1, 1),
        (BundleInvalid("x"), 1, 1),
        (ContractViolation("x"), 1, 1),
        (EventsInvalid("x"), 1, 1),
        (NoChampion("x"), 2, 2),
        (SettingInvalid("x"), 2, 2),
        (InvalidRequest("x"), 2, 2),
        (NothingToCompare("x"), 2, 2),
        (ValueError("x"), 2, 1),
        (TypeError("x"), 2, 1),
        (RegistryUnreachable("x"), 3, 3),
        (FeaturesUnavailable("x"), 3, 3),
        (FactsUnavailable("x"), 3, 3),
        (ConnectionRefusedError("x"), 3, 3),
        (PermissionError("x"), 3, 1),
        (mlflow.exceptions.RestException({"error_code": "INTERNAL_ERROR"}), 3, 1),
        (sqlalchemy.exc.OperationalError("x", None, Exception("y")), 3, 1),
        (redis.ConnectionError("x"), None, 3),
        (redis.TimeoutError("x"), None, 3),
        (Conflict("x"), 4, 4),
        (PortInUse("x"), 4, 4),
        (KeyError(), None, 1),
        (ZeroDivisionError("x"), None, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_its_exit_code_in_a_command_and_in_a_step(
    error: Exception, code: int | None, of_step: int
) -> None:
    assert (exit_code(error), exit_code_of_step(error)) == (code, of_step)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EventsInvalid("2 of 9 rows: mend\nthem"), "2 of 9 rows: mend\nthem"),
        (GateFailed(Check("ndcg_at_10", 0.1, 0.2, "floor")), "GateFailed: ndcg_at_10 is 0.1"),
        (redis.TimeoutError("no answer"), "TimeoutError: no answer"),
    ],
)
def test_our_own_errors_are_shown_without_their_class(error: Exception, said: str) -> None:
    assert message_of_step(error).startswith(said)
