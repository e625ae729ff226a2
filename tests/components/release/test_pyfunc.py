"""A version of the registry as MLflow loads it: the same answers as the path that is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.home import default_tracking_uri
from components.release.register_bundle import register_bundle
from components.release.registry import Registry
from pipelines.inspect.ask import evaluation_requests
from serving.release.golden import read_golden
from serving.release.manifest import read_manifest
from serving.schemas import DEFAULT_K, Recommendation, RequestBody, Response
from tests.pipelines.cli.conftest import answered, reco
from tests.pipelines.conftest import toy_home

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning"),  # MLflow's of its own types
]


def items(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item["item_id"], item["score"]) for item in answer["items"]]


def test_a_registered_champion_answers_as_the_command_does(
    toy_line: Path, migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import pandas as pd

    home = toy_home(tmp_path / "home", toy_line)
    shutil.copyfile(migrated, home / "mlflow.db")
    uri = default_tracking_uri(home)
    version = register_bundle(toy_line / "evaluated", uri, "recommender")
    registry = Registry(uri, "recommender")
    registry.point("champion", version)
    inputs = registry._client.get_run(registry.version(version).run_id).inputs
    assert inputs is not None
    [logged] = inputs.dataset_inputs
    manifest = read_manifest(toy_line / "evaluated")
    assert logged.dataset.digest == manifest["made_from"]["data_hash"]
    assert json.loads(logged.dataset.source)["cut"] == manifest["cut"]
    monkeypatch.setenv("RECO_HOME", str(home))
    mlflow.set_tracking_uri(uri)
    model = mlflow.pyfunc.load_model("models:/recommender@champion")
    assert model.input_example.to_dict("records") == [read_golden(toy_line / "evaluated")[0].request]
    signature = model.metadata.signature
    assert set(signature.inputs.input_names()) == set(RequestBody.__struct_fields__)
    assert set(signature.outputs.input_names()) == set(Response.__struct_fields__)
    [shown] = [column.type.dtype for column in signature.outputs if column.name == "items"]
    assert {field.name for field in shown.properties} == set(Recommendation.__struct_fields__)
    assert not list(registry.download(registry.version(version), tmp_path / "copy").glob("MLmodel"))

    asked = evaluation_requests(toy_line / "evaluated", 5)
    asked += [{name: value for name, value in asked[0].items() if name != "user_id"}]
    commanded = []
    for line in asked:
        options = {"--user": line.get("user_id"), "--store": line["store_id"], "--at": line["at"]}
        given = [word for option, value in options.items() if value for word in (option, value)]
        basket = ["--basket", ",".join(line["basket"])]
        commanded.append(answered(reco(home, "recommend", *basket, *given, "--output", "json")))
    answers = model.predict(pd.DataFrame([{**line, "explain": True} for line in asked]))
    for answer, expected in zip(answers, commanded, strict=True):
        for own in (answer, expected):  # these two are of the call
            del own["stage_ms"], own["request_id"]
        assert answer == expected
    assert not any(answer["degraded"] for answer in answers)
    assert items(answers[0]) != items(answers[-1]), "the shopper's row was not read"
    assert model.predict(model.input_example)[0]["items"]
    assert len(model.predict(pd.DataFrame([{**asked[0], "k": 7}]))[0]["items"]) == 7
    table = pd.DataFrame([{**asked[0], "k": 7}, asked[0], {**asked[0], "k": 3}])
    for kind in ("float64", "Int64"):  # the second has a value of its own for an empty cell
        answers = model.predict(table.astype({"k": kind}))
        assert [len(answer["items"]) for answer in answers] == [7, DEFAULT_K, 3]
