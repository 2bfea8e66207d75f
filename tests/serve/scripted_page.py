"""The page of a server whose answers to /predict a test decides: a real one rarely fails."""

import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phalanx.serve.web_page import routes


class Script:
    """The answers, and what was asked."""

    def __init__(self, address: str):
        self.address = address
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[int], Response] = lambda number: Response("{}")

    async def __call__(self, request: Request) -> Response:
        self.asked.append((dict(request.headers), await request.body()))
        return self.answer(len(self.asked))


@contextmanager
def serve_script() -> Iterator[Script]:
    """A server on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        script = Script(f"http://127.0.0.1:{free.getsockname()[1]}/")
        asked = [
            Route("/predict", script.__call__, methods=["POST"]),
            Route("/model", lambda request: JSONResponse(MODEL)),
        ]
        config = uvicorn.Config(
            Starlette(routes=[*routes, *asked]), log_level="error", lifespan="off"
        )
        server = uvicorn.Server(config)
        free.listen(64)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield script
        server.should_exit = True
        thread.join()


MODEL = {"name": "demo", "model": "resnet8", "classes": [*"0123456789"], "image_size": 28}
CLASSES = {"Ankle boot": 0.873, "<b>Sneaker</b>": 0.081, "Sandal": 0.03, "Bag": 0.01, "Coat": 0.006}
DONE = "document.querySelectorAll('.guesses li').length == 5 * {}"


@pytest.fixture(scope="module")
def running():
    with serve_script() as script:
        yield script


@pytest.fixture
def script(running, browser):
    """A server that answers well, and its page, freshly opened."""
    running.asked.clear()
    running.answer = lambda number: answer_well()
    browser.resize(1280)
    browser.open(running.address)
    browser.run("sessionStorage.clear()")
    return running


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "a photo.jpg"
    Image.fromarray(np.full((40, 60, 3), 200, np.uint8)).save(path)
    return path


def answer_well(**more):
    seen = io.BytesIO()
    Image.fromarray(np.full((28, 28, 3), 90, np.uint8)).save(seen, "PNG")
    prediction = {
        "image": "a photo.jpg",
        "guesses": [{"class": name, "probability": share} for name, share in CLASSES.items()],
        "seen": f"data:image/png;base64,{base64.b64encode(seen.getvalue()).decode()}",
        "activation_map": [[0.0, 0.1, 0.0], [0.0, 0.2, 0.1], [0.3, 0.1, 1.0]],
        **more,
    }
    timing = {"decode": 1.23, "queue": 0.08, "compute": 11.2, "total": 12.7}
    return JSONResponse({"model": "demo", "predictions": [prediction], "timing_ms": timing})


def fail(status, text, **headers):
    return JSONResponse({"error": text}, status, headers=headers)
