"""How a report looks: nothing is wider than a phone, and everything can be read."""

import re
from pathlib import Path

import pytest

import phalanx
from phalanx.report.report_page import _DARKEST_SHADE, write_report
from synthetic_run import CLASSES, make_run

STYLE = Path(phalanx.__file__).parent / "report" / "templates" / "base.html"
LONG = ["a class whose name is a whole sentence, which somebody has chosen nevertheless", "n" * 99]
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_SIZES = "[...document.querySelectorAll('.matrix th')].map(th => [th.clientWidth, th.clientHeight])"


def test_long_names_and_hashes_fit_on_a_phone(tmp_path, browser):
    parent = {"run": "x" * 200, "step": 3, "weights_sha256": "ab" * 32}
    classes = [*LONG, *CLASSES[2:]]
    run = make_run(tmp_path / ("run" * 30), classes=classes, parent=parent, command="c" * 200)
    page = write_report(run)
    for width in (320, 1280):
        browser.resize(width)
        browser.open(page.as_uri())
        assert browser.run(_OVERFLOW) == 0
        for wide, high in browser.run(_SIZES):
            assert wide <= 260 and high <= 200
    assert browser.addresses == [] and browser.complaints == []


def find_luminance(colour):
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def find_contrast(one, other):
    low, high = sorted((find_luminance(one), find_luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out(scheme):
    blocks = re.findall(r":root \{(.*?)\}", STYLE.read_text(), flags=re.DOTALL)
    hexes = re.findall(r"--([\w-]+): #(\w{6})", blocks[scheme])
    colours = {name: tuple(bytes.fromhex(value)) for name, value in hexes}
    for name in ("ink", "muted", "train", "good", "warn"):
        assert find_contrast(colours[name], colours["paper"]) >= 4.5, name
    for name, *parts in re.findall(r"--(heat|wrong): (\d+), (\d+), (\d+)", blocks[scheme]):
        cell = [
            _DARKEST_SHADE * int(part) + (1 - _DARKEST_SHADE) * paper
            for part, paper in zip(parts, colours["paper"], strict=True)
        ]
        assert find_contrast(colours["ink"], cell) >= 4.5, name
