"""`phalanx plan` of a model in stages: what each has, where they begin, and a step over time."""

import json
import sys
from functools import partial

import pytest
from PIL import Image

from phalanx.catalog import plugins
from phalanx.cli.main import main

FOUR = ("--shards=4", "--pipeline", "--devices=4", "--gradient-accumulation=8")
SPLITS = "--pipeline-splits=layer1/2,layer2/1,layer3/0"


@pytest.fixture(autouse=True)
def here(empty_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def told(read_plan):
    """The rows of a plan of resnet20 by their names."""
    return partial(read_plan, "demo", "--device=cpu", "--model=resnet20")


def test_stages_are_chosen_told_and_drawn(told):
    rows = told(*FOUR, "--threads=1")
    assert rows["ranks"][0] == "4 stages, one stage on each of 4 devices"
    assert rows["ranks"][2:] == ["0     0      0         8"] + [
        f"{stage}     {stage}      0         8" for stage in (1, 2, 3)
    ]
    assert rows["stages"][0].split("  ")[0] == "stage"
    assert [line.split()[:4] for line in rows["stages"][1:]] == [
        ["0", "stem", "to", "layer1/1"],
        ["1", "layer1/2", "to", "layer2/0"],
        ["2", "layer2/1", "to", "layer2/2"],
        ["3", "layer3/0", "to", "head"],
    ]
    assert " ".join(rows["units"]) == (
        "stem layer1/0 layer1/1 | layer1/2 layer2/0 | layer2/1 layer2/2 | layer3/0 layer3/1 "
        "layer3/2 head a stage begins after each |; --pipeline-splits takes these names, in this "
        "order"
    )
    assert rows["note"] == [
        f"{SPLITS.replace('=', ' ')}: chosen so that 4 stages cost about the same"
    ]
    assert all(len(line) <= 86 for line in rows["step"])


def test_of_a_long_step_the_first_group_is_drawn(told):
    rows = told(*FOUR[:-1], SPLITS, "--gradient-accumulation=64", "--replicas=2", "--devices=8")
    *stages, legend, cut, bubble, others = rows["step"]
    assert len(stages) == 4 and all(line.endswith(" …") and len(line) <= 86 for line in stages)
    assert legend.endswith("with the last digit of its number")
    assert cut == "… the first 8 of 64 micro-batches"
    assert bubble.startswith("bubble: ")
    assert others == "2 pipelines do the same at the same time"
    assert "units" not in rows, "the user has named them"


def test_folded_stages_are_one_row(told):
    rows = told(*FOUR[:2], "--devices=1", "--gradient-accumulation=4")
    assert rows["step"][0].startswith("all 4 stages  0░░░0▓▓▓▓▓▓▓▓▓▓▓1"), "recomputed: 3 x forward"
    assert rows["step"][-1] == "stages are folded: one device runs all of them, pass after pass"
    assert rows["stages"][0].split() == ["stage", "units", "cost", "parameters"]
    assert rows["memory"][0].startswith("peak ") and "stage" not in rows["memory"][0]


def test_without_a_prediction_stages_have_names_alone(told, capsys):
    rows = told(*FOUR, "--no-memory")
    assert rows["stages"] == [
        "stage  units",
        "0      stem to layer1/1",
        "1      layer1/2 to layer2/0",
        "2      layer2/1 to layer2/2",
        "3      layer3/0 to head",
    ]
    assert "step" not in rows and "memory" not in rows


def read_json(capsys, *words: str):
    assert main(["plan", "demo", "--device=cpu", "--model=resnet20", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stages_as_json(capsys):
    found = read_json(capsys, *FOUR[:-1], "--gradient-accumulation=64", "--batch-size=8")
    stages = found["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1, 2, 3]
    assert [stage["in_flight"] for stage in stages] == [8] * 4, "whatever is accumulated"
    assert stages[1]["units"] == ["layer1/2", "layer2/0"]
    assert sum(stage["share"] for stage in stages) == pytest.approx(1)
    peaks = [stage["memory"]["peak"] for stage in stages]
    assert found["memory"]["peak"] == max(peaks) == peaks[0]
    assert 3 / 11 < found["bubble"] < 0.4, "of even stages, 3 in 11"
    border = 8 * 16 * 28 * 28 * 4  # a micro-batch of layer1/1's output
    assert [stages[0]["sent"], stages[1]["received"], stages[3]["sent"]] == [border, border, 0]
    assert found["exchange"]["activations"] == 64 * (border + border // 2), "of stage 1"
    assert [rank["stage"] for rank in found["ranks"]] == [0, 1, 2, 3]
    interleaved = read_json(capsys, *FOUR, SPLITS, "--pipeline-schedule=Interleaved")
    assert [stage["in_flight"] for stage in interleaved["stages"]] == [4, 3, 2, 1]


def test_recomputation_keeps_only_what_stages_send(capsys):
    plain, again = (
        read_json(capsys, *FOUR, f"--enable-recompute={word}") for word in ("false", "true")
    )
    for kept, less in zip(plain["stages"], again["stages"], strict=True):
        assert less["memory"]["activations"] < kept["memory"]["activations"] / 2
    assert again["bubble"] == pytest.approx(plain["bubble"], abs=0.01)


def test_replicas_add_up_the_gradients_of_their_stage(capsys):
    alone = read_json(capsys, *FOUR)
    many = read_json(capsys, *FOUR, "--devices=8", "--replicas=2")
    assert alone["exchange"]["gradients"] == 0
    most = many["exchange"]
    gradients = [stage["memory"]["gradients"] for stage in many["stages"]]
    assert most["gradients"] in gradients, "2 x 1/2 of them go round"
    assert many["memory"]["statistics"] > 0


# --- pictures ---


@pytest.mark.draws
@pytest.mark.parametrize(
    "words",
    [
        (*FOUR, "--devices=1"),
        pytest.param((*FOUR, "--replicas=2", "--devices=8"), marks=pytest.mark.slow),
        pytest.param(("--replicas=64", "--devices=64", "--steps=9"), marks=pytest.mark.slow),
    ],
)
def test_a_picture_is_a_png(words, capsys):
    options = ("--device=cpu", "--model=resnet20", *words)
    assert main(["plan", "demo", *options, "--picture", "step.PNG"]) == 0
    with Image.open("step.PNG") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert image.format == "PNG" and image.width > 1000 and image.height > 150
    assert {(0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00)} <= colours, "forward and backward"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--picture", "step.jpg"], "expected a file that ends in .png, got 'step.jpg'"),
        (
            ["--picture", "step.png", "--no-memory"],
            "needs the prediction that --no-memory skips; leave out one of them",
        ),
    ],
)
def test_no_picture_without_a_place_or_a_prediction(words, told, capsys):
    assert main(["plan", "demo", "--device=cpu", *words]) == 2
    assert capsys.readouterr().err == f"phalanx plan: --picture: {told}\n"


@pytest.mark.draws
def test_a_picture_that_cannot_be_written_is_a_matter_of_the_disk(capsys):
    assert main(["plan", "demo", "--device=cpu", "--picture", "nowhere/step.png"]) == 6
    assert "nowhere/step.png" in capsys.readouterr().err


# --- a network of one's own ---

OWN = """
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant

MODELS["three"] = OwnVariant(image_size=28, classes=10, build="three_units:build", head="c")


def build(num_classes):
    from torch import nn

    from phalanx.models.units import UnitModel

    model = UnitModel()
    model.a = nn.Conv2d(3, 8, 3)
    model.b = nn.Conv2d(8, 8, 3, stride=2)
    model.c = nn.Sequential(nn.Flatten(), nn.Linear(8 * 12 * 12, num_classes))
    model.units = {name: (name,) for name in "abc"}
    return model
"""


def test_a_plugins_units_are_cut_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "three_units.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_LOADED", {})
    own = ["plan", "demo", "--device=cpu", "--plugin=three_units", "--model=three"]
    try:
        assert main([*own, "--shards=2", "--devices=2"]) == 0
        out = capsys.readouterr().out
        assert "\nnote          --pipeline-splits b: chosen so that 2 stages" in out
        assert "\nunits         a | b c\n" in out
        assert main([*own, "--shards=4", "--devices=4"]) == 2
        assert "three has only 3 units, and a stage has at least one" in capsys.readouterr().err
        assert main([*own, "--pipeline-splits=c,b", "--gradient-accumulation=3"]) == 0
        assert (
            "\nmemory        not known: --pipeline-splits b: starts at b" in capsys.readouterr().out
        )
    finally:
        sys.modules.pop("three_units", None)
        from phalanx.catalog.models import MODELS

        MODELS.pop("three", None)
