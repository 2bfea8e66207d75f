"""CIFAR-10 and CIFAR-100 from their files, and straight from their archives."""

import io
import tarfile

import numpy as np
import pytest

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.cifar import has_cifar_files, open_cifar
from phalanx.data.formats.sources import open_source
from phalanx.errors import DataError

RANDOM = np.random.default_rng(0)


def records_of(images, *, labels):
    records = RANDOM.integers(0, 256, (images, labels + 3072), np.uint8)
    records[:, labels - 1] %= 10 if labels == 1 else 100
    return records


def write_archive(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("place", [".", "cifar-100-binary"])
def test_cifar100_has_its_fine_labels(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    records = records_of(7, labels=2)
    records[:, 0] = 200  # no coarse label is ever looked at
    (tmp_path / place / "train.bin").write_bytes(records.tobytes())
    source = open_cifar("cifar100", tmp_path, "train")
    assert source.labels.tolist() == records[:, 1].tolist() and source.name(3) == "train.bin[3]"
    assert (source.read(3)[..., 2].reshape(-1) == records[3, 2 + 2048 :]).all()
    with pytest.raises(DataError, match=r"no test\.bin here or in cifar-100-binary/"):
        open_cifar("cifar100", tmp_path, "valid")


def test_cifar100_has_a_hundred_classes_by_name():
    classes = DATASETS["cifar100"].classes
    assert len(set(classes)) == 100 and list(classes) == sorted(classes)
    assert (classes[0], classes[11], classes[53], classes[99]) == ("apple", "boy", "orange", "worm")


def test_a_label_beyond_the_classes_is_refused(tmp_path):
    records = records_of(3, labels=2)
    records[1, 1] = 100
    (tmp_path / "test.bin").write_bytes(records.tobytes())
    with pytest.raises(DataError, match="label 100 at image 1, but cifar100 has 100 classes"):
        open_cifar("cifar100", tmp_path, "valid")


def test_an_archive_is_read_without_unpacking(tmp_path):
    parts = {
        f"cifar-10-batches-bin/{name}": records_of(2, labels=1).tobytes()
        for name in ("readme.html", "data_batch_5.bin", "data_batch_1.bin", "test_batch.bin")
    }
    for number in (2, 3, 4):
        parts[f"cifar-10-batches-bin/data_batch_{number}.bin"] = records_of(2, labels=1).tobytes()
    write_archive(tmp_path / "cifar-10-binary.tar.gz", parts)
    packed = open_cifar("cifar10", tmp_path, "train")
    assert len(packed) == 10 and len(open_cifar("cifar10", tmp_path, "valid")) == 2
    for name, data in parts.items():
        (tmp_path / name.rpartition("/")[2]).write_bytes(data)
    assert open_cifar("cifar10", tmp_path, "train").fingerprint() == packed.fingerprint()
    assert list(tmp_path.glob("cifar-10-batches-bin")) == []


def test_a_damaged_archive_is_named(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    write_archive(path, {"cifar-100-binary/train.bin": records_of(50, labels=2).tobytes()})
    with pytest.raises(DataError, match=r"has no cifar-100-binary/test\.bin; fetch it again"):
        open_cifar("cifar100", tmp_path, "valid")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"binary\.tar\.gz: cannot be read \(.*fetch it again"):
        open_cifar("cifar100", tmp_path, "train")


def test_the_two_sets_are_told_apart(tmp_path):
    (tmp_path / "train.bin").write_bytes(records_of(3, labels=2).tobytes())
    assert has_cifar_files(tmp_path, "cifar100") and not has_cifar_files(tmp_path, "cifar10")
    (tmp_path / "train.bin").write_bytes(b"weights of something else")
    assert not has_cifar_files(tmp_path, "cifar100")
    (tmp_path / "test_batch.bin").write_bytes(records_of(3, labels=1).tobytes())
    assert has_cifar_files(tmp_path, "cifar10")


def write_cifar(folder, *, images=4):
    folder.mkdir(parents=True, exist_ok=True)
    records = RANDOM.integers(0, 256, (6, images, 3073), np.uint8)
    records[:, :, 0] %= 10
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for name, part in zip(names, records, strict=True):
        (folder / name).write_bytes(part.tobytes())
    return records


@pytest.mark.parametrize("place", [".", "cifar-10-batches-bin"])
def test_cifar_files_are_found_and_read(tmp_path, place):
    records = write_cifar(tmp_path / place)
    source = open_source("cifar10", str(tmp_path), "train")
    assert len(source) == 20 and source.name(9) == "data_batch_3.bin[1]"
    assert (source.labels == records[:5, :, 0].reshape(-1)).all()
    assert (source.read(9)[..., 1].reshape(-1) == records[2, 1, 1025:2049]).all()
    assert len(open_source("cifar10", str(tmp_path), "valid")) == 4


def damage(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage("data_batch_2.bin", lambda data: data[:-1]), "data_batch_2.bin: 12,291 bytes"),
        (damage("data_batch_2.bin", lambda data: data[:3073]), "unequal length"),
        (damage("data_batch_2.bin", lambda data: b""), "truncated"),
        (lambda folder: (folder / "data_batch_4.bin").unlink(), "data_batch_4.bin: cannot be read"),
        (lambda folder: (folder / "data_batch_1.bin").unlink(), "no data_batch_1.bin"),
    ],
)
def test_a_damaged_cifar_file_is_named(tmp_path, spoil, message):
    write_cifar(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        open_source("cifar10", str(tmp_path), "train")
