"""A run served by torch on a GPU: folded, captured, and batches filled up to a few sizes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import phalanx
from phalanx.cli.main import main
from phalanx.serve.backend import BackendOptions, PaddedModel, open_backends
from small_runs import small_run
from small_server import open_server

IMAGES, CLASSES = 9, 10
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    place = tmp_path_factory.mktemp("served") / "run"
    assert main(small_run(digits, place, steps=6, model="resnet8")) == 0
    return place


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images that are larger than the model's, and not square."""
    folder, draw = tmp_path_factory.mktemp("files"), np.random.default_rng(3)
    for number in range(IMAGES):
        coarse = draw.integers(0, 256, (5, 6, 3), np.uint8)
        Image.fromarray(coarse).resize((36, 30)).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("device", "precision", "apart"),
    [
        ("cpu", "32.32", 1e-5),
        pytest.param("cuda", "32.32", 2e-3, marks=ON_A_GPU),  # of modules, perhaps in TF32
        pytest.param("cuda", "16.16", 0.01, marks=ON_A_GPU),  # folded norms, in graphs
    ],
)
def test_a_server_answers_as_predict_does(run, files, device, precision, apart):
    options = {"device": device, "precision": precision}
    wanted = [dict(answer.guesses) for answer in phalanx.predict(run, files, **options)]
    words = [word for name, text in options.items() for word in (f"--{name}", text)]
    with open_server(run, *words, "--max-batch", "4") as server:
        assert f", {device}, batches of up to 4)" in server.line

        def ask(file):
            reply = server.ask(f"/predict?top={CLASSES}", file.read_bytes())
            assert reply.status == 200, reply.body
            (prediction,) = reply.json["predictions"]
            return {guess["class"]: guess["probability"] for guess in prediction["guesses"]}

        alone = [ask(file) for file in files]
        with ThreadPoolExecutor(IMAGES) as pool:  # in batches of 1 to 4, filled up on a GPU
            together = list(pool.map(ask, files))
        assert server.stop() == 0
    for found in (alone, together):
        for answer, expected in zip(found, wanted, strict=True):
            assert sum(answer.values()) == pytest.approx(1, abs=1e-3)
            for name, share in expected.items():
                assert answer[name] == pytest.approx(share, abs=apart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_gpu_are_filled_up_to_sizes_that_are_captured(run):
    options = BackendOptions(device="cuda", threads=1, max_batch=8, flags={"precision": "16.16"})
    (backend,) = open_backends(run, options, count=1)
    assert backend.batch_sizes == (1, 2, 4, 8)
    fitted = PaddedModel(backend, 8)
    fitted.warm_up()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    model = phalanx.load(run, device="cpu")
    with torch.inference_mode():
        wanted = model.module(model.preprocess(pixels)).numpy()
    found = fitted.run(pixels)["logits"]
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, atol=0.05 * np.abs(wanted).max())
