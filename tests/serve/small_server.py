"""A tiny model in an ONNX file, and real servers of it."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.catalog.variant import METADATA_KEY
from phalanx.data.formats.decode import encode_png
from phalanx.export.metadata import ModelMetadata

SIZE, CLASSES, CHANNELS = 32, 7, 4
NAME = "tiny"
START_S = 60


def make_metadata(**changes: Any) -> ModelMetadata:
    preprocessing = Preprocessing(
        image_size=SIZE,
        augment="resized-crop",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    facts = {
        "name": NAME,
        "model": "resnet8",
        "classes": tuple(f"class {number}" for number in range(CLASSES)),
        "preprocessing": preprocessing,
        "preprocessing_fingerprint": preprocessing.fingerprint,
        "has_activation_map": True,
    }
    return ModelMetadata(**(facts | changes))


def write_model(
    path: Path,
    *,
    metadata: str | None = None,
    classes: int = CLASSES,
    size: int = SIZE,
    work: int = 0,
    takes_pixels: bool = False,
    factor: float = 1.0,
) -> Path:
    """A convolution, a mean and a matrix, with the class activation map of the likeliest class.

    work: sides of a matrix that is multiplied with itself for each batch, which takes time. It
    fails for an image with a value of a million. takes_pixels: bytes, of 0 to 255. factor: of the
    matrix.
    """
    draw = np.random.default_rng(0)
    kernels = draw.normal(size=(CHANNELS, 3, 3, 3)).astype(np.float32)
    weights = (factor * draw.normal(size=(classes, CHANNELS))).astype(np.float32)
    values = {"kernels": kernels, "weights": weights, "columns": np.array([-1, CHANNELS, 1, 1])}
    values |= {"flat": np.array([0, -1]), "channel": np.array([1])}
    nodes = [
        helper.make_node("Conv", ["input", "kernels"], ["raw"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["raw"], ["features"]),
        helper.make_node("GlobalAveragePool", ["features"], ["mean"]),
        helper.make_node("Reshape", ["mean", "flat"], ["vector"]),
        helper.make_node("Gemm", ["vector", "weights"], ["logits"], transB=1),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["weights", "best"], ["own"]),
        helper.make_node("Reshape", ["own", "columns"], ["factors"]),
        helper.make_node("Mul", ["features", "factors"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "channel"], ["activation_map"], keepdims=0),
    ]
    if work:
        values |= {
            "most": np.array(1e5, np.float32),
            "row": np.zeros(1, np.float32),
            "sides": np.array([work, work]),
        }
        nodes[4].output[0] = "early"
        nodes[5:5] = [
            helper.make_node("ReduceMax", ["input"], ["peak"], keepdims=0),
            helper.make_node("Div", ["peak", "most"], ["scaled"]),
            helper.make_node("Cast", ["scaled"], ["place"], to=TensorProto.INT64),
            helper.make_node("Gather", ["row", "place"], ["zero"]),  # fails where there is none
            helper.make_node("Expand", ["zero", "sides"], ["matrix"]),
            helper.make_node("MatMul", ["matrix", "matrix"], ["square"]),
            helper.make_node("ReduceMax", ["square"], ["nothing"], keepdims=0),
            helper.make_node("Add", ["early", "nothing"], ["logits"]),
        ]
    given = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, size, size])
    if takes_pixels:
        given = helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", size, size, 3])
        nodes[:0] = [
            helper.make_node("Cast", ["image"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["floats"], ["input"], perm=[0, 3, 1, 2]),
        ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [given],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes]),
            helper.make_tensor_value_info("activation_map", TensorProto.FLOAT, ["N", None, None]),
        ],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if metadata is None:
        kind = "image" if takes_pixels else "tensor"
        metadata = make_metadata(input=kind).model_dump_json()
    text = metadata
    if text:
        helper.set_model_props(model, {METADATA_KEY: text})
    onnx.save(model, path)
    return path


def make_png(seed: int = 0, shape: tuple[int, int] = (40, 50)) -> bytes:
    """Noise as a PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
    return encode_png(pixels)


def make_tensor(images: int, seed: int = 0, size: int = SIZE) -> np.ndarray:
    """Normalised images."""
    return np.random.default_rng(seed).normal(size=(images, 3, size, size)).astype(np.float32)


@dataclass
class Answered:
    """What a server said."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RunningServer:
    """A server process that is ready."""

    process: subprocess.Popen[str]
    line: str  # that it printed
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        *,
        method: str | None = None,
    ) -> Answered:
        """Send one request on a connection of its own; a dict is sent as JSON."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), path, data, headers or {}
            )
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answered(answer.status, found, answer.read())
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


def serve_command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "phalanx", "serve", *map(str, words)]


@contextmanager
def open_server(
    *words: str | Path, environment: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """A block with a server on a free port; words: of its command line."""
    process = subprocess.Popen(
        serve_command(*words, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline() if select([process.stdout], [], [], START_S)[0] else ""
        if not line.startswith("serving "):
            process.send_signal(signal.SIGABRT)  # says where it is
            raise AssertionError(f"no server: {line}{process.communicate(timeout=START_S)[1]}")
        port = int(line.partition(" (")[0].rstrip("/").rpartition(":")[2])
        yield RunningServer(process, line, port)
    finally:
        with suppress(OSError):
            process.kill()
        process.communicate()


def infer_body(
    tensor: np.ndarray, *, outputs: list[str] | None = None
) -> tuple[bytes, dict[str, str]]:
    """A request of the Open Inference Protocol with a binary tensor, and its headers."""
    asked: dict[str, Any] = {
        "inputs": [
            {
                "name": "input",
                "datatype": "FP32",
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": tensor.nbytes},
            }
        ]
    }
    if outputs is not None:
        asked["outputs"] = [{"name": name} for name in outputs]
    head = json.dumps(asked).encode()
    return head + tensor.tobytes(), {"Inference-Header-Content-Length": str(len(head))}
