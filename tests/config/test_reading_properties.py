"""Layers for any options, and any file: what is said last wins, what is no option is refused."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx.config.read import dump_config, read_settings
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.errors import ConfigError

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
a_few = settings(in_one_folder, max_examples=25)  # each reads three files
VALUES = {  # of options that do not depend on each other
    "batch-size": st.integers(1, 512),
    "seed": st.integers(0, 2**31),
    "lr": st.floats(0.001, 1).map(lambda x: round(x, 4)),
    "label-smoothing": st.floats(0, 0.5).map(lambda x: round(x, 3)),
    "keep": st.integers(1, 9),
    "weight-decay": st.floats(0, 0.1).map(lambda x: round(x, 5)),
    "logs-per-epoch": st.sampled_from(["1", "2", "1/2", "0"]),
    "norm-type": st.sampled_from(["batch", "group"]),
    "zero-init-residual": st.booleans(),
    "warmup-epoch": st.sampled_from(["0ep", "1st", "2%"]),
}
LAYER = st.fixed_dictionaries({}, optional=VALUES)
ANY_VALUE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.fixture(autouse=True)
def here(empty_folder):
    Path("presets").mkdir()


def write(name: str, values: dict) -> None:
    Path(name).write_text(yaml.safe_dump(values), encoding="utf-8")


def spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_or_refuse(preset: str | None, flags: dict[str, str]) -> None:
    try:
        settings = read_settings(preset, flags)
    except ConfigError as error:
        assert str(error)
    else:
        assert list(settings.config.flat()) == list(OPTIONS)


@a_few
@given(LAYER, LAYER, LAYER)
def test_what_is_said_last_wins_and_is_named(preset, file, flags):
    write("presets/root.yaml", {"extends": "demo", **preset})
    write("mine.yaml", {"extends": "root", **file})
    read = read_settings("mine.yaml", {name: spell(value) for name, value in flags.items()})
    values, demo = read.config.flat(), read_settings("demo").config.flat()
    for name in OPTIONS:
        layers = [demo, preset, file, flags]
        [*_, wanted] = [layer[name] for layer in layers if name in layer]
        assert values[name] == wanted, name
    for name, value in flags.items():
        assert read.origins[name] == "flag" and values[name] == value
    for name in file.keys() - flags.keys():
        assert read.origins[name] == "file mine.yaml"


@a_few
@given(LAYER)
def test_a_config_reads_back_as_it_was_written(layer):
    write("mine.yaml", {"extends": "demo", **layer})
    config = read_settings("mine.yaml").config
    Path("again.yaml").write_text(dump_config(config))
    assert read_settings("again.yaml").config == config


@in_one_folder
@given(
    st.text(max_size=20).filter(lambda key: key.replace("_", "-") not in {*SPELLINGS, "extends"})
)
@example("<<")
@example("batchsize")
def test_a_key_that_is_no_option_is_refused(key):
    write("mine.yaml", {key: 1})
    with pytest.raises(ConfigError):
        read_settings("mine.yaml")
    with pytest.raises(ConfigError):
        read_settings("demo", {key: "1"})


@in_one_folder
@given(st.dictionaries(st.sampled_from([*OPTIONS, "extends"]), ANY_VALUE, min_size=1, max_size=3))
def test_any_value_is_read_or_refused(values):
    values.pop("plugin", None)  # which imports what it names
    write("mine.yaml", values)
    read_or_refuse("mine.yaml", {})


@in_one_folder
@given(st.one_of(st.binary(max_size=60), st.text("ab:-[]{}&*<!|>%@#'\"?,\n\t 01", max_size=60)))
@example("a: &a [*a, *a]")
@example("lr: !!python/object/apply:os.system ['true']")
@example("&a {<<: *a}")
@example("lr: 0b_")
@example("epochs: 0x")
@example("epochs: 190:20:30.15")
@example("seed: 1:99999999999999999999999999")
@example("2024-13-45: 1\nlr: 2024-13-45")
def test_any_file_is_read_or_refused(content):
    data = content.encode() if isinstance(content, str) else content
    Path("mine.yaml").write_bytes(data)
    read_or_refuse("mine.yaml", {})


@in_one_folder
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(set(SPELLINGS) - {"plugin"})), st.text(max_size=10)),
        st.one_of(st.text(max_size=12), st.floats().map(str), st.integers().map(str)),
        max_size=4,
    )
)
def test_any_flags_are_read_or_refused(flags):
    read_or_refuse("demo", flags)
