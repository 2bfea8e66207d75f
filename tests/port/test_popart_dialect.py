"""PopART: every option of resnet_main.py once, its batches and rates, and mistakes."""

import pytest
from small_ports import port

from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.port.dialect_popart import POPART

STAGES = "--num-ipus 4 --replication-factor 2 "
EFFECTS = {  # a command's options, the last of them the one that is tried, and what it sets
    "--dataset CIFAR-100": {"data": "cifar100"},
    "--dataset imagenet": {"data": "imagenet", "image-size": None},
    "--num-workers 4": {"workers": 4},
    "--replication-factor 4 --batch-size 64": {"batch-size": 16, "replicas": 4, "lr": 1},
    "--size x50": {"model": "resnext50_32x4d", "stride-in": "1x1"},
    "--size 110": {"model": "resnet110", "stride-in": "3x3"},
    "--size 14": {"model": "resnet14_small"},
    "--size 18": {"model": "resnet18", "stride-in": "3x3"},
    "--norm-type BATCH": {"norm-type": "batch"},
    "--norm-type none": {"norm-type": "none"},
    "--norm-groups 8": {"norm-type": "group", "norm-num-groups": 8},
    "--shortcut-type A": {"shortcut-type": "A"},
    "--precision 32": {"precision": "32.32", "enable-stochastic-rounding": False},
    "--prng": {"precision": "16.16", "enable-stochastic-rounding": True},
    "--no-prng": {"enable-stochastic-rounding": False},
    "--fp-exceptions": {"fp-exceptions": True},
    "--half-partials": {"half-partials": True},
    "--base-learning-rate -8": {"lr": 0.125},
    "--learning-rate-decay 1,0.5,0.25": {"lr-decay": "1,0.5,0.25", "lr-schedule": "step"},
    "--learning-rate-schedule 0.2,0.4": {"lr-drop-after": "0.2,0.4"},
    "--epochs 7": {"epochs": 7},
    "--no-validation": {"validation-mode": "none"},
    "--steps-per-log 2": {"logs-per-epoch": "25/8"},
    "--weight-decay 1e-4": {"weight-decay": 1e-4},
    STAGES: {"shards": 2, "replicas": 2, "pipeline": False},
    STAGES + "--gradient-accumulation-factor 2 --pipeline": {
        "pipeline": True, "pipeline-schedule": "Grouped"
    },
    STAGES + "--pipeline": {"pipeline": True, "pipeline-schedule": "Sequential"},
    "--gradient-accumulation-factor 4": {"gradient-accumulation": 4, "lr": 0.5},
    "--recompute": {"enable-recompute": True},
    "--batches-per-step 100": {"device-iterations": 100, "logs-per-epoch": "125/8"},
    "--log-dir mine": {"run-dir": "mine/net"},
    "--log_dir_string first": {"run-dir": "logs/first"},
}  # fmt: skip
REASONS = {  # what changes nothing in the config, and a part of why
    "--data-dir nowhere": "",
    "--num-ipus 1": "a device for each replica",
    "--pipeline": "nothing to cut",
    "--valid-per-epoch 2": "made no use of it",
    "--get-reports": "made no use of it",
    "--simulation": "the CPU by itself",
    "--ckpt mine.onnx": "in the folder of the run",
    "--syncless-collectives": "IPU's compiler",
    "--max-bytes-per-tile 300000": "IPU's compiler",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)


def test_every_option_is_tried():
    words = [word for options in (*EFFECTS, *REASONS) for word in options.split()]
    names = {row.name for row in POPART.scripts["resnet_main.py"].options}
    assert len(names) == 34
    assert {word.removeprefix("--") for word in words if word.startswith("--")} == names


@pytest.mark.parametrize("options", EFFECTS)
def test_an_option_has_its_effect(options, capsys):
    answer = port(capsys, f"python resnet_main.py {options}")
    assert answer["problem"] is None
    resolved = answer["resolved"]
    assert {name: resolved[name] for name in EFFECTS[options]} == EFFECTS[options]


@pytest.mark.parametrize("options", REASONS)
def test_an_option_without_effect_says_why(options, capsys):
    answer = port(capsys, f"python resnet_main.py {options}")
    row = answer["options"][0]
    assert row["source"] == "command"
    assert REASONS[options] in row["why"]
    assert answer["resolved"] == read_settings("pa-resnet20").config.flat()


def test_without_options_it_is_a_preset(capsys):
    assert port(capsys, "python resnet_main.py")["line"] == "phalanx train pa-resnet20"


def test_data_that_is_not_in_its_folder_is_a_warning(capsys):
    answer = port(capsys, "python resnet_main.py --data-dir=./")
    assert answer["problem"] is None
    assert "the plan goes by published counts" in answer["warnings"][0]
    assert answer["plan"]["total_steps"] == 46_875


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 32 --replication-factor 3", "3 of them cannot share it; give a multiple, "),
        ("--num-ipus 3 --replication-factor 2 --batch-size 32", "2 replicas cannot share them"),
        ("--size 21", "--size 21: the old program has no such choice"),
        ("--sise 20", "did you mean --size?"),
        ("--learning-rate 1", "may stand for --learning-rate-decay, --learning-rate-schedule"),
    ],
)
def test_a_mistake_is_told(options, message, capsys):
    assert main(["port", f"python resnet_main.py {options}"]) == 2
    assert message in capsys.readouterr().err
