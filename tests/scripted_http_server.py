"""A server that fails as a test wants: what a real one does rarely, and never on demand."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CLASSES = ["cat", "dog", "owl"]
REFUSAL = {"error": "the queue is full; send it again later"}


def to_json(status, facts, **headers):
    return status, json.dumps(facts).encode(), {k.replace("_", "-"): v for k, v in headers.items()}


def answer_well(body):
    """As /predict answers: one prediction for each part of the form."""
    shares = dict(zip(CLASSES, (0.7, 0.2, 0.1), strict=True))
    guesses = [{"class": name, "probability": share} for name, share in shares.items()]
    count = body.count(b"filename=")
    return to_json(200, {"predictions": [{"image": "x", "guesses": guesses}] * count})


class Server:
    """What it was asked, and what it answers: a function of the body and the number of requests."""

    def __init__(self):
        self.asked, self.connections, self.lock = [], set(), threading.Lock()
        self.answer = lambda body, number: answer_well(body)
        self.model = to_json(200, {"name": "demo", "classes": CLASSES})

    def reply(self, handler, body):
        with self.lock:
            self.asked.append((handler.path, dict(handler.headers), body))
            self.connections.add(handler.client_address)
            number = len(self.asked)
        return self.answer(body, number)


@contextmanager
def serve() -> Iterator[Server]:
    """A server on a free port of this machine."""
    script = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body leave together

        def do_GET(self):
            self.send(*script.model)

        def do_POST(self):
            answer = script.reply(self, self.rfile.read(int(self.headers["Content-Length"])))
            if answer is None:  # hangs up
                self.close_connection = True
                return
            self.send(*answer)

        def send(self, status, body, headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    script.url = f"http://127.0.0.1:{httpd.server_port}/"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
