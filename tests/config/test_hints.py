"""The tables of other trainers' words name only what exists here."""

import re

import pytest

from phalanx.catalog.other_trainers import OTHER_NAMES, TRAINERS
from phalanx.catalog.other_values import OTHER_VALUES
from phalanx.cli import data, find, train, validate  # noqa: F401 - they register themselves
from phalanx.cli.command import REGISTERED_COMMANDS, parse_args
from phalanx.cli.main import COMMANDS
from phalanx.config.hints import suggest_option
from phalanx.config.read import merge_layers, read_flags
from phalanx.config.schema import OPTIONS, SPELLINGS

OF_TRAIN = {argument.name.lstrip("-") for argument in REGISTERED_COMMANDS["train"].arguments}
# a flag and the value after it, where one follows that is no word of the sentence
VALUE = r"--([a-z0-9-]+) ((?!with|which|for|and|or|in|is|to|has|alone|false)[^\s`,;:]+)"


@pytest.mark.parametrize("names", TRAINERS.values(), ids=list(TRAINERS))
def test_every_answer_names_real_options_values_and_commands(names):
    for name, answer in names.items():
        for flag in re.findall(r"--([a-z0-9-]+)", answer):
            assert flag in OPTIONS or flag in OF_TRAIN, f"{name}: {answer}"
        for line in re.findall("`phalanx ([^`]+)`", answer):
            command = next(known for known in COMMANDS if line.startswith(known))
            words = line.removeprefix(command).split()
            assert not parse_args(REGISTERED_COMMANDS[command], words).problems, f"{name}: {answer}"
        for flag, value in re.findall(VALUE, answer.partition(";")[0]):
            if OPTIONS.get(flag) and OPTIONS[flag].choices:
                assert value in OPTIONS[flag].choices, f"{name}: {answer}"


@pytest.mark.parametrize("option", OTHER_VALUES)
def test_every_value_that_an_answer_names_is_one(option):
    for value, answer in OTHER_VALUES[option].items():
        assert value == re.sub(r"[-_.\s]", "", value.lower())
        for flag in re.findall(r"--([a-z0-9-]+)", answer):
            assert flag in OPTIONS, f"{option} {value}: {answer}"
        if not answer.startswith("there is no "):
            problems: list[str] = []
            ours = re.split("[,;]", answer)[0]
            merge_layers([read_flags({option: ours}, problems)], problems, name="")


def test_every_name_is_in_the_table_once_and_is_none_of_ours():
    assert sum(map(len, TRAINERS.values())) == len(OTHER_NAMES) >= 150
    for name in OTHER_NAMES:
        assert name == name.lower().replace("_", "-") and name not in SPELLINGS


@pytest.mark.parametrize("word, other", [("bench", "epochs"), ("iterations", "exif-orientation")])
def test_names_that_have_little_but_their_dashes_in_common_are_not_alike(word, other):
    assert suggest_option(f"--{word}", [f"--{other}"]) == f"there is only --{other}"


def test_every_name_is_answered_from_the_table_where_all_options_are_known():
    known = [f"--{name}" for name in OPTIONS]
    for name in OTHER_NAMES:
        hint = suggest_option(f"--{name.replace('-', '_')}", known)
        assert not hint.startswith(("did you mean", "none of", "write")), name
        assert hint.startswith("it is --") == OTHER_NAMES[name].startswith("--"), name
