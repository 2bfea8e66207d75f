"""Images to a server: every one of them is answered, unreadable or failed, and counted once."""

import re
import socket
import threading
import time

import pytest

from phalanx.client.connection import Connection, RequestFailed, parse_address
from phalanx.client.images import collect_validation
from phalanx.client.load_generator import LoadOptions, send_images
from phalanx.client.protocols import ServedModel
from phalanx.client.results import summarize_latency, summarize_result
from phalanx.errors import ConfigError
from scripted_http_server import CLASSES, REFUSAL, answer_well, serve, to_json

MODEL = ServedModel("demo", tuple(CLASSES))


@pytest.fixture
def server():
    with serve() as script:
        yield script


def read(place):
    return f"{place}.png", b"file %d" % place


def send(server, images, **options):
    options = LoadOptions(**{"timeout_s": 5.0, **options})
    result = send_images(parse_address(server.url), MODEL, images, read, options=options)
    sent = images if options.per_thread is None else options.per_thread * options.threads
    assert result.sent_images == sent, "an image is answered, failed or unreadable"
    return result


def find_sent(server):
    return [int(n) for _, _, body in server.asked for n in re.findall(rb"\r\nfile (\d+)\r\n", body)]


# --- how images are sent ---


@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (4, 2), (100, 3)])
def test_every_image_is_sent_once(server, batch, threads):
    result = send(server, 10, batch_size=batch, threads=threads)
    assert sorted(find_sent(server)) == list(range(10))
    assert len(result.requests) == len(server.asked) == -(-10 // batch)
    assert {a.guesses[0] for a in result.answers.values()} == {("cat", 0.7)}
    assert sorted(result.answers) == list(range(10)) and result.answered_images == 10


def test_a_measurement_sends_so_many_of_each_thread_after_a_warm_up(server):
    result = send(server, 3, batch_size=2, threads=2, per_thread=5)
    assert len(server.asked) == 2 * (1 + 3), "one warm-up of each, and 2 + 2 + 1 images"
    assert result.answered_images == 10 and len(result.requests) == 6
    assert {request.thread for request in result.requests} == {0, 1}


def test_a_connection_is_used_again(server):
    send(server, 20, threads=2)
    assert len(server.connections) == 2


def test_async_keeps_several_requests_of_a_thread_under_way(server):
    together, most = threading.Barrier(6, timeout=10), []

    def answer(body, number):
        if number <= 6:
            most.append(together.wait())  # goes on only when six are here at once
        return answer_well(body)

    server.answer = answer
    result = send(server, 12, threads=2, in_flight=3, per_thread=None)
    assert sorted(most) == list(range(6)) and result.answered_images == 12


def test_a_key_goes_with_every_request(server):
    address = parse_address(server.url, api_key="secret")
    send_images(address, MODEL, 3, read, options=LoadOptions())
    assert {headers["Authorization"] for _, headers, _ in server.asked} == {"Bearer secret"}
    assert "secret" not in repr(address)


# --- what goes wrong ---


def test_a_busy_server_is_asked_again_after_the_time_it_names(server):
    busy = to_json(429, REFUSAL, Retry_After="0.2")
    server.answer = lambda body, number: busy if number <= 2 else answer_well(body)
    began = time.monotonic()
    result = send(server, 3, threads=1)
    assert time.monotonic() - began >= 0.4
    assert result.answered_images == 3 and result.failed_images == 0
    assert dict(result.retries) == {"HTTP 429": 2} and result.waited_s == pytest.approx(0.4)
    assert max(request.took_s for request in result.requests) < 0.2, "waiting is no latency"


def test_a_server_that_stays_busy_is_given_up_and_counted(server):
    server.answer = lambda body, number: to_json(429, REFUSAL, Retry_After="0")
    result = send(server, 4, threads=2, retries=3)
    assert len(server.asked) == 4 * (1 + 3)
    assert dict(result.failures) == {f"HTTP 429: {REFUSAL['error']}": 4}


def test_a_server_that_drains_is_asked_again_only_where_it_says_so(server):
    server.answer = lambda body, number: to_json(503, {"error": "stopping"})
    assert dict(send(server, 2).failures) == {"HTTP 503: stopping": 2}
    assert len(server.asked) == 2
    server.answer = lambda body, number: (
        to_json(503, {"error": "stopping"}, Retry_After="0") if number == 3 else answer_well(body)
    )
    assert send(server, 2, threads=1).answered_images == 2


def test_one_bad_image_does_not_spoil_its_batch(server):
    def answer(body, number):
        if b"file 2\r\n" in body:
            return to_json(400, {"error": "image 2 is none"})
        return answer_well(body)

    server.answer = answer
    result = send(server, 6, batch_size=3)
    assert (
        result.answered_images == 5 and result.unreadable_images == 1 and result.failed_images == 0
    )
    assert result.answers[2].problem == "image 2 is none"
    assert {place for place, one in result.answers.items() if one.guesses} == {0, 1, 3, 4, 5}


def test_a_problem_beside_good_answers_is_counted_as_unreadable(server):
    good = {"image": "x", "guesses": [{"class": "cat", "probability": 1.0}]}
    bad = {"image": "y", "guesses": [], "problem": "cut off"}
    server.answer = lambda body, number: to_json(200, {"predictions": [good, bad]})
    result = send(server, 2, batch_size=2)
    assert (result.answered_images, result.unreadable_images) == (1, 1)
    assert result.answers[1].problem == "cut off"


def test_a_file_that_cannot_be_read_is_not_sent(server):
    def read_some(place):
        if place == 1:
            raise RequestFailed("Permission denied")
        return read(place)

    options = LoadOptions(batch_size=3)
    result = send_images(parse_address(server.url), MODEL, 3, read_some, options=options)
    assert find_sent(server) == [0, 2] and result.unreadable_images == 1
    assert result.answers[1].problem == "Permission denied"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ((200, b"<html>", {}), "HTTP 200 with a body that is not JSON"),
        ((200, b"[" * 100_000, {}), "HTTP 200 with a body that is not JSON"),
        (to_json(200, {"predictions": []}), "0 answers to 1 images"),
        (to_json(200, {"other": 1}), "an answer of another form (KeyError: 'predictions')"),
        (to_json(200, {"predictions": [{"guesses": []}]}), "an answer without probabilities"),
        (to_json(500, {"error": "oh"}), "HTTP 500: oh"),
        ((502, b"bad gateway", {}), "HTTP 502: bad gateway"),
        (None, "{place} closed the connection without an answer"),
    ],
)
def test_every_failure_has_a_name(server, answer, named):
    server.answer = lambda body, number: answer
    result = send(server, 2)
    place = parse_address(server.url).place
    assert dict(result.failures) == {named.format(place=place): 2}


def test_a_server_that_is_too_slow_is_named(server):
    free = threading.Event()
    server.answer = lambda body, number: answer_well(body) if free.wait(20) else None
    result = send(server, 1, timeout_s=0.2)
    free.set()
    place = parse_address(server.url).place
    assert dict(result.failures) == {f"no answer from {place} within 0.2 s": 1}


def test_a_server_that_is_gone_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    result = send_images(parse_address(place), MODEL, 3, read, options=LoadOptions())
    assert dict(result.failures) == {f"{place} refused the connection": 3}
    assert summarize_result(result)["latency_ms"] == {"p50": None, "p95": None, "p99": None, "n": 0}


def test_a_connection_that_was_closed_while_it_rested_is_opened_again(server):
    with Connection(parse_address(server.url), timeout_s=5) as connection:
        assert connection.post("/predict", b"filename=", {}).status == 200
        server.answer = lambda body, number: None if number == 2 else answer_well(body)
        assert connection.post("/predict", b"filename=", {}).status == 200
    assert len(server.asked) == 3


@pytest.mark.parametrize("per_thread", [None, 3])  # before the first request, or in it
def test_a_bug_in_a_thread_ends_the_whole_load(server, per_thread):
    def read_wrongly(place):
        raise ZeroDivisionError

    options = LoadOptions(threads=3, per_thread=per_thread)
    with pytest.raises(ZeroDivisionError):
        send_images(parse_address(server.url), MODEL, 3, read_wrongly, options=options)


# --- numbers and addresses ---


def test_percentiles_need_enough_requests(server):
    latency = summarize_latency(send(server, 50))
    assert latency["p50"] <= latency["p95"] <= latency["max"] and latency["p99"] is None
    assert latency["n"] == 50 and latency["min"] > 0


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8500", "http://localhost:8500/"),
        ("https://host/models/", "https://host:443/models/"),
        ("http://[::1]:80", "http://[::1]:80/"),
    ],
)
def test_addresses_are_understood(text, url):
    assert parse_address(text).url == url


@pytest.mark.parametrize(
    "text",
    ["ftp://host", "http://", "http://host:99999", "http://a b", "http://h/?q=1", "http://h:x"],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="--url"):
        parse_address(text)


def test_a_key_in_the_address_is_sent_to_the_file():
    with pytest.raises(ConfigError, match="give the key by --api-key-file"):
        parse_address("http://user:key@host")


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("synthetic-resnet50", "(synthetic) is noise"),
        ("imagenet-resnet50", "(imagenet) is not on this machine"),
    ],
)
def test_a_preset_without_images_sends_those_that_come_along(preset, why):
    found = collect_validation(preset, {}, count=2)
    assert len(found) == 2 and found.labels == [None, None]
    assert found.note == f"{preset}: its data {why}: sending images that come with Phalanx"
