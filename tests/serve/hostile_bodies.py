"""Bodies that a JSON or tensor route should refuse: what is wrong with each is in its name."""

import base64
import gzip
import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostile_images import bomb, fuzzed, make_photo

Draw = random.Random
Body = tuple[str, dict[str, str], bytes]  # path, headers, body
JSON = {"Content-Type": "application/json"}
BINARY = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Target:
    """The model under attack, as an honest client knows it."""

    name: str
    input_name: str
    shape: tuple[int, ...]  # of one image, without the batch

    @property
    def v1(self) -> str:
        """Where TensorFlow Serving's requests go."""
        return f"/v1/models/{self.name}:predict"

    @property
    def v2(self) -> str:
        """Where those of the Open Inference Protocol go."""
        return f"/v2/models/{self.name}/infer"

    def zeros(self, count: int = 1) -> np.ndarray:
        """A right input."""
        return np.zeros((count, *self.shape), np.float32)


def infer_body(target: Target, draw: Draw | None = None, **change: Any) -> Body:
    """A right binary request, but for the fields of its input that are changed."""
    data = target.zeros().tobytes()
    tensor = {
        "name": target.input_name,
        "shape": [1, *target.shape],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor | change]}).encode()
    return target.v2, {BINARY: str(len(head))}, head + data


def wrong_tensor(target: Target, draw: Draw) -> Body:
    """dtype, shape, name or size that do not fit."""
    size = target.zeros().nbytes
    changes: tuple[dict[str, Any], ...] = (
        *({"datatype": word} for word in ("FP64", "INT8", "BYTES", "BOOL", "fp32", "", None, 7)),
        *({"shape": shape} for shape in wrong_shapes(target)),
        *({"name": word} for word in ("", "output", "input\0", "ï" * 300, None, 3, ["input"])),
        *({"parameters": {"binary_data_size": n}} for n in (0, 1, -1, size + 4, 2**63, 1.5, "x")),
        {"parameters": None},
        {"parameters": []},
        {"data": [1.0]},
    )
    return infer_body(target, **draw.choice(changes))


def wrong_shapes(target: Target) -> list[Any]:
    """Shapes that are no shape of this input."""
    shape = list(target.shape)
    return [
        [], [1], shape, [0, *shape], [-1, *shape], [2, *shape], [1, 1, *shape],
        [1, *shape[::-1], 2], [2**31, *shape], [2**62, 4, 1, 1], [1.0, *shape], ["1", *shape],
        [None], {}, "1", 1, [[1]],
    ]  # fmt: skip


def wrong_binary_header(target: Target, draw: Draw) -> Body:
    """A length of the JSON part that is not one."""
    path, _, body = infer_body(target)
    wrong = ("-1", "0", "x", "1e3", "99999999", "9" * 40, "", " ", "0x10", "3", str(len(body) + 1))
    return path, {BINARY: draw.choice(wrong)}, body


def strange_numbers(target: Target, draw: Draw) -> Body:
    """Not-a-number and infinity, in binary and in JSON: an answer must still be JSON."""
    data = target.zeros()
    data.flat[:: draw.choice((1, 7))] = draw.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45))
    if draw.random() < 0.7:
        path, headers, body = infer_body(target)
        return path, headers, body[: -data.nbytes] + data.tobytes()
    word = draw.choice(("NaN", "Infinity", "-Infinity", "1e999", "9" * 4000, "1" + "0" * 400))
    count = int(np.prod(target.shape))
    text = f'{{"inputs": [{{"name": "{target.input_name}", "datatype": "FP32", "shape": [1, '
    text += ", ".join(map(str, target.shape)) + '], "data": [' + ", ".join([word] * count) + "]}]}"
    return target.v2, JSON, text.encode()


def wrong_bytes_tensor(target: Target, draw: Draw) -> Body:
    """image_bytes whose lengths lie, or whose images do."""
    image = draw.choice((make_photo(), bomb(draw), fuzzed(draw)))
    length = draw.choice((len(image), 0, len(image) + 1, 2**32 - 1, 3))
    data = draw.choice((struct.pack("<I", length) + image, b"", b"\1", image))
    tensor = {
        "name": "image_bytes",
        "shape": draw.choice(([1], [2], [0], [-1], [1, 1], [10**9])),
        "datatype": draw.choice(("BYTES", "BYTES", "UINT8")),
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor] * draw.choice((1, 1, 2))}).encode()
    return target.v2, {BINARY: str(len(head))}, head + data


def wrong_instances(target: Target, draw: Draw) -> Body:
    """What TensorFlow Serving's route cannot use."""
    ragged = [[1.0], [1.0, 2.0]]
    deep: Any = 1.0
    for _ in range(40):
        deep = [deep]
    rows = (
        None, {}, [], [[]], "x", 1, True, [None], [1], [True], ["x"], [{}], [ragged], [[[[]]]],
        deep,
        [{"b64": 1}], [{"b64": "%%%"}], [{"b64": ""}], [{"b64": "QUJD" * 999}], [{"b64": "aGk="}],
        [{"b64": base64.b64encode(bomb(draw)).decode()}], [{"b64": "\ud800"}], [{"x": 1, "y": 2}],
        [np.zeros(3).tolist()] * 9999, [[[["1"]]]], [[[[{}]]]],
    )  # fmt: skip
    key = draw.choice(("instances", "instances", "inputs", "Instances", "", "\0"))
    body: dict[str, Any] = {key: draw.choice(rows)}
    if draw.random() < 0.2:
        body |= {"inputs": [1], "signature_name": draw.choice(("", "x", 3, None))}
    return target.v1, JSON, json.dumps(body).encode()


def broken_json(target: Target, draw: Draw) -> Body:
    """No JSON, or more of it than anybody should read."""
    good = json.dumps({"instances": target.zeros().tolist()}).encode()
    cut = bytearray(good[: draw.randrange(1, len(good))])
    flipped = bytearray(good)
    for _ in range(5):
        flipped[draw.randrange(len(flipped))] = draw.randrange(256)
    texts = (
        bytes(cut), bytes(flipped), b"", b"{", b"null", b"[]", b'"x"', b"1", b"\xff\xfe{}", b"\0",
        b"[" * 100_000, b'{"a":' * 50_000, b"[" * 100_000 + b"]" * 100_000,
        b'{"instances": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"instances": [1' + b"0" * 100_000 + b"]}", b'{"instances": [NaN]}', b"{'a': 1}",
        b'{"instances": [{"b64": "\\ud800"}]}', b'{"instances": [], "instances": 1}',
        b"{" + b",".join(b'"%d":1' % n for n in range(50_000)) + b"}",
        good.decode().encode("utf-16"), b"\xef\xbb\xbf" + good[:30],
    )  # fmt: skip
    return draw.choice((target.v1, target.v2)), JSON, draw.choice(texts)


def wrong_infer_json(target: Target, draw: Draw) -> Body:
    """The fields of an infer request in the wrong types."""
    right = {
        "name": target.input_name,
        "shape": [1, *target.shape],
        "datatype": "FP32",
        "data": [0],
    }
    odd: tuple[Any, ...] = (None, 1, "x", [], {}, [None], [[]], {"a": 1}, True, -1, 2**70)
    body: dict[str, Any] = {"inputs": [right]}
    field = draw.choice(("inputs", "outputs", "id", "parameters", "data", "twice", "none"))
    if field == "data":
        right["data"] = draw.choice((*odd, [0.0] * 100_000, ["x"] * 10, [[0], [0, 0]]))
    elif field == "twice":
        body["inputs"] = [right, right]
    elif field == "outputs":
        outputs = (
            *odd,
            [{"name": "x"}],
            [{"name": "logits", "parameters": {"classification": -1}}],
        )
        body["outputs"] = draw.choice(outputs)
    elif field != "none":
        body[field] = draw.choice(odd)
    return target.v2, JSON, json.dumps(body).encode()


def compressed(target: Target, draw: Draw) -> Body:
    """A body said to be compressed: a bomb, or not compressed at all."""
    path, headers, body = infer_body(target)
    packed = draw.choice(
        (gzip.compress(bytes(1 << 24)), gzip.compress(body)[:-9], b"\x1f\x8b", body)
    )
    word = draw.choice(("gzip", "deflate", "br", "zstd", "gzip, gzip, gzip", "x", "identity; q=0"))
    return path, headers | {"Content-Encoding": word}, packed


BODY_KINDS = {
    "wrong tensor": wrong_tensor,
    "wrong binary header": wrong_binary_header,
    "strange numbers": strange_numbers,
    "wrong bytes tensor": wrong_bytes_tensor,
    "wrong instances": wrong_instances,
    "broken JSON": broken_json,
    "wrong infer JSON": wrong_infer_json,
    "compressed body": compressed,
}
