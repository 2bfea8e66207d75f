"""Whether the GPU decodes JPEGs if no option says so, from which step on, and what is said."""

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.assemble import build
from phalanx.assemble.dataset_summary import build_input_spec, plan_run
from phalanx.assemble.rank_context import build_rank_context
from phalanx.config.read import read_settings
from phalanx.data.loading.gpu_share import ImageCheck
from small_photos import encode, write_photos

CUDA = torch.device("cuda")
FLAGS = {"data": "folder", "model": "resnet8", "image-size": "32", "batch-size": "8", "epochs": "3"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of four images to train on, of 80 kB and more."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        folder = root / ("train" if number < 8 else "val") / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (320, 320, 3), dtype=np.uint8)
        (folder / f"{number}.jpg").write_bytes(encode(Image.fromarray(noise)))
    return root


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with engines, as far as the choice asks; returns what may be set otherwise."""
    found = {"problem": "", "engines": True}
    monkeypatch.setattr(build, "find_gpu_decode_problem", lambda device: found["problem"])
    monkeypatch.setattr(build, "has_decoding_engines", lambda device: found["engines"])
    return found


def choose(root, *, device=CUDA, checked_since=0, is_decided=False, **flags):
    """The percentage and the first step of the GPU, and the notes."""
    words = {**FLAGS, "data-dir": str(root)}
    words |= {name.replace("_", "-"): value for name, value in flags.items()}
    settings = read_settings(None, words)
    plan, _ = plan_run(settings)
    spec, context = build_input_spec(settings.config, plan), build_rank_context(plan, None)
    check = None if checked_since is None else ImageCheck(checked_since, is_decided)
    chosen, notes = build.choose_decoder(spec, plan, device, settings.config, context, check)
    return chosen.gpu_percent, chosen.first_checked_step, notes


def test_photographs_may_be_the_gpus_from_the_second_pass_on(photos, gpu):
    note = (
        "the cores decode every image once, up to step 1; then the GPU does, if it has waited for "
        "them (--gpu-decode false: never)"
    )
    assert choose(photos) == (100, 1, [note])
    assert choose(photos, checked_since=1)[:2] == (100, 2)
    assert choose(photos, is_decided=True) == (100, 1, []), "what was decided is said later"


@pytest.mark.parametrize("more", [{}, {"determinism": "strict"}, {"auto_augment": "rand-augment"}])
@pytest.mark.parametrize(("share", "percent"), [("true", 100), ("0.4", 40), ("false", 0)])
def test_an_option_is_obeyed_from_the_first_step_on(photos, gpu, more, share, percent):
    if percent == 0 or "auto_augment" not in more:
        assert choose(photos, gpu_decode=share, **more) == (percent, None, [])


@pytest.mark.parametrize(
    "flags",
    [
        {"device": torch.device("cpu")},
        {"determinism": "strict"},
        {"auto_augment": "rand-augment"},
        {"color_jitter": "0.4"},
        {"normalization_location": "host"},
        {"epochs": "1"},
        {"checked_since": 2},
        {"checked_since": None},
    ],
)
def test_the_cores_decode_all_without_a_word(photos, gpu, flags):
    assert choose(photos, **flags) == (0, None, [])


def test_without_engines_the_cores_decode(photos, gpu):
    gpu["engines"] = False
    assert choose(photos) == (0, None, [])


def test_a_gpu_that_could_decode_says_why_it_does_not(photos, gpu):
    gpu["problem"] = "nvJPEG was not found: pip install nvidia-nvjpeg"
    told = "the cores decode all images: nvJPEG was not found: pip install nvidia-nvjpeg"
    assert choose(photos) == (0, None, [told])


def test_small_images_are_left_to_the_cores(tmp_path, gpu):
    gpu["problem"] = "nobody asks"
    assert choose(write_photos(tmp_path), batch_size="4") == (0, None, [])


def test_a_set_of_other_files_is_left_to_the_cores(photos, tmp_path, gpu):
    for path in photos.rglob("*.jpg"):
        other = tmp_path / path.relative_to(photos).with_suffix(".png")
        other.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).save(other)
    assert choose(tmp_path) == (0, None, [])
