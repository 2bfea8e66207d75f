"""A run served by torch on a GPU: folded, captured, and batches filled up to a few sizes."""

import numpy as np
import pytest

from phalanx import load
from phalanx.cli.main import main
from phalanx.serve.backend import BackendOptions, FittedModel, open_backends
from small_runs import small_run


@pytest.mark.gpu
def test_a_run_is_answered_on_a_gpu(digits, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    place = tmp_path / "run"
    assert main(small_run(digits, place, steps=2, model="resnet8")) == 0
    options = BackendOptions(device="cuda", threads=1, max_batch=8, flags={})
    (backend,) = open_backends(place, options, count=1)
    assert backend.sizes == (1, 2, 4, 8)
    fitted = FittedModel(backend, 8)
    fitted.warm_up()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    model = load(place, device="cpu")
    with torch.inference_mode():
        wanted = model.module(model.preprocess(pixels)).numpy()
    found = fitted.run(pixels)["logits"]
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, atol=0.05 * np.abs(wanted).max())
