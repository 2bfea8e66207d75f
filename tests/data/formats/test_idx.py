import gzip

import numpy as np
import pytest

from phalanx.data.formats.sources import open_source
from phalanx.errors import DataError

RANDOM = np.random.default_rng(0)


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


def write_mnist(folder, *, images=None, labels=None, stem="train", ending=""):
    folder.mkdir(parents=True, exist_ok=True)
    images = RANDOM.integers(0, 256, (20, 28, 28), np.uint8) if images is None else images
    labels = np.arange(20, dtype=np.uint8) % 10 if labels is None else labels
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        data = idx_bytes(array)
        data = gzip.compress(data) if ending else data
        (folder / f"{stem}-{name}-ubyte{ending}").write_bytes(data)
    return images, labels


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_idx_files_are_found_and_read(tmp_path, ending, place):
    images, labels = write_mnist(tmp_path / place, ending=ending)
    source = open_source("mnist", str(tmp_path), "train")
    assert len(source) == 20 and source.classes == tuple("0123456789")
    assert (source.labels == labels).all() and source.labels.dtype == np.int64
    assert (source.read(7) == images[7][:, :, None]).all()
    assert source.name(7) == "train-images-idx3-ubyte[7]"


def test_the_validation_split_of_idx_files_is_t10k(tmp_path):
    write_mnist(tmp_path)
    images, _ = write_mnist(tmp_path, stem="t10k")
    source = open_source("fashion-mnist", str(tmp_path), "valid")
    assert (source.read(0)[..., 0] == images[0]).all() and source.classes[1] == "trouser"


def test_sets_side_by_side_are_not_mixed_up(tmp_path):
    digits, _ = write_mnist(tmp_path / "MNIST/raw")
    clothes, _ = write_mnist(tmp_path / "FashionMNIST/raw")
    assert (open_source("mnist", str(tmp_path), "train").read(0)[..., 0] == digits[0]).all()
    source = open_source("fashion-mnist", str(tmp_path), "train")
    assert (source.read(0)[..., 0] == clothes[0]).all()


def test_a_fingerprint_follows_pixels_and_labels(tmp_path):
    images, labels = write_mnist(tmp_path)
    first = open_source("mnist", str(tmp_path), "train").fingerprint()
    assert first["images"] == 20 and first["classes"] == 10
    for changed in ({"images": images ^ 1}, {"labels": labels[::-1].copy()}):
        write_mnist(tmp_path, **{"images": images, "labels": labels, **changed})
        assert open_source("mnist", str(tmp_path), "train").fingerprint() != first


def damage(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage(IMAGES, lambda data: data[:-1]), "truncated"),
        (damage(IMAGES, lambda data: data[:6]), "truncated"),
        (damage(IMAGES, lambda data: b"\0\0\x08\x01" + data[4:]), "not with 0x00000803"),
        (damage(IMAGES, lambda data: b""), "not the idx file expected"),
        (damage(LABELS, lambda data: data[:-1] + b"\x0a"), "label 10 at image 19"),
        (
            lambda folder: write_mnist(folder, labels=np.zeros(19, np.uint8)),
            "do not belong together",
        ),
        (lambda folder: (folder / LABELS).unlink(), "needs train-labels-idx1-ubyte"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, spoil, message):
    write_mnist(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        open_source("mnist", str(tmp_path), "train")
    assert "train-" in str(caught.value)


@pytest.mark.parametrize("keep", [1, 30, -1])
def test_a_cut_gzip_file_is_named(tmp_path, keep):
    write_mnist(tmp_path, ending=".gz")
    damage(f"{IMAGES}.gz", lambda data: data[:keep])(tmp_path)
    with pytest.raises(DataError, match=r"ubyte\.gz: cannot be read.*fetch it again"):
        open_source("mnist", str(tmp_path), "train")
