"""Who wins, who said so, and that all mistakes are told at once."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from phalanx.config.changes import find_changes
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.read import dump_config, read_settings, read_stored_settings
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.errors import ConfigError

PRESETS = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))


@pytest.fixture(autouse=True)
def here(empty_folder):
    Path("presets").mkdir()


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def problems_of(preset: str | None, flags: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_settings(preset, flags)
    return str(caught.value)


def test_default_extends_preset_file_flag_in_that_order():
    write("presets/root.yaml", "lr: 1\nmomentum: 0.1\nseed: 1\nkeep: 1\n")
    write("presets/leaf.yaml", "extends: root\nlr: 2\nmomentum: 0.2\nseed: 2\n")
    write("mine.yaml", "extends: leaf\nlr: 3\nmomentum: 0.3\n")
    settings = read_settings("mine.yaml", {"lr": "4"})
    names = ("lr", "momentum", "seed", "keep", "label-smoothing")
    assert [settings.config.flat()[name] for name in names] == [4, 0.3, 2, 1, 0.0]
    assert [settings.origins[name] for name in names] == [
        *("flag", "file mine.yaml", "preset presets/leaf.yaml", "preset presets/root.yaml"),
        "default",
    ]


def test_every_option_has_an_origin_and_a_value():
    settings = read_settings("demo", {"lr": "1"})
    assert list(settings.origins) == list(settings.config.flat()) == list(OPTIONS)
    assert set(settings.origins.values()) == {"default", "preset demo", "flag"}
    assert settings.name == "demo"


def test_a_run_is_called_after_its_preset_or_file():
    Path("deep").mkdir()
    write("deep/cats.yaml", "lr: 1\n")
    write("dogs.yml", "lr: 1\n")
    assert read_settings("deep/cats.yaml").name == "cats"
    assert read_settings("dogs.yml").name == "dogs"


def test_without_a_preset_the_dataset_brings_its_own():
    assert read_settings().name == "demo"
    assert read_settings(None, {"data": "cifar10"}).name == "cifar10-resnet20"
    assert read_settings(None, {"data": "synthetic"}).config.data.data == "synthetic"


@pytest.mark.parametrize(
    ("preset", "flags", "epochs", "steps"),
    [
        ("demo", {}, 8, None),
        ("demo", {"steps": "5"}, None, 5),
        ("generated-resnet50", {}, None, 100),
        ("generated-resnet50", {"epochs": "2"}, 2, None),
        ("synthetic-resnet50", {}, None, 100),
        ("presets/longer.yaml", {}, 3, None),
        ("presets/longer.yaml", {"steps": "7"}, None, 7),
        ("presets/silent.yaml", {}, 10, None),
        ("demo", {"epochs": "none"}, 10, None),
    ],
)
def test_the_highest_layer_that_names_a_length_decides_it(preset, flags, epochs, steps):
    write("presets/longer.yaml", "extends: generated-resnet50\nepochs: 3\n")
    write("presets/silent.yaml", "lr: 1\n")
    settings = read_settings(preset, flags)
    assert (settings.config.train.epochs, settings.config.train.steps) == (epochs, steps)


def test_two_lengths_in_one_layer_are_refused():
    assert problems_of("demo", {"epochs": "2", "steps": "3"}) == (
        "--epochs: give epochs or steps, not both"
    )
    write("mine.yaml", "lr: 1\nepochs: 2\nsteps: 3\n")
    assert problems_of("mine.yaml", {}) == "mine.yaml:2: epochs: give epochs or steps, not both"


def test_a_length_of_nothing_is_refused():
    told = "epochs: must be at least 0.0001, got 0"
    assert problems_of("demo", {"epochs": "0"}) == f"--{told}.0"
    write("mine.yaml", "epochs: 0\n")
    assert problems_of("mine.yaml", {}) == f"mine.yaml:1: {told}"
    assert read_settings("mine.yaml", {"steps": "3"}).config.train.epochs is None


def test_a_rate_of_0_is_a_rate():
    write("mine.yaml", "lr-per-image: 1\n")
    schedule = read_settings("mine.yaml", {"lr": "0"}).config.schedule
    assert (schedule.lr, schedule.lr_per_image) == (0, None)


def test_two_of_three_rates_in_one_layer_are_refused():
    told = "give only one of --lr, --lr-per-image, --base-learning-rate"
    assert problems_of("demo", {"lr": "1", "lr-per-image": "1"}) == f"--lr: {told}"
    flags = {"lr-per-image": "1", "base-learning-rate": "-9"}
    assert problems_of("demo", flags) == f"--lr-per-image: {told}"


@pytest.mark.parametrize(
    ("old", "new", "text", "value"),
    [
        ("epoch", "epochs", "3", 3.0),
        ("imagenet-data-path", "data-dir", "pictures", "pictures"),
        ("checkpoint-path", "run-dir", "runs/a", "runs/a"),
    ],
)
def test_old_spellings_are_understood(old, new, text, value):
    assert read_settings("folder-resnet18", {old: text}).config.flat()[new] == value
    write("mine.yaml", f"data: folder\n{old}: {text}\n")
    assert read_settings("mine.yaml").config.flat()[new] == value
    assert SPELLINGS[old] == new and old not in OPTIONS


def test_the_environment_names_the_folder_where_nobody_else_does(monkeypatch):
    monkeypatch.setenv("DATA_DIR", "/pictures")
    settings = read_settings("cifar10-resnet20")
    assert settings.config.data.data_dir == "/pictures"
    assert settings.origins["data-dir"] == "environment DATA_DIR"
    flagged = read_settings("cifar10-resnet20", {"data-dir": "here"})
    assert (flagged.config.data.data_dir, flagged.origins["data-dir"]) == ("here", "flag")
    assert read_settings("demo").config.data.data_dir is None, "embedded reads no folder"


def test_all_problems_are_told_together():
    write("mine.yaml", "lr: fast\nbatch-sise: 3\nkeep: 0\nmodel: resnet19\n")
    text = problems_of("mine.yaml", {"sede": "1", "momentum": "much", "epochs": "-1"})
    assert text.startswith("7 problems:\n  ")
    for told in (
        "mine.yaml:1: lr: expected a number, got 'fast'",
        "mine.yaml:2: batch-sise: no such option; did you mean 'batch-size'?",
        "mine.yaml:3: keep: must be at least 1, got 0",
        "mine.yaml:4: model: no model is called 'resnet19'; did you mean 'resnet",
        "--sede: no such option; did you mean 'seed'?",
        "--momentum: expected a number, got 'much'",
        "--epochs: must be at least 0.0001, got -1.0",
    ):
        assert text.count(f"\n  {told}") == 1, f"{told}\nnot in\n{text}"


def test_a_missing_preset_is_told_with_the_flags_problems():
    text = problems_of("dmeo", {"sede": "1", "lr": "fast"})
    assert text.startswith("3 problems:")
    assert "dmeo: no preset" in text and "--sede: no such" in text and "--lr: expected" in text


def test_problems_of_the_command_line_are_told_with_the_rest():
    with pytest.raises(ConfigError, match=r"2 problems:\n  --jsn: odd\n  --lr: expected a number"):
        read_settings("demo", {"lr": "fast"}, problems=["--jsn: odd"])


@pytest.mark.parametrize("data", ["embedded", "generated", "synthetic"])
def test_a_folder_for_data_that_reads_none_is_refused(data):
    text = problems_of(None, {"data": data, "data-dir": "pictures"})
    assert text.startswith(
        f"--data-dir: {data} does not read a folder; say what is there with --data"
    )


def test_near_names_are_todays_names():
    assert "did you mean 'epochs'?" in problems_of("demo", {"epochz": "3"})


def test_a_config_is_frozen_and_closed():
    config = read_settings("demo").config
    with pytest.raises(ValidationError, match="frozen"):
        config.data.batch_size = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.data = config.data
    with pytest.raises(ValidationError, match="Extra inputs"):
        type(config.data)(batchsize=1)


def test_options_of_several_sections_are_replaced_by_their_names():
    config = read_settings("demo", {}).config
    changed = config.replace_options({"batch-size": 3, "data-dir": "here", "lr": 2.0})
    assert changed.flat() == {**config.flat(), "batch-size": 3, "data-dir": "here", "lr": 2.0}
    assert config.replace_options({}) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_dumped_config_reads_back_to_the_same_values(name):
    config = read_settings(name).config
    text = dump_config(config)
    assert read_settings(write("dumped.yaml", text)).config == config
    again = read_stored_settings(yaml.safe_load(text), flags={}, where="dumped.yaml", name=name)
    assert again.config == config
    assert set(again.origins.values()) == {"run"}
    assert dump_config(again.config) == text


@pytest.mark.parametrize(
    "odd",
    ["null", "yes", "007", "1e5", "~", "a: b # c", " padded ", "überall/ä", "x y " * 60, "[1]"],
)
def test_odd_text_survives_a_dump(odd):
    stored = {"data": "folder", "data-dir": odd, "logs-per-epoch": "1/3", "precision": "16.32"}
    config = read_stored_settings(stored, flags={}, where="here", name="odd").config
    assert config.data.data_dir == odd
    assert read_settings(write("dumped.yaml", dump_config(config))).config == config
    assert yaml.safe_load(dump_config(config))["data-dir"] == odd


def test_a_dump_says_everything_once():
    text = dump_config(read_settings("demo").config)
    assert list(yaml.safe_load(text)) == list(OPTIONS)
    assert text.startswith("# every option of this run")


def test_flags_go_on_top_of_a_stored_config():
    stored = yaml.safe_load(dump_config(read_settings("demo").config))
    again = read_stored_settings(stored, flags={"steps": "5"}, where="runs/a", name="a")
    assert (again.config.train.steps, again.config.train.epochs) == (5, None)
    assert (again.origins["steps"], again.origins["lr"]) == ("flag", "run")


def test_a_stored_config_with_strange_options_says_where():
    with pytest.raises(ConfigError, match=r"runs/a/config.yaml: flavour: no such option"):
        read_stored_settings({"flavour": 1}, flags={}, where="runs/a/config.yaml", name="a")


PHOTOS = {"data": "folder", "data-dir": "photos"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("on", True), ("1", True), ("1.0", True), ("false", False), ("0", False),
     ("0.0", False), ("0.4", 0.4), (".29", 0.29), ("0.01", 0.01)],
)  # fmt: skip
def test_a_share_of_images_is_a_word_or_whole_percents(text, value):
    config = read_settings(None, {**PHOTOS, "gpu-decode": text}).config
    found = config.data.gpu_decode
    assert found == value and type(found) is type(value)
    write("mine.yaml", f"data: folder\ndata-dir: photos\ngpu-decode: {text}\n")
    assert read_settings("mine.yaml").config.data.gpu_decode == value
    stored = yaml.safe_load(dump_config(config))
    again = read_stored_settings(stored, flags={}, where="runs/a", name="a")
    assert again.config.data.gpu_decode == value and find_changes(again, stored) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1.5", "--gpu-decode: must be at most 1, got 1.5"),
        ("-0.1", "--gpu-decode: must be at least 0, got -0.1"),
        ("half", "--gpu-decode: expected true or false, or a share such as 0.4, got 'half'"),
        ("nan", "--gpu-decode: expected true or false, or a share such as 0.4, got nan"),
        ("0.405", "--gpu-decode: expected true, false or whole percents such as 0.4, got 0.405"),
    ],
)
def test_no_share_of_images_is_told_once(text, told):
    assert problems_of(None, {**PHOTOS, "gpu-decode": text}) == told
    write("mine.yaml", f"data: folder\ndata-dir: photos\ngpu-decode: {text}\n")
    assert problems_of("mine.yaml", {}).startswith("mine.yaml:3: gpu-decode: ")


@pytest.mark.parametrize(("stored", "flag"), [(True, "0.4"), (False, "true"), (0.4, "0.5")])
def test_a_resume_cannot_change_the_share_of_images(stored, flag):
    """Runs of earlier releases hold true or false."""
    run = read_settings(None, PHOTOS).config.flat() | {"gpu-decode": stored}
    same = read_stored_settings(run, flags={}, where="runs/a", name="a")
    other = read_stored_settings(run, flags={"gpu-decode": flag}, where="runs/a", name="a")
    assert find_changes(same, run) == {}
    assert find_changes(other, run) == {"gpu-decode": f"--gpu-decode {str(stored).lower()}"}


@pytest.mark.parametrize("flag", [("lr-per-image", "0.001"), ("base-learning-rate", "-10")])
def test_a_run_whose_rate_grows_with_the_batch_is_read_again(flag):
    name, text = flag
    config = read_settings("demo", {name: text}).config
    again = read_stored_settings(config.flat(), flags={}, where="runs/a", name="a").config
    assert again == config
    lower = read_stored_settings(config.flat(), flags={"lr": "0.5"}, where="runs/a", name="a")
    assert (lower.config.schedule.lr, lower.config.flat()[name]) == (0.5, None)
