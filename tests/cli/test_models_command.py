"""`phalanx models ls` and `show`: what they tell, how it lines up, and what they refuse."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.catalog.models import MODELS, OLD_NAMES, read_model_sizes
from phalanx.cli.main import main
from phalanx.units import format_si

UNIT_FIELDS = [
    "name",
    "shape",
    "parameters",
    "macs",
    "activation_bytes",
    "cumulative_parameters",
    "cumulative_macs",
    "cumulative_activations",
]
PLUGIN = """
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant

MODELS["{name}"] = OwnVariant(build="{module}:build", image_size=8, classes=5)


def build(classes):
    from torch import nn

    {body}
"""


@pytest.fixture(autouse=True)
def here(empty_folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("phalanx.catalog.plugins._LOADED", {})
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.fixture
def say(capsys):
    """Run a command line that goes well; what it printed."""

    def run(*words: str) -> str:
        assert main(["models", *words]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def fail(capsys):
    """Run a command line that goes wrong; what it said."""

    def run(*words: str) -> str:
        assert main(["models", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    return run


def write_plugin(module: str, body: str) -> None:
    Path(f"{module}.py").write_text(PLUGIN.format(name=f"{module}_net", module=module, body=body))


def cells(text: str, name: str) -> list[str]:
    """The words of the line that begins with that name."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


# --- ls ---


def test_the_list_has_every_model_with_its_size(say):
    out = say("ls")
    for name, variant in MODELS.items():
        size = read_model_sizes()[name]
        shown = [*format_si(size.parameters).split(), *format_si(size.macs).split()]
        assert cells(out, name)[1:7] == [*shown, f"{variant.image_size}", f"{variant.classes:,}"]
    assert " ".join(cells(out, "resnet50")[1:]) == "25.6 M 4.09 G 224 1,000 bottleneck 3-4-6-3"
    assert max(map(len, out.splitlines())) <= 80


def test_the_list_goes_by_family(say):
    blocks = [block.splitlines() for block in say("ls").split("\n\n")]
    assert [block[0].split()[0] for block in blocks] == [
        *("ResNet", "ResNet-9", "EfficientNet", "airbench"),
    ]
    for head, *lines in blocks:
        named = [line.split()[0] for line in lines]
        assert named == [name for name in MODELS if MODELS[name].family == head.split()[0]]


def test_words_narrow_the_list(say, fail):
    def names(*words: str) -> list[str]:
        return [row["name"] for row in json.loads(say("ls", *words, "--json"))]

    assert names("lite") == ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"]
    assert names("ResNeXt", "wide") == ["resnext29_32x4d_wide"]
    assert names("cifar_resnet2") == ["resnet20"], "a former name"
    assert "no model's name contains 'resnet' and 'lite'; `phalanx models ls`" in fail(
        "ls", "resnet", "lite"
    )


def test_the_list_as_json(say):
    rows = {row["name"]: row for row in json.loads(say("ls", "--json"))}
    assert list(rows) == list(MODELS)
    assert rows["resnext101_32x8d"] == {
        "name": "resnext101_32x8d",
        "family": "ResNet",
        "parameters": 88_791_336,
        "macs": read_model_sizes()["resnext101_32x8d"].macs,
        "image_size": 224,
        "classes": 1000,
        "smallest_image": 17,
        "units": 35,
        "old_names": [],
    }
    assert rows["resnext101_32x4d"]["old_names"] == ["resnext101"]
    assert sorted(old for row in rows.values() for old in row["old_names"]) == sorted(OLD_NAMES)


def test_a_plugins_model_is_listed_and_counted(say):
    write_plugin("listed", "return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))")
    (row,) = json.loads(say("ls", "listed", "--plugin", "listed", "--json"))
    assert (row["family"], row["units"], row["classes"]) == ("plugin", 1, 5)
    assert (row["parameters"], row["macs"]) == (192 * 5 + 5, 192 * 5)
    assert cells(say("ls", "--plugin", "listed"), "listed_net")[1:3] == ["965", "960"]


# --- show ---


def test_a_model_as_json(say):
    sheet = json.loads(say("show", "resnet50", "--batch-size", "2", "--json"))
    facts = {key: value for key, value in sheet.items() if key != "units"}
    assert facts == {
        "name": "resnet50",
        "family": "ResNet",
        "image_size": 224,
        "batch_size": 2,
        "classes": 1000,
        "precision": "32.32",
        "parameters": 25_557_032,
        "macs": 4_089_184_256,
        "activation_bytes": sum(unit["activation_bytes"] for unit in sheet["units"]),
        "splits": [],
    }
    assert [unit["name"] for unit in sheet["units"]] == list(MODELS["resnet50"].units)
    first, last = sheet["units"][0], sheet["units"][-1]
    assert list(first) == UNIT_FIELDS
    assert first["shape"] == [64, 56, 56] and first["macs"] == 118_013_952
    assert first["cumulative_macs"] == pytest.approx(118_013_952 / 4_089_184_256)
    assert [last[field] for field in UNIT_FIELDS[-3:]] == [1.0, 1.0, 1.0]


def test_a_model_as_a_table(say):
    out = say("show", "resnet20")
    assert out.startswith("resnet20: ResNet, small basic 3-3-3\nimages of 32 x 32, 10 classes; ")
    assert "what 64 images keep for the backward pass, precision 32.32\n" in out
    stem, total = cells(out, "stem"), cells(out, "total")
    kept = 64 * 4 * (3 * 32 * 32 + 2 * 16 * 32 * 32) + 2 * 16 * 4  # images, two maps, two figures
    assert stem[:5] == ["stem", "16x32x32", "464", "442", "k"]
    assert stem[5:7] == [f"{kept / 2**20:.1f}", "MiB"] and stem[7:9] == ["0.2%", "1.1%"]
    assert total[1:4] == ["269,722", "40.6", "M"]
    assert cells(out, "head")[-3:] == ["100.0%"] * 3


@pytest.mark.parametrize("name", ["resnet152", "resnext101_32x8d", "efficientnet_b7"])
def test_a_table_lines_up_in_80_columns(say, name):
    splits = ("--pipeline-splits", *MODELS[name].units[5:21:5])
    lines = say("show", name, "--batch-size", "1024", *splits).splitlines()
    assert max(map(len, lines)) <= 80
    (start,) = [place for place, line in enumerate(lines) if line.startswith("unit ")]
    units = [line for line in lines[start + 1 : -2] if not line.startswith("─")]
    assert len(units) == len(MODELS[name].units)
    assert {len(line) for line in [lines[start], *units]} == {len(lines[start])}


def test_an_old_name_is_understood(say):
    assert say("show", "cifar_resnet8") == say("show", "resnet8")


def test_options_change_what_is_counted(say):
    def count(*words: str) -> dict[str, int]:
        return json.loads(say("show", *words, "--json"))

    plain = count("resnet8")
    assert count("resnet8", "--classes", "100")["parameters"] == plain["parameters"] + 90 * 65
    assert count("resnet8", "--image-size", "64")["macs"] == 4 * (plain["macs"] - 640) + 640
    twice = count("resnet8", "--batch-size", "128")["activation_bytes"]
    assert 1.99 < twice / plain["activation_bytes"] < 2
    half = count("resnet8", "--precision", "16.32")
    assert 0.5 < half["activation_bytes"] / plain["activation_bytes"] < 0.501
    assert half["precision"] == "16.32"
    projected = count("resnet8", "--shortcut-type", "B")["parameters"]
    assert projected == plain["parameters"] + (16 + 2) * 32 + (32 + 2) * 64
    grouped = count("efficientnet_b0", "--efficientnet-group-dim", "16", "--image-size", "64")
    assert grouped["parameters"] > read_model_sizes()["efficientnet_b0"].parameters


def test_a_preset_in_this_folder_has_no_say(say):
    plain = say("show", "resnet8")
    Path("presets").mkdir()
    Path("presets/demo.yaml").write_text("# mine\nnorm-type: none\nbatch-size: 8\n")
    assert say("show", "resnet8") == plain


def test_splits_make_stages(say):
    words = ("show", "resnet50", "--pipeline-splits", "b1/2/relu", "layer3/0")
    sheet = json.loads(say(*words, "--json"))
    assert sheet["splits"] == [
        {
            "name": "b1/2/relu",
            "unit": "layer2/0",
            "shifted": "b1/2/relu is inside layer1/2; the stage starts at layer2/0",
        },
        {"name": "layer3/0", "unit": "layer3/0", "shifted": ""},
    ]
    lines = say(*words).splitlines()
    rules = [place for place, line in enumerate(lines) if line.startswith("── stage")]
    assert [lines[place + 1].split()[0] for place in rules] == ["stem", "layer2/0", "layer3/0"]
    assert lines[-1] == "b1/2/relu is inside layer1/2; the stage starts at layer2/0"
    assert lines[-2].startswith("total")
    macs = [unit["macs"] for unit in sheet["units"]]
    kept = [unit["activation_bytes"] for unit in sheet["units"]]
    for place, (first, end) in zip(rules, ((0, 4), (4, 8), (8, 18)), strict=True):
        assert f" MACs {sum(macs[first:end]) / sum(macs):.1%}, " in lines[place]
        assert f" activations {sum(kept[first:end]) / sum(kept):.1%} ─" in lines[place]


def test_splits_may_be_given_one_flag_each(say):
    together = say("show", "resnet8", "--pipeline-splits", "layer2/0", "layer3/0")
    flags = ("--pipeline-splits", "layer2/0", "--pipeline-splits=layer3/0")
    assert say("show", "resnet8", *flags) == together


def test_a_plugins_model_is_one_unit(say, fail):
    write_plugin("whole", "return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))")
    sheet = json.loads(say("show", "whole_net", "--plugin", "whole", "--json"))
    assert [unit["name"] for unit in sheet["units"]] == ["model"]
    assert (sheet["image_size"], sheet["classes"], sheet["parameters"]) == (8, 5, 965)
    told = fail("show", "whole_net", "--image-size", "9")
    assert "model cannot take a batch of 64 x 3 x 9 x 9: " in told
    assert told.endswith("; try another --batch-size or --image-size\n")


UNITS = """from phalanx.models.units import UnitModel

    class Net(UnitModel):
        def __init__(self):
            super().__init__()
            self.wide, self.flat = nn.Conv2d(3, 4, 1), nn.Flatten()
            self.last = nn.Linear(256, classes)
            self.units.update(wide=("wide",), last=("flat", "last"))

    return Net()"""


def test_a_plugins_own_units_can_be_split(say, fail):
    write_plugin("parts", UNITS)
    words = ("show", "parts_net", "--plugin", "parts", "--pipeline-splits")
    sheet = json.loads(say(*words, "last", "--json"))
    assert [unit["name"] for unit in sheet["units"]] == ["wide", "last"]
    assert sheet["splits"] == [{"name": "last", "unit": "last", "shifted": ""}]
    assert "no unit is called 'lost'; did you mean 'last'?" in fail(*words, "lost")


def test_a_plugin_that_looks_at_values_cannot_be_counted(fail):
    write_plugin("looks", "import torch; return nn.Linear(int(torch.ones(()).item()), 1)")
    told = fail("show", "looks_net", "--plugin", "looks")
    assert "--plugin: its network cannot be counted: " in told and "no values" in told


MISTAKES = {
    "show resnet51": "no model is called 'resnet51'; did you mean ",
    "show resnet51 --bach-size 3": "2 problems:\n  no model is called 'resnet51'; did you mean ",
    "show": "the following arguments are required: NAME",
    "show resnet50 --image-size 8": "--image-size 8: resnet50 halves the image 5 times",
    "show resnet50 --batch-size 0": "--batch-size: must be at least 1, got 0",
    "show resnet50 --classes few": "--classes: expected a number from 1 to 1,000,000, got 'few'",
    "show resnet50 --precision 8": "--precision: no choice is called '8'",
    "show resnet50 --init-weights a.pth": "--init-weights: no such option",
    "show resnet50 --efficientnet-group-dim 4": "only EfficientNet models have it, and resnet50 is",
    "show resnet50 --norm-type group --norm-num-groups 7": "--norm-num-groups 7: bn1 has 64",
    "show resnet50 --pipeline-splits b9/relu": "no part of resnet50 is called 'b9/relu'; near",
    "show resnet50 --pipeline-splits stem": "--pipeline-splits stem: starts at stem, and the mod",
    "show resnet50 --pipeline-splits layer2/0 b1/2/relu": "--pipeline-splits b1/2/relu: starts at "
    "layer2/0, and layer2/0 at layer2/0; list them in forward order",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told(fail, line):
    assert MISTAKES[line] in fail(*line.split())


WITHOUT_TORCH = """
import json, sys
from phalanx.cli.main import main

for words, code in json.loads(sys.argv[1]):
    assert main(["models", *words]) == code, words
    assert "torch" not in sys.modules, f"{words} imported torch"
"""


def test_the_list_and_mistakes_never_import_torch():
    lines = [(["ls"], 0), (["ls", "--json"], 0), (["ls", "--help"], 0), (["show", "--help"], 0)]
    lines += [(line.split(), 2) for line in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- the page ---


def test_the_page_of_models_is_fresh():
    checkout = Path(phalanx.__file__).parents[2]
    text = (checkout / "docs" / "models.md").read_text(encoding="utf-8")
    assert text.count("\n| `") == len(MODELS)
    writer = runpy.run_path(str(checkout / "scripts" / "write_docs.py"))
    assert text == writer["models_page"](), "stale: run `make docs`"
