"""A user's own models and datasets, from a module beside the run."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

import phalanx
from phalanx.catalog import plugins
from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.catalog.plugins import format_plugin_flag, load_plugins
from phalanx.catalog.variant import OwnVariant
from phalanx.cli.main import main
from phalanx.data.formats.sources import OPENERS
from phalanx.engine.checkpoint_store import list_checkpoints, read_files, write_checkpoint_as
from phalanx.errors import ConfigError
from phalanx.models.build import build_model
from phalanx.models.units import to_unit_model
from phalanx.report.folder import RunFolder
from phalanx.sweep.check import read_sweep
from phalanx.sweep.process import build_command
from phalanx.sweep.state import SweepState, Trial
from small_runs import read_result, run_phalanx, small_run

PLUGIN = '''
"""Stripes of three colours, and two networks that tell them apart."""

from dataclasses import replace

import numpy as np

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant
from phalanx.data.formats.arrays import ArraySource
from phalanx.data.formats.sources import OPENERS

COLOURS = ("red", "green", "blue")
MODELS["mini"] = OwnVariant(image_size=8, classes=3, build="stripes:build_mini", head="4")
MODELS["resnet8_thin"] = replace(MODELS["resnet8"], widths=(4, 8, 16))
DATASETS["stripes"] = replace(
    DATASETS["mnist"], preset="demo", image_size=8, needs_folder=False, classes=COLOURS
)
OPENERS["stripes"] = lambda _folder, split, _spec: open_stripes(split)


def open_stripes(split):
    images = {"train": 48, "valid": 12}[split]
    pixels = np.random.default_rng(images).integers(0, 99, (images, 8, 8, 3)).astype(np.uint8)
    labels = np.arange(images) % 3
    pixels[np.arange(images), :, 3, labels] = 255
    return ArraySource(pixels=pixels, labels=labels, classes=COLOURS, files=(split,))


def build_mini(num_classes):
    from torch import nn

    conv, linear = nn.Conv2d(3, 4, 3), nn.Linear(4, num_classes)
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to write plugins into; whatever they change is put right again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_LOADED", {})
    kept = [(table, dict(table)) for table in (MODELS, DATASETS, OPENERS)]
    yield tmp_path
    for table, rows in kept:
        table.clear()
        table.update(rows)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def stripes(tmp_path, monkeypatch):
    """A folder with the plugin in it, which only Phalanx itself puts on the search path."""
    (tmp_path / "stripes.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    return tmp_path


def train(folder: Path, run: str, **options: object) -> None:
    given = {"plugin": "stripes", "data": "stripes", "batch-size": 12, "steps": 4, "lr": 0.05}
    given |= {"warmup-epoch": "1st", "ckpts-per-epoch": 4, "keep": 9, "device": "cpu", **options}
    done = run_phalanx(
        "train", *(f"--{name}={value}" for name, value in given.items()), f"--run-dir={run}",
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_plugins_network_trains_on_a_plugins_data(stripes):
    train(stripes, "own", model="mini", workers=0)
    summary = read_result(stripes / "own")
    assert (summary["steps"], summary["scored"]) == (4, 12)
    facts = json.loads((stripes / "own" / summary["checkpoint"] / "facts.json").read_text())
    assert facts["classes"] == ["red", "green", "blue"]
    assert facts["config"]["plugin"] == "stripes"


def test_a_plugins_row_trains_with_a_worker_and_its_resume_is_the_same(stripes):
    train(stripes, "row", model="resnet8_thin", workers=1)
    run = stripes / "row"
    straight = read_result(run)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "summary.json").unlink()
    words = ("--workers", "0", "--plugin", "stripes")
    done = run_phalanx("train", "--resume", "row", *words, cwd=stripes)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 2" in done.stdout
    assert read_result(run)["weights_sha256"] == straight["weights_sha256"]


def test_a_run_whose_plugin_is_gone_says_so(stripes):
    done = run_phalanx("plan", "--plugin", "stripes", "--model", "mini", cwd=stripes)
    assert done.returncode == 0, done.stderr
    (stripes / "stripes.py").unlink()
    done = run_phalanx("plan", "--plugin", "stripes", "--model", "mini", cwd=stripes)
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx plan: --plugin stripes: No module named 'stripes'; ")


def test_a_plugin_that_raises_is_named_with_its_line_and_leaves_no_run(here, digits, capsys):
    broken = PLUGIN.replace("from torch import nn\n", "return {}[num_classes]\n")
    (here / "broken.py").write_text(broken.replace("stripes:", "broken:"))
    line = broken[: broken.index("return {}")].count("\n") + 1
    words = small_run(digits, here / "run", steps=1, plugin="broken", model="mini", workers=0)
    assert main(words) == 70
    assert capsys.readouterr().err.startswith(
        "phalanx train: this is a bug in the plugin broken: build_mini failed in "
        f"{here / 'broken.py'}, line {line}: KeyError: 10. Fix it there; the traceback is in "
    )
    assert not (here / "run").exists()


# --- plugins that a file asks for ---

ROW = "from phalanx.catalog.models import MODELS\nMODELS['theirs'] = MODELS['resnet8']\n"


def write_theirs(folder: Path) -> None:
    """A plugin that leaves a trace when it runs, a preset and a sweep that ask for it."""
    (folder / "theirs.py").write_text(f"open('ran', 'w').close()\n{ROW}")
    (folder / "presets").mkdir()
    text = "extends: demo\nplugin: theirs\nmodel: theirs\n"
    (folder / "presets" / "asks.yaml").write_text(text)
    options = "options: {plugin: theirs, steps: 2}\nsearch: {lr: [0.1]}\nmethod: grid\n"
    (folder / "sweep.yaml").write_text(options)
    searched = "options: {steps: 2}\nsearch: {plugin: ['null', theirs]}\nmethod: grid\n"
    (folder / "search.yaml").write_text(searched)


@pytest.fixture(scope="module")
def foreign_run(tmp_path_factory, digits) -> Path:
    """A run folder whose config.yaml and checkpoints ask for the plugin `theirs`."""
    run = tmp_path_factory.mktemp("foreign") / "run"
    words = small_run(digits, run, steps=4, ckpts_per_epoch=6, keep=9)
    assert main(words) == 0
    (run / "summary.json").unlink()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("plugin: null", "plugin: theirs"))
    for checkpoint in list_checkpoints(run / "checkpoints"):
        files = read_files(checkpoint)
        facts = json.loads(files["facts.json"])
        facts["config"]["plugin"] = "theirs"
        files["facts.json"] = json.dumps(facts).encode()
        write_checkpoint_as(checkpoint.parent, checkpoint.name, files)
    return run


COMMANDS_ON_A_RUN = {
    "train --resume RUN": "config.yaml",
    "train --fork RUN --run-dir new --epochs 4": "step-00000004",
    "validate RUN": "step-00000004",
    "validate RUN --all": "step-00000001",
    "predict RUN image.png": "step-00000004",
    "average RUN": "step-00000004",
    "replay RUN --step 2": "config.yaml",
}


@pytest.mark.parametrize("line", COMMANDS_ON_A_RUN)
def test_what_a_run_names_is_imported_only_if_the_command_line_names_it(
    here, foreign_run, capsys, line
):
    write_theirs(here)
    run = here / "run"
    shutil.copytree(foreign_run, run, symlinks=True)
    Image.new("RGB", (12, 12)).save(here / "image.png")
    words = [str(run) if word == "RUN" else word for word in line.split()]
    assert main(words) == ConfigError.exit_code
    assert not (here / "ran").exists()
    told = capsys.readouterr().err
    assert f"{COMMANDS_ON_A_RUN[line]}: plugin: asks for the plugin theirs, whose code" in told
    assert told.endswith("if you trust it, add --plugin theirs\n")
    assert main([*words, "--plugin", "theirs"]) == 0, capsys.readouterr().err
    assert (here / "ran").exists()


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("plan asks", "presets/asks.yaml:2"),
        ("plan presets/asks.yaml", "presets/asks.yaml:2"),
        ("sweep sweep.yaml --dry-run", "sweep.yaml:1"),
        ("sweep search.yaml --dry-run", "search.yaml:2"),
    ],
)
def test_what_a_file_names_is_imported_only_if_the_command_line_names_it(here, capsys, line, where):
    write_theirs(here)
    before = list(sys.path)
    assert main(line.split()) == ConfigError.exit_code
    assert not (here / "ran").exists() and sys.path == before
    assert f": {where}: plugin: asks for the plugin theirs, whose" in capsys.readouterr().err
    assert main([*line.split(), "--plugin", "theirs"]) == 0
    assert (here / "ran").exists()


def test_functions_import_what_their_keyword_names_alone(here, foreign_run):
    write_theirs(here)
    with pytest.raises(ConfigError, match="add --plugin theirs"):
        phalanx.load(foreign_run)
    assert not (here / "ran").exists()
    phalanx.load(foreign_run, plugin="theirs")
    assert (here / "ran").exists()


def test_a_plugin_that_is_installed_does_not_open_the_current_folder(here):
    before = list(sys.path)
    load_plugins("json")
    assert sys.path == before
    (here / "mine.py").write_text("")
    load_plugins("mine")
    assert sys.path == [*before, str(here)]


def test_hints_of_how_to_go_on_name_the_plugin(foreign_run, here, capsys):
    assert RunFolder(foreign_run).plugin_flag == " --plugin theirs"
    assert main(["train", "demo", "--run-dir", str(foreign_run)]) == ConfigError.exit_code
    assert f"with --resume {foreign_run} --plugin theirs, or choose" in capsys.readouterr().err
    write_theirs(here)
    words = ["train", "--resume", str(foreign_run), "--plugin", "theirs", "--lr", "9"]
    assert main(words) == ConfigError.exit_code
    hint = f"phalanx train --fork {foreign_run} --run-dir NEW --plugin theirs"
    assert hint in capsys.readouterr().err


def test_a_hint_is_no_way_to_smuggle_a_command():
    assert format_plugin_flag("a; rm -rf b") == " --plugin 'a; rm -rf b'"


def test_a_sweeps_trial_gets_the_plugin_of_the_sweep(here):
    write_theirs(here)
    (here / "of_preset.yaml").write_text("preset: asks\nsearch: {lr: [0.1]}\nmethod: grid\n")
    load_plugins("theirs")
    sweep = read_sweep(Path("of_preset.yaml"))
    trial = Trial(number=0, values={"lr": "0.1"})
    words, _ = build_command(sweep, trial, here / "run")
    assert "--plugin=theirs" in words
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text("{}")
    assert build_command(sweep, trial, here / "run") == (
        ["train", "--resume", str(here / "run"), "--plugin=theirs"],
        True,
    )
    state = SweepState(folder=here, sweep=sweep, trials=(trial,))
    assert state.command(trial) == "phalanx train asks --plugin theirs --lr 0.1"


# --- mistakes ---


def said_by(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_plugins(name)
    return str(caught.value)


def test_a_plugin_that_is_not_there_says_where_it_is_looked_for(here, capsys):
    assert main(["plan", "--plugin", "nowhere_at_all"]) == 2
    assert capsys.readouterr().err == (
        "phalanx plan: --plugin nowhere_at_all: No module named 'nowhere_at_all'; give a module's "
        "name, without .py, that is in this folder, is installed, or is reached by PYTHONPATH\n"
    )
    (here / "mine.py").write_text("")
    assert "without .py" in said_by("mine.py")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0", "--plugin mine: ZeroDivisionError: division by zero"),
        ("def (", "--plugin mine: SyntaxError: "),
        ("raise ValueError('no such luck')", "--plugin mine: ValueError: no such luck"),
        (
            "import nothing_like_this",
            "--plugin mine: No module named 'nothing_like_this', which it imports",
        ),
    ],
)
def test_a_plugin_that_fails_is_told_with_its_reason(here, source, said):
    (here / "mine.py").write_text(source)
    assert said_by("mine").startswith(said)


TAKERS = {
    "replaces a model": (
        "from phalanx.catalog.models import MODELS\nMODELS['resnet18'] = MODELS['resnet34']",
        "--plugin mine: replaces the model 'resnet18'; give yours another name",
    ),
    "removes a model": (
        "from phalanx.catalog.models import MODELS\ndel MODELS['resnet18']",
        "--plugin mine: replaces the model 'resnet18'; give yours another name",
    ),
    "replaces a dataset": (
        "from phalanx.catalog.datasets import DATASETS\nDATASETS['mnist'] = DATASETS['cifar10']",
        "--plugin mine: replaces the dataset 'mnist'; give yours another name",
    ),
}


@pytest.mark.parametrize("what", TAKERS)
def test_a_plugin_takes_nothing_from_the_tables(here, what):
    source, said = TAKERS[what]
    (here / "mine.py").write_text(source)
    assert said_by("mine") == said


def test_a_plugins_folder_is_trained_on_without_scores(stripes):
    dataset = 'DATASETS["stripes"] = replace(DATASETS["stripes"], needs_folder=True)'
    (stripes / "stripes.py").write_text(f"{PLUGIN}\n\n{dataset}\n")
    train(stripes, "run", **{"data-dir": stripes, "model": "mini", "validation-mode": "none"})
    assert read_result(stripes / "run")["steps"] == 4


def test_two_plugins_add_their_rows_and_do_not_take_each_others(here):
    row = "from phalanx.catalog.models import MODELS\nMODELS['{}'] = MODELS['resnet{}']"
    (here / "first.py").write_text(row.format("a", 18))
    (here / "second.py").write_text(row.format("b", 34))
    (here / "third.py").write_text(row.format("a", 50))
    load_plugins("first, second")
    assert MODELS["a"] is MODELS["resnet18"] and MODELS["b"] is MODELS["resnet34"]
    load_plugins("first,second")
    assert "--plugin third: replaces the model 'a'" in said_by("third")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("mine:nothing", "mine:nothing cannot be called: module 'mine' has no attribute 'nothing'"),
        ("not_there:build", "not_there:build cannot be called: No module named 'not_there'"),
        ("mine", "mine cannot be called: "),
        ("mine:text", "mine:text gave a str, not a module"),
    ],
)
def test_a_network_that_cannot_be_made_is_told(here, build, said):
    (here / "mine.py").write_text("def text(classes):\n    return 'words'\n")
    load_plugins("mine")
    with pytest.raises(ConfigError) as caught:
        build_model(OwnVariant(image_size=8, build=build), num_classes=3)
    assert str(caught.value).startswith(f"--plugin: {said}")


def test_a_network_of_ones_own_is_one_unit(here):
    (here / "stripes.py").write_text(PLUGIN)
    load_plugins("stripes")
    model = build_model(MODELS["mini"], num_classes=5)
    assert tuple(to_unit_model(model).units) == MODELS["mini"].units == ("model",)
    assert model.get_submodule(MODELS["mini"].head).out_features == 5


def test_the_example_of_the_page_works(here, capsys):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (here / "my_things.py").write_text(page.split("```python\n")[1].split("```")[0])
    assert main(["models", "show", "tiny", "--plugin", "my_things", "--classes", "7"]) == 0
    assert "made by my_things:build_tiny" in capsys.readouterr().out
    assert main(["plan", "--plugin", "my_things", "--model", "resnet16_wide"]) == 0


def test_the_network_with_dropout_of_the_page_works(here, capsys):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (here / "my_nets.py").write_text(page.split("```python\n")[2].split("```")[0])
    row = re.search(r"in my_things.py: (MODELS.*)", page)[1]
    (here / "my_small_things.py").write_text(
        "from phalanx.catalog.models import MODELS\n"
        f"from phalanx.catalog.variant import OwnVariant\n\n{row}\n"
    )
    assert main(["models", "show", "small", "--plugin", "my_small_things", "--classes", "7"]) == 0
    assert "head" in capsys.readouterr().out


def test_rows_that_are_no_rows_are_refused(here):
    (here / "odd.py").write_text("from phalanx.catalog.models import MODELS\nMODELS['z'] = 3\n")
    assert said_by("odd").startswith("--plugin odd: the model 'z' is not a Variant; ")
