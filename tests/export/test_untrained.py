"""Models that no run has trained: a preset or a model by name, with random weights or a file's."""

import json

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import phalanx
from phalanx.catalog.variant import METADATA_KEY
from phalanx.cli.main import main
from phalanx.export.metadata import read_metadata
from small_layouts import write_splits


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_preset_has_random_weights_and_says_so_everywhere(here, capsys):
    assert main(["export", "demo", "--check-images", "4", "--max-batch", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "demo: random weights, so its answers mean nothing\n"
    assert printed.out.startswith(
        "agrees with the model on 4 validation images of its data (embedded), in batches of 1 and 2"
    )
    assert "export/demo.onnx: resnet8, random weights, float32, " in printed.out
    session = onnxruntime.InferenceSession("export/demo.onnx")
    about = read_metadata(session.get_modelmeta().custom_metadata_map[METADATA_KEY], "demo.onnx")
    assert (about.name, about.weights, about.run, about.step) == ("demo", "random", "", 0)
    assert about.classes[-1] == "ankle boot"
    card = (here / "export" / "README.md").read_text()
    for words in (
        "images of 28x28 pixels: **random weights**, never trained, in the network of `demo`",
        "## Scores\n\nNone: the weights are random, so its answers mean nothing.",
        "- trained on no image by Phalanx\n- 10 classes: `t-shirt`",
        "- Its weights are random: no answer of it means anything.",
        "its logits differ from the model's by ",
    ):
        assert words in card
    assert "validation data; for others" not in card


def test_random_weights_follow_from_the_seed(here):
    first, again, other = (
        load_file(
            phalanx.export(
                "demo", format="safetensors", out=f"{at}.safetensors", seed=seed, check_images=1
            ).path
        )
        for at, seed in enumerate((3, 3, 4))
    )
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_weights_from_elsewhere(here, run, capsys):
    source = phalanx.export(run, format="safetensors", out="w.safetensors")
    tensors = load_file(source.path)
    save_file(tensors, "plain.safetensors")
    words = ["export", "resnet8", "--data", "mnist", "--image-size", "12", "--format"]
    words += ["safetensors", "--check-images", "4", "--out", "out.safetensors", "--json"]
    assert main([*words, "--init-weights", "plain.safetensors"]) == 0
    printed = capsys.readouterr()
    assert "resnet8: the weights of " in printed.err and "mean nothing" not in printed.err
    told = json.loads(printed.out)
    assert told["metadata"]["weights"] == "file"
    assert (
        told["checked"]["source"]
        == "4 images that come with Phalanx (its data is not on this machine)"
    )
    card = (here / "out.safetensors.md").read_text()
    assert "the weights of `plain.safetensors`, in the network of `resnet8`" in card
    assert "These weights come from elsewhere and were not scored." in card
    found = load_file("out.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert main([*words, "--init-weights", "plain.safetensors", "--reset-head"]) == 0
    printed = capsys.readouterr()
    assert "with a random classifier, so its answers mean nothing" in printed.err
    assert json.loads(printed.out)["metadata"]["weights"] == "random"


def test_classes_that_only_the_data_names_are_numbered(here):
    done = phalanx.export(
        "resnet10",
        data="imagenet",
        image_size=32,
        format="safetensors",
        out="w.safetensors",
        check_images=1,
    )
    assert done.metadata.classes[::999] == ("class 0", "class 999")
    assert (
        done.checked.source == "1 image that comes with Phalanx (its data is not on this machine)"
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["rsenet50"], 4, "rsenet50: no such run, checkpoint, preset or model; did you mean 'resn"),
        (
            ["demo", "--averaged"],
            2,
            "--averaged: demo is not a run, so it has no checkpoints; leave it out",
        ),
        (
            ["demo", "--checkpoint", "last"],
            2,
            "--checkpoint last: demo is not a run, so it has no checkpoints; leave it out",
        ),
        (["folder-resnet18"], 3, "--data folder is read from a folder: give --data-dir DIR"),
        (["demo", "--init-weights", "gone.pth"], 4, "gone.pth: no such file; --init-weights takes"),
        (["demo", "--data-dir", "gone", "--data", "folder"], 3, "gone"),
        (["demo", "--format", "timm"], 2, "resnet8: timm has no network with its stem for small"),
    ],
)
def test_mistakes(here, words, code, message, capsys):
    assert main(["export", *words]) == code
    assert message in capsys.readouterr().err
    assert not [*here.iterdir()]


def test_weights_of_other_classes_are_told(tmp_path, capsys):
    data, run, file = tmp_path / "data", tmp_path / "run", tmp_path / "w.safetensors"
    write_splits(data, {"train": 4, "val": 2})
    model = ["--model=resnet8", "--image-size=16", "--workers=0"]
    words = ["train", "folder-resnet18", f"--data-dir={data}", *model]
    words += ["--batch-size=4", "--steps=1"]
    assert main([*words, f"--run-dir={run}"]) == 0
    assert main(["export", str(run), "--format=safetensors", f"--out={file}"]) == 0
    words += [f"--init-weights={file}"]
    score = ["validate", "folder-resnet18", f"--data-dir={data}", *model, f"--init-weights={file}"]

    def find_notes(name, *more):
        capsys.readouterr()
        assert main([*words, f"--run-dir={tmp_path / name}", *more]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "the classes" in line]

    assert find_notes("same") == []
    for split in ("train", "val"):
        (data / split / "cat").rename(data / split / "emu")  # sorted after the dog
    (note,) = find_notes("other")
    assert note.startswith("note: the classes are not those of the weights ('cat' there, 'dog' h")
    assert find_notes("fresh", "--reset-head") == []
    assert main(score) == 0
    assert note in capsys.readouterr().err.splitlines()
