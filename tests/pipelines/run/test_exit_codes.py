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
    ("error", "code"),
    [
        (GateFailed(Check("ndcg_at_10", 0.1, 0.2, "floor")), 1),
        (BundleInvalid("x"), 1),
        (ContractViolation("x"), 1),
        (EventsInvalid("x"), 1),
        (NoChampion("x"), 2),
        (SettingInvalid("x"), 2),
        (InvalidRequest("x"), 2),
        (ValueError("x"), 2),
        (TypeError("x"), 2),
        (RegistryUnreachable("x"), 3),
        (FeaturesUnavailable("x"), 3),
        (FactsUnavailable("x"), 3),
        (mlflow.exceptions.RestException({"error_code": "INTERNAL_ERROR"}), 3),
        (sqlalchemy.exc.OperationalError("x", None, Exception("y")), 3),
        (PermissionError("x"), 3),
        (Conflict("x"), 4),
        (PortInUse("x"), 4),
        (ZeroDivisionError("x"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_its_exit_code(error: Exception, code: int | None) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateFailed(Check("ndcg_at_10", 0.1, 0.2, "floor")), 1),
        (EventsInvalid("x"), 1),
        (ValueError("x"), 1),
        (KeyError(), 1),
        (NothingToCompare("the champion was evaluated on another test window"), 2),
        (NoChampion("there is nothing to go back to"), 2),
        (RegistryUnreachable("no registry"), 3),
        (redis.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused."), 3),
        (redis.TimeoutError("Timeout reading from socket"), 3),
        (ConnectionRefusedError("the online store at 127.0.0.1:1 cannot be reached: refused"), 3),
        (Conflict("process 7 promotes"), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_a_step_has_the_code_of_its_error(error: Exception, code: int) -> None:
    assert exit_code_of_step(error) == code


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
