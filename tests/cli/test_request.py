"""`phalanx request` as a command, to a server whose answers a test decides."""

import json
import shutil
import socket

import pytest
from PIL import Image

from phalanx.cli.main import main
from scripted_http_server import REFUSAL, answer_well, serve, to_json


@pytest.fixture
def server():
    with serve() as script:
        yield script


@pytest.fixture
def photos(tmp_path):
    """Two cats and a dog, in folders of their classes."""
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)


def test_predictions_and_accuracy_by_folders(server, photos, capsys):
    assert main(["request", str(photos), "--url", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{photos}/cat/1.png: cat 70.0%  dog 20.0%  owl 10.0%"
    assert len(lines) == 7
    assert lines[3].startswith("answered    3 images in 3 requests over 2 connections in ")
    assert lines[4].startswith("throughput  ") and lines[4].endswith(" images/s")
    assert lines[5].startswith("latency     p50 ") and lines[5].endswith("n=3)")
    assert lines[6].startswith("accuracy    66.7% top-1 (95% interval 20.8% to 93.9%, n=3)")


@pytest.mark.parametrize(
    ("given", "accuracy"),
    [("photos", (2, 3)), ("photos/cat", (2, 3)), ("photos/cat/2023", None)],
)
def test_folders_inside_a_class_folder_are_of_its_class(given, accuracy, server, photos, capsys):
    (photos / "cat/2023/may").mkdir(parents=True)
    (photos / "cat/1.png").rename(photos / "cat/2023/may/1.png")
    (photos / "dog").rename(photos / "cat/dog")  # the innermost that is called like a class
    assert main(["request", str(photos.parent / given), "--url", server.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["accuracy"]
    assert (found and (round(found["top1"] * found["n"]), found["n"])) == accuracy


def test_folders_that_are_no_classes_are_no_labels(server, photos, capsys):
    (photos / "cat").rename(photos / "holiday")
    (photos / "dog").rename(photos / "2024")
    assert main(["request", str(photos), "--url", server.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] is None and len(found["predictions"]) == 3
    assert found["predictions"][0]["guesses"][0] == {"class": "cat", "probability": 0.7}


def test_a_table_of_labels(server, photos, tmp_path, capsys):
    table = tmp_path / "labels.csv"
    table.write_text("photos/cat/1.png,owl\nphotos/cat/2.png,dog\nphotos/dog/3.png,cat\n")
    words = ["request", str(photos), "--url", server.url, "--labels", str(table)]
    assert main(words) == 0
    assert "accuracy    33.3% top-1" in capsys.readouterr().out
    table.write_text("photos/cat/1.png,owl\nphotos/cat/2.png,wolf\n")
    assert main(words) == 3
    assert "2.png is of class 'wolf', which the model does not have" in capsys.readouterr().err
    table.write_text("elsewhere/1.png,owl\nelsewhere/2.png,dog\n")
    assert main(words) == 3
    assert f"--labels {table}: names none of the images" in capsys.readouterr().err


def test_a_table_of_one_class_is_enough_to_score_by(server, photos, tmp_path, capsys):
    table = tmp_path / "labels.csv"
    table.write_text("path,label\nphotos/dog/3.png,cat\n")
    words = ["request", str(photos / "dog/3.png"), "--url", server.url, "--labels", str(table)]
    assert main(words) == 0
    assert "accuracy    100.0% top-1" in capsys.readouterr().out


def test_a_measurement_prints_numbers_alone(server, photos, capsys):
    words = ["--num-threads", "3", "--num-images", "20", "--batch-size", "4", "--verbose"]
    assert main(["request", str(photos), "--url", server.url, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("request ") and "4 images, " in line for line in lines) == 5
    assert any(
        line.startswith("answered    60 images in 15 requests over 3 connections") for line in lines
    )
    assert not any("cat 70.0%" in line for line in lines)


def test_unreadable_and_failed_images_are_named_and_make_the_code(server, photos, capsys):
    shutil.copy(photos / "cat/1.png", photos / "cat/broken.png")

    def answer(body, number):
        bad = b'broken.png"' in body
        return to_json(400, {"error": "is no image"}) if bad else answer_well(body)

    server.answer = answer
    assert main(["request", str(photos), "--url", server.url]) == 3
    printed = capsys.readouterr()
    assert f"{photos}/cat/broken.png: is no image" in printed.err
    assert "unreadable  1 image" in printed.out
    server.answer = lambda body, number: to_json(429, REFUSAL, Retry_After="0")
    assert main(["request", str(photos), "--url", server.url, "--retries", "1"]) == 8
    printed = capsys.readouterr().out
    assert f"failed      4 images: HTTP 429: {REFUSAL['error']}" in printed
    assert "repeated    4 requests after HTTP 429; waited 0.0 s in all" in printed


def test_a_server_that_is_not_there(photos, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["request", str(photos), "--url", f"localhost:{port}"]) == 8
    said = capsys.readouterr().err
    assert f"localhost:{port} refused the connection; is the server running?" in said
    assert f"phalanx serve RUN --port {port}" in said


def test_an_address_that_leads_nowhere(photos, capsys):
    assert main(["request", str(photos), "--url", "nowhere.invalid"]) == 8
    assert "nowhere.invalid is not a known host; check --url" in capsys.readouterr().err


def test_the_key_comes_from_a_file_or_the_environment(
    server, photos, tmp_path, monkeypatch, capsys
):
    words = ["request", str(photos / "dog"), "--url", server.url]
    file = tmp_path / "key"
    file.write_text("from a file\n")
    assert main([*words, "--api-key-file", str(file)]) == 0
    assert server.asked[-1][1]["Authorization"] == "Bearer from a file"
    monkeypatch.setenv("PHALANX_API_KEY", "from here")
    assert main(words) == 0
    assert server.asked[-1][1]["Authorization"] == "Bearer from here"
    server.model = to_json(401, {"error": "wrong key"})
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "the server requires another API key; give it with --api-key-file FILE" in said
    assert " or in PHALANX_API_KEY" in said
    file.write_text(" \n")
    assert main([*words, "--api-key-file", str(file)]) == 2
    assert "is empty; write the key into it" in capsys.readouterr().err


def test_a_server_that_is_not_ours_needs_the_name_of_its_model(server, photos, capsys):
    server.model = to_json(404, {"error": "Malformed request"})
    server.answer = lambda body, number: to_json(200, {"predictions": [[0.0, 2.0]]})
    words = ["request", str(photos / "dog"), "--url", server.url, "--protocol", "tensorflow"]
    assert main(words) == 2
    assert "does not say which model it has (HTTP 404); give its name with --name" in (
        capsys.readouterr().err
    )
    assert main([*words, "--name", "resnet50"]) == 0
    assert server.asked[-1][0] == "/v1/models/resnet50:predict"
    assert "3.png: class 1 88.1%  class 0 11.9%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "1 image in 1 request over 1 connection in "),
        (["--use-async"], "1 image in 1 request over 1 connection in "),
        (["--num-images", "2"], "4 images in 4 requests over 2 connections in "),
        (["--num-images", "3", "--use-async"], "6 images in 6 requests over 6 connections in "),
    ],
)
def test_no_connection_is_opened_that_nothing_is_sent_over(server, photos, words, said, capsys):
    assert main(["request", str(photos / "dog"), "--url", server.url, *words]) == 0
    assert f"answered    {said}" in capsys.readouterr().out
    assert len(server.connections) == int(said.split()[-3])


def test_a_page_of_another_server_is_told_in_a_line(server, photos, capsys):
    server.model = to_json(404, {"error": "Malformed request"})
    page = b"<!DOCTYPE HTML>\n<html>\n<head>\n<title>Error\n response</title></head>\n<p>no\n"
    words = ["request", str(photos / "dog"), "--url", server.url, "--name", "m"]
    for body, shown in (
        (page, "a web page, 'Error response'"),
        (b"<html>\n<p>no", "a web page"),
        (b"no\n\nsuch\nverb", "no such verb"),
        (json.dumps({"error": "no\nsuch verb"}).encode(), "no such verb"),
    ):
        server.answer = lambda _, number, body=body: (501, body, {})
        assert main([*words, "--protocol", "tensorflow"]) == 8
        assert f"failed      1 image: HTTP 501: {shown}\n" in capsys.readouterr().out


def test_an_answer_without_end_is_not_read(server, photos, monkeypatch, capsys):
    words = ["request", str(photos / "dog"), "--url", server.url]
    server.model = (200, b"", {"Content-Length": "99999999999"})
    assert main(words) == 8
    said = capsys.readouterr().err
    assert "sends an answer of more than 256.0 MiB, which does not look like an inference" in said
    assert "server; check --url" in said
    monkeypatch.setattr("phalanx.client.connection._MOST_BYTES", 9)
    chunks = b"5\r\nabcde\r\n" * 2 + b"0\r\n\r\n"
    server.model = (200, chunks, {"Content-Length": "", "Transfer-Encoding": "chunked"})
    assert main(words) == 8
    assert "does not look like an inference server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no image is named; give files or folders, or --serve RUN"),
        (["x.png", "--protocol", "v3"], "--protocol v3: choose from predict, tensorflow, v2"),
        (["x.png", "--batch-size", "0"], "--batch-size: expected a whole number from 1 to 4,096"),
        (["x.png", "--num-threads", "many"], "--num-threads: expected a whole number"),
        (["x.png", "--timeout", "-1"], "--timeout: expected seconds up to 3600"),
        (["x.png", "--serve", "r", "--url", "u"], "--url: --serve starts a server of its own"),
        (["--serve", "r", "--api-key-file", "k"], "--api-key-file: --serve starts a server of its"),
        (["x.png", "--data-dir", "d"], "--data-dir: goes with --serve RUN; leave it out"),
        (["x.png", "--use-async", "--num-threads", "63"], "expected a whole number from 1 to 62"),
        (["--serve", "r", "--labels", "l.csv"], "--labels: no image is named"),
        (["x.png", "--ulr", "u"], "--ulr: no such option; did you mean '--url'?"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(words, said, capsys):
    assert main(["request", *words]) == 2
    assert said in capsys.readouterr().err
