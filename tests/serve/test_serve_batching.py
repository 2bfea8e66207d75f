"""The queue: what becomes a batch, what is refused, and what a failure costs."""

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from phalanx.serve.api_error import ApiError
from phalanx.serve.batching import Batcher
from small_server import (
    NAME,
    RunningServer,
    infer_body,
    make_tensor,
    open_server,
    serve_command,
    write_model,
)

INFER = f"/v2/models/{NAME}/infer"


class HeldModel:
    """Doubles its rows, once it is let go; notes the sizes of its batches. Fails for -1."""

    def __init__(self):
        self.sizes, self.go = [], threading.Semaphore(0)

    def warm_up(self):
        pass

    def run(self, rows):
        self.sizes.append(len(rows))
        self.go.acquire()
        if (rows == -1).any():
            raise ValueError("minus one")
        return {"double": 2 * rows}


@contextmanager
def running(model, *more, **options):
    batcher = Batcher(**({"max_batch": 4, "max_wait_s": 0.0, "max_queue": 100} | options))
    batcher.start([model, *more])
    try:
        yield batcher
    finally:
        for one in (model, *more):
            one.go.release(1000)
        batcher.close()


async def until(condition):
    """Wait for another thread."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never happened")


async def ask(batcher, *values, is_abandoned=lambda: False):
    rows = np.array(values, np.float32)
    with batcher.reserve(len(rows)) as places:
        outputs, timing = await places.run(rows, is_abandoned)
    assert timing.queue_s >= 0 and timing.compute_s >= 0
    return outputs["double"].tolist()


def test_a_batch_is_what_has_queued_while_the_last_one_ran():
    model = HeldModel()

    async def go(batcher):
        tasks = [asyncio.create_task(ask(batcher, 1))]
        await until(lambda: model.sizes == [1])
        tasks += [asyncio.create_task(ask(batcher, n, n + 0.5)) for n in range(2, 5)]
        await until(lambda: batcher.waiting == 6)
        model.go.release(3)
        return await asyncio.gather(*tasks)

    with running(model) as batcher:
        found = asyncio.run(go(batcher))
    assert found == [[2.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
    assert model.sizes == [1, 4, 2], "the third request is alone in the last batch"


def test_a_request_larger_than_a_batch_is_put_together_again():
    model, other = HeldModel(), HeldModel()

    async def go(batcher):
        task = asyncio.create_task(ask(batcher, *range(11)))
        await until(lambda: len(model.sizes) == len(other.sizes) == 1)
        model.go.release(2)  # the first rows, or the middle ones, are answered last
        await until(lambda: len(model.sizes) == 2)
        other.go.release()
        return await task

    with running(model, other) as batcher:
        assert asyncio.run(go(batcher)) == [2.0 * n for n in range(11)]
    assert sorted(model.sizes + other.sizes) == [3, 4, 4]


def test_a_full_queue_refuses_at_once_and_takes_again_later():
    model = HeldModel()

    async def go(batcher):
        tasks = [asyncio.create_task(ask(batcher, 0))]
        await until(lambda: model.sizes == [1])
        tasks += [asyncio.create_task(ask(batcher, n)) for n in (1, 2, 3)]
        await until(lambda: batcher.waiting == 3)
        began = time.perf_counter()
        with pytest.raises(ApiError) as refused:
            await ask(batcher, 4)
        assert time.perf_counter() - began < 0.5
        model.go.release(2)
        assert await asyncio.gather(*tasks) == [[0.0], [2.0], [4.0], [6.0]]
        model.go.release()
        assert await ask(batcher, 5) == [10.0]
        return refused.value

    with running(model, max_queue=3) as batcher:
        refused = asyncio.run(go(batcher))
        assert batcher.waiting == 0
    assert refused.status == 429 and refused.headers == {"Retry-After": "1"}
    assert refused.message == "3 images are waiting already; send it again later"


def test_places_are_given_back_when_decoding_fails():
    with running(HeldModel()) as batcher:
        with pytest.raises(KeyError), batcher.reserve(5):
            assert batcher.waiting == 5
            raise KeyError
        assert batcher.waiting == 0


def test_a_batch_that_fails_costs_only_its_own_requests(caplog):
    model = HeldModel()

    async def go(batcher):
        bad = asyncio.create_task(ask(batcher, -1))
        await until(lambda: model.sizes == [1])
        good = asyncio.create_task(ask(batcher, 3))
        model.go.release(2)
        with pytest.raises(ApiError) as failed:
            await bad
        return failed.value, await good

    with running(model) as batcher:
        failed, good = asyncio.run(go(batcher))
    assert (failed.status, good) == (500, [6.0])
    assert "ValueError: minus one" in caplog.text and "minus one" not in failed.message


def test_a_batch_that_cannot_be_put_together_costs_only_its_own_requests(monkeypatch):
    model = HeldModel()

    def refuse(rows):
        monkeypatch.undo()
        raise MemoryError

    async def go(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        await until(lambda: model.sizes == [1])
        lost = [asyncio.create_task(ask(batcher, n)) for n in (2, 3)]
        await until(lambda: batcher.waiting == 2)
        monkeypatch.setattr(np, "concatenate", refuse)
        model.go.release(2)
        found = await asyncio.gather(first, *lost, return_exceptions=True)
        return found, await ask(batcher, 4)

    with running(model) as batcher:
        (first, *lost), last = asyncio.run(go(batcher))
        assert not batcher.is_broken
    assert (first, last, [error.status for error in lost]) == ([2.0], [8.0], [500, 500])


def test_a_model_thread_that_ends_says_so_and_refuses_what_waits(caplog):
    model = HeldModel()

    def fail() -> bool:
        raise MemoryError

    async def go(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        await until(lambda: model.sizes == [1])
        waiting = [asyncio.create_task(ask(batcher, n, is_abandoned=fail)) for n in (2, 3)]
        await until(lambda: batcher.waiting == 2)
        model.go.release()
        found = await asyncio.gather(first, *waiting, return_exceptions=True)
        with pytest.raises(ApiError) as refused:
            await ask(batcher, 4)
        return found, refused.value.status

    with running(model) as batcher:
        (first, *lost), status = asyncio.run(go(batcher))
        assert batcher.is_broken and batcher.waiting == 0
    assert (first, [error.status for error in lost], status) == ([2.0], [503, 503], 503)
    assert "a model's thread has ended" in caplog.text


def test_rows_of_a_client_that_has_left_are_not_run():
    model = HeldModel()

    async def go(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        await until(lambda: model.sizes == [1])
        gone = asyncio.create_task(ask(batcher, 2, 2, is_abandoned=lambda: True))
        cancelled = asyncio.create_task(ask(batcher, 3, 3, 3))
        await until(lambda: batcher.waiting == 5)
        cancelled.cancel()
        last = asyncio.create_task(ask(batcher, 4))
        await until(lambda: batcher.waiting == 3)
        model.go.release(2)
        with pytest.raises(ApiError):
            await gone
        return await first, await last

    with running(model) as batcher:
        assert asyncio.run(go(batcher)) == ([2.0], [8.0])
        assert batcher.waiting == 0
    assert model.sizes == [1, 1]


def test_a_batch_waits_for_more_where_it_is_told_to():
    model = HeldModel()
    model.go.release(9)

    async def go(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        await asyncio.sleep(0.02)
        return await asyncio.gather(first, ask(batcher, 2, 2, 2))

    with running(model, max_wait_s=10.0) as batcher:
        asyncio.run(go(batcher))
    assert model.sizes == [4], "as soon as it is full, it runs"
    with running(model, max_wait_s=0.05) as batcher:
        asyncio.run(ask(batcher, 1))
    assert model.sizes == [4, 1], "after the wait, it runs as it is"


def test_what_warming_up_raises_is_raised():
    class Cold(HeldModel):
        def warm_up(self):
            raise ApiError(1, "cold")

    with pytest.raises(ApiError, match="cold"):
        Batcher(max_batch=1, max_wait_s=0, max_queue=1).start([Cold()])


# --- with a real server and a slow model ---


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("slow") / f"{NAME}.onnx", work=2600)


@pytest.fixture(scope="module")
def busy_server(slow_model):
    with open_server(slow_model, "--max-batch", "1", "--max-queue", "2") as found:
        yield found


def test_an_overloaded_server_refuses_with_429(busy_server: RunningServer):
    body, headers = infer_body(make_tensor(1), outputs=["logits"])
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: busy_server.ask(INFER, body, headers), range(12)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status == 429)
    # two may wait; whether the first of them has begun when the third arrives is the scheduler's
    assert 2 <= statuses.count(200) <= 6
    assert busy_server.ask(INFER, body, headers).status == 200


def test_a_model_that_fails_gives_500_and_the_server_lives_on(busy_server: RunningServer):
    poison = make_tensor(1)
    poison[0, 0, 0, 0] = 1e6
    answer = busy_server.ask(INFER, *infer_body(poison))
    assert answer.status == 500
    assert answer.json == {"error": "the model failed; the server's log says why"}
    assert busy_server.ask(INFER, *infer_body(make_tensor(1))).status == 200
    lines = busy_server.ask("/metrics").body.decode().splitlines()
    assert "phalanx_failed_batches_total 1" in lines


def test_sigterm_loses_nothing_that_was_sent_before(slow_model):
    """The server sleeps while requests arrive, so that all wait in the backlog and in buffers."""
    body, headers = infer_body(make_tensor(1), outputs=["logits"])
    words = ("--max-batch", "32", "--max-queue", "64", "--request-timeout", "9")
    with open_server(slow_model, *words) as found:
        kept, *fresh = [http.client.HTTPConnection("127.0.0.1", found.port) for _ in range(31)]
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        slow = socket.create_connection(("127.0.0.1", found.port))
        slow.sendall(b"GET /v2 HTTP/1.1\r\n")
        os.kill(found.process.pid, signal.SIGSTOP)
        for connection in (kept, *fresh):
            connection.request("POST", INFER, body, headers)
        probe = http.client.HTTPConnection("127.0.0.1", found.port)
        probe.request("GET", "/health")
        os.kill(found.process.pid, signal.SIGTERM)
        os.kill(found.process.pid, signal.SIGCONT)
        for connection in (kept, *fresh):
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        answer = probe.getresponse()
        assert (answer.status, answer.read()) == (503, b'{"status":"stopping"}')
        time.sleep(1)  # the port is closed now
        slow.sendall(b"\r\n")
        assert slow.recv(99).startswith(b"HTTP/1.1 200")
        slow.close()
        assert found.process.wait(timeout=30) == 0


def test_sigterm_answers_what_was_accepted(busy_server: RunningServer):
    """The last test of this server."""
    body, headers = infer_body(make_tensor(2), outputs=["logits"])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(busy_server.ask, INFER, body, headers)
        while b"\nphalanx_waiting_images 0\n" in busy_server.ask("/metrics").body:
            assert not asked.done(), "the model is not slow enough for this test"
        assert busy_server.stop() == 0
        assert asked.result().status == 200
    with pytest.raises(ConnectionRefusedError):
        busy_server.ask("/health")
    assert busy_server.process.stderr is not None
    assert "indices element out of data bounds" in busy_server.process.stderr.read()


def test_what_is_left_when_the_drain_ends_gets_a_reason(model_file, tmp_path):
    log = tmp_path / "access.log"
    with (
        open_server(model_file, "--drain-seconds", "1", "--access-log", log) as found,
        socket.create_connection(("127.0.0.1", found.port), timeout=10) as begun,
    ):
        begun.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc")
        assert found.ask("/health").status == 200
        assert found.stop() == 0
        head, _, body = begun.recv(999).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in head
    assert json.loads(body) == {"error": "the server has stopped; send it again"}
    line = json.loads(log.read_text().splitlines()[-1])
    assert (line["path"], line["status"], line["error"]) == (
        "/predict",
        503,
        "the server has stopped",
    )


def test_a_closed_terminal_ends_it_like_sigterm(model_file):
    with (
        open_server(model_file) as found,
        socket.create_connection(("127.0.0.1", found.port)) as begun,
    ):
        begun.sendall(b"GET /v2 HTTP/1.1\r\n")
        assert found.ask("/health").status == 200
        found.process.send_signal(signal.SIGHUP)
        assert any(found.ask("/health").status == 503 for _ in range(1000))
        begun.sendall(b"\r\n")
        assert begun.recv(99).startswith(b"HTTP/1.1 200")
        assert found.process.wait(timeout=30) == 0


def test_nohup_keeps_it_without_a_terminal(model_file, monkeypatch):
    command = serve_command
    monkeypatch.setattr("small_server.serve_command", lambda *words: ["nohup", *command(*words)])
    with open_server(model_file) as found:
        found.process.send_signal(signal.SIGHUP)
        for _ in range(5):
            assert found.ask("/health").status == 200


BROKEN = """
import sys
from phalanx.serve import batching
from phalanx.cli.main import main

def fail(self):
    raise MemoryError

batching.Batcher._take_parts = fail
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_whose_model_thread_has_ended_ends(model_file, monkeypatch):
    command = [sys.executable, "-c", BROKEN, "serve"]
    monkeypatch.setattr("small_server.serve_command", lambda *words: [*command, *map(str, words)])
    with open_server(model_file) as found:
        assert found.ask(INFER, *infer_body(make_tensor(1))).status == 503
        assert found.process.wait(timeout=30) == 70
        assert found.process.stderr is not None
        assert "a model's thread has ended" in found.process.stderr.read()
