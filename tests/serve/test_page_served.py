"""The page of a real server: images in, its own answers out."""

import numpy as np
import pytest
from PIL import Image

from small_server import CLASSES, NAME, SIZE, make_metadata, make_png, open_server, write_model

KEY = "a long secret key"
DONE = "document.querySelectorAll('.guesses li').length == 5 * {}"


@pytest.fixture
def images(tmp_path):
    """A PNG, a JPEG that is wide, and a file that is no image."""
    (tmp_path / "noise.png").write_bytes(make_png())
    Image.fromarray(np.full((60, 200, 3), 128, np.uint8)).save(tmp_path / "wide.jpg")
    (tmp_path / "text.jpg").write_bytes(b"hello")
    return [tmp_path / name for name in ("noise.png", "wide.jpg", "text.jpg")]


def test_images_are_dropped_on_the_page_of_a_real_server(server, browser, images, tmp_path):
    browser.resize(1280)
    browser.open(f"{server.url}/")
    facts = f"Model {NAME} (resnet8, {CLASSES} classes, {SIZE}\xa0\xd7\xa0{SIZE} pixels)."
    browser.wait_for(f"document.body.innerText.includes('{facts}')")
    browser.drop(*images)
    browser.wait_for(f"{DONE.format(2)} && !!document.querySelector('.again:not([hidden] *)')")
    browser.wait_for(
        "[...document.querySelectorAll('.seen')].filter(i => i.naturalWidth).length == 2"
    )
    shown = browser.run(
        "[...document.querySelectorAll('.card')].map(card => [...card.querySelectorAll("
        "'.label')].map(cell => cell.textContent))"
    )
    body = images[0].read_bytes()
    answer = server.ask("/predict?details=true", body, {"Content-Type": "image/png"}).json
    (prediction,) = answer["predictions"]
    assert shown[0] == [one["class"] for one in prediction["guesses"]]
    assert browser.run("document.querySelector('.seen').src") == prediction["seen"]
    assert browser.run(f"document.querySelector('.seen').naturalWidth == {SIZE}")
    label = "document.querySelector('.map').getAttribute('aria-label')"
    assert shown[0][0] in browser.run(label)
    text = browser.text()
    assert "not a JPEG, PNG, WebP" in text and " ms in the server (decode " in text
    said = [line for line in browser.complaints if "status of 400" not in line]
    assert said == [] and all(one.startswith(server.url) for one in browser.addresses)
    for width in (1280, 390):
        browser.resize(width)
        browser.draw(tmp_path / f"{width}.png")
        drawn = Image.open(tmp_path / f"{width}.png")
        assert drawn.width in (width, width - 15) and len(drawn.getcolors(1 << 24)) > 200


def test_a_file_that_is_too_large_is_told_in_words(server, browser, tmp_path):
    file = tmp_path / "large.png"
    file.write_bytes(make_png() + bytes(5 << 20))
    browser.open(f"{server.url}/")
    browser.wait_for(f"document.body.innerText.includes('Model {NAME} (')")
    browser.drop(file)
    wanted = "large.png: 5.0 MiB, and this server takes up to 4.0 MiB; send a smaller image"
    browser.wait_for(f"document.body.innerText.includes('{wanted}')")
    assert not any("predict" in address for address in browser.addresses)


def test_the_page_needs_no_key_and_asks_for_that_of_the_server(model_file, browser, images):
    with open_server(model_file, environment={"PHALANX_API_KEY": KEY}) as locked:
        browser.open(f"{locked.url}/")
        browser.drop(images[0])
        browser.wait_for("find('key-dialog').open")
        refusal = locked.ask("/predict", b"x", {"Content-Type": "image/png"})
        assert refusal.status == locked.ask("/model").status == 401
        assert browser.run("find('key-problem').textContent") == ""
        command = f'curl -H "X-API-Key: KEY" -F image=@photo.jpg {locked.url}/predict'
        assert browser.run("find('curl').textContent") == command
        browser.send("Input.insertText", text=KEY)
        browser.press("Enter", code=13, text="\r")
        browser.wait_for(DONE.format(1))
        browser.wait_for(f"document.body.innerText.includes('Model {NAME} (')")


def test_random_weights_are_told_on_the_page_and_when_it_starts(browser, tmp_path):
    about = make_metadata(weights="random").model_dump_json()
    file = write_model(tmp_path / "new.onnx", metadata=about)
    with open_server(file) as server:
        assert f"(resnet8, random weights, {CLASSES} classes, " in server.line
        browser.open(f"{server.url}/")
        browser.wait_for(
            "document.body.innerText.includes('Its weights are random: what it answers means')"
        )
