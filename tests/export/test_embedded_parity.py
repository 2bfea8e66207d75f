"""Every embedded test image, as a tensor and as a file: an export answers as its checkpoint."""

import re

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import phalanx
from phalanx.data.formats.arrays import open_embedded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The demo after one of its epochs."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    phalanx.train("demo", epochs=1, run_dir=folder, device="cpu")
    return folder


@pytest.fixture(scope="module")
def pixels():
    return open_embedded("valid").rgb


@pytest.fixture(scope="module")
def model(trained):
    return phalanx.load(trained, device="cpu")


@pytest.fixture(scope="module")
def logits(model, pixels):
    with torch.no_grad():
        return model.module(model.preprocess(pixels)).numpy()


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("takes_bytes", [False, True])
def test_from_the_tensor(trained, model, pixels, logits, form, takes_bytes, tmp_path):
    out = tmp_path / f"demo.{form}"
    phalanx.export(trained, format=form, with_preprocessing=takes_bytes, check_images=1500, out=out)
    batch = pixels if takes_bytes else model.preprocess(pixels).contiguous().numpy()
    if form == "onnx":
        session = onnxruntime.InferenceSession(out)
        (found,) = session.run(["logits"], {session.get_inputs()[0].name: batch})
    else:
        with torch.no_grad():
            found = torch.export.load(out).module()(torch.from_numpy(batch))[0].numpy()
    assert len(found) == 1500 and (found.argmax(1) == logits.argmax(1)).all()
    assert np.abs(found - logits).max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "size"), [("png", 28), ("jpg", 28), ("png", 100), ("jpg", 100), ("jpg", 20)]
)
def test_from_files_read_by_the_card(trained, pixels, kind, size, tmp_path, monkeypatch):
    """Files of the images' own size, and enlarged or shrunk, read without anything of ours."""
    paths = [tmp_path / f"{number}.{kind}" for number in range(len(pixels))]
    for path, image in zip(paths, pixels, strict=True):
        picture = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
        picture.save(path, quality=90)
    exported = phalanx.export(trained, out=tmp_path / "model" / "demo.onnx")
    program = re.findall(r"^```python\n(.*?)^```$", exported.card.read_text(), re.S | re.M)[0]
    monkeypatch.chdir(exported.path.parent)
    monkeypatch.setattr("sys.argv", ["card"])
    names = {}
    exec(program, names)
    found = [names["classes"][names["classify"](path).argmax()] for path in paths]
    expected = [answer.label for answer in phalanx.predict(trained, paths, device="cpu")]
    equal = np.mean([one == other for one, other in zip(found, expected, strict=True)])
    print(f"{kind} of {size}: top-1 equal for {equal:.2%} of {len(paths):,}")
    assert equal >= 0.995
