"""The pages: every value is escaped, none is forgotten, and the templates are installed too."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from jinja2 import UndefinedError

import phalanx
from html_page import Page
from phalanx.report.html import embed_image, render_html

PACKAGE = Path(phalanx.__file__).parent
VALUES = {
    "name": "<i>&\"'",
    "state": "",
    "curves": [],
    "facts": [("<u>", "<s>")],
    "steps": [(0.1, float("nan"))],
}


def test_every_value_is_escaped():
    page = Page(render_html("find_lr.html", **VALUES))
    assert "<i>&\"'" in page.text and "<u> <s>" in page.text and "0.1 nan" in page.text
    assert not {"i", "u", "s"} & set(page.tags)


def test_a_name_that_is_no_text_does_not_break_a_page():
    page = render_html("find_lr.html", **{**VALUES, "name": "caf\udce9"})
    assert "<h1>caf?</h1>" in page


def test_a_value_that_was_forgotten_is_an_error():
    with pytest.raises(UndefinedError, match="'facts' is undefined"):
        render_html("find_lr.html", **{name: VALUES[name] for name in VALUES if name != "facts"})


def test_no_template_reaches_for_anything_outside_and_all_are_installed():
    templates = sorted((PACKAGE / "report" / "templates").iterdir())
    assert len(templates) > 4
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert "http" not in text and "<script" not in text and "<link" not in text, path.name
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["phalanx"]
    found = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert found >= set(templates)


@pytest.mark.parametrize(("size", "has_few"), [(28, True), (65, False)])
def test_few_pixels_stay_sharp(size, has_few):
    image = embed_image(np.zeros((size, size, 3), np.uint8), "PNG")
    assert image.has_few_pixels == has_few
    assert image.address.startswith("data:image/png;base64,")
