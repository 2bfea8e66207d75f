"""The page for everybody: on a phone, in the dark, by keyboard, and read aloud."""

import pytest

from scripted_page import DONE, fail, photo, running, script

__all__ = ["photo", "running", "script"]  # fixtures

# of every visible text: how much it differs from what lies behind it, as WCAG counts it
CONTRAST = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((numbers(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    found.push([ratio(style.color, behind(element)), walk.currentNode.data.trim()]);
  }
  const edges = [];
  for (const element of document.querySelectorAll("#drop, button, .switch input")) {
    if (!element.checkVisibility()) continue;
    const color = getComputedStyle(element).borderTopColor;
    edges.push([ratio(color, behind(element.parentElement)), element.id || element.textContent]);
  }
  return {found, edges};
})()
"""


@pytest.fixture
def filled(browser, script, photo):
    """The page with an answer and a failure."""
    good = script.answer
    script.answer = lambda number: fail(400, "no image") if number == 2 else good(number)
    browser.drop(photo, photo)
    browser.wait_for(f"{DONE.format(1)} && document.body.innerText.includes('Try again')")
    return browser


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_and_all_text_can_be_read(filled, width, dark):
    filled.resize(width, dark=dark)
    assert filled.run("document.documentElement.scrollWidth") <= width
    beyond = (
        "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > "
    )
    assert filled.run(f"{beyond} innerWidth + 1).length") == 0
    ratios = filled.run(CONTRAST)
    assert len(ratios["found"]) > 15 and len(ratios["edges"]) >= 4
    assert [one for one in ratios["found"] if one[0] < 4.5] == []
    assert [one for one in ratios["edges"] if one[0] < 3] == []
    ground = filled.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark


def test_the_keyboard_reaches_everything_and_shows_where_it_is(filled):
    filled.run("document.activeElement.blur()")
    reached = []
    for _ in range(5):
        filled.press_tab()
        reached.append(
            filled.run("document.activeElement.id || document.activeElement.textContent")
        )
        around = "'files' === document.activeElement.id ? find('drop') : document.activeElement"
        width = filled.run(f"parseFloat(getComputedStyle({around}).outlineWidth)")
        assert width >= 3, f"{reached[-1]}: the focus is not visible"
    assert reached == ["files", "show-map", "clear", "Try again", "What this server offers"]


def test_a_screen_reader_is_told_what_everything_is(filled):
    roles = filled.read_roles()
    assert ("switch", "Class activation map") in roles
    assert ("heading", "a photo.jpg") in roles and ("region", "Results") in roles
    assert ("button", "Try again") in roles
    assert "Choose images" in next(name for role, name in roles if role == "button")
    images = {name for role, name in roles if role in ("image", "img")}
    assert "a photo.jpg as the network saw it, 28 by 28 pixels" in images
    assert "Class activation map for Ankle boot: strongest at the lower right" in images
    named = ("button", "link", "switch", "textbox", "image", "img", "dialog", "heading")
    assert [role for role, name in roles if role in named and not name] == []
    levels = "[...document.querySelectorAll('h1, h2, h3')].filter(h => h.checkVisibility())"
    assert filled.run(f"{levels}.map(h => h.tagName).join()") == "H1,H2,H3,H3"
    assert filled.run("document.documentElement.lang") == "en"


def test_answers_are_said_when_they_come(browser, script, photo):
    browser.run(
        "window.said = []; new MutationObserver(() => said.push(find('status').textContent))"
        ".observe(find('status'), {childList: true})"
    )
    browser.drop(photo)
    browser.wait_for(DONE.format(1))
    wanted = ["Classifying a photo.jpg", "a photo.jpg: Ankle boot, 87 percent"]
    assert browser.run("said") == wanted
    assert browser.run("find('status').getAttribute('role')") == "status"


def test_the_question_for_a_key_is_labelled_and_holds_the_focus(browser, script, photo):
    script.answer = lambda number: fail(401, "an API key is needed")
    browser.drop(photo)
    browser.wait_for("find('key-dialog').open")
    roles = browser.read_roles()
    assert ("dialog", "This server asks for an API key") in roles
    assert ("textbox", "API key") in roles
    for _ in range(5):
        browser.press_tab()
        inside = (
            "find('key-dialog').contains(document.activeElement) || document.activeElement === "
        )
        assert browser.run(f"{inside} document.body")
    browser.press("Escape", code=27)
    browser.wait_for("!find('key-dialog').open")


def test_nothing_moves_for_those_who_prefer_that(filled):
    moving = "getComputedStyle(document.querySelector('.fill')).transitionDuration"
    assert filled.run(moving) == "0.3s"
    filled.resize(1280, still=True)
    assert filled.run(moving) == "0s"
