"""TensorFlow Serving's REST: /v1/models/NAME, its metadata, and :predict."""

import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.export.metadata import INPUT_NAMES, LOGITS
from phalanx.serve.api_error import ApiError
from phalanx.serve.arrays import flatten, to_bytes, to_floats
from phalanx.serve.backend import SHAPES
from phalanx.serve.batching import Rows
from phalanx.serve.images import ImageFile
from phalanx.serve.service import FILES_INPUT, VERSION, Service, parse_object, to_json_response

_SIGNATURE = "serving_default"
_NAME, _VERSION = "{name:before_verb}", "{version:before_verb}"
_TYPES = {"tensor": "DT_FLOAT", "image": "DT_UINT8"}


class _BeforeVerb(StringConvertor):
    """A path segment that may be followed by a verb such as :predict."""

    regex = "[^/:]+"


register_url_convertor("before_verb", _BeforeVerb())


class TensorflowApi:
    """The handlers of TensorFlow Serving's REST interface."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = []
        for place in (f"/v1/models/{_NAME}", f"/v1/models/{_NAME}/versions/{_VERSION}"):
            self.routes += [
                Route(f"{place}:predict", self._predict, methods=["POST"]),
                Route(f"{place}/metadata", self._metadata),
                Route(place, self._status),
            ]

    async def _status(self, request: Request) -> Response:
        self._service.refuse_other_model(request)
        state = "AVAILABLE" if self._service.ready else "UNLOADING"
        status = {"error_code": "OK", "error_message": ""}
        return to_json_response(
            {"model_version_status": [{"version": VERSION, "state": state, "status": status}]}
        )

    async def _metadata(self, request: Request) -> Response:
        service = self._service
        service.refuse_other_model(request)
        metadata, size = service.metadata, service.metadata.preprocessing.image_size
        inputs = {
            INPUT_NAMES[kind]: _describe_tensor(INPUT_NAMES[kind], _TYPES[kind], SHAPES[kind](size))
            for kind in service.backend.input_kinds[:1]
        }
        signature = {
            "inputs": inputs,
            "outputs": {LOGITS: _describe_tensor(LOGITS, "DT_FLOAT", (len(metadata.classes),))},
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }
        return to_json_response(
            {
                "model_spec": {"name": service.name, "signature_name": "", "version": VERSION},
                "metadata": {"signature_def": {"signature_def": {_SIGNATURE: signature}}},
            }
        )

    async def _predict(self, request: Request) -> Response:
        service = self._service
        service.refuse_other_model(request)
        found, by_rows = await service.read_body(request, self._read_request, len)
        outputs = await service.classify(request, found)
        return to_json_response({"predictions" if by_rows else "outputs": outputs[LOGITS]})

    def _read_request(self, data: bytes) -> tuple[Rows | list[ImageFile], bool]:
        """The images of a request, and whether they were sent in rows."""
        body = parse_object(data)
        signature = body.get("signature_name", _SIGNATURE)
        if signature not in (_SIGNATURE, ""):
            raise ApiError(400, f"signature_name {signature!r}"[:100] + f" is not {_SIGNATURE}")
        if ("instances" in body) == ("inputs" in body):
            raise ApiError(400, 'the body needs either "instances" or "inputs"')
        by_rows = "instances" in body
        values = body["instances"] if by_rows else body["inputs"]
        if not by_rows and isinstance(values, dict) and "b64" not in values:
            values = self._take_only_value(values, "inputs")
        if not by_rows and isinstance(values, dict):
            values = [values]
        if not isinstance(values, list):
            raise ApiError(400, f"{'instances' if by_rows else 'inputs'}: expected a list")
        self._service.refuse_image_count(len(values))
        if by_rows:
            values = [
                self._take_only_value(v, f"instance {at}")
                if isinstance(v, dict) and "b64" not in v
                else v
                for at, v in enumerate(values)
            ]
        return self._read_values(values), by_rows

    def _take_only_value(self, given: dict[str, Any], what: str) -> Any:
        """The value of the input, by its name."""
        known = {*(INPUT_NAMES[kind] for kind in INPUT_NAMES), FILES_INPUT}
        if len(given) != 1 or next(iter(given)) not in known:
            own = INPUT_NAMES[self._service.backend.input_kinds[0]]
            names = ", ".join(map(repr, given))[:100] or "none"
            raise ApiError(400, f"{what}: expected the one input {own!r}, found {names}")
        return next(iter(given.values()))

    def _read_values(self, values: list[Any]) -> Rows | list[ImageFile]:
        """Rows for the model, or files: all are of the kind of the first."""
        if isinstance(values[0], dict):
            return [_read_file(value, at) for at, value in enumerate(values)]
        size = self._service.metadata.preprocessing.image_size
        shape = _find_shape(values[0])
        kinds = [kind for kind in SHAPES if SHAPES[kind](size) == shape]
        if not kinds:
            raise ApiError(
                400,
                f"instance 0 has shape {list(shape)}; expected [{size}, {size}, 3] of pixels from "
                f"0 to 255, [3, {size}, {size}] of normalised ones, or "
                '{"b64": "..."} with an image file',
            )
        flat = flatten(values, shape, "instances")
        return self._fit_rows(kinds[0], flat, (len(values), *shape))

    def _fit_rows(self, kind: str, flat: list[Any], shape: Sequence[int]) -> Rows:
        """The numbers as rows of a kind that the model accepts."""
        taken = self._service.backend.input_kinds
        if kind == "tensor":
            if kind not in taken:
                raise ApiError(
                    400,
                    "this model normalises images itself: send pixels from 0 to 255 as "
                    f"{list(SHAPES['image'](shape[-1]))}",
                )
            return to_floats(flat, "instances").reshape(shape)
        pixels = to_bytes(flat, "instances").reshape(shape)
        if kind in taken:
            return pixels
        size = shape[1]
        rows: NDArray[np.float32] = np.empty((len(pixels), 3, size, size), np.float32)
        for row, image in zip(rows, pixels, strict=True):
            self._service.preprocessor.normaliser.write(image, row)
        return rows


def _find_shape(value: Any) -> tuple[int, ...]:
    """The shape of nested lists, from the first element of each."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < 8:
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _read_file(value: Any, at: int) -> ImageFile:
    """An image file in base64."""
    text = value.get("b64") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(text, str):
        raise ApiError(400, f'instance {at}: expected {{"b64": "..."}} like the first one')
    try:
        return ImageFile(f"instance {at}", binascii.a2b_base64(text, strict_mode=True))
    except ValueError as error:
        raise ApiError(400, f"instance {at}: is not base64 ({error})") from None


def _describe_tensor(name: str, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in (-1, *shape)]
    return {
        "dtype": dtype,
        "tensor_shape": {"dim": sizes, "unknown_rank": False},
        "name": f"{name}:0",
    }
