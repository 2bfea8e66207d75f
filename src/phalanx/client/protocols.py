"""Three protocols: our own /predict, TensorFlow Serving's REST, Open Inference v2."""

import json
import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from phalanx.client.connection import Reply, RequestFailed

_TOP = 5
_BOUNDARY = "phalanx-8f1f5d0c7e3b4c0a9f5c2d6e1b7a4f38"
_FILES_INPUT = "image_bytes"


@dataclass(frozen=True)
class ServedModel:
    """The model of a server: its name, and its classes and weights if the server gives them."""

    name: str
    classes: tuple[str, ...] = ()
    weights: str = ""  # "trained", "file" or "random"


@dataclass(frozen=True)
class ImageAnswer:
    """The likeliest classes of an image, or what is wrong with it."""

    guesses: tuple[tuple[str, float], ...] = ()  # class and probability, the likeliest first
    problem: str = ""


@dataclass(frozen=True)
class _EncodedRequest:
    """The body of a request, and its headers."""

    path: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class _ImageProtocol:
    """How requests with image files are encoded, and answers decoded."""

    encode: Callable[[ServedModel, Sequence[tuple[str, bytes]]], _EncodedRequest]  # names and files
    decode: Callable[[ServedModel, Reply], list[ImageAnswer]]  # of a reply with status 200


# --- our own ---


def _encode_predict(model: ServedModel, files: Sequence[tuple[str, bytes]]) -> _EncodedRequest:
    parts = []
    for name, data in files:
        # as browsers write it: what would end the name or the line is escaped
        escaped = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        head = (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="{escaped}"'
            "\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        parts += [head.encode(errors="replace"), data, b"\r\n"]
    body = b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])
    return _EncodedRequest(
        "/predict", body, {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    )


def _decode_predict(_model: ServedModel, reply: Reply) -> list[ImageAnswer]:
    answers = []
    for one in reply.read_json()["predictions"]:
        guesses = tuple((str(g["class"]), float(g["probability"])) for g in one["guesses"])
        answers.append(ImageAnswer(guesses, str(one.get("problem", ""))))
    return answers


# --- TensorFlow Serving ---


def _encode_tensorflow(model: ServedModel, files: Sequence[tuple[str, bytes]]) -> _EncodedRequest:
    instances = [{"b64": b64encode(data).decode()} for _, data in files]
    body = json.dumps({"instances": instances}).encode()
    path = f"/v1/models/{quote(model.name, safe='')}:predict"
    return _EncodedRequest(path, body, {"Content-Type": "application/json"})


def _decode_tensorflow(model: ServedModel, reply: Reply) -> list[ImageAnswer]:
    found = reply.read_json()["predictions"]
    # with several outputs, an instance is an object of them
    rows = [one["logits"] if isinstance(one, dict) else one for one in found]
    return _decode_logits(model, np.array(rows, np.float64))


# --- Open Inference Protocol v2, with the binary tensor extension ---


def _encode_v2(model: ServedModel, files: Sequence[tuple[str, bytes]]) -> _EncodedRequest:
    tensor = b"".join(len(data).to_bytes(4, "little") + data for _, data in files)
    given = {
        "name": _FILES_INPUT,
        "datatype": "BYTES",
        "shape": [len(files)],
        "parameters": {"binary_data_size": len(tensor)},
    }
    wanted = {"name": "logits", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
    return _EncodedRequest(
        f"/v2/models/{quote(model.name, safe='')}/infer",
        head + tensor,
        {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        },
    )


def _decode_v2(model: ServedModel, reply: Reply) -> list[ImageAnswer]:
    length = reply.headers.get("inference-header-content-length")
    head = json.loads(reply.body if length is None else reply.body[: int(length)])
    binary = memoryview(reply.body)[int(length) :] if length is not None else memoryview(b"")
    for output in head["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if output["name"] == "logits":
            values = output["data"] if size is None else np.frombuffer(binary[:size], "<f4")
            return _decode_logits(model, np.array(values, np.float64).reshape(output["shape"]))
        binary = binary[size or 0 :]
    raise KeyError("logits")


def _decode_logits(model: ServedModel, logits: NDArray[np.float64]) -> list[ImageAnswer]:
    """The likeliest classes of each row."""
    classes = logits.shape[1]
    names = model.classes or tuple(f"class {at}" for at in range(classes))
    if len(names) != classes:
        raise RequestFailed(f"{classes} logits for {len(names)} classes")
    answers = []
    for row in logits:
        powers = np.exp(row - row.max())
        shares = powers / powers.sum()
        best = np.argsort(-shares, kind="stable")[:_TOP]
        answers.append(ImageAnswer(tuple((names[at], float(shares[at])) for at in best)))
    return answers


PROTOCOLS = {
    "predict": _ImageProtocol(_encode_predict, _decode_predict),
    "tensorflow": _ImageProtocol(_encode_tensorflow, _decode_tensorflow),
    "v2": _ImageProtocol(_encode_v2, _decode_v2),
}


def decode_answers(
    protocol: _ImageProtocol, model: ServedModel, reply: Reply, *, images: int
) -> list[ImageAnswer]:
    """An answer for each image of a request; RequestFailed if the reply has another form."""
    try:
        answers = protocol.decode(model, reply)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RequestFailed(
            f"an answer of another form ({type(error).__name__}: {str(error)[:60]})"
        ) from None
    if len(answers) != images:
        raise RequestFailed(f"{len(answers)} answers to {images} images")
    wrong = [a for a in answers if not a.problem and not a.guesses]
    if wrong or any(not math.isfinite(share) for a in answers for _, share in a.guesses):
        raise RequestFailed("an answer without probabilities")
    return answers
