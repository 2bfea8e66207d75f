"""The page at `/`, in a real browser; its server says what a test decides."""

import re
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from phalanx.serve import web_page
from scripted_page import DONE, answer_well, fail, photo, running, script, serve_script

__all__ = ["photo", "running", "script"]  # fixtures

CARD = "document.querySelector('.card{} {}')"


# --- images come in ---


def test_a_dropped_image_is_shown_as_the_network_saw_it_with_its_classes(browser, script, photo):
    browser.drop(photo)
    browser.wait_for(f"{DONE.format(1)} && {CARD.format('', '.seen')}.naturalWidth == 28")
    browser.wait_for("find('model-facts').textContent.includes('resnet8')")  # asked for on its own
    text = browser.text()
    assert "a photo.jpg" in text and "as the network saw it, 28\xa0\xd7\xa028\xa0pixels" in text
    assert re.search(r"Ankle boot\s+87\.3%\s+<b>Sneaker</b>\s+8\.1%", text)
    assert "12.7 ms in the server (decode 1.2, queue 0.1, compute 11.2); " in text
    assert "Model demo (resnet8, 10 classes, 28\xa0\xd7\xa028 pixels)." in text
    browser.wait_for(
        "[...document.querySelectorAll('.fill')].map(bar => Math.round(100 * bar.offsetWidth / "
        "bar.parentElement.offsetWidth)).join() == '87,8,3,1,1'"
    )
    headers, body = script.asked[0]
    assert headers["content-type"].startswith("multipart/form-data")
    assert b'filename="a photo.jpg"' in body and photo.read_bytes() in body
    assert browser.addresses[-1] == f"{script.address}predict?details=true"


def test_several_are_dropped_one_is_bad_and_nothing_comes_from_elsewhere(
    browser, script, photo, tmp_path
):
    text = "broken.jpg: is no image; send a JPEG or PNG file"
    script.answer = lambda number: fail(400, text) if number == 2 else answer_well()
    bad = tmp_path / "broken.jpg"
    bad.write_bytes(b"nothing")
    browser.drop(photo, bad, photo, photo)
    browser.wait_for(f"{DONE.format(3)} && document.body.innerText.includes('{text}')")
    assert len(script.asked) == 4
    assert browser.run("document.querySelectorAll('.card').length") == 4
    assert all(address.startswith(script.address) for address in browser.addresses)
    said = [line for line in browser.complaints if "status of 400" not in line]
    assert said == [], "no script failed, and the content policy stopped nothing"


def test_images_are_chosen_and_pasted(browser, script, photo):
    browser.choose("#files", photo, photo)
    browser.wait_for(DONE.format(2))
    browser.send(
        "Browser.grantPermissions",
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
        origin=script.address,
    )
    browser.run(
        "new Promise(done => { const c = document.createElement('canvas'); c.toBlob(b => done("
        "navigator.clipboard.write([new ClipboardItem({'image/png': b})])))})",
        userGesture=True,
    )
    browser.press("v", code=86, modifiers=2, commands=["paste"])
    browser.wait_for(DONE.format(3))
    assert b"\x89PNG" in script.asked[2][1]


def test_a_folder_and_an_overlong_list_are_answered_in_words(browser, script, photo, tmp_path):
    browser.drop(tmp_path)
    browser.wait_for(f"find('notice').textContent.includes('{tmp_path.name} is a folder')")
    assert script.asked == []
    browser.run("document.dispatchEvent(new DragEvent('drop', {dataTransfer: new DataTransfer()}))")
    assert "No file was dropped" in browser.run("find('notice').textContent")
    browser.drop(*[photo] * 103)
    browser.wait_for("document.querySelectorAll('.card').length == 100")
    browser.run("find('clear').click()")
    assert "Only the first 100 of 103 images were taken" in browser.text()


def test_results_are_cleared(browser, script, photo):
    browser.drop(photo)
    browser.wait_for(DONE.format(1))
    browser.run("find('clear').click()")
    assert browser.run("find('results').hidden && find('cards').children.length === 0")
    assert browser.run("document.activeElement.id") == "files"


# --- the class activation map ---


def test_the_map_lies_over_the_image_and_is_switched_by_the_keyboard(browser, script, photo):
    browser.choose("#files", photo)
    browser.wait_for(DONE.format(1))
    pixel = "{}.getContext('2d').getImageData({}, {}, 1, 1).data"
    canvas = CARD.format("", ".map")
    corner = browser.run(f"[...{pixel.format(canvas, 190, 190)}]")
    other = browser.run(f"[...{pixel.format(canvas, 2, 2)}]")
    assert min(corner[:2]) > 240 and corner[3] > 180, "bright where the class was seen"
    assert max(other[:3]) < 20 and other[3] < 60, "nearly clear elsewhere"
    label = browser.run(f"{canvas}.getAttribute('aria-label')")
    assert label == "Class activation map for Ankle boot: strongest at the lower right"
    browser.run("find('files').focus()")
    browser.press_tab()
    assert browser.run("document.activeElement.id") == "show-map"
    shown = f"getComputedStyle({canvas}).visibility"
    assert browser.run(shown) == "visible"
    browser.press_space()
    assert browser.run(shown) == "hidden"
    browser.press_space()
    assert browser.run(shown) == "visible"


def test_a_model_without_a_map_offers_no_switch(browser, script, photo):
    script.answer = lambda number: answer_well(activation_map=None)
    browser.drop(photo)
    browser.wait_for(DONE.format(1))
    assert browser.run("find('map-switch').hidden && find('map-legend').hidden")


# --- the API key ---


def give_key(browser, key):
    browser.wait_for("find('key-dialog').open")
    assert browser.run("document.activeElement.id") == "key"
    browser.send("Input.insertText", text=key)
    browser.press("Enter", code=13, text="\r")


def test_a_key_is_asked_for_once_and_kept_for_this_tab_only(browser, script, photo):
    def answer(number):
        given = script.asked[number - 1][0].get("authorization")
        return answer_well() if given == "Bearer right" else fail(401, f"not the key: {given}")

    script.answer = answer
    browser.drop(photo, photo, photo)
    browser.wait_for("find('key-dialog').open")
    assert browser.run("find('key-problem').textContent") == ""
    give_key(browser, "wrong")
    browser.wait_for("find('key-problem').textContent == 'The server refused this key.'")
    give_key(browser, " right ")
    browser.wait_for(DONE.format(3))
    assert browser.run("Object.values({...sessionStorage})") == ["right"]
    kept = "Object.keys({...localStorage}).length + document.cookie.length"
    assert browser.run(kept) == 0
    browser.drop(photo)
    browser.wait_for(DONE.format(4))
    assert script.asked[-1][0]["authorization"] == "Bearer right"


def test_without_a_key_the_server_s_answer_stays_and_can_be_tried_again(browser, script, photo):
    script.answer = lambda number: fail(401, "give a key") if number < 3 else answer_well()
    browser.drop(photo)
    browser.wait_for("find('key-dialog').open")
    browser.press("Escape", code=27)
    browser.wait_for("document.querySelector('.again').checkVisibility()")
    assert browser.run(f"{CARD.format('', '.failure')}.textContent") == "give a key"
    browser.run("document.querySelector('.again').click()")
    give_key(browser, "any")
    browser.wait_for(DONE.format(1))
    assert len(script.asked) == 3


# --- what goes wrong ---


def test_errors_are_shown_as_they_are_and_are_text(browser, script, photo, tmp_path):
    text = "<img src=x onerror=alert(1)>: draining\nask again later"
    script.answer = lambda number: fail(503, text)
    hostile = tmp_path / "<img src=x onerror=document.title=1>.jpg"
    hostile.write_bytes(photo.read_bytes())
    browser.drop(hostile)
    browser.wait_for(f"{CARD.format('', '.failure')}?.textContent")
    assert browser.run(f"{CARD.format('', '.failure')}.textContent") == text
    assert browser.run(f"{CARD.format('', '.name')}.textContent") == hostile.name
    assert browser.run("document.querySelectorAll('.card img').length") == 2
    assert f"{hostile.name} failed: {text}" == browser.run("find('status').textContent")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (lambda number: PlainTextResponse("<html>", 502), "HTTP 502 Bad Gateway"),
        (lambda number: PlainTextResponse("not json"), "HTTP 200 OK"),
        (lambda number: answer_well(classes=[], problem="too large"), "too large"),
    ],
)
def test_other_answers_are_named(browser, script, photo, answer, shown):
    script.answer = answer
    browser.drop(photo)
    browser.wait_for(f"{CARD.format('', '.failure')}?.textContent == '{shown}'")


def test_a_busy_server_is_asked_again_after_the_time_it_names(browser, script, photo):
    busy = {"Retry-After": "0.2"}
    script.answer = lambda number: fail(429, "full", **busy) if number == 1 else answer_well()
    browser.drop(photo)
    browser.wait_for("document.body.innerText.includes('busy; trying again in 0.2 s')")
    browser.wait_for(DONE.format(1))
    assert len(script.asked) == 2


def test_a_server_that_is_gone_is_named(browser, photo):
    with serve_script() as script:
        browser.open(script.address)
    browser.drop(photo)
    browser.wait_for(f"{CARD.format('', '.failure')}?.textContent")
    host = script.address.split("/")[2]
    assert f"No answer from {host}: Failed to fetch. Is the server still" in browser.text()


# --- the files ---


def test_the_content_policy_allows_nothing_but_the_page_s_own_files(browser, script):
    policy = browser.run("fetch('/').then(r => r.headers.get('content-security-policy'))")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy and "*" not in policy
    assert {rules["script-src"], rules["style-src"], rules["connect-src"]} == {"'self'"}
    blocked = (
        "(() => { const s = document.createElement('style'); s.textContent = 'h1 { color: red }';"
    )
    browser.run(f"{blocked} document.head.append(s) }})()")
    browser.wait_for("getComputedStyle(document.querySelector('h1')).color != 'rgb(255, 0, 0)'")
    assert any("Content Security Policy" in line for line in browser.complaints)


def test_the_page_names_no_other_host():
    assert [route.path for route in web_page.routes] == ["/", "/page.css", "/page.js"]
    for name in ("page.html", "page.css", "page.js"):
        text = (Path(web_page.__file__).with_name(name)).read_text(encoding="utf-8")
        assert (
            re.findall(r"(?:https?:)?//[\w.]+\.\w+", text.replace("http://www.w3.org/", "")) == []
        )
