"""KServe adapter `ranker`: feature tensors in -> one purchase probability per row out."""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model
from kserve.errors import InvalidInput

from feature_repo.schema import CATEGORICAL, DENSE_NAMES, LIMIT, is_within_limit
from serving.checkout.checkout import Checkout
from serving.errors import Overloaded
from serving.schemas import PRIORITIES, read_call

MAX_ROWS = 4_096  # rows of one ranker call, and elements of one tensor's first dimension anywhere
MAX_CALL_BYTES = MAX_ROWS * (4 * len(DENSE_NAMES) + 8 * len(CATEGORICAL)) + 4_096  # and its names
_KINDS = {"FP32": "iuf", "INT32": "iu", "INT64": "iu", "BYTES": "OUS"}  # numpy kinds that JSON data may have


class Predictor(Model):
    """The ranker on its own, over the Open Inference Protocol, for a transformer elsewhere."""

    def __init__(self, checkout: Checkout) -> None:
        """Take what holds the bundle: when it is swapped, this model's ranker is, too."""
        super().__init__("ranker")
        self._checkout = checkout
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return the metadata of the inputs for /v2/models/ranker."""
        return [
            {"name": "dense", "datatype": "FP32", "shape": [-1, len(DENSE_NAMES)]},
            {"name": "categorical", "datatype": "INT64", "shape": [-1, len(CATEGORICAL)]},
        ]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return the metadata of the outputs for /v2/models/ranker."""
        return [{"name": "score", "datatype": "FP32", "shape": [-1]}]

    async def predict(
        self,
        payload: InferRequest | Mapping[str, Any],
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> InferResponse:
        """Return the scores of the rows in `dense` and `categorical`, and the bundle they are of.

        Raises:
            InvalidInput: naming the input that is wrong.
            Overloaded: the endpoint refuses checkouts, so it ranks no rows of others.
        """
        if not isinstance(payload, InferRequest):
            raise InvalidInput("the ranker takes tensors: POST /v2/models/ranker/infer, or gRPC ModelInfer")
        tensors = read_tensors(payload, {"dense": ("FP32",), "categorical": ("INT64",)})
        dense = _rows(tensors, "dense", len(DENSE_NAMES))
        categorical = _rows(tensors, "categorical", len(CATEGORICAL))
        if len(dense) != len(categorical):
            raise InvalidInput(f"dense has {len(dense)} rows and categorical {len(categorical)}")
        if not is_within_limit(dense):
            raise InvalidInput(f"dense holds a number that is not from -{LIMIT:g} to {LIMIT:g}")
        # After the checkouts of this endpoint: rows of others must not take the time of shoppers.
        # They count from here: the queue of checkouts decides, not the time that their tensors took to read.
        now, behind = time.perf_counter(), {**(headers or {}), "x-priority": PRIORITIES[1]}
        call = read_call(behind, self.name, self._checkout.service.limit_s, now)
        if not self._checkout.service.admission.admits(call, now):
            raise Overloaded("the endpoint has more checkouts than it can answer in time: ask it later")
        recommender = self._checkout.recommender
        levels = np.array(recommender.bundle.cardinality, np.int64)
        # A code outside its table would fail the whole batch, or wrap around to another row.
        if ((categorical < 0) | (categorical >= levels)).any():
            raise InvalidInput(f"categorical codes go from 0 to below {levels.tolist()}")
        scores = recommender.rank(dense, categorical) if len(dense) else np.empty(0, np.float32)
        columns = {"score": ("FP32", scores.tolist())}
        return respond(payload, self.name, payload.id, columns, {"bundle_id": recommender.bundle.bundle_id})


def read_tensors(request: InferRequest, expected: Mapping[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
    """Return the request's input tensors by name, each checked for datatype, shape and content.

    Args:
        request: the decoded request, from REST or gRPC.
        expected: for each input that may come, the datatypes it may have.

    Raises:
        InvalidInput: naming the expected input that is wrong, never echoing the input.
    """
    tensors: dict[str, np.ndarray] = {}
    for tensor in request.inputs:
        if tensor.name not in expected:
            raise InvalidInput(f"unknown input; this model has {', '.join(expected)}")
        if tensor.name in tensors:
            raise InvalidInput(f"input {tensor.name} comes twice")
        if tensor.datatype not in expected[tensor.name]:
            raise InvalidInput(f"input {tensor.name} must be {' or '.join(expected[tensor.name])}")
        tensors[tensor.name] = _values(tensor)
    return tensors


def wanted_outputs(request: InferRequest, known: Iterable[str]) -> list[str]:
    """Return the names of the outputs that are asked for, each once: all, if none is named.

    Raises:
        InvalidInput: one of them is unknown.
    """
    names = list(known)
    wanted = [output.name for output in request.request_outputs or ()] or names
    if not set(wanted) <= set(names):
        raise InvalidInput(f"unknown output; this model has {', '.join(names)}")
    return list(dict.fromkeys(wanted))


def respond(
    request: InferRequest,
    model: str,
    response_id: str | None,
    columns: Mapping[str, tuple[str, list[Any]]],
    parameters: dict[str, str | bool | int],
) -> InferResponse:
    """Return columns (name -> datatype, values) as output tensors: all, or those that were asked for.

    Raises:
        InvalidInput: one that is asked for is unknown.
    """
    return InferResponse(
        response_id=response_id or uuid.uuid4().hex,
        model_name=model,
        infer_outputs=[
            InferOutput(name, [len(columns[name][1])], columns[name][0], columns[name][1])
            for name in wanted_outputs(request, columns)
        ],
        parameters=parameters,
        use_binary_outputs=bool(request.from_grpc and request.use_binary_outputs),
    )


def _rows(tensors: Mapping[str, np.ndarray], name: str, width: int) -> np.ndarray:
    if name not in tensors:
        raise InvalidInput(f"input {name} is missing: [n, {width}]")
    if tensors[name].ndim != 2 or tensors[name].shape[1] != width:
        raise InvalidInput(f"input {name} must have the shape [n, {width}]")
    return tensors[name]


def _values(tensor: InferInput) -> np.ndarray:
    shape = tensor.shape
    if not 1 <= len(shape) <= 2 or any(not 0 <= side <= MAX_ROWS for side in shape):
        raise InvalidInput(f"input {tensor.name} has a shape that this model does not take")
    try:
        # What JSON brings may be of any type; numpy would turn "7", 2.9 and true into numbers.
        if tensor.data and np.asarray(tensor.data).dtype.kind not in _KINDS[tensor.datatype]:
            raise InvalidInput(f"input {tensor.name} holds data that is not {tensor.datatype}")
        with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which the model refuses
            values: np.ndarray = tensor.as_numpy()
    except InvalidInput:
        raise
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise InvalidInput(f"input {tensor.name}: shape and data do not fit together") from error
    return values
