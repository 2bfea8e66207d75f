"""Which preset a name means."""

from pathlib import Path

import pytest

from phalanx.config.presets import (
    builtin_preset_folder,
    find_old_preset,
    find_preset,
    is_preset,
    iterate_old_presets,
    iterate_presets,
    read_preset_summary,
    shorten_name,
)
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError


@pytest.fixture(autouse=True)
def here(empty_folder):
    Path("presets").mkdir()


def lr_of(name: str) -> float:
    return read_settings(name).config.schedule.lr


def test_the_local_folder_wins_over_entries_and_those_over_ours():
    ours = lr_of("demo")
    Path("configs.yml").write_text("demo:\n  lr: 2\nother:\n  lr: 3\n")
    assert lr_of("demo") == 2 != ours
    Path("presets/demo.yaml").write_text("lr: 1\n")
    assert lr_of("demo") == 1
    assert lr_of("other") == 3
    names = [preset.name for preset in iterate_presets()]
    assert names[:3] == ["demo", "demo", "other"]
    assert names[3:] == sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))


def test_entries_share_values_by_anchor_and_merge():
    Path("configs.yml").write_text(
        "small: &small\n"
        "  model: resnet8\n"
        "  lr: 0.5\n"
        "  weight-decay: 5e-5\n"
        "long: &long\n"
        "  epochs: 40\n"
        "both:\n"
        "  <<: [*small, *long]\n"
        "  lr: 0.25\n"
        "last:\n"
        "  lr: 0.125\n"
        "  <<: *small\n"
    )
    both, last = read_settings("both"), read_settings("last")
    assert (both.config.schedule.lr, both.config.train.epochs) == (0.25, 40)
    assert both.config.optim.weight_decay == 5e-5
    assert last.config.schedule.lr == 0.125, "the entry's own key wins, wherever the merge stands"
    assert both.origins["lr"] == both.origins["weight-decay"] == "preset both (configs.yml)"


def test_a_mistake_in_an_entry_names_the_file_and_the_line():
    Path("configs.yml").write_text("fine:\n  lr: 1\nbad:\n  lr: 1\n  batchsize: 3\n")
    assert lr_of("fine") == 1
    with pytest.raises(ConfigError, match=r"configs\.yml:5: batchsize: .*'batch-size'"):
        read_settings("bad")


def test_an_entry_may_extend_ours():
    Path("configs.yml").write_text("mine:\n  extends: demo\n  lr: 1\n")
    settings = read_settings("mine")
    assert (settings.origins["lr"], settings.origins["momentum"]) == (
        "preset mine (configs.yml)",
        "preset demo",
    )


def test_a_path_is_a_file_and_never_a_preset():
    Path("demo.yaml").write_text("lr: 7\n")
    assert lr_of("demo.yaml") == lr_of("./demo.yaml") == 7 != lr_of("demo")
    assert find_preset("demo.yaml").origin == "file demo.yaml"
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file; .*presets ls"):
        read_settings("nope.yaml")


def test_a_folder_is_told_from_a_preset():
    for folder in (Path("photos"), Path("runs/mine"), Path("demo")):
        folder.mkdir(parents=True)
    told = "is a folder, not a preset; if the images are in it, give --data-dir "
    for name in ("photos", "./photos", "photos/"):
        with pytest.raises(ConfigError, match=f"^{name}: {told}{name}$"):
            find_preset(name)
    Path("runs/mine/run.json").touch()
    told = "is a run, not a preset; its options are runs/mine/config.yaml, and `phalanx train "
    told += "--resume runs/mine` continues it"
    with pytest.raises(ConfigError, match=told):
        find_preset("runs/mine")
    assert find_preset("demo").origin == "preset demo"


def test_a_misspelt_preset_names_the_near_one():
    Path("configs.yml").write_text("kittens:\n  lr: 1\n")
    with pytest.raises(ConfigError, match=r"kitten: no preset is called that; .*'kittens'"):
        read_settings("kitten")
    with pytest.raises(ConfigError, match=r"dmeo: .*did you mean 'demo'"):
        read_settings("dmeo")
    with pytest.raises(
        ConfigError,
        match=r"zzz: .*; none of the \d+ known names is close to it \(`phalanx presets ls` lists",
    ):
        read_settings("zzz")


@pytest.mark.parametrize(
    ("files", "ring"),
    [
        ({"a": "a"}, "a"),
        ({"a": "b", "b": "c", "c": "a"}, "a > b > c"),
        ({"a": "b", "b": "c", "c": "b"}, "a > b > c"),
    ],
)
def test_extends_in_a_ring_is_refused(files, ring):
    for name, extends in files.items():
        Path(f"presets/{name}.yaml").write_text(f"extends: {extends}\n")
    with pytest.raises(ConfigError, match=f"extends forms a cycle: {ring}") as caught:
        read_settings("a")
    assert str(caught.value).count(" > ") <= len(files), "it goes round once"


def test_extending_what_does_not_exist_names_the_near_one():
    Path("presets/a.yaml").write_text("extends: demoo\n")
    with pytest.raises(ConfigError, match=r"demoo: no preset .*'demo'"):
        read_settings("a")


def test_the_first_comment_says_what_a_preset_is():
    Path("presets/a.yaml").write_text("# cats at night\nlr: 1\n")
    Path("presets/b.yaml").write_text("lr: 1\n")
    Path("configs.yml").write_text("c:\n  lr: 1\n")
    about = {name: read_preset_summary(find_preset(name)) for name in "abc"}
    assert about == {"a": "cats at night", "b": "", "c": "an entry of configs.yml"}


def test_what_presets_ls_shows_of_our_own_is_not_cut_off():
    files = list(builtin_preset_folder().rglob("*.yaml"))
    heads = {file.stem: file.read_text(encoding="utf-8").splitlines()[:2] for file in files}
    assert len(files) > 90
    assert [name for name, (_, second) in heads.items() if second.strip("# ")] == []


# --- configurations of the applications before Phalanx ---


def test_an_old_name_is_found_and_with_the_application_it_is_from():
    preset = find_preset("resnet50_mk2_pipelined")
    assert (preset.application, preset.full_name) == ("pl", "pl/resnet50_mk2_pipelined")
    assert find_preset(preset.full_name) == preset
    assert read_settings(preset.full_name).name == "resnet50_mk2_pipelined"
    assert is_preset(preset.name) and is_preset(preset.full_name)
    assert not is_preset("pl/mk2_resnet50_bn_16ipus"), "that is TensorFlow 1's"


def test_a_name_of_two_applications_is_refused_with_both():
    with pytest.raises(
        ConfigError,
        match=r"resnet8_test: 2 applications have a configuration of that name; give --config "
        r"tf1/resnet8_test \(TensorFlow 1\) or tf2/resnet8_test \(TensorFlow 2\)",
    ):
        read_settings("resnet8_test")
    lengths = [
        read_settings(f"{application}/resnet8_test").config.train.epochs
        for application in ("tf1", "tf2")
    ]
    assert lengths == [10, 1]
    assert find_old_preset("resnet8_test", "tf2").full_name == "tf2/resnet8_test"


@pytest.mark.parametrize("name", ["resnet50", "efficientnet-b0"])
def test_an_old_name_that_is_a_model_needs_its_application(name):
    way_out = rf"{name}: is a model and a configuration; give --model {name}, or --config pl/{name}"
    with pytest.raises(ConfigError, match=way_out):
        read_settings(name)
    assert read_settings(f"pl/{name}").config.data.data == "imagenet"


def test_what_is_here_wins_over_an_old_name():
    Path("presets/mk2_resnet8_test.yaml").write_text("lr: 5\n")
    assert lr_of("mk2_resnet8_test") == 5
    assert read_settings("tf1/mk2_resnet8_test").config.schedule.base_learning_rate == -6
    Path("tf1").mkdir()
    Path("tf1/mk2_resnet8_test").write_text("lr: 6\n")
    assert lr_of("tf1/mk2_resnet8_test") == 6, "a file is a file"


def test_a_misspelt_old_name_is_answered_by_a_near_one():
    with pytest.raises(
        ConfigError,
        match=r"mk2_resnet50_bn_16ipu: no preset is called that; did you mean "
        r"'mk2_resnet50_bn_16ipus'\? \(`phalanx presets ls` lists ours, and with --old",
    ):
        read_settings("mk2_resnet50_bn_16ipu")
    with pytest.raises(
        ConfigError,
        match=r"resnet50_mlperf_bs20: TensorFlow 2 has no configuration of that name; did you mean "
        r"'resnet50_mlperf_bs16'",
    ):
        read_settings("tf2/resnet50_mlperf_bs20")
    with pytest.raises(ConfigError, match=r"tf9/x: no such file"):
        read_settings("tf9/x")


def test_the_shortest_name_finds_its_preset():
    presets = list(iterate_old_presets())
    short = [shorten_name(preset) for preset in presets]
    assert [find_preset(name) for name in short] == presets
    assert sum("/" in name for name in short) == 2 * 3 + 2, "three names twice, two models"
