"""Downloads from a real server on this machine: whole, broken off, damaged, missing."""

import gzip
import hashlib
import http.server
import threading
from dataclasses import replace

import pytest

from phalanx.catalog.datasets import DATASETS, PUBLISHED
from phalanx.data import fetch as fetching
from phalanx.data.fetch import PUBLISHED_FILES, fetch_dataset
from phalanx.errors import ConfigError, DataError, DiskError

CONTENT = {f"file{number}": bytes([number]) * 300_000 for number in (1, 2)}
BROKEN_OFF_AT = 1000


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path, notes what was asked, and breaks off as often as it is told."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.break_off, self.ranges = {}, [], 0, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        data = self.server.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        data = data[start:]
        if self.server.break_off:
            self.server.break_off -= 1
            data = data[:BROKEN_OFF_AT]
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.files = {f"{name}.gz": gzip.compress(d, mtime=0) for name, d in CONTENT.items()}
        server.files["noise.tar.gz"] = hashlib.shake_256(b"").digest(100_000)
        sums = {name: hashlib.md5(data).hexdigest() for name, data in CONTENT.items()}
        mnist = replace(PUBLISHED_FILES["mnist"], url=server.url, md5=sums)
        monkeypatch.setitem(PUBLISHED_FILES, "mnist", mnist)
        noise = {"noise.tar.gz": hashlib.md5(server.files["noise.tar.gz"]).hexdigest()}
        monkeypatch.setitem(
            PUBLISHED_FILES,
            "cifar10",
            replace(PUBLISHED_FILES["cifar10"], url=server.url, md5=noise),
        )
        yield server
        server.shutdown()
        thread.join()


def parts_in(folder):
    return list(folder.rglob("*.part"))


def test_a_set_is_downloaded_checked_and_kept(tmp_path, server):
    told = []
    got = fetch_dataset("mnist", tmp_path, on_progress=lambda *words: told.append(words))
    assert got.folder == tmp_path and got.downloaded == ("file1.gz", "file2.gz")
    for name in CONTENT:
        assert (tmp_path / "MNIST" / f"{name}.gz").read_bytes() == server.files[f"{name}.gz"]
    size = len(server.files["file2.gz"])
    assert told[-1] == ("file2.gz", size, size) and not parts_in(tmp_path)


def test_what_is_there_is_not_downloaded_again(tmp_path, server):
    fetch_dataset("mnist", tmp_path)
    server.asked.clear()
    assert fetch_dataset("mnist", tmp_path).downloaded == () and server.asked == []
    (tmp_path / "MNIST/file2.gz").write_bytes(b"damaged")
    assert fetch_dataset("mnist", tmp_path).downloaded == ("file2.gz",)
    for name, data in CONTENT.items():
        (tmp_path / "MNIST" / f"{name}.gz").unlink()
        (tmp_path / name).write_bytes(data)
    assert fetch_dataset("mnist", tmp_path).downloaded == (), (
        "plain files in the folder itself do too"
    )


def test_a_dropped_connection_is_taken_up_where_it_broke(tmp_path, server):
    server.break_off = 2
    fetch_dataset("cifar10", tmp_path)
    assert (tmp_path / "noise.tar.gz").read_bytes() == server.files["noise.tar.gz"]
    assert [asked for _, asked in server.asked] == [None, "bytes=1000-", "bytes=2000-"]


def test_a_part_of_an_earlier_call_is_gone_on_with(tmp_path, server):
    whole = server.files["noise.tar.gz"]
    (tmp_path / "noise.tar.gz.part").write_bytes(whole[:60_000])
    fetch_dataset("cifar10", tmp_path)
    assert server.asked == [("/noise.tar.gz", "bytes=60000-")]
    (tmp_path / "noise.tar.gz").rename(tmp_path / "noise.tar.gz.part")
    fetch_dataset("cifar10", tmp_path)
    assert (tmp_path / "noise.tar.gz").read_bytes() == whole, "a part that was whole already"


def test_a_server_without_ranges_is_begun_anew(tmp_path, server):
    server.ranges = False
    (tmp_path / "noise.tar.gz.part").write_bytes(server.files["noise.tar.gz"][:60_000])
    fetch_dataset("cifar10", tmp_path)
    assert (tmp_path / "noise.tar.gz").read_bytes() == server.files["noise.tar.gz"]


def test_a_server_that_never_gets_further_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(fetching.time, "sleep", lambda seconds: None)
    server.ranges, server.break_off = False, 100
    with pytest.raises(
        DataError, match=r"connection broke 5 times.*99,000 bytes are missing.*continues"
    ):
        fetch_dataset("cifar10", tmp_path)
    assert parts_in(tmp_path)[0].stat().st_size == BROKEN_OFF_AT, "kept for the next call"
    assert not (tmp_path / "noise.tar.gz").exists()


def test_a_wrong_checksum_leaves_nothing(tmp_path, server):
    server.files["noise.tar.gz"] = b"another file"
    with pytest.raises(DataError, match=r"noise\.tar\.gz: wrong checksum"):
        fetch_dataset("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_told_with_its_address(tmp_path, server):
    del server.files["noise.tar.gz"]
    with pytest.raises(
        DataError, match=r"/noise\.tar\.gz: the server answered 404 Not Found; .*by"
    ):
        fetch_dataset("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/", r"127\.0\.0\.1:9/noise.*cannot be reached .*by hand"),
        ("http://no-such-host.invalid/", "cannot be reached"),
    ],
)
def test_no_network_is_told_with_a_way_out(tmp_path, server, monkeypatch, url, message):
    unreachable = replace(PUBLISHED_FILES["cifar10"], url=url)
    monkeypatch.setitem(PUBLISHED_FILES, "cifar10", unreachable)
    with pytest.raises(DataError, match=message):
        fetch_dataset("cifar10", tmp_path)


def test_a_system_package_is_used_where_it_is_or_copied(tmp_path, server, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    for name, data in CONTENT.items():
        (package / f"{name}.gz").write_bytes(gzip.compress(data, 1, mtime=0))
    monkeypatch.setitem(
        PUBLISHED_FILES, "mnist", replace(PUBLISHED_FILES["mnist"], package=str(package))
    )
    assert fetch_dataset("mnist", None).folder == package
    assert fetch_dataset("mnist", tmp_path / "mine").downloaded == () and server.asked == []
    assert (tmp_path / "mine/MNIST/file2.gz").is_file() and not parts_in(tmp_path)
    (package / "file1.gz").write_bytes(b"damaged")
    assert fetch_dataset("mnist", None).downloaded == ("file1.gz",)
    assert (tmp_path / "data/mnist/MNIST/file1.gz").is_file()


def test_a_place_that_cannot_be_written_is_named(tmp_path, server):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"file/x: Not a directory.*another --data-dir"):
        fetch_dataset("cifar10", tmp_path / "file/x")


def test_a_set_nobody_publishes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'cifar' cannot be fetched; did you mean 'cifar10'"):
        fetch_dataset("cifar", tmp_path)


def test_addresses_and_sums_are_those_of_the_publishers():
    assert set(PUBLISHED_FILES) == {"cifar10", "cifar100", "mnist", "fashion-mnist"}
    for published in PUBLISHED_FILES.values():
        assert published.url.startswith("http") and published.url.endswith("/")
        assert all(len(bytes.fromhex(md5)) == 16 for md5 in published.md5.values())


def test_the_catalog_knows_what_can_be_fetched():
    assert set(PUBLISHED) == set(PUBLISHED_FILES) <= set(DATASETS)
