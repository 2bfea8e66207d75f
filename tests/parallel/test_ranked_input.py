"""A GPU of one rank decodes nothing that the cores of another rank found damaged."""

from hashlib import sha256

import pytest
from ranked_input import decode_on_ranks

from small_jpegs import end_in_scan, lose_rows, write_files

DAMAGED = dict.fromkeys((1, 2, 14, 17), end_in_scan) | dict.fromkeys((0, 6, 15), lose_rows)


@pytest.fixture
def damaged(tmp_path):
    """A folder with images that the cores cannot decode, and some that only they should."""
    return write_files(tmp_path / "data", DAMAGED)


def decode(data, folder, *, stages=1):
    """The numbers of the files that the decoder of each rank got, and what is known then."""
    files = data.glob("train/*/*.jpg")
    numbers = {sha256(path.read_bytes()).hexdigest(): int(path.stem) for path in files}
    found = decode_on_ranks(data, 2, folder, stages=stages)
    assert found[0]["check"] == found[1]["check"]
    assert {*found[0]["check"]["cores_only"]} == {*DAMAGED}
    return [{numbers[file] for file in one["seen"]} for one in found]


def test_an_image_that_one_rank_found_damaged_no_rank_gives_to_its_gpu(damaged, tmp_path):
    decoded = decode(damaged, tmp_path)
    assert all(len(seen) > 8 for seen in decoded)
    assert not set.union(*decoded) & set(DAMAGED)


def test_a_stage_that_gets_no_images_learns_which_are_damaged(damaged, tmp_path):
    first, last = decode(damaged, tmp_path, stages=2)
    assert len(first) > 8 and not first & set(DAMAGED) and not last
