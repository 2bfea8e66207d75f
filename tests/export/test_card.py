"""The model card, whose programs run as they are."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import phalanx
from phalanx.assemble.build import build_normaliser
from phalanx.data.formats.decode import EncodedImage
from phalanx.data.transforms.transform import build_transform
from phalanx.export import card_facts
from phalanx.export.usage import describe_usage
from small_layouts import write_splits


def find_programs(card):
    return re.findall(r"^```python\n(.*?)^```$", card, flags=re.DOTALL | re.MULTILINE)


def test_the_program_of_the_card_answers_as_the_checkpoint(exported, run, tmp_path):
    names = [f"{number}.{kind}" for number in range(4) for kind in ("png", "jpg")]
    random = np.random.default_rng(5)
    for name in names:  # larger than the model's images, in part narrower
        pixels = random.integers(0, 255, (10, 17, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((51, 30)).save(tmp_path / name)
    (program,) = find_programs(exported.card.read_text())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *(tmp_path / name for name in names)],
        cwd=exported.path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    first = done.stdout.splitlines()[::5]
    expected = phalanx.predict(run, [tmp_path / name for name in names], device="cpu")
    for line, answer in zip(first, expected, strict=True):
        path, label, share = re.fullmatch(r"(.*): (\w+) ([\d.]+)%", line).groups()
        assert (path, label) == (answer.image, answer.label)
        assert float(share) / 100 == pytest.approx(answer.probability, abs=0.01)


@pytest.mark.parametrize("augment", ["none", "pad-crop", "resized-crop"])
@pytest.mark.parametrize("how", ["mean-std", "mean", "none", "per-image"])
def test_the_cards_preparation_is_ours(exported, augment, how, tmp_path):

    preprocessing = replace(
        exported.metadata.preprocessing, augment=augment, normalization=how, std=(0.2, 0.3, 0.4)
    )
    about = exported.metadata.model_copy(update={"preprocessing": preprocessing})
    shades = np.add.outer(np.arange(90), np.arange(70))[..., None] + [0, 40, 90]
    picture = Image.fromarray(shades.astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    picture.save(tmp_path / "a.png", exif=exif)
    names = {}
    program = find_programs(describe_usage(about, "safetensors", "a.safetensors"))[1]
    exec(program, names)
    found = names["prepare"](tmp_path / "a.png")
    pixels = np.zeros((1, 12, 12, 3), np.uint8)
    image = EncodedImage((tmp_path / "a.png").read_bytes(), "a.png", upright=True).decode()
    build_transform(preprocessing.transform).apply_evaluation(image, pixels[0])
    ours = build_normaliser(preprocessing, torch.device("cpu"))(pixels)[0].numpy()
    assert found.dtype == np.float32 and found.shape == ours.shape
    spread = ours.max() - ours.min()
    assert np.abs(found - ours).max() < 0.01 * spread  # a byte more or less


@pytest.mark.parametrize("form", ["safetensors", "timm"])
def test_the_card_opens_photos_that_are_turned_or_have_16_bits_as_we_do(exported, form, tmp_path):
    program = find_programs(describe_usage(exported.metadata, form, "a"))[-1]
    compile(program, "card", "exec")
    opening = re.search(r"(    image = Image.open\(path\)\n.*?convert.*?\n)", program, re.DOTALL)[1]
    names = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(f"def open_image(path):\n{opening}    return image\n", names)
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.add.outer(700 * np.arange(30), 300 * np.arange(20)).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png", exif=exif)
    ours = EncodedImage((tmp_path / "a.png").read_bytes(), "a.png", upright=True).decode()
    assert np.array_equal(np.asarray(names["open_image"](tmp_path / "a.png")), ours)


def test_the_card_says_what_the_model_is(exported, run):
    card = exported.card.read_text()
    assert exported.card == run / "export" / "README.md"
    summary = phalanx.validate(run, device="cpu")
    low, high = summary.interval95
    assert f"| top-1 | {summary.top1:.2%} | {low:.2%} to {high:.2%} | 40 |" in card
    for line in (
        "resnet8 with 10 classes for images of 12x12 pixels: the weights of the run "
        "`bars & digits` at step",
        "- 96 training images, 40 validation images",
        "- 10 classes: `0`, `1`, `2`",
        "| `lr` | 0.05 |",
        "| `ema-decay` | 0.8 |",
        "also where an image shows none of them",
        "On 40 validation images of its data (mnist), in batches of 1, 2 and 32,",
        "| `input`, the input | float32 | [N, 3, 12, 12] | normalised, RGB |",
    ):
        assert line in card
    assert str(run.parent) not in card  # no path of this machine


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("phalanx train --data-dir=/home/me/data", "phalanx train --data-dir=data"),
        ("/opt/bin/phalanx train '/my data/set one'", "phalanx train 'set one'"),
        (
            "phalanx train --plugin /a/b.py,~/c/d.py,../e/f.py",
            "phalanx train --plugin b.py,d.py,f.py",
        ),
        ("phalanx train --data images/cats --lr 0.1", "phalanx train --data images/cats --lr 0.1"),
        ("phalanx train it's /home/me/x", "phalanx train 'it'\"'\"'s' x"),
    ],
)
def test_the_recipe_names_no_folder_of_this_machine(command, shown):
    assert card_facts._hide_paths(command) == shown


def test_averaged_weights_have_their_own_score(run, tmp_path):
    out = tmp_path / "a.safetensors"
    card = phalanx.export(run, format="safetensors", averaged=True, out=out).card.read_text()
    averaged = phalanx.validate(run / "checkpoints" / "best" / "average.safetensors", device="cpu")
    assert f"| top-1 | {averaged.top1:.2%} |" in card
    assert "the averaged weights of the run" in card
    assert f"| top-5 | {averaged.top5:.2%} |" in card and f"| loss | {averaged.loss:.4f} |" in card


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory):
    """Seven validation images and one that cannot be read; both kinds of averaged weights."""
    root = write_splits(tmp_path_factory.mktemp("photos"), {"train": 4, "val": 4})
    (root / "val" / "dog" / "dog3.jpg").write_bytes(b"no image")
    phalanx.train(
        data_dir=root,
        run_dir=root.with_name("cut"),
        model="resnet8",
        image_size=16,
        batch_size=4,
        epochs=2,
        ema_decay=0.5,
        weight_avg_strategy="mean",
        workers=0,
        device="cpu",
    )
    return root.with_name("cut")


def read_card(checkpoint, out, **options):
    return phalanx.export(checkpoint, format="safetensors", out=out, **options).card.read_text()


@pytest.mark.parametrize("kind", ["moving", "of checkpoints"])
def test_averaged_weights_count_the_images_that_were_scored(photo_run, tmp_path, kind):
    folder = photo_run / "checkpoints"
    newest = folder / "step-00000004"
    target = newest / "average.safetensors" if kind == "moving" else folder / "average"
    row = phalanx.validate(target, device="cpu", workers=0)
    low, high = row.interval95
    assert row.scored == 7
    options = {"averaged": True} if kind == "moving" else {}
    checkpoint = newest if kind == "moving" else target
    card = read_card(checkpoint, tmp_path / "a.safetensors", **options)
    assert f"| top-1 | {row.top1:.2%} | {low:.2%} to {high:.2%} | 7 |" in card
    assert f"| loss | {row.loss:.4f} | | 7 |" in card


def test_a_score_without_records_does_not_guess_how_many_images_it_is_of(photo_run, tmp_path):
    copy = tmp_path / "step-00000004"
    shutil.copytree(photo_run / "checkpoints" / copy.name, copy)
    row = phalanx.validate(copy, device="cpu", workers=0)
    assert f"| top-1 | {row.top1:.2%} | | |" in read_card(copy, tmp_path / "a.safetensors")
