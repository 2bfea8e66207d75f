"""Exports of a run that a GPU trained, in the programs that read them, on the GPU."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch.export.passes import move_to_device_pass

import phalanx
from phalanx.export.onnx_file import quiet_exporters

SIZE = 20
DEVICES = [
    ("cpu", "32.32"),
    pytest.param(
        ("cuda", "16.16"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Trained:
    """A run of a network that timm has, its device, and what its checkpoint says of images."""

    def __init__(self, run, device):
        self.run, self.device = run, device
        model = phalanx.load(run, device="cpu", precision="32.32")
        pixels = np.random.default_rng(1).integers(0, 256, (9, SIZE, SIZE, 3), np.uint8)
        self.images = model.preprocess(pixels).contiguous()
        with torch.inference_mode():
            self.logits = model.module(self.images)

    def compare(self, found, *, apart):
        """Fails where logits are further apart than a share of the largest one."""
        limit = apart * float(self.logits.abs().max())
        torch.testing.assert_close(found.float().cpu(), self.logits, rtol=0, atol=limit)


@pytest.fixture(scope="module", params=DEVICES, ids=lambda param: param[0])
def trained(request, digits, tmp_path_factory):
    device, precision = request.param
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = {"data": "mnist", "data_dir": digits, "run_dir": folder, "image_size": SIZE}
    options |= {"model": "resnet10", "batch_size": 16, "steps": 2, "determinism": "strict"}
    phalanx.train(**options, device=device, precision=precision)
    return Trained(folder, device)


def test_timm_reads_the_folder_of_a_run(timm, trained, tmp_path):
    done = phalanx.export(trained.run, format="timm", out=tmp_path / "out", check_images=8)
    assert done.notes == (), "timm itself has checked it"
    theirs = timm.create_model(f"local-dir:{done.path}", pretrained=True).eval()
    with torch.inference_mode():
        trained.compare(theirs(trained.images), apart=1e-4)
        on_device = theirs.to(trained.device)(trained.images.to(trained.device))
    trained.compare(on_device, apart=5e-3)  # convolutions on a GPU are in TF32


@pytest.mark.parametrize(
    ("dtype", "apart"), [("float32", 5e-3), ("float16", 0.02), ("bfloat16", 0.1)]
)
def test_a_program_of_torch_runs_on_the_device_in_any_batch(trained, dtype, apart, tmp_path):
    out = tmp_path / "model.pt2"
    options = {"format": "pt2", "dtype": dtype, "check_images": 8, "max_batch": 4}
    assert phalanx.export(trained.run, out=out, **options).metadata.dtype == dtype
    with quiet_exporters():
        program = move_to_device_pass(torch.export.load(out), trained.device).module()
    with torch.inference_mode():
        for count in (1, 2, 9):
            logits, seen = program(trained.images[:count].to(trained.device))
            assert logits.device.type == seen.device.type == trained.device
            limit = apart * float(trained.logits.abs().max())
            torch.testing.assert_close(
                logits.cpu(), trained.logits[:count], rtol=0, atol=limit, msg=f"batch of {count}"
            )


def test_the_onnx_file_of_a_run_says_what_its_checkpoint_does(trained, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the packages of phalanx[export]")
    done = phalanx.export(trained.run, out=tmp_path / "model.onnx", check_images=8)
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"input": trained.images.numpy()})
    trained.compare(torch.from_numpy(found), apart=1e-4)
