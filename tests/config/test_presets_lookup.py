"""Which preset a name means."""

from pathlib import Path

import pytest

from phalanx.config.presets import (
    builtin_preset_folder,
    find_preset,
    iterate_presets,
    read_preset_summary,
)
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
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


def test_a_misspelt_preset_names_the_near_one():
    Path("configs.yml").write_text("kittens:\n  lr: 1\n")
    with pytest.raises(ConfigError, match=r"kitten: no preset is called that; .*'kittens'"):
        read_settings("kitten")
    with pytest.raises(ConfigError, match=r"dmeo: .*did you mean 'demo'"):
        read_settings("dmeo")
    with pytest.raises(
        ConfigError,
        match=r"zzz: .*; none of the \d+ known names is close to it; `phalanx presets ls` lists",
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
