"""From text to values: YAML as people write it, flags as they type them."""

import os
from pathlib import Path

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_folder")


def read_yaml(text: str | bytes, **flags: str):
    data = text if isinstance(text, bytes) else text.encode()
    Path("mine.yaml").write_bytes(data)
    return read_settings("mine.yaml", flags)


def option(text: str, name: str):
    return read_yaml(text).config.flat()[name]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr: 5e-5", 5e-5),
        ("lr: 5E-5", 5e-5),
        ("lr: 1e3", 1000.0),
        ("lr: 1.e+1", 10.0),
        ("lr: 5.0e-5", 5e-5),
        ("lr: .5", 0.5),
        ("lr: 1", 1.0),
        ("seed: 0x10", 16),
        ("seed: 1_000", 1000),
        ("precision: 16.32", "16.32"),
        ("precision: '32.32'", "32.32"),
        ("logs-per-epoch: 1/2", "1/2"),
        ("logs-per-epoch: 2", "2"),
        ("ckpts-per-epoch: 0.5", "0.5"),
        ("warmup-epoch: 5", "5"),
        ("warmup-epoch: 10%", "10%"),
        ("max-bad: 1%", "1%"),
        ("max-bad: 10", "10"),
        ("max-bad:", None),
        ("max-bad: null", None),
        ("run-dir: 007", "007"),
        ("run-dir: yes", "yes"),
        ("run-dir: 'null'", "null"),
        ("run-dir: 2026-11-15", "2026-11-15"),
        ("zero-init-residual: yes", True),
        ("zero-init-residual: off", False),
        ("batch_size: 3", 3),
    ],
)
def test_a_value_is_read_as_it_is_meant(text, value):
    key = text.split(":")[0].replace("_", "-")
    read = option(text, key)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("batch-size: 3.0", "batch-size: expected a whole number, got 3.0"),
        ("batch-size: true", "batch-size: expected a whole number, got True"),
        ("batch-size: '3'", "batch-size: expected a whole number, got '3'"),
        ("batch-size:", "batch-size: expected a whole number, got None"),
        ("lr: fast", "lr: expected a number, got 'fast'"),
        ("lr: true", "lr: expected a number, got True"),
        ("lr: .nan", "lr: expected a number, got nan"),
        ("lr: .inf", "lr: expected a number, got inf"),
        ("epochs: -.inf", "epochs: expected a number, got -inf"),
        ("zero-init-residual: 1", "zero-init-residual: expected true or false, got 1"),
        ("lr: [1, 2]", "lr: expected a single value, got a list or a mapping"),
        ("lr: {a: 1}", "lr: expected a single value, got a list or a mapping"),
        ("warmup-epoch: soon", "warmup-epoch: expected a length such as 5ep"),
        ("logs-per-epoch: -1", "logs-per-epoch: cannot be negative"),
        ("max-bad: some", "max-bad: expected a count or a share"),
        ("batch-size: 0", "batch-size: must be at least 1, got 0"),
        ("momentum: 1.5", "momentum: must be at most 1.0, got 1.5"),
        ("epoch-tail: dorp", "epoch-tail: no choice is called 'dorp'; did you mean 'drop'?"),
        ("precision: 16.64", "precision: no choice is called '16.64'; did you mean '16.16'?"),
        ("model: resnet7", "model: no model is called 'resnet7'; did you mean 'resnet"),
        ("data: cifar", "data: no dataset is called 'cifar'; did you mean 'cifar10'?"),
        ("lr: 2026-13-45", "lr: expected a number"),
    ],
)
def test_a_wrong_value_names_the_file_the_line_and_what_is_wanted(text, what):
    with pytest.raises(ConfigError) as caught:
        read_yaml(f"# mine\n\n{text}\n")
    assert str(caught.value).startswith(f"mine.yaml:3: {what}")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("lr: 1\nlr: 2\n", "mine.yaml:2: lr is given twice, in line 1 already; leave one out"),
        ("<<: {lr: 1}\n<<: {lr: 2}\n", r"mine.yaml:2: << is given twice.*; write <<: \[\*a, \*b\]"),
        ("lr: 1\nepochs: 2\nepoch: 3\n", "mine.yaml.*epoch.*twice"),
        ("lr: 1\nbatch-sise: 2\n", "mine.yaml:2: batch-sise: no such option; .*'batch-size'"),
        ("lr: [1\n", r"mine.yaml:2: not valid YAML: .*"),
        ("lr: 'open\n", r"mine.yaml:2: not valid YAML: .*"),
        ("\tlr: 1\n", r"mine.yaml:1: not valid YAML: .*"),
        ("- lr\n", "mine.yaml:1: expected lines of the form `option: value`"),
        ("just words\n", "mine.yaml:1: expected lines of the form `option: value`"),
        ("lr: 1\n---\nlr: 2\n", "mine.yaml:2: not valid YAML: .*"),
        ("<<: 5\nlr: 1\n", "mine.yaml:1: not valid YAML: .*"),
        ("lr: *missing\n", "mine.yaml:1: not valid YAML: .*"),
        ("lr: !tag 5\n", "mine.yaml:1: .*"),
        ("? [a, b]\n: 5\n", "mine.yaml:1: .*"),
        ("extends: [demo]\n", "mine.yaml:1: extends: .*"),
        (b"lr: \xff\n", "mine.yaml: not UTF-8 text"),
        (b"lr: 1\n\x00", "mine.yaml.*: not valid YAML.*"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(text, what):
    with pytest.raises(ConfigError, match=what):
        read_yaml(text)


def test_an_empty_file_asks_for_nothing():
    assert read_yaml("").config == read_yaml("# nothing\n").config
    assert read_yaml("").config.train.epochs == 10


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "5e-5", 5e-5),
        ("epochs", "3", 3.0),
        ("precision", "16.32", "16.32"),
        ("zero-init-residual", "true", True),
        ("zero-init-residual", "No", False),
        ("max-bad", "none", None),
        ("data-dir", "null", None),
        ("logs-per-epoch", "1/3", "1/3"),
        ("seed", str(2**63 - 1), 2**63 - 1),
    ],
)
def test_a_flag_becomes_a_value_of_its_options_type(name, text, value):
    assert read_settings("demo", {name: text}).config.flat()[name] == value


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("batch-size", "many", "expected a whole number, got 'many'"),
        ("batch-size", "1.5", "expected a whole number, got '1.5'"),
        ("lr", "nan", "expected a number, got nan"),
        ("lr", "inf", "expected a number, got inf"),
        ("lr", "-1", "must be at least 0.0, got -1.0"),
        ("label-smoothing", "1", "must be at most 0.999, got 1.0"),
        ("seed", str(2**63), f"must be at most {2**63 - 1}, got {2**63}"),
        ("zero-init-residual", "maybe", "expected true or false, got 'maybe'"),
        ("epochs", "", "expected a number, got ''"),
    ],
)
def test_a_wrong_flag_names_itself_and_what_is_wanted(name, text, what):
    with pytest.raises(ConfigError) as caught:
        read_settings("demo", {name: text})
    assert str(caught.value) == f"--{name}: {what}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr-epoch-decay: [2, 4]", "2,4"),
        ("lr-epoch-decay:\n- 50%\n- 75%", "50%,75%"),
        ("lr_drop_after: [0.5, 0.75]", "0.5,0.75"),
        ("lr-decay: [1, 0.1]", "1,0.1"),
        ("recompute-checkpoints: ['layer[12]', conv]", "layer[12],conv"),
        ("adam-betas: [0.9, 0.99]", "0.9,0.99"),
        ("crop-scale: [0.25, 1]", "0.25,1"),
        ("crop-ratio: [3/4, 4/3]", "3/4,4/3"),
        ("progressive-resolution: ['16:10%', '20:50%']", "16:10%,20:50%"),
    ],
)
def test_a_list_is_what_a_flag_says_with_commas(text, value):
    assert option(text, text.split(":")[0].replace("_", "-")) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr-epoch-decay: [[2], 4]", "expected a list of single values; write a,b or [a, b]"),
        ("lr-epoch-decay: {a: 2}", "expected a single value, got a list or a mapping"),
        ("lr-epoch-decay: []", "expected a length such as 5ep, 500st or 10%, got ''"),
        ("lr: [0.1, 0.2]", "expected a single value, got a list or a mapping"),
        (
            "adam-betas: [0.9]",
            "expected two shares from 0 to below 1, such as 0.9,0.999, got '0.9'",
        ),
    ],
)
def test_other_lists_are_refused(text, told):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text)
    assert str(caught.value) == f"mine.yaml:1: {text.split(':')[0]}: {told}"


def test_few_lines_that_merge_into_billions_of_keys_are_refused_at_once():
    lines = ["a0: &a0 {lr: 1}"]
    for level in range(1, 10):
        merged = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{merged}]}}")
    with pytest.raises(
        ConfigError, match=r"mine.yaml: its merges \(<<\) expand to more than 10,000 keys"
    ):
        read_yaml("\n".join([*lines, "<<: [*a9]"]))


def test_a_mapping_that_merges_itself_is_read():
    with pytest.raises(ConfigError, match="a: no such option"):
        read_yaml("a: &a {<<: *a, lr: 1}")


def test_a_file_too_large_for_options_is_refused_unread():
    Path("mine.yaml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(
        ConfigError, match=r"mine.yaml: 1.0 MiB, over the 1.0 MiB that an options file"
    ):
        read_settings("mine.yaml")


def test_a_pipe_among_presets_is_not_waited_for():
    Path("presets").mkdir()
    os.mkfifo("presets/mine.yaml")
    with pytest.raises(ConfigError, match=r"presets/mine.yaml: is not a regular file"):
        read_settings("mine")
