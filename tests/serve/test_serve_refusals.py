"""What a client can do wrong: each gets a status and the way out, and the server lives on."""

import base64
import gzip
import json
import re
import socket
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from phalanx.serve.api_error import ApiError
from phalanx.serve.body import BodyReader
from small_server import (
    NAME,
    SIZE,
    RunningServer,
    infer_body,
    make_png,
    make_tensor,
    open_server,
    write_model,
)

PREDICT = f"/v1/models/{NAME}:predict"
INFER = f"/v2/models/{NAME}/infer"
PNG = {"Content-Type": "image/png"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def make_bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes and many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes((3 * width + 1) * min(height, 100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def tensor_input(**changes) -> dict:
    facts = {"name": "input", "datatype": "FP32", "shape": [1, 3, SIZE, SIZE], "data": []}
    return {"inputs": [facts | changes]}


CUT_OFF = (
    b'{"inputs": [{"name": "image_bytes", "datatype": "BYTES", "shape": [1], "parameters": '
    b'{"binary_data_size": 6}}]}'
)
ONE = [0.5] * (3 * SIZE * SIZE)
BAD = {
    # /predict
    "no image": ("/predict", b"hello", PNG, 400, "not a JPEG, PNG"),
    "an empty body": ("/predict", b"", PNG, 400, "the file is empty"),
    "a bomb": ("/predict", make_bomb(50_000, 50_000), PNG, 400, "over the 64,000,000"),
    "a hair": ("/predict", make_bomb(1, 60_000), PNG, 400, "too narrow"),
    "top": ("/predict?top=8", make_png(), PNG, 400, "from 1 to 7, got '8'"),
    "top of text": ("/predict?top=x", make_png(), PNG, 400, "from 1 to 7, got 'x'"),
    "details": ("/predict?details=x", make_png(), PNG, 400, "expected true or false"),
    "tops": ("/predict?tops=3", make_png(), PNG, 400, "'tops': no such parameter; did you mean"),
    "another parameter": (
        "/predict?top=3&labels=yes", make_png(), PNG, 400, "choose from top, details",
    ),
    "text": ("/predict", b"{}", {"Content-Type": "text/plain"}, 415, "is not an image"),
    "no boundary": ("/predict", b"x", {"Content-Type": "multipart/form-data"}, 400, "boundary"),
    "no form": ("/predict", b"x", FORM, 400, "no end"),
    "a form cut off": ("/predict", b"--b\r\n\r\n\r\nabc", FORM, 400, "no end"),
    "a form of nothing": ("/predict", b"--b--\r\n", FORM, 400, "no part"),
    "a part without headers": ("/predict", b"--b\r\nabc\r\n--b--", FORM, 400, "part 1"),
    "a large form": ("/predict", b"--b\r\n\r\n\r\n\r\n" * 17 + b"--b--", FORM, 413, "more than 16"),
    "encoding": ("/predict", b"x", {**PNG, "Content-Encoding": "br"}, 415, "gzip, deflate or none"),
    "no gzip": ("/predict", b"hello there", {**PNG, "Content-Encoding": "gzip"}, 400, "not gzip"),
    "a cut gzip": (
        "/predict", gzip.compress(make_png())[:-9], {**PNG, "Content-Encoding": "gzip"}, 400,
        "in the middle",
    ),
    "a gzip bomb": (
        "/predict", gzip.compress(bytes(2**23)), {**PNG, "Content-Encoding": "gzip"}, 413,
        "--max-request-mib",
    ),
    "a large body": ("/predict", bytes(2**22 + 1), PNG, 413, "larger than 4.0 MiB"),
    # TensorFlow Serving
    "no JSON": (PREDICT, b"{", {}, 400, "the body is not JSON"),
    "no object": (PREDICT, b"[]", {}, 400, "JSON object"),
    "deep JSON": (PREDICT, b"[" * 100_000, {}, 400, "the body is not JSON"),
    "neither": (PREDICT, {}, {}, 400, 'either "instances" or "inputs"'),
    "both": (PREDICT, {"instances": [], "inputs": []}, {}, 400, 'either "instances" or "inputs"'),
    "no instance": (PREDICT, {"instances": []}, {}, 400, "no image was sent"),
    "no list": (PREDICT, {"instances": 3}, {}, 400, "expected a list"),
    "many": (PREDICT, {"instances": [0] * 17}, {}, 413, "17 images in one request"),
    "a signature": (PREDICT, {"instances": [0], "signature_name": "x"}, {}, 400, "serving_default"),
    "a shape": (PREDICT, {"instances": [[[1, 2]]]}, {}, 400, "has shape [1, 2]; expected [32, 32"),
    "ragged": (
        PREDICT, {"instances": [np.zeros((3, SIZE, SIZE)).tolist(), [[1]]]}, {}, 400,
        "dimension 0 has a list of 1",
    ),
    "strings": (
        PREDICT, {"instances": [np.full((3, SIZE, SIZE), "1").tolist()]}, {}, 400,
        "expected numbers, found '1'",
    ),
    "nulls": (
        PREDICT, {"instances": [np.full((3, SIZE, SIZE), None).tolist()]}, {}, 400,
        "expected numbers, found None",
    ),
    "pixels": (
        PREDICT, {"instances": [np.full((SIZE, SIZE, 3), 256).tolist()]}, {}, 400,
        "must be from 0 to 255",
    ),
    "scaled pixels": (
        PREDICT, {"instances": [np.full((SIZE, SIZE, 3), 0.5).tolist()]}, {}, 400,
        "these are fractions from 0 to 1; multiply them by 255",
    ),
    "large numbers": (
        PREDICT, {"instances": np.full((1, 3, SIZE, SIZE), -1e300).tolist()}, {}, 400,
        "instances: -1e+300 is too large for float32",
    ),
    "no base64": (PREDICT, {"instances": [{"b64": "#"}]}, {}, 400, "is not base64"),
    "b64 of a number": (PREDICT, {"instances": [{"b64": 3}]}, {}, 400, 'expected {"b64"'),
    "a file that is none": (
        PREDICT, {"instances": [{"b64": base64.b64encode(b"x").decode()}]}, {}, 400,
        "instance 0: not a JPEG",
    ),
    "another input": (PREDICT, {"instances": [{"x": 1}]}, {}, 400, "one input 'input', found 'x'"),
    "an unknown model": ("/v1/models/x:predict", b"{}", {}, 404, "no model is called 'x'"),
    "an unknown verb": (f"/v1/models/{NAME}:classify", b"{}", {}, 404, "nothing is at"),
    # Open Inference Protocol
    "no inputs": (INFER, {}, {}, 400, "exactly one input, one of input, image_bytes"),
    "two inputs": (INFER, {"inputs": [{}, {}]}, {}, 400, "exactly one"),
    "an input's name": (
        INFER, tensor_input(name="x"), {}, 400,
        "no input is called 'x'; there is input, image_bytes",
    ),
    "a name of lists": (INFER, tensor_input(name=[]), {}, 400, "no input is called []"),
    "a datatype": (INFER, tensor_input(datatype="FP16"), {}, 400, "must be FP32, found 'FP16'"),
    "no shape": (INFER, tensor_input(shape=None), {}, 400, "shape must be a list"),
    "negative": (INFER, tensor_input(shape=[-1, 3, SIZE, SIZE]), {}, 400, "shape must be a list"),
    "a large shape": (
        INFER, tensor_input(shape=[10**18]), {}, 400,
        "whole numbers from 0 to 2,147,483,647, found [1000000000000000000]",
    ),
    "another shape": (INFER, tensor_input(shape=[1, SIZE, SIZE, 3]), {}, 400, "expected [-1, 3"),
    "too many": (INFER, tensor_input(shape=[17, 3, SIZE, SIZE]), {}, 413, "--max-images is 16"),
    "none": (INFER, tensor_input(shape=[0, 3, SIZE, SIZE]), {}, 400, "no image was sent"),
    "too few numbers": (INFER, tensor_input(data=[1.0]), {}, 400, "3,072 numbers, 1 were sent"),
    "a large number": (
        INFER, tensor_input(data=[*ONE[1:], 1e300]), {}, 400,
        "input: 1e+300 is too large for float32, which ends at 3.4e+38",
    ),
    "no data": (INFER, tensor_input(data=None), {}, 400, '"data" must be a list'),
    "an id": (INFER, {**tensor_input(data=ONE), "id": 3}, {}, 400, '"id" must be a string'),
    "outputs": (INFER, {**tensor_input(data=ONE), "outputs": 3}, {}, 400, '"outputs" must be'),
    "an output": (
        INFER, {**tensor_input(data=ONE), "outputs": [{"name": "x"}]}, {}, 400,
        "no output is called 'x'; there is logits, activation_map",
    ),
    "classes of a map": (
        INFER,
        {
            **tensor_input(data=ONE),
            "outputs": [{"name": "activation_map", "parameters": {"classification": 2}}],
        },
        {}, 400, "classification",
    ),
    "shared memory": (
        INFER, tensor_input(parameters={"shared_memory_region": "x"}), {}, 400, "not supported",
    ),
    "header length": (
        INFER, b"{}", {"Inference-Header-Content-Length": "9"}, 400, "up to the 2 bytes",
    ),
    "a long header length": (
        INFER, b"{}", {"Inference-Header-Content-Length": "9" * 5000}, 400, "up to the 2 bytes",
    ),
    "files of two dimensions": (
        INFER,
        {"inputs": [{"name": "image_bytes", "datatype": "BYTES", "shape": [1, 5], "data": ["x"]}]},
        {}, 400, "image_bytes: has shape [1, 5], expected [-1]",
    ),
    "a strange host": ("/v3", b"", {"Host": "["}, 404, "nothing is at /v3"),
    "binary size": (
        INFER, tensor_input(parameters={"binary_data_size": 9}), {}, 400, "0 bytes follow the JSON",
    ),
    "files cut off": (
        INFER,
        CUT_OFF + b"\xff\xff\xff\xffxx",
        {"Inference-Header-Content-Length": str(len(CUT_OFF))}, 400, "element 0 is cut off",
    ),
    "files in JSON": (
        INFER,
        {"inputs": [{"name": "image_bytes", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
        {}, 400, "is not base64",
    ),
    # paths
    "another path": ("/v3", b"", {}, 404, "nothing is at /v3; /docs"),
    "another method": ("/v2", b"", {}, 405, "/v2 does not take POST"),
    "a version": (f"/v2/models/{NAME}/versions/2/infer", b"{}", {}, 404, "no version '2'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_requests_get_a_reason(server: RunningServer, what):
    path, body, headers, status, reason = BAD[what]
    answer = server.ask(path, body, headers, method="POST")
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert reason in answer.json["error"], answer.json
    assert server.ask("/health").status == 200


def test_a_known_path_with_another_method_is_405(server: RunningServer):
    for path in (PREDICT, f"/v1/models/{NAME}/versions/1:predict", INFER, "/predict"):
        answer = server.ask(path)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert answer.json["error"] == f"{path} does not take GET"


def test_values_that_the_model_makes_infinity_of_are_refused(server: RunningServer):
    large, infinite = make_tensor(1), make_tensor(1)
    large[0, :, 5:9] = 3e38
    infinite[0, 0, 5, 5] = np.inf
    for tensor, most in ((large, "3e+38"), (infinite, "inf")):
        answer = server.ask(INFER, *infer_body(tensor))
        assert answer.status == 400
        assert answer.json["error"].startswith("the model gives infinity or NaN for these values")
        assert answer.json["error"].endswith(f" to {most}; send normalised pixels")
    instances = np.full((1, 3, SIZE, SIZE), 3e38).tolist()
    assert "infinity or NaN" in server.ask(PREDICT, {"instances": instances}).json["error"]


def test_a_model_that_makes_infinity_of_images_has_failed(tmp_path):
    with open_server(write_model(tmp_path / "m.onnx", factor=np.inf), "--name", NAME) as found:
        for path, body in (
            ("/predict", make_png()),
            (PREDICT, {"instances": [{"b64": base64.b64encode(make_png()).decode()}]}),
        ):
            answer = found.ask(path, body, PNG)
            assert answer.status == 500
            assert answer.json["error"] == (
                "the model gives infinity or NaN for an image: its weights are damaged, or its "
                "precision is too low"
            )
        found.process.kill()
        assert found.process.stderr.read().count("the model gives infinity or NaN") == 2


def send(server: RunningServer, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back for bytes on a connection, until it is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        except OSError:
            pass
        found = b""
        try:
            while data := connection.recv(65536):
                found += data
        except ConnectionResetError:
            pass
        return found


def read_counter(server: RunningServer, labels: str) -> int:
    """How many requests of a kind were answered."""
    text = server.ask("/metrics").body.decode()
    found = re.search(f"^phalanx_requests_total{re.escape(labels)} ([0-9]+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),  # TLS
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9_000, b"431"),
        (b"GET /" + b"x" * 40_000, b"431"),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9_000 + b"\r\n", b"431"),
        (b"POST /predict HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused(server: RunningServer, sent, status):
    route, method = ("/predict", "POST") if b"chunked" in sent else ("other", "other")
    counter = f'{{route="{route}",method="{method}",status="{status.decode()}"}}'
    before = read_counter(server, counter)
    assert send(server, sent).startswith(b"HTTP/1.1 " + status)
    assert read_counter(server, counter) == before + 1
    assert server.ask("/health").status == 200


def test_headers_after_a_body_count_as_headers(server: RunningServer):
    head = b"POST /predict HTTP/1.1\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n"
    chunk = b"3\r\nabc\r\n0\r\n"
    found = send(server, head + b"\r\n" + chunk + b"T: x\r\n" * 9_000 + b"\r\n")
    assert found.startswith(b"HTTP/1.1 431") and found.count(b"HTTP/1.1") == 1


def test_headers_are_counted_for_each_request(server: RunningServer):
    one = b"GET /health HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert send(server, one, one, one, last, pause_s=0.05).count(b"HTTP/1.1 200") == 4


def test_a_chunked_body_is_limited_too(server: RunningServer):
    head = (
        b"POST /predict HTTP/1.1\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + chunk * 6)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_refused_body_leaves_the_connection_usable(server: RunningServer):
    long = b"POST /v3 HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000)
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    found = send(server, long, last, pause_s=0.1)
    assert found.startswith(b"HTTP/1.1 404") and b"HTTP/1.1 200" in found


@pytest.fixture(scope="module")
def slow_server(model_file):
    """A server with little patience, for everybody."""
    words = ("--request-timeout", "0.5", "--host", "0.0.0.0", "--no-auth")
    with open_server(model_file, *words) as running:
        yield running


def test_a_slow_body_is_refused(slow_server: RunningServer):
    head = b"POST /predict HTTP/1.1\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\n"
    found = send(slow_server, head, b"x")
    assert found.startswith(b"HTTP/1.1 408") and b"not complete after 0.5 s" in found


def test_slow_headers_are_refused(slow_server: RunningServer):
    found = send(slow_server, b"GET / HTTP/1.1\r\nA: ")
    assert found.startswith(b"HTTP/1.1 408") and b"headers were not complete" in found


def test_a_client_that_leaves_is_forgotten(server: RunningServer):
    body, headers = infer_body(make_tensor(16))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {INFER} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode()
    for sent in (head + body[: len(body) // 2], head + body):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(sent)
    time.sleep(0.2)
    assert server.ask(INFER, body, headers).status == 200
    lines = server.ask("/metrics").body.decode().splitlines()
    assert "phalanx_waiting_images 0" in lines
    assert any('status="499"' in line for line in lines)


def test_json_of_errors_is_readable_by_everybody(server: RunningServer):
    strange = server.ask("/v1/models/%00%ff%22:predict", b"{}", method="POST")
    assert strange.status == 404 and json.loads(strange.body)["error"]


def read_peak_mib(server: RunningServer) -> float:
    """The most memory that the server ever had."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) / 1024


def test_packed_bodies_are_in_memory_one_after_the_other(slow_server: RunningServer):
    mib, count = 30, 10
    body = gzip.compress(b'{"instances": [' + b" " * (mib * 2**20) + b"]}")
    before = read_peak_mib(slow_server)
    with ThreadPoolExecutor(count) as pool:
        packed = {"Content-Encoding": "gzip"}
        asked = [pool.submit(slow_server.ask, PREDICT, body, packed) for _ in range(count)]
        statuses = [one.result().status for one in asked]
    assert statuses == [400] * count, "each is told that it has no image, none that it is too much"
    assert read_peak_mib(slow_server) - before < 4 * mib


def test_what_a_body_is_unpacked_to_counts_like_a_body():
    reader = BodyReader(max_bytes=100, max_s=1.0, total_bytes=150)
    body = gzip.compress(bytes(60))
    reader.add_held_bytes(90)
    assert reader.decompress(body, "gzip") == bytes(60)
    reader.add_held_bytes(60)
    with pytest.raises(ApiError) as refused:
        reader.decompress(body, "gzip")
    assert refused.value.status == 429 and "too many large requests" in refused.value.message
    reader.add_held_bytes(-60)
    assert reader.decompress(body, "gzip") == bytes(60)
