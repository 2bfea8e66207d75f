"""The Open Inference Protocol, version 2, over REST, with binary tensors and classification.

KServe, Triton and their clients use it.
"""

import binascii
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx import __version__
from phalanx.export.metadata import INPUT_NAMES, LOGITS
from phalanx.serve.api_error import ApiError
from phalanx.serve.arrays import flatten, to_bytes, to_floats
from phalanx.serve.backend import SHAPES
from phalanx.serve.batching import Outputs, Rows
from phalanx.serve.images import ImageFile
from phalanx.serve.service import FILES_INPUT, VERSION, Service, parse_object, to_json_response

_EXTENSIONS = ("binary_tensor_data", "classification")
_HEADER_LENGTH = "inference-header-content-length"
_DATATYPES = {"tensor": "FP32", "image": "UINT8"}
_KINDS = {name: kind for kind, name in INPUT_NAMES.items()}
_LENGTH = struct.Struct("<I")
_MAX_DIMENSIONS = 8
_MAX_SIDE = 2**31 - 1
_MAX_DIGITS = 15


@dataclass(frozen=True)
class _RequestedOutput:
    """An output that a client requests, and its form."""

    name: str
    binary: bool
    classes: int = 0  # how many to name, by the classification extension; 0: numbers


@dataclass(frozen=True)
class _InferRequest:
    """A parsed request."""

    rows: Rows | list[ImageFile]
    outputs: tuple[_RequestedOutput, ...]
    id: str | None


class OpenInferenceApi:
    """The handlers of this protocol."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
        ]
        for place in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            self.routes += [
                Route(f"{place}/infer", self._infer, methods=["POST"]),
                Route(f"{place}/ready", self._model_ready),
                Route(place, self._model),
            ]

    async def _server(self, request: Request) -> Response:
        return to_json_response(
            {"name": "phalanx", "version": __version__, "extensions": _EXTENSIONS}
        )

    async def _live(self, request: Request) -> Response:
        return to_json_response({"live": True})

    async def _ready(self, request: Request) -> Response:
        return to_json_response({"ready": self._service.ready}, 200 if self._service.ready else 503)

    async def _model_ready(self, request: Request) -> Response:
        self._service.refuse_other_model(request)
        ready = self._service.ready
        return to_json_response({"name": self._service.name, "ready": ready}, 200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        service = self._service
        service.refuse_other_model(request)
        size = service.metadata.preprocessing.image_size
        inputs = [
            {
                "name": INPUT_NAMES[kind],
                "datatype": _DATATYPES[kind],
                "shape": [-1, *SHAPES[kind](size)],
            }
            for kind in service.backend.input_kinds
        ]
        inputs.append({"name": FILES_INPUT, "datatype": "BYTES", "shape": [-1]})
        outputs = [
            {
                "name": name,
                "datatype": "FP32",
                "shape": [-1, len(service.metadata.classes)] if name == LOGITS else [-1, -1, -1],
            }
            for name in service.outputs
        ]
        return to_json_response(
            {
                "name": service.name,
                "versions": [VERSION],
                "platform": f"phalanx_{service.backend.runtime.partition(' ')[0]}",
                "inputs": inputs,
                "outputs": outputs,
            }
        )

    async def _infer(self, request: Request) -> Response:
        service = self._service
        service.refuse_other_model(request)
        length = request.headers.get(_HEADER_LENGTH)
        asked = await service.read_body(
            request,
            lambda body: self._read_request(*_split_body(body, length)),
            lambda body: len(_split_body(body, length)[0]),
        )
        return self._answer(asked, await service.classify(request, asked.rows))

    # --- reading ---

    def _read_request(self, header: memoryview, binary: memoryview) -> _InferRequest:
        found = parse_object(header)
        inputs = found.get("inputs")
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise ApiError(
                400, f'"inputs" must have exactly one input, one of {self._list_inputs()}'
            )
        identity = found.get("id")
        if identity is not None and not isinstance(identity, str):
            raise ApiError(400, '"id" must be a string')
        rows = self._read_input(inputs[0], binary)
        return _InferRequest(rows, self._read_outputs(found), identity)

    def _list_inputs(self) -> str:
        own = [INPUT_NAMES[kind] for kind in self._service.backend.input_kinds]
        return ", ".join((*own, FILES_INPUT))

    def _read_input(self, tensor: dict[str, Any], binary: memoryview) -> Rows | list[ImageFile]:
        name = tensor.get("name")
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if name != FILES_INPUT and kind not in self._service.backend.input_kinds:
            known = self._list_inputs()
            raise ApiError(400, f"no input is called {name!r}"[:100] + f"; there is {known}")
        shape = _read_shape(tensor, str(name))
        self._service.refuse_image_count(shape[0])
        data = _find_data(tensor, str(name), binary)
        if kind is None:
            _refuse_datatype(tensor, str(name), "BYTES")
            if shape[1:] not in ((), (1,)):
                raise ApiError(400, f"{name}: has shape {list(shape)}, expected [-1]")
            return _read_files(data, shape[0])
        _refuse_datatype(tensor, str(name), _DATATYPES[kind])
        size = self._service.metadata.preprocessing.image_size
        wanted = SHAPES[kind](size)
        if shape[1:] != wanted:
            raise ApiError(400, f"{name}: has shape {list(shape)}, expected {[-1, *wanted]}")
        return _read_rows(data, kind, shape, str(name))

    def _read_outputs(self, found: dict[str, Any]) -> tuple[_RequestedOutput, ...]:
        """The requested outputs; all of them if none is named."""
        parameters = _read_parameters(found, "the request")
        binary = parameters.get("binary_data_output", False) is True
        outputs = found.get("outputs")
        if outputs is None or outputs == []:
            return tuple(_RequestedOutput(name, binary) for name in self._service.outputs)
        if not isinstance(outputs, list) or len(outputs) > len(self._service.outputs):
            raise ApiError(400, f'"outputs" must be a list of {", ".join(self._service.outputs)}')
        return tuple(self._read_output(one, binary) for one in outputs)

    def _read_output(self, tensor: Any, binary: bool) -> _RequestedOutput:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if name not in self._service.outputs:
            known = ", ".join(self._service.outputs)
            raise ApiError(400, f"no output is called {name!r}"[:100] + f"; there is {known}")
        parameters = _read_parameters(tensor, name)
        classes = parameters.get("classification", 0)
        if type(classes) is not int or classes < 0 or (classes and name != LOGITS):
            raise ApiError(400, f"{name}: classification must be a number of classes, of {LOGITS}")
        wants_binary = parameters.get("binary_data", binary) is True
        return _RequestedOutput(
            name, wants_binary, min(classes, len(self._service.metadata.classes))
        )

    # --- responding ---

    def _answer(self, asked: _InferRequest, outputs: Outputs) -> Response:
        described: list[dict[str, Any]] = []
        blocks: list[bytes] = []
        for one in asked.outputs:
            values, datatype = outputs[one.name], "FP32"
            if one.classes:
                values, datatype = self._name_classes(values, one.classes), "BYTES"
            facts: dict[str, Any] = {
                "name": one.name,
                "datatype": datatype,
                "shape": list(values.shape),
            }
            if one.binary:
                blocks.append(_to_binary(values))
                facts["parameters"] = {"binary_data_size": len(blocks[-1])}
            else:
                flat = values.reshape(-1)
                facts["data"] = flat.tolist() if datatype == "BYTES" else np.ascontiguousarray(flat)
            described.append(facts)
        answer: dict[str, Any] = {
            "model_name": self._service.name,
            "model_version": VERSION,
            "outputs": described,
        }
        if asked.id is not None:
            answer["id"] = asked.id
        if not blocks:
            return to_json_response(answer)
        header = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(
            b"".join((header, *blocks)),
            media_type="application/octet-stream",
            headers={"Inference-Header-Content-Length": str(len(header))},
        )

    def _name_classes(self, logits: NDArray[Any], count: int) -> NDArray[Any]:
        """The best classes of each row as Triton writes them: "score:number:name"."""
        names = self._service.metadata.classes
        best = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        texts = [
            [f"{row[at]:f}:{at}:{names[at]}" for at in ranked]
            for row, ranked in zip(logits, best, strict=True)
        ]
        return np.array(texts, dtype=object)


def _split_body(body: bytes, length: str | None) -> tuple[memoryview, memoryview]:
    """The JSON, and the binary data after it."""
    view = memoryview(body)
    if length is None:
        return view, view[len(body) :]
    is_number = length.isascii() and length.isdecimal() and len(length) <= _MAX_DIGITS
    if not is_number or int(length) > len(body):
        raise ApiError(
            400,
            f"Inference-Header-Content-Length: expected a number up to the {len(body):,} bytes of "
            f"the body, got {length[:60]!r}",
        )
    return view[: int(length)], view[int(length) :]


def _read_parameters(found: dict[str, Any], what: str) -> dict[str, Any]:
    parameters = found.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ApiError(400, f"{what}: parameters must be an object")
    if any(key.startswith("shared_memory") for key in parameters):
        raise ApiError(400, f"{what}: shared memory is not supported; send the data")
    return parameters


def _read_shape(tensor: dict[str, Any], name: str) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= _MAX_DIMENSIONS
        or any(type(size) is not int or not 0 <= size <= _MAX_SIDE for size in shape)
    ):
        wanted = f"1 to {_MAX_DIMENSIONS} whole numbers from 0 to {_MAX_SIDE:,}"
        raise ApiError(400, f"{name}: shape must be a list of {wanted}, found {shape!r}"[:200])
    return tuple(shape)


def _refuse_datatype(tensor: dict[str, Any], name: str, expected: str) -> None:
    found = tensor.get("datatype")
    if found != expected:
        raise ApiError(400, f"{name}: datatype must be {expected}, found {found!r}"[:200])


def _find_data(tensor: dict[str, Any], name: str, binary: memoryview) -> memoryview | list[Any]:
    """The data of the input: binary after the JSON, or within it."""
    size = _read_parameters(tensor, name).get("binary_data_size")
    if size is None:
        if len(binary):
            raise ApiError(400, f"{name}: binary data was sent without a binary_data_size")
        data = tensor.get("data")
        if not isinstance(data, list):
            raise ApiError(400, f'{name}: "data" must be a list, or binary_data_size be given')
        return data
    if type(size) is not int or size != len(binary):
        raise ApiError(
            400,
            f"{name}: binary_data_size is {size!r}"[:100]
            + f", and {len(binary):,} bytes follow the JSON",
        )
    return binary


def _read_rows(data: memoryview | list[Any], kind: str, shape: tuple[int, ...], name: str) -> Rows:
    dtype = np.dtype("<f4" if kind == "tensor" else "u1")
    if isinstance(data, memoryview):
        expected = prod(shape) * dtype.itemsize
        if len(data) != expected:
            raise ApiError(
                400, f"{name}: {list(shape)} needs {expected:,} bytes, {len(data):,} were sent"
            )
        # the data may begin at any byte, and not every library reads unaligned arrays
        rows: Rows = np.require(np.frombuffer(data, dtype).reshape(shape), requirements="A")
        return rows
    flat = data
    if data and isinstance(data[0], list):
        flat = flatten([data], shape, name)
    if len(flat) != prod(shape):
        raise ApiError(
            400, f"{name}: {list(shape)} needs {prod(shape):,} numbers, {len(flat):,} were sent"
        )
    return (to_floats if kind == "tensor" else to_bytes)(flat, name).reshape(shape)


def _read_files(data: memoryview | list[Any], count: int) -> list[ImageFile]:
    """Image files: binary, each after its length, or as base64 in JSON."""
    found = _split_elements(data) if isinstance(data, memoryview) else _decode_elements(data)
    if len(found) != count:
        raise ApiError(
            400, f"{FILES_INPUT}: its shape needs {count:,} files, {len(found):,} were sent"
        )
    return [ImageFile(f"{FILES_INPUT} {at}", one) for at, one in enumerate(found)]


def _split_elements(data: memoryview) -> list[bytes]:
    elements, at = list[bytes](), 0
    while at < len(data):
        begin = at + _LENGTH.size
        size = _LENGTH.unpack_from(data, at)[0] if begin <= len(data) else len(data)
        if begin + size > len(data):
            raise ApiError(400, f"{FILES_INPUT}: element {len(elements)} is cut off")
        elements.append(bytes(data[begin : begin + size]))
        at = begin + size
    return elements


def _decode_elements(data: list[Any]) -> list[bytes]:
    elements = []
    for at, text in enumerate(data):
        if not isinstance(text, str):
            raise ApiError(400, f"{FILES_INPUT}: element {at} must be a string in base64")
        try:
            elements.append(binascii.a2b_base64(text, strict_mode=True))
        except ValueError as error:
            raise ApiError(400, f"{FILES_INPUT}: element {at} is not base64 ({error})") from None
    return elements


def _to_binary(values: NDArray[Any]) -> bytes:
    """An array in the format of the binary extension."""
    if values.dtype != object:
        return np.ascontiguousarray(values, "<f4").tobytes()
    texts = [str(text).encode() for text in values.reshape(-1)]
    return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
