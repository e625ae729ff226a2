"""A registered bundle as MLflow's own kind of model: `mlflow.pyfunc.load_model("models:/NAME@champion")`.

Its `predict` takes a table or a list of request lines and answers as `reco recommend` does, with the online
store that the settings of its process name.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # a registry is opened by commands that answer nothing
    from serving.answer.recommender import Recommender

EXAMPLE = "input_example.json"


class BundleModel:
    """What MLflow wraps as a model."""

    def __init__(self, recommender: Recommender) -> None:
        self._recommender = recommender

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Answer each row; an empty cell is a field that the request lacks."""
        from pandas import isna
        from pandas.api.types import is_scalar

        from serving.schemas import parse_request

        rows = model_input if isinstance(model_input, list) else model_input.to_dict("records")
        profiles = self._recommender.bundle.profiles
        answers = []
        for number, row in enumerate(rows):
            line = {name: value for name, value in row.items() if not (is_scalar(value) and isna(value))}
            line["basket"] = [str(item) for item in line.get("basket", [])]
            request = parse_request(line, now=time.time(), default_id=f"row-{number}", profiles=profiles)
            answers.append(self._recommender.recommend(request).to_dict())
        return answers


def write_flavour(folder: Path, run_id: str, bundle: str, example: Mapping[str, Any]) -> None:
    """Write the files that make a run a model of MLflow: MLmodel, and an example of its input.

    Args:
        folder: of the files, which belong to the root of the run's artifacts.
        run_id: of the run.
        bundle: name of the bundle's folder among these artifacts.
        example: a request that the bundle can answer.
    """
    flavour = {"loader_module": __name__, "data": bundle, "python_version": platform.python_version()}
    model = {
        "run_id": run_id,
        "flavors": {"python_function": flavour},
        "signature": {"inputs": json.dumps(_INPUTS), "outputs": json.dumps(_OUTPUTS), "params": None},
        "saved_input_example_info": {
            "artifact_path": EXAMPLE,
            "type": "dataframe",
            "pandas_orient": "split",
        },
    }
    split = {"columns": list(example), "data": [list(example.values())]}
    (folder / EXAMPLE).write_text(json.dumps(split), encoding="utf-8")
    (folder / "MLmodel").write_text(yaml.safe_dump(model), encoding="utf-8")


def _column(name: str, kind: str, required: bool = False, **of: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "required": required, **of}


def _object(required: Iterable[tuple[str, str]], optional: Iterable[tuple[str, str]]) -> dict[str, Any]:
    fields = {name: {"type": kind, "required": True} for name, kind in required}
    fields |= {name: {"type": kind, "required": False} for name, kind in optional}
    return {"type": "object", "properties": fields}


# Of `serving.schemas`, in MLflow's words; a test compares the names.
_INPUTS = [
    _column("basket", "array", required=True, items={"type": "string"}),
    *(_column(name, "string") for name in ("user_id", "store_id", "at", "profile", "request_id")),
    _column("k", "any"),  # not `long`: beside empty cells pandas makes floats of whole numbers
    _column("explain", "boolean"),
]
_ITEM = _object(
    required=[("item_id", "string"), ("score", "double"), ("source", "string"), ("reason", "string")],
    optional=[
        *((name, "double") for name in ("price", "promotion")),
        *((name, "string") for name in ("coupon", "name", "reason_code")),
    ],
)
_OUTPUTS = [
    *(_column(name, "string", required=True) for name in ("request_id", "bundle_id", "rung")),
    _column("items", "array", required=True, items=_ITEM),
    _column("degraded", "boolean", required=True),
    _column("degraded_reason", "string"),
    _column("stage_ms", "map", required=True, values={"type": "double"}),
    _column("unknown_items", "long"),
]


def _load_pyfunc(path: str) -> BundleModel:
    """MLflow's entry: open the bundle as the endpoint does."""
    from serving.answer.recommender import open_recommender
    from serving.settings import Settings
    from serving.shop.fact_store import open_fact_store
    from serving.stores.online_features import open_store

    settings = Settings.from_env()
    store, facts = open_store(settings.online_store_url), open_fact_store(settings.fact_store_url)
    return BundleModel(open_recommender(Path(path), store, None, facts, rules=settings.rules_path))
