"""Requests to a real server: three protocols, overload, a server that dies, and a child's end."""

import os
import signal
import threading
import time

import pytest

from phalanx.client.connection import parse_address
from phalanx.client.load_generator import LoadOptions, send_images
from phalanx.client.load_process import LoadJob, measure_load
from phalanx.client.served_model import find_model
from phalanx.client.server_process import open_server
from phalanx.errors import CheckpointError, ConfigError, NetworkError
from small_server import CLASSES, NAME, make_png, write_model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("served") / f"{NAME}.onnx"))


@pytest.fixture(scope="module")
def address(model_file):
    with open_server(model_file, ["--max-request-mib", "1"], ready_s=60) as server:
        assert server.name == NAME
        yield parse_address(server.url)


FILES = [make_png(seed) for seed in range(12)]


def read(place):
    return f"{place}.png", FILES[place] if place >= 0 else b"hello"


def send(address, **options):
    model = find_model(address, name=None, timeout_s=5)
    options = LoadOptions(**{"timeout_s": 20.0, **options})
    return send_images(address, model, len(FILES), read, options=options)


def test_three_protocols_say_the_same(address):
    model = find_model(address, name=None, timeout_s=5)
    assert model.classes == tuple(f"class {number}" for number in range(CLASSES))
    found = {p: send(address, protocol=p, batch_size=5) for p in ("predict", "tensorflow", "v2")}
    for place in range(len(FILES)):
        by_predict = found["predict"].answers[place].guesses
        assert len(by_predict) == 5 and sum(share for _, share in by_predict) <= 1 + 1e-9
        for protocol in ("tensorflow", "v2"):
            other = found[protocol].answers[place].guesses
            assert [name for name, _ in other] == [name for name, _ in by_predict]
            assert [s for _, s in other] == pytest.approx([s for _, s in by_predict], abs=1e-6)
    shares = {answer.guesses[0][1] for answer in found["v2"].answers.values()}
    assert len(shares) == len(FILES), "the images are told apart"


@pytest.mark.parametrize("protocol", ["predict", "tensorflow", "v2"])
def test_a_bad_image_is_named_and_leaves_its_batch_alone(address, protocol):
    model = find_model(address, name=None, timeout_s=5)
    places = [0, 1, -1, 2]
    options = LoadOptions(protocol=protocol, batch_size=4)
    result = send_images(address, model, 4, lambda at: read(places[at]), options=options)
    assert (result.answered_images, result.unreadable_images, result.failed_images) == (3, 1, 0)
    assert result.answers[2].problem.startswith("not a JPEG, PNG")


def test_what_is_too_large_is_told_by_the_server_that_hangs_up_on_it(address):
    model = find_model(address, name=None, timeout_s=5)
    large = FILES[0] + bytes(8 << 20)
    result = send_images(address, model, 1, lambda at: ("l.png", large), options=LoadOptions())
    assert result.unreadable_images == 1 and "larger than 1.0 MiB" in result.answers[0].problem


def test_processes_share_the_connections_of_a_load(address, tmp_path):
    files = []
    for place, data in enumerate(FILES):
        (tmp_path / f"{place}.png").write_bytes(data)
        files.append(str(tmp_path / f"{place}.png"))
    options = LoadOptions(threads=3, seconds=0.5)
    job = LoadJob(url=address.url, model=NAME, files=tuple(files), options=options)
    times = measure_load(job, processes=2)
    assert len(times.ended_at) == len(times.took_s) == len(times.images) > 10
    assert 0 < times.busiest < 1.5
    assert not times.failures and times.began_at < times.stopped_at
    inside = [end for end in times.ended_at if times.began_at <= end <= times.stopped_at]
    assert len(inside) > 10


# --- the server as a child ---


def test_a_server_that_refuses_and_then_dies_loses_nothing(model_file):
    with open_server(model_file, ["--max-queue", "2", "--max-batch", "1"], ready_s=60) as server:
        address = parse_address(server.url)
        result = send(address, threads=24, per_thread=10, retries=0)
        assert result.sent_images == 240 and result.answered_images + result.failed_images == 240
        assert result.failed_images > 0 and all(
            why.startswith("HTTP 429: ") for why in result.failures
        )

        def kill_soon():
            time.sleep(0.2)
            os.killpg(server.pid, signal.SIGKILL)

        threading.Thread(target=kill_soon).start()
        result = send(address, threads=2, per_thread=1000)
    assert result.sent_images == 2000 and 0 < result.answered_images < 2000
    assert all("connection" in why for why in result.failures), result.failures


def test_a_server_ends_with_its_block_whatever_happens(model_file):
    with pytest.raises(ZeroDivisionError), open_server(model_file, ready_s=60) as server:
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    with pytest.raises(NetworkError, match="refused the connection; is the server running"):
        find_model(parse_address(server.url), name=None, timeout_s=5)


def test_what_the_server_refuses_is_raised_here(tmp_path):
    text = tmp_path / "model.onnx"
    text.write_text("{}")
    with pytest.raises(CheckpointError, match=r"^[^:]*/model.onnx: is JSON text"):
        open_server(str(text), ready_s=60).__enter__()


def test_another_name_is_refused(address):
    with pytest.raises(
        ConfigError, match=r"--name other: http.* serves tiny; leave the option out"
    ):
        find_model(address, name="other", timeout_s=5)
