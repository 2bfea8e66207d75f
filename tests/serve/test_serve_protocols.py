"""What the server answers to well-formed requests, in each of its dialects."""

import base64
import json
import time
from http.client import HTTPConnection

import numpy as np
import onnxruntime
import pytest

from phalanx.data.formats.decode import EncodedImage, encode_png
from phalanx.data.transforms.transform import build_transform
from small_server import (
    CLASSES,
    NAME,
    SIZE,
    RunningServer,
    infer_body,
    make_metadata,
    make_png,
    make_tensor,
    open_server,
    write_model,
)

triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient")
PREDICT = f"/v1/models/{NAME}:predict"
INFER = f"/v2/models/{NAME}/infer"


@pytest.fixture(scope="session")
def direct(model_file):
    """The model called directly."""
    session = onnxruntime.InferenceSession(model_file)
    return lambda tensor: session.run(["logits", "activation_map"], {"input": tensor})


def prepare(png: bytes) -> np.ndarray:
    """An image file as the model's input, by torch's formula."""
    preprocessing = make_metadata().preprocessing
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    build_transform(preprocessing.transform).apply_evaluation(
        EncodedImage(png, "image").decode(), pixels
    )
    scaled = pixels.astype(np.float64) / 255
    normalised = (scaled - preprocessing.mean) / preprocessing.std
    return normalised.transpose(2, 0, 1).astype(np.float32)


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def form(*parts: tuple[str, bytes], boundary: str = "----x") -> tuple[bytes, dict[str, str]]:
    body = b""
    for name, data in parts:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n'
        body += head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


# --- POST /predict ---


def test_predict_names_the_likeliest_classes_of_a_file(server: RunningServer, direct):
    png = make_png()
    answer = server.ask("/predict?top=3", png, {"Content-Type": "image/png"})
    assert answer.status == 200, answer.body
    found = answer.json
    assert found["model"] == NAME and set(found["timing_ms"]) == {
        "decode", "queue", "compute", "total",
    }  # fmt: skip
    (prediction,) = found["predictions"]
    shares = softmax(direct(prepare(png)[None])[0][0].astype(np.float64))
    best = np.argsort(-shares)[:3]
    assert [one["class"] for one in prediction["guesses"]] == [f"class {at}" for at in best]
    given = [one["probability"] for one in prediction["guesses"]]
    assert np.allclose(given, shares[best], atol=1e-5)
    assert set(prediction) == {"image", "guesses"}


def test_predict_takes_several_files_and_tells_which_is_bad(server: RunningServer):
    body, headers = form(
        ("a/one.png", make_png(1)), ("bad.png", b"no image"), ("two.png", make_png(2))
    )
    answer = server.ask("/predict", body, headers)
    assert answer.status == 200
    one, bad, two = answer.json["predictions"]
    assert (one["image"], bad["image"], two["image"]) == ("one.png", "bad.png", "two.png")
    assert bad["guesses"] == [] and "not a JPEG, PNG" in bad["problem"]
    alone = server.ask("/predict", make_png(2), {"Content-Type": "image/png"}).json["predictions"][
        0
    ]
    assert two["guesses"] == alone["guesses"] != one["guesses"]
    assert len(two["guesses"]) == 5


def test_predict_details_show_the_image_as_it_was_seen_and_the_map(server: RunningServer, direct):
    png = make_png(3)
    (found,) = server.ask("/predict?details=true", png, {"Content-Type": "image/png"}).json[
        "predictions"
    ]
    kind, _, data = found["seen"].partition(",")
    assert kind == "data:image/png;base64"
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    build_transform(make_metadata().preprocessing.transform).apply_evaluation(
        EncodedImage(png, "").decode(), pixels
    )
    assert base64.b64decode(data) == encode_png(pixels)
    given, raw = np.array(found["activation_map"]), direct(prepare(png)[None])[1][0]
    assert given.shape == raw.shape and given.min() == 0 and given.max() == 1
    assert np.allclose(given, (raw - raw.min()) / (raw.max() - raw.min()), atol=1e-3)


def test_one_bad_file_is_refused(server: RunningServer):
    answer = server.ask("/predict", make_png()[:200], {"Content-Type": "image/png"})
    assert answer.status == 400 and "truncated" in answer.json["error"]


# --- TensorFlow Serving ---


def test_tensorflow_status_and_metadata(server: RunningServer):
    status = server.ask(f"/v1/models/{NAME}").json["model_version_status"]
    assert [(one["version"], one["state"]) for one in status] == [("1", "AVAILABLE")]
    found = server.ask(f"/v1/models/{NAME}/versions/1/metadata").json
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    sizes = [one["size"] for one in signature["inputs"]["input"]["tensor_shape"]["dim"]]
    assert sizes == ["-1", "3", str(SIZE), str(SIZE)]
    assert found["model_spec"]["name"] == NAME


def test_tensorflow_predict_takes_rows_columns_pixels_and_files(server: RunningServer, direct):
    tensor, png = make_tensor(2), make_png(4)
    wanted = direct(tensor)[0]
    rows = server.ask(PREDICT, {"instances": tensor.tolist()}).json["predictions"]
    assert np.allclose(rows, wanted, atol=1e-5)
    named = [{"input": one.tolist()} for one in tensor]
    found = server.ask(PREDICT, {"instances": named, "signature_name": "serving_default"}).json
    assert found["predictions"] == rows
    columns = server.ask(PREDICT, {"inputs": {"input": tensor.tolist()}}).json
    assert columns == {"outputs": rows}
    assert server.ask(PREDICT, {"inputs": tensor.tolist()}).json == columns

    file = {"b64": base64.b64encode(png).decode()}
    from_file = server.ask(PREDICT, {"instances": [file]}).json["predictions"]
    assert np.allclose(from_file, direct(prepare(png)[None])[0], atol=1e-4)
    assert (
        server.ask(PREDICT, {"instances": [{"image_bytes": file}]}).json["predictions"] == from_file
    )

    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    normalised = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    from_pixels = server.ask(PREDICT, {"instances": [pixels.tolist()]}).json["predictions"]
    wanted = direct(normalised.transpose(2, 0, 1)[None].astype(np.float32))[0]
    assert np.allclose(from_pixels, wanted, atol=1e-4)
    as_floats = {"instances": [pixels.astype(float).tolist()]}
    assert server.ask(PREDICT, as_floats).json["predictions"] == from_pixels


def test_tensorflow_predict_takes_dark_pixels(server: RunningServer, direct):
    dark = np.random.default_rng(0).integers(0, 2, (SIZE, SIZE, 3), np.uint8)
    normalised = (dark / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    rows = server.ask(PREDICT, {"instances": [dark.tolist()]}).json["predictions"]
    wanted = direct(normalised.transpose(2, 0, 1)[None].astype(np.float32))[0]
    assert np.allclose(rows, wanted, atol=1e-4)


# --- Open Inference Protocol, by a client that nobody here wrote ---


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found


def test_triton_client_finds_the_server_and_its_model(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(NAME) and client.is_model_ready(NAME, "1")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata(NAME)
    assert found["inputs"][0] == {"name": "input", "datatype": "FP32", "shape": [-1, 3, SIZE, SIZE]}
    assert [one["name"] for one in found["outputs"]] == ["logits", "activation_map"]
    assert found["outputs"][0]["shape"] == [-1, CLASSES]
    assert not client.is_model_ready("another")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_triton_client_infers(client, direct, binary):
    tensor = make_tensor(3, seed=5)
    given = triton.InferInput("input", tensor.shape, "FP32")
    given.set_data_from_numpy(tensor, binary_data=binary)
    asked = [
        triton.InferRequestedOutput(n, binary_data=binary) for n in ("activation_map", "logits")
    ]
    for outputs in (None, asked):
        found = client.infer(NAME, [given], outputs=outputs, request_id="seven")
        logits, maps = direct(tensor)
        assert np.allclose(found.as_numpy("logits"), logits, atol=1e-5)
        assert np.allclose(found.as_numpy("activation_map"), maps, atol=1e-4)
        assert found.get_response()["id"] == "seven"
    only = client.infer(NAME, [given], outputs=asked[1:]).get_response()["outputs"]
    assert [one["name"] for one in only] == ["logits"]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_triton_client_asks_for_classes(client, direct, binary):
    tensor = make_tensor(2, seed=6)
    given = triton.InferInput("input", tensor.shape, "FP32")
    given.set_data_from_numpy(tensor)
    asked = triton.InferRequestedOutput("logits", binary_data=binary, class_count=2)
    found = client.infer(NAME, [given], outputs=[asked]).as_numpy("logits")
    best = np.argsort(-direct(tensor)[0], axis=1)[:, :2]
    texts = [[t.decode() if isinstance(t, bytes) else t for t in row] for row in found]
    assert [[t.split(":")[1:] for t in row] for row in texts] == [
        [[str(at), f"class {at}"] for at in row] for row in best
    ]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_triton_client_may_compress(client, direct, algorithm):
    tensor = make_tensor(1, seed=7)
    given = triton.InferInput("input", tensor.shape, "FP32")
    given.set_data_from_numpy(tensor)
    found = client.infer(
        NAME,
        [given],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.allclose(found.as_numpy("logits"), direct(tensor)[0], atol=1e-5)


def test_triton_client_sends_image_files(client, direct):
    png = make_png(8)
    given = triton.InferInput("image_bytes", [2], "BYTES")
    given.set_data_from_numpy(np.array([png, make_png(9)], dtype=object))
    found = client.infer(NAME, [given]).as_numpy("logits")
    assert found.shape == (2, CLASSES)
    assert np.allclose(found[0], direct(prepare(png)[None])[0][0], atol=1e-4)


def test_triton_client_learns_what_is_wrong(client):
    tensor = make_tensor(1)
    given = triton.InferInput("input", tensor.shape, "FP32")
    given.set_data_from_numpy(tensor)
    with pytest.raises(triton.InferenceServerException, match="no model is called 'another'"):
        client.infer("another", [given])
    with pytest.raises(triton.InferenceServerException, match="no version '2'; its only one is 1"):
        client.infer(NAME, [given], model_version="2")
    wrong = triton.InferInput("pixels", tensor.shape, "FP32")
    wrong.set_data_from_numpy(tensor)
    with pytest.raises(
        triton.InferenceServerException, match="no input is called 'pixels'; there is input, image"
    ):
        client.infer(NAME, [wrong])


def test_a_model_that_takes_pixels_gets_them(tmp_path):
    file = write_model(tmp_path / "pixels.onnx", takes_pixels=True)
    session = onnxruntime.InferenceSession(file)
    pixels = np.random.default_rng(1).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    (wanted,) = session.run(["logits"], {"image": pixels})
    png = make_png(11)
    seen = np.zeros((1, SIZE, SIZE, 3), np.uint8)
    transform = build_transform(make_metadata().preprocessing.transform)
    transform.apply_evaluation(EncodedImage(png, "image").decode(), seen[0])
    best = int(session.run(["logits"], {"image": seen})[0].argmax())
    with open_server(file) as server, triton.InferenceServerClient(server.url[7:]) as client:
        given = triton.InferInput("image", pixels.shape, "UINT8")
        for binary in (True, False):
            given.set_data_from_numpy(pixels, binary_data=binary)
            assert np.allclose(client.infer(NAME, [given]).as_numpy("logits"), wanted, atol=1e-3)
        rows = server.ask(PREDICT, {"instances": pixels.tolist()}).json["predictions"]
        assert np.allclose(rows, wanted, atol=1e-3)
        refused = server.ask(PREDICT, {"instances": make_tensor(1).tolist()})
        assert refused.status == 400 and "normalises images itself" in refused.json["error"]
        (found,) = server.ask("/predict?top=1", png, {"Content-Type": "image/png"}).json[
            "predictions"
        ]
        assert found["guesses"][0]["class"] == f"class {best}"


def test_a_request_of_more_than_a_batch_is_split(server: RunningServer, direct):
    tensor = make_tensor(13, seed=10)  # batches have 8
    body, headers = infer_body(tensor, outputs=["logits"])
    found = np.array(server.ask(INFER, body, headers).json["outputs"][0]["data"])
    assert np.allclose(found.reshape(13, CLASSES), direct(tensor)[0], atol=1e-5)


# --- what else there is ---


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_offers_another_protocol_gets_its_answer(server: RunningServer, chunked):
    connection, png = HTTPConnection("127.0.0.1", server.port, timeout=10), make_png()
    for together in (True, False, True):  # the connection stays
        connection.putrequest("POST", "/predict?top=1")
        # what Java's HttpClient sends unless it is told HTTP_1_1
        connection.putheader("Connection", "Upgrade, HTTP2-Settings")
        connection.putheader("Upgrade", "h2c")
        connection.putheader("HTTP2-Settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
        connection.putheader("Content-Type", "image/png")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(png), png) if chunked else png
        size = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))
        connection.putheader(*size)
        connection.endheaders(body if together else None)
        if not together:
            time.sleep(0.05)
            connection.send(body)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["model"]) == (200, NAME)
    connection.close()


def test_a_tunnel_is_refused(server: RunningServer):
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("CONNECT", "x:443", headers={"Connection": "Upgrade", "Upgrade": "h2c"})
    assert connection.getresponse().status in (400, 404, 405)
    connection.close()


def test_the_rest_of_the_server(server: RunningServer):
    assert server.ask("/health").json == {"status": "ready"}
    document = server.ask("/openapi.json").json
    assert "/predict" in document["paths"] and f"{NAME}" in json.dumps(document)
    page = server.ask("/docs")
    assert page.status == 200 and "/v2/models/{name}/infer" in page.body.decode()
    text = page.body.decode()
    assert f"curl -F image=@shoe.png {server.url}/predict" in text
    assert f"{server.url}/v1/models/{NAME}:predict" in text
    assert f"curl {server.url}/v2/models/{NAME}/infer" in text
    assert "http://" not in text.replace(server.url, "")
    assert "127.0.0.1:8000" not in json.dumps(document)
    assert server.line == (
        f"serving {NAME} on {server.url}/ (resnet8, 7 classes, onnxruntime "
        f"{onnxruntime.__version__}, cpu, batches of up to 8)\n"
    )


def test_metrics_count_requests_images_and_batches(server: RunningServer):
    def read() -> dict[str, float]:
        lines = server.ask("/metrics").body.decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    before = read()
    body, headers = infer_body(make_tensor(3))
    assert server.ask(INFER, body, headers).status == 200
    after = read()
    route = 'route="/v2/models/{name}/infer",method="POST",status="200"'
    for name, more in {
        f"phalanx_requests_total{{{route}}}": 1,
        "phalanx_images_total": 3,
        "phalanx_batch_images_count": 1,
        'phalanx_batch_images_bucket{le="2"}': 0,
        'phalanx_batch_images_bucket{le="4"}': 1,
        "phalanx_queue_seconds_count": 1,
    }.items():
        assert after[name] - before.get(name, 0) == more, name
    assert after["phalanx_ready"] == 1 and after["phalanx_waiting_images"] == 0
    assert after["process_resident_memory_bytes"] > 2**20
