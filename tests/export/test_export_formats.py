"""Every format, opened as another program would, says what the checkpoint says."""

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open

import phalanx
from phalanx.catalog.variant import METADATA_KEY
from phalanx.export.metadata import PT2_METADATA, read_metadata


@pytest.fixture(scope="module")
def model(run):
    return phalanx.load(run, device="cpu")


@pytest.fixture(scope="module")
def pixels(digits):
    """All 40 validation images, as bytes."""
    grey = np.frombuffer((digits / "t10k-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    return np.repeat(grey.reshape(-1, 12, 12, 1), 3, axis=3)


@pytest.fixture(scope="module")
def images(model, pixels):
    return model.preprocess(pixels).contiguous()


@pytest.fixture(scope="module")
def logits(model, images):
    with torch.no_grad():
        return model.module(images).numpy()


@pytest.mark.parametrize("batch", [1, 2, 7, 40])
def test_onnx_gives_the_checkpoints_logits_at_any_batch(exported, images, logits, batch):
    session = onnxruntime.InferenceSession(exported.path)
    (found,) = session.run(["logits"], {"input": images[:batch].numpy()})
    assert found.shape == (batch, 10)
    np.testing.assert_allclose(found, logits[:batch], atol=1e-4)
    assert (found.argmax(1) == logits[:batch].argmax(1)).all()


def test_onnx_takes_bytes_with_preprocessing(run, tmp_path, pixels, logits):
    out = tmp_path / "bytes.onnx"
    phalanx.export(run, with_preprocessing=True, out=out)
    session = onnxruntime.InferenceSession(out)
    (found,) = session.run(["logits"], {"image": pixels})
    np.testing.assert_allclose(found, logits, atol=1e-4)
    assert session.get_inputs()[0].type == "tensor(uint8)"


def test_the_activation_map_adds_up_to_the_logit(exported, model, images, logits):
    session = onnxruntime.InferenceSession(exported.path)
    (seen,) = session.run(["activation_map"], {"input": images.numpy()})
    assert seen.shape == (40, 3, 3)
    bias = model.module.fc.bias.detach().numpy()[logits.argmax(1)]
    np.testing.assert_allclose(seen.mean((1, 2)) + bias, logits.max(1), atol=1e-4)


def test_a_program_of_torch_runs_without_our_code(run, tmp_path, images, logits):
    out = tmp_path / "digits.pt2"
    phalanx.export(run, format="pt2", out=out)
    extra = {PT2_METADATA: ""}
    program = torch.export.load(out, extra_files=extra).module()
    for batch in (1, 2, 40):
        np.testing.assert_allclose(program(images[:batch])[0], logits[:batch], atol=1e-4)
    about = read_metadata(extra[PT2_METADATA], out)
    assert about.classes == tuple("0123456789") and about.has_activation_map


def test_weights_fit_the_model_of_their_metadata(run, tmp_path, model):
    out = tmp_path / "digits.safetensors"
    phalanx.export(run, format="safetensors", averaged=True, dtype="float16", out=out)
    with safe_open(out, framework="pt") as file:
        about = read_metadata(file.metadata()[METADATA_KEY], out)
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    averaged = phalanx.load(run / "checkpoints" / "best" / "average.safetensors", device="cpu")
    assert (about.averaged, about.dtype, about.model) == (True, "float16", "resnet8")
    assert found["fc.weight"].dtype == torch.float16
    assert found["bn1.running_var"].dtype == torch.float32
    for name, tensor in averaged.module.state_dict().items():
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=1e-3, atol=1e-6)
    assert not torch.equal(found["fc.weight"].float(), model.module.fc.weight.half().float())


def test_mirror_images_are_left_out_and_that_is_told(digits, tmp_path, capsys):
    run = tmp_path / "run"
    options = {"data": "mnist", "data_dir": digits, "run_dir": run, "image_size": 12}
    phalanx.train(**options, batch_size=16, steps=1, flip_averaging=True, device="cpu")
    done = phalanx.export(run, format="safetensors")
    assert done.path == run / "export" / "safetensors" / "run.safetensors"
    assert done.notes[0].startswith("--flip-averaging: the run scores each image together with")
    assert "which this export does not do" in done.card.read_text()


def test_metadata_of_an_onnx_file(exported, run, model):
    session = onnxruntime.InferenceSession(exported.path)
    about = read_metadata(session.get_modelmeta().custom_metadata_map[METADATA_KEY], exported.path)
    assert about == exported.metadata
    assert about.name == "bars-digits" and about.run == "bars & digits"
    assert about.classes == model.classes and about.step == model.step
    assert about.preprocessing_fingerprint == model.preprocessing.fingerprint
    assert (about.input_shape, about.input_name) == ((3, 12, 12), "input")
    assert b"/src/" not in exported.path.read_bytes()  # no path of this machine
