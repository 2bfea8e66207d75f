"""A GPU of one rank decodes nothing that the cores of another rank found damaged."""

from hashlib import sha256

from ranked_input import decode_on_ranks

from small_jpegs import end_in_scan, lose_rows, write_files

DAMAGED = dict.fromkeys((1, 2, 14, 17), end_in_scan) | dict.fromkeys((0, 6, 15), lose_rows)


def test_an_image_that_one_rank_found_damaged_no_rank_gives_to_its_gpu(tmp_path):
    root = write_files(tmp_path / "data", DAMAGED)
    files = root.glob("train/*/*.jpg")
    numbers = {sha256(path.read_bytes()).hexdigest(): int(path.stem) for path in files}
    decoded = [{numbers[file] for file in found} for found in decode_on_ranks(root, 2, tmp_path)]
    assert all(len(found) > 8 for found in decoded)
    assert not set.union(*decoded) & set(DAMAGED)
