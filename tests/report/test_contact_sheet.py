"""Contact sheets: a caption can be read in any European script."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from phalanx.cli.main import main
from phalanx.report.contact_sheet import find_font, write_contact_sheet
from small_layouts import write_image

FONTS = Path(matplotlib.get_data_path()) / "fonts/ttf"


def test_letters_beyond_ascii_are_drawn(tmp_path):
    letters = "oößжλ"
    for letter in letters:
        pixels = np.zeros((1, 8, 8, 3), np.uint8)
        write_contact_sheet(tmp_path / f"{letter}.png", pixels, [letter], title="")
    drawn = {Image.open(tmp_path / f"{letter}.png").tobytes() for letter in letters}
    assert len(drawn) == len(letters)  # a letter that the font lacks is an empty box


@pytest.fixture
def install(monkeypatch):
    """Makes these fonts of matplotlib the only ones of the system."""

    def install(*names):
        fonts = [str(FONTS / name) for name in names]
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda: fonts)

    return install


def test_a_font_of_the_system_is_taken_if_ours_lacks_a_letter(install):
    install("cmr10.ttf", "STIXGeneral.ttf")
    assert find_font("cat") == FONTS / "DejaVuSans.ttf"
    assert find_font("cat \u20dd\u200d") == FONTS / "STIXGeneral.ttf"
    install("cmr10.ttf", "LastResortHE-Regular.ttf")  # a box for every letter
    assert find_font("cat \u20dd") is None


def test_classes_that_no_font_can_draw_are_shown_by_their_numbers(install, tmp_path, capsys):
    for name in ("dog", "猫"):
        for number in range(2):
            write_image(tmp_path / "data" / name / f"{number}.jpg")
    install("cmr10.ttf")
    out = tmp_path / "batch.png"
    words = ["--data", "folder", "--data-dir", tmp_path / "data", "--validation-mode", "none"]
    words += ["--model", "resnet8", "--image-size", 8, "--batch-size", 4, "--steps", 1]
    assert main(["data", "show", *map(str, [*words, "--out", out])]) == 0
    told = "no installed font has all letters of the class names; class 0: dog, class 1: 猫\n"
    assert capsys.readouterr().out == f"{out}: step 1, 4 images\n{told}"
