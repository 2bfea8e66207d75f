"""Other servers for one ONNX file; serve_peers.py compares them with our own.

    python scripts/peer_servers.py fastapi|litserve FILE PORT BATCH
    python scripts/peer_servers.py direct FILE

All take float32 images and return float32 logits, as bytes. FastAPI: the obvious handler, with the
raw body, and onnxruntime in a pool with a thread for each core that the process may use. LitServe:
batches of up to BATCH, the tensor as a file of a form, since its JSON would be a hundred thousand
numbers. `direct` is no server: it calls onnxruntime as the lines on its input say.
"""

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import litserve
import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response

LOGITS, BATCH_WAIT_S = "logits", 0.005


def open_session(file: str) -> Any:
    """onnxruntime on as many threads as this process has cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def read_image(session: Any, data: bytes) -> np.ndarray:
    """The images in the bytes of a tensor."""
    shape = session.get_inputs()[0].shape[1:]
    return np.frombuffer(data, np.float32).reshape(-1, *shape)


def run_session(session: Any, images: np.ndarray) -> np.ndarray:
    """Their logits."""
    return session.run([LOGITS], {session.get_inputs()[0].name: images})[0]


def serve_fastapi(file: str, port: int, batch: int) -> None:
    """A handler that passes each request to a thread pool."""
    app, session = FastAPI(), open_session(file)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        images = read_image(session, await request.body())
        loop = asyncio.get_running_loop()
        logits = await loop.run_in_executor(pool, run_session, session, images)
        return Response(logits.tobytes(), media_type="application/octet-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


class Classifier(litserve.LitAPI):
    """LitServe's hooks in the order they are called; its workers are separate processes."""

    def __init__(self, file: str, **options: Any) -> None:
        super().__init__(**options)
        self.file = file

    def setup(self, device: str) -> None:
        """Open the model."""
        self.session = open_session(self.file)

    def decode_request(self, request: Request) -> np.ndarray:
        """The image in the form, as a batch of one."""
        return read_image(self.session, request["input"].file.read())

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Images as one array; not called if batches have one image."""
        return np.concatenate(inputs)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Their logits."""
        return run_session(self.session, images)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        """Logits by image."""
        return list(output)

    def encode_response(self, output: np.ndarray) -> Response:
        """As bytes."""
        return Response(output.tobytes(), media_type="application/octet-stream")


def serve_litserve(file: str, port: int, batch: int) -> None:
    """LitServe with batches of up to `batch`."""
    api = Classifier(file, max_batch_size=batch, batch_timeout=BATCH_WAIT_S, api_path="/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


def call_directly(file: str) -> None:
    """For each line "BATCH SECONDS" or "BATCH CALLS calls": the seconds of every call, as JSON."""
    session = open_session(file)
    shape = session.get_inputs()[0].shape[1:]
    draw = np.random.default_rng(0)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, amount, *unit = line.split()
        images = draw.standard_normal((int(batch), *shape), np.float32)
        took: list[float] = []
        begin = time.perf_counter()
        while len(took) < float(amount) if unit else time.perf_counter() - begin < float(amount):
            start = time.perf_counter()
            run_session(session, images)
            took.append(time.perf_counter() - start)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    kind, file, *numbers = sys.argv[1:]
    if kind == "direct":
        call_directly(file)
    else:
        {"fastapi": serve_fastapi, "litserve": serve_litserve}[kind](file, *map(int, numbers))
