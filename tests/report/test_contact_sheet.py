"""Contact sheets: a caption can be read in any European script."""

import numpy as np
from PIL import Image

from phalanx.report.contact_sheet import write_contact_sheet


def test_letters_beyond_ascii_are_drawn(tmp_path):
    letters = "oößжλ"
    for letter in letters:
        pixels = np.zeros((1, 8, 8, 3), np.uint8)
        write_contact_sheet(tmp_path / f"{letter}.png", pixels, [letter], title="")
    drawn = {Image.open(tmp_path / f"{letter}.png").tobytes() for letter in letters}
    assert len(drawn) == len(letters)  # a letter that the font lacks is an empty box
