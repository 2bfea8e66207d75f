"""Every option of every older program with odd values: a mistake is told, and nothing breaks."""

import re
from functools import cache

import pytest

from phalanx.cli.port_plan import list_flags
from phalanx.dialects.runner import RUNNER
from phalanx.errors import UserError
from phalanx.port import ported_command
from phalanx.port.dialect_choice import DIALECTS
from phalanx.port.launchers import LAUNCHERS
from phalanx.port.shell_text import OldLine

VALUES = (
    "0", "-3", "0.0", "1e9", "nan", "inf", "abc", "1/0", "False", "", "{a: 1}", "1e-999999999",
    "999999999",
)  # fmt: skip
RMSPROP = "--optimiser RMSprop --lr-schedule exponential --model efficientnet"
POLYNOMIAL = "--lr-schedule polynomial_decay_lr --optimiser LARS --abs-learning-rate 1 --epochs 4"
BRACES = (  # parameters of TensorFlow 2, of which one is odd at a time
    ("rmsprop", "optimizer-params", "{momentum: 0.9, base_decay_exponent: -14, epsilon: 0.001}"),
    ("lars", "optimizer-params", "{momentum: 0.9, weight_decay: 0.1, eeta: 0.1, epsilon: 0.001}"),
    ("polynomial", "lr-schedule-params", "{initial_learning_rate: 1, epochs_to_total_decay: 2, "
                                         "end_learning_rate_ratio: 0.5, power: 2}"),
    ("stepped", "lr-schedule-params", "{boundaries: [30, 60], values: [0.1, 0.01, 0.001]}"),
    ("", "lr-warmup-params", "{warmup_mode: shift, warmup_epochs: 5}"),
    ("", "norm-layer", "{name: batch_norm, momentum: 0.9}"),
    ("", "norm-layer", "{name: group_norm, num_groups: 4}"),
)  # fmt: skip
CONTEXTS = {  # other options, with which more of a program's arithmetic is used
    "tf1": (f"{RMSPROP} --generated-data", f"{POLYNOMIAL} --weight-avg-N 2", "--iterations 9"),
    "tf2": ("--global-batch-size 64 --synthetic-data host", "--weight-updates-per-epoch 50"),
    "pytorch": ("--data generated", "--weight-avg-strategy mean --epoch 4"),
    "popart": ("--pipeline --num-ipus 4", "--steps-per-log 2 --replication-factor 2"),
}
SCRIPTS = {
    f"{dialect.name} {name}": (dialect.name, name, script.options)
    for dialect in (*DIALECTS.values(), RUNNER)
    for name, script in dialect.scripts.items()
    if " " not in name or name.startswith("-m")
}


@pytest.fixture(autouse=True)
def presets_are_looked_up_once(monkeypatch):
    for name in ("read_preset_values", "name_preset"):
        monkeypatch.setattr(ported_command, name, cache(getattr(ported_command, name)))


def is_ported(words, dialect):
    """Whether a command is ported; False where it is refused, and anything else breaks the test."""
    try:
        ported_command.port_line(OldLine(tuple(words)), list_flags, dialect=dialect)
    except UserError:
        return False
    except Exception as error:
        raise AssertionError(" ".join(words)) from error
    return True


@pytest.mark.parametrize("place", SCRIPTS)
def test_an_odd_value_of_an_option_is_ported_or_refused(place):
    dialect, script, options = SCRIPTS[place]
    asked = dialect if dialect in DIALECTS else None
    contexts = CONTEXTS.get(dialect, ()) if script in ("train.py", "resnet_main.py") else ()
    for option in options:
        for value in VALUES:
            words = ["python", *script.split(), f"--{option.name}={value}"]
            if is_ported(words, asked) and (option.number or option.outcome.kind == "computed"):
                for context in contexts:
                    is_ported([*words, *context.split()], asked)


@pytest.mark.parametrize(("rule", "option", "text"), BRACES)
def test_an_odd_value_in_braces_is_ported_or_refused(rule, option, text):
    rules = {"optimizer-params": "--optimizer", "lr-schedule-params": "--lr-schedule"}
    chosen = [f"{rules[option]}={rule}"] if rule else []
    for old in re.findall(r"(?<=[ \[])[-0-9.]+(?=[,\]}])", text):
        for value in (*VALUES, "1e-300", "[1]", "[]", "null"):
            words = ["python", "train.py", *chosen, f"--{option}={text.replace(old, value)}"]
            is_ported(words, "tf2")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_odd_value_of_a_launcher_is_ported_or_refused(launcher):
    for option in LAUNCHERS[launcher]:
        for value in VALUES:
            dashes = "-" if len(option.name) < 3 else "--"
            words = [launcher, f"{dashes}{option.name}={value}", "python", "train.py"]
            is_ported([*words, "--dataset", "imagenet"], "tf1")
