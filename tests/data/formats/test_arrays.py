import runpy
from pathlib import Path

import numpy as np
import pytest

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.arrays import EMBEDDED_FOLDER, compute_md5, hash_arrays
from phalanx.data.formats.sources import open_source

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_embedded.py"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SHA256 = {  # of the images that come with Phalanx
    "train": "3fc3c5f7cb89c15342c87369a5de49614b0afa857bee68ba117e74fae5e3bacb",
    "valid": "8ecb0ea2863a77349efc909573268c191fe211c1d03d299002471c30828eeb91",
}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_embedded_images_are_the_ones_that_were_chosen(split):
    source = open_source("embedded", None, split)
    facts = DATASETS["embedded"]
    expected = {"train": facts.train_images, "valid": facts.valid_images}[split]
    assert len(source) == expected
    assert np.bincount(source.labels).tolist() == [expected // 10] * 10
    assert source.fingerprint()["sha256"] == SHA256[split]
    assert source.name(17) == f"{split}.npz[17]"


def test_embedded_grey_has_three_equal_channels():
    image = open_source("embedded", None, "train").read(5)
    assert image.shape == (28, 28, 3) and image.dtype == np.uint8
    assert (image[..., 0] == image[..., 2]).all() and image.max() > 100


def test_embedded_files_are_small_and_licensed():
    assert sum(file.stat().st_size for file in EMBEDDED_FOLDER.iterdir()) < 4_500_000
    assert "2017 Zalando SE" in (EMBEDDED_FOLDER / "LICENSE.fashion-mnist").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")
@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_script_makes_the_same_images_again(split):
    script = runpy.run_path(str(SCRIPT))
    assert hash_arrays(*script["make_split"](DEBIAN, split)) == SHA256[split]


def test_what_is_no_file_has_no_checksum(tmp_path):
    (tmp_path / "labels").symlink_to("/dev/null")  # /dev/zero would never end
    assert compute_md5(tmp_path / "labels") == compute_md5(tmp_path / "labels", gunzip=True) == ""
    (tmp_path / "plain").write_bytes(b"abc")
    assert compute_md5(tmp_path / "plain") == "900150983cd24fb0d6963f7d28e17f72"
