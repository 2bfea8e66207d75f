"""ImageNet in folders with boxes, in its official archives, and as Kaggle hands it out."""

import base64
import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from phalanx.data.formats.imagenet import (
    SEQUENTIAL_FORMATS,
    has_imagenet_folders,
    open_imagenet,
)
from phalanx.data.formats.imagenet_devkit import (
    SYNSET_LABELS,
    read_numbered_synsets,
    read_validation_synsets,
)
from phalanx.data.formats.sources import DATA_FORMATS
from phalanx.errors import DataError

OFFICIAL = SEQUENTIAL_FORMATS["imagenet-official"]
KAGGLE = SEQUENTIAL_FORMATS["imagenet-kaggle"]
FOX, SETTER = "n02119789", "n02100735"
META_MAT = base64.b64decode(  # four rows of ImageNet's eight fields, compressed as MATLAB does
    "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFN1biBOb3YgMTUgMTM6MDA6"
    "NTAgMjAyNgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAA"
    "LgEAAHic42NgYHjBwcDABqSBFAMTAwSwQvksQMwIxexAXFyZV5xaUgyUZ2EQhIp3ALGnT3BYkLORgaFRvKcLyIBw"
    "PwgNB+X5RSnFyALpOfnFKAJ5pbnxyRmZOSlFqXlgARQOzIy81JL4jNTM9IwSqJaSosTMvPjM3MT01GIGPqCgBQPC"
    "P2xo/mFEwiDACRWHgA/2IP0OSPpZsOjnRNIvAOXnGRgZGlqaW1hCxYkxhx/NHBA/O7NEIS2/QkchrDSnAIt/sJnD"
    "imYOiJ8IMgXqDvLDA6LfAI9+GEDWD9NHaTyQrT9gigOF/nagJB0YGJgbmyKFAyFzhmI64MainwlJPwsQMgJFhnY6"
    "4KAoHRgaGFoM93QwMsoDAUrSgYGlmZGlCVI4EDJnKKaDoVIeAAChMWOA"
)


def jpeg(value=0, size=(40, 20)):
    out = io.BytesIO()
    Image.new("RGB", size, (value, 0, 0)).save(out, "JPEG")
    return out.getvalue()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def tar_bytes(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


# --- folders ---


@pytest.fixture
def raw(tmp_path):
    for number, synset in enumerate((SETTER, FOX)):
        for image in range(2):
            write(tmp_path / f"train/{synset}/{synset}_{image}.JPEG", jpeg(number))
        write(tmp_path / f"validation/{synset}/ILSVRC2012_val_0000000{number}.JPEG", jpeg())
    write(
        tmp_path / "imagenet_2012_bounding_boxes.csv",
        f"{FOX}_1.JPEG,0.5,0.25,0.75,0.5\n{SETTER}_0.JPEG,0.0,0.1,1.2,0.9\n"
        f"{FOX}_1.JPEG,0.25,0.375,0.5,0.625\nn00000000_9.JPEG,0,0,1,1\n",
    )
    return tmp_path


def test_boxes_of_several_rows_are_their_hull(raw):
    source = open_imagenet(raw, "train")
    assert source.classes == (SETTER, FOX) and len(source) == 4
    assert source.box(3) == (0.25, 0.25, 0.75, 0.625)
    assert source.box(0) == pytest.approx((0, 0.1, 1, 0.9)), "clipped to the image"
    assert source.box(1) is None and source.box(2) is None
    assert source.read(3).shape == (20, 40, 3)
    assert open_imagenet(raw, "valid").box(0) is None


def test_a_changed_table_of_boxes_is_read_anew(raw):
    open_imagenet(raw, "train")
    write(raw / "imagenet_2012_bounding_boxes.csv", f"{FOX}_0.JPEG,0.5,0.5,0.25,0.125\n")
    source = open_imagenet(raw, "train")
    assert source.box(2) == (0.25, 0.125, 0.5, 0.5) and source.box(3) is None
    (raw / "imagenet_2012_bounding_boxes.csv").unlink()
    assert open_imagenet(raw, "train").box(2) is None


@pytest.mark.parametrize("line", ["a.JPEG,0,0,1", "a.JPEG,0,0,one,1", "a.JPEG,0,0,nan,1"])
def test_a_broken_line_of_boxes_is_named(raw, line):
    write(raw / "imagenet_2012_bounding_boxes.csv", f"file,x1,y1,x2,y2\nb.JPEG,0,0,1,1\n{line}\n")
    with pytest.raises(
        DataError, match=r"boxes\.csv, line 3: expected a file and four numbers, got"
    ):
        open_imagenet(raw, "train")


def test_imagenet_is_told_from_any_folder_of_images(raw):
    assert has_imagenet_folders(raw)
    (raw / "imagenet_2012_bounding_boxes.csv").unlink()
    assert has_imagenet_folders(raw), "by its synsets"
    for synset, name in ((SETTER, "dog"), (FOX, "fox")):
        (raw / "train" / synset).rename(raw / "train" / name)
    assert not has_imagenet_folders(raw)
    assert not has_imagenet_folders(raw / "train")


# --- the official archives ---


def test_a_meta_file_written_by_a_matlab_library_is_read():
    numbers = ("n02119789", "n02100735", "n02110185", "n02096294")
    assert read_numbered_synsets(META_MAT) == dict(enumerate(numbers, 1))


def write_kit(root, *, truth="2\n1\n2\n", meta=META_MAT):
    home = "ILSVRC2012_devkit_t12/data"
    files = {f"{home}/ILSVRC2012_validation_ground_truth.txt": truth.encode()}
    files |= {f"{home}/meta.mat": meta} if meta else {}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    write(root / "ILSVRC2012_devkit_t12.tar.gz", out.getvalue())


@pytest.fixture
def official(tmp_path):
    inner = {
        f"{synset}.tar": tar_bytes(
            {f"{synset}_{image}.JPEG": jpeg(10 * image + place) for image in (1, 0)}
        )
        for place, synset in enumerate((FOX, SETTER))
    }
    write(tmp_path / "ILSVRC2012_img_train.tar", tar_bytes(inner))
    images = {f"ILSVRC2012_val_0000000{number}.JPEG": jpeg(number) for number in (3, 1, 2)}
    write(tmp_path / "ILSVRC2012_img_val.tar", tar_bytes(images))
    write_kit(tmp_path)
    return tmp_path


def test_official_training_images_come_synset_by_synset(official):
    write(official / "imagenet_2012_bounding_boxes.csv", f"{FOX}_0.JPEG,0.5,0.25,0.75,0.5\n")
    images = list(OFFICIAL.iterate(official, "train"))
    assert [i.name for i in images] == [f"{s}_{n}.JPEG" for s in (SETTER, FOX) for n in (0, 1)]
    assert [i.synset for i in images] == [SETTER, SETTER, FOX, FOX]
    assert images[1].data == jpeg(11) and images[2].box == (0.5, 0.25, 0.75, 0.5)
    assert images[0].box is None
    assert list(OFFICIAL.iterate(official, "train", start=3)) == images[3:]
    assert OFFICIAL.count(official, "train") == 4
    assert OFFICIAL.classes(official) == (SETTER, FOX)


def test_official_validation_images_have_the_synsets_of_the_kit(official):
    images = list(OFFICIAL.iterate(official, "valid"))
    assert [(i.name[-6], i.synset) for i in images] == [("1", SETTER), ("2", FOX), ("3", SETTER)]
    assert images[1].data == jpeg(2) and OFFICIAL.count(official, "valid") == 3
    (official / "ILSVRC2012_img_train.tar").unlink()
    assert OFFICIAL.classes(official) == (SETTER, FOX)


def test_a_list_of_synsets_stands_in_for_the_kit(official):
    write_kit(official, meta=META_MAT[:300])
    with pytest.raises(DataError, match=rf"meta\.mat: cannot be read .*{SYNSET_LABELS}"):
        read_validation_synsets(official)
    write(official / SYNSET_LABELS, f"{FOX}\n{FOX}\n{SETTER}\n")
    assert [i.synset for i in OFFICIAL.iterate(official, "valid")] == [FOX, FOX, SETTER]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: write_kit(root, truth="1\n9\n1\n"), "has no synset number 9, which"),
        (
            lambda root: write_kit(root, truth="1\n2\n"),
            "3 images, but the development kit lists 2",
        ),
        (lambda root: write_kit(root, meta=b""), r"has no meta\.mat"),
        (lambda root: write(root / "ILSVRC2012_devkit_t12.tar.gz", b"no"), "kit_t12.* cannot be"),
        (lambda root: (root / "ILSVRC2012_devkit_t12.tar.gz").unlink(), "kit_t12.*: not found"),
        (lambda root: (root / "ILSVRC2012_img_val.tar").unlink(), "img_val.tar: not found"),
    ],
)
def test_a_kit_that_does_not_fit_is_refused(official, spoil, message):
    spoil(official)
    with pytest.raises(DataError, match=message):
        list(OFFICIAL.iterate(official, "valid"))


def test_a_cut_archive_is_named(official):
    path = official / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:-12_000])
    with pytest.raises(DataError, match=r"img_train\.tar.*download it again"):
        list(OFFICIAL.iterate(official, "train"))


def test_a_link_in_an_archive_is_refused(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("n00000001.tar")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    write(tmp_path / "ILSVRC2012_img_train.tar", out.getvalue())
    with pytest.raises(DataError, match=r"n00000001\.tar is a link or a device"):
        list(OFFICIAL.iterate(tmp_path, "train"))


# --- Kaggle ---


@pytest.fixture
def kaggle(tmp_path):
    home = tmp_path / "ILSVRC/Data/CLS-LOC"
    for synset in (FOX, SETTER):
        write(home / f"train/{synset}/{synset}_7.JPEG", jpeg())
    for number in (1, 2):
        write(home / f"val/ILSVRC2012_val_0000000{number}.JPEG", jpeg(number))
    write(
        tmp_path / "LOC_val_solution.csv",
        "ImageId,PredictionString\n"
        f"ILSVRC2012_val_00000002,{FOX} 10 5 20 10 {FOX} 5 10 15 15 \n"
        f"ILSVRC2012_val_00000001,{SETTER} 0 0 60 20 \n",
    )
    write(
        tmp_path / "LOC_train_solution.csv",
        f"ImageId,PredictionString\n{FOX}_7,{FOX} 20 5 40 15 \n",
    )
    write(tmp_path / "LOC_synset_mapping.txt", f"{FOX} kit fox\n{SETTER} English setter\n")
    return tmp_path


def test_kaggles_flat_validation_images_find_their_class_and_box(kaggle):
    images = list(KAGGLE.iterate(kaggle, "valid"))
    assert [(i.name[-6], i.synset) for i in images] == [("1", SETTER), ("2", FOX)]
    assert images[0].box == (0, 0, 1, 1), "a box beyond the edge ends there"
    assert images[1].box == (5 / 40, 5 / 20, 20 / 40, 15 / 20)
    assert images[1].data == jpeg(2) and KAGGLE.count(kaggle, "valid") == 2
    assert list(KAGGLE.iterate(kaggle, "valid", start=1)) == images[1:]


def test_kaggles_training_images_come_with_boxes(kaggle):
    images = list(KAGGLE.iterate(kaggle, "train"))
    assert [(i.name, i.synset, i.box) for i in images] == [
        (f"{SETTER}_7.JPEG", SETTER, None),
        (f"{FOX}_7.JPEG", FOX, (0.5, 0.25, 1.0, 0.75)),
    ]
    assert KAGGLE.classes(kaggle) == (SETTER, FOX)
    (kaggle / "LOC_synset_mapping.txt").unlink()
    assert KAGGLE.classes(kaggle) == (SETTER, FOX)


def test_a_box_of_an_unreadable_image_is_left_out(kaggle):
    write(kaggle / "ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000002.JPEG", b"no image")
    assert list(KAGGLE.iterate(kaggle, "valid"))[1].box is None


def test_a_validation_image_that_no_table_names_is_refused(kaggle):
    write(kaggle / "ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000003.JPEG", jpeg())
    with pytest.raises(DataError, match=r"00000003\.JPEG: LOC_val_solution\.csv has no row for it"):
        list(KAGGLE.iterate(kaggle, "valid"))
    write(kaggle / "LOC_val_solution.csv", f"ImageId,PredictionString\na,{FOX} 1 2 3\n")
    with pytest.raises(DataError, match=r"LOC_val_solution\.csv, line 2: expected an image"):
        list(KAGGLE.iterate(kaggle, "valid"))


def test_sequential_formats_are_told_apart(official, tmp_path_factory):
    other = tmp_path_factory.mktemp("kaggle")
    (other / "ILSVRC/Data/CLS-LOC").mkdir(parents=True)
    for name in SEQUENTIAL_FORMATS:
        assert DATA_FORMATS[name].is_in(official) == (name == "imagenet-official")
        assert DATA_FORMATS[name].is_in(other) == (name == "imagenet-kaggle")
    images = OFFICIAL.iterate(official, "valid", start=2)
    assert np.array([image.synset for image in images]).tolist() == [SETTER]
