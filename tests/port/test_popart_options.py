"""Every option of PopART's resnet_main.py once, its arithmetic of batches, and mistakes."""

import pytest
from small_ports import check_effect, find_last_row, find_tried, port

from phalanx.cli.main import main
from phalanx.dialects.popart import POPART

SCRIPT = "python resnet_main.py "
README = """
size dataset data-dir base-learning-rate batch-size replication-factor
gradient-accumulation-factor recompute num-ipus no-prng pipeline
"""  # the options that the README lists

EFFECTS = {  # options of a command, the last of them the one that is tried, and what it sets
    "--size x50": {"model": "resnext50_32x4d", "stride-in": "1x1"},
    "--size 8": {"model": "resnet8", "shortcut-type": "B"},
    "--size 14": {"model": "resnet14_small"},
    "--size 101": {"model": "resnet101", "stride-in": "1x1"},
    "--dataset IMAGENET": {"data": "imagenet", "image-size": 224},
    "--dataset CIFAR-100": {"data": "cifar100"},
    "--data-dir=./": {"data": "cifar10"},
    "--base-learning-rate -8": {"lr": 2**-8 * 32},
    "--gradient-accumulation-factor 4 --base-learning-rate -7": {"lr": 2**-7 * 32},
    "--batch-size 64": {"batch-size": 64, "lr": 1.0},
    "--replication-factor 4": {"replicas": 4, "batch-size": 8, "lr": 0.5},
    "--gradient-accumulation-factor 8": {"gradient-accumulation": 8, "lr": 0.5},
    "--recompute": {"enable-recompute": True},
    "--num-ipus 4": {"shards": 4, "pipeline": False, "gradient-accumulation": None},
    "--num-ipus 8 --replication-factor 2 --pipeline": {
        "shards": 4, "pipeline": True, "replicas": 2, "batch-size": 4, "gradient-accumulation": 4
    },
    "--num-ipus 4 --gradient-accumulation-factor 4 --pipeline": {
        "shards": 4, "batch-size": 32, "gradient-accumulation": 4
    },
    "--prng": {"enable-stochastic-rounding": True},
    "--no-prng": {"enable-stochastic-rounding": False},
    "--num-workers 4": {"workers": 4},
    "--norm-type BATCH": {"norm-type": "batch"},
    "--norm-type NONE": {"norm-type": "none"},
    "--norm-groups 8": {"norm-num-groups": 8},
    "--shortcut-type A": {"shortcut-type": "A"},
    "--precision 32": {"precision": "32.32", "enable-stochastic-rounding": False},
    "--fp-exceptions": {"fp-exceptions": True},
    "--half-partials": {"half-partials": True},
    "--learning-rate-decay 1,0.5,0.1": {"lr-decay": "1,0.5,0.1"},
    "--learning-rate-schedule 0.3,0.6": {"lr-drop-after": "0.3,0.6"},
    "--epochs 5": {"epochs": 5},
    "--no-validation": {"validation": False},
    "--batches-per-step 100 --steps-per-log 2": {"logs-per-epoch": "125/16"},  # 1562.5 / 200
    "--batches-per-step 100": {"device-iterations": 100},
    "--weight-decay 1e-4": {"l2-regularization": 1e-4, "weight-decay": 0},
    "--simulation": {"device": "cpu"},
    "--log-dir /mnt/logs": {"run-dir": "/mnt/logs/20/net"},
    "--log-dir /mnt/logs --log_dir_string mine": {"run-dir": "/mnt/logs/20/mine"},
}  # fmt: skip
REASONS = {  # what changes nothing in the config, and a part of why
    "--valid-per-epoch 2": "never used",
    "--get-reports": "never used",
    "--ckpt model.onnx": "phalanx export",
    "--syncless-collectives": "IPU's compiler",
    "--max-bytes-per-tile 1000": "IPU's compiler",
}


def test_every_option_is_tried():
    names = {row.name for row in POPART.scripts["resnet_main.py"].options}
    assert (len(README.split()), len(names)) == (11, 34)
    assert find_tried(*EFFECTS, *REASONS) == names
    assert set(README.split()) <= names


@pytest.mark.parametrize("options", EFFECTS)
def test_an_option_has_its_effect(options, capsys):
    answer = port(capsys, SCRIPT + options)
    check_effect(answer, EFFECTS[options])
    assert any(f"--{name}" in find_last_row(answer)["new"] for name in EFFECTS[options])


@pytest.mark.parametrize("options", REASONS)
def test_an_option_without_effect_says_why(options, capsys):
    plain, answer = port(capsys, SCRIPT), port(capsys, SCRIPT + options)
    assert REASONS[options] in answer["options"][0]["why"]
    assert answer["command"] == plain["command"] == ["phalanx", "train", "pa-resnet20"]


@pytest.mark.parametrize("norm", ["GROUP", "BATCH"])
def test_a_batch_passes_a_pipeline_in_parts(norm, capsys):
    """A step is the same, but for the statistics of batch norm, which is told."""
    answer = port(capsys, f"{SCRIPT}--num-ipus 3 --batch-size 24 --norm-type {norm} --pipeline")
    assert answer["plan"]["global_batch"] == 24
    assert answer["resolved"]["batch-size"] == 8
    assert answer["resolved"]["gradient-accumulation"] == 3
    assert answer["plan"]["lr_peak"] == 2**-6 * 24
    told = [text for text in answer["warnings"] if "statistics of batch norm" in text]
    assert len(told) == (norm == "BATCH")


def test_a_pipeline_of_one_device_is_taken_as_two_stages(capsys):
    answer = port(capsys, f"{SCRIPT}--size x50 --pipeline")
    assert answer["problem"] is None
    assert (answer["resolved"]["shards"], answer["resolved"]["pipeline"]) == (2, True)
    assert any("taken as 2 stages" in text for text in answer["warnings"])


def test_a_batch_that_only_the_code_allows_is_told(capsys):
    answer = port(capsys, f"{SCRIPT}--num-ipus 4 --batch-size 6")
    assert any("the README wants a multiple of --num-ipus 4" in t for t in answer["warnings"])
    assert not port(capsys, f"{SCRIPT}--num-ipus 4 --batch-size 8")["warnings"]


def test_data_that_a_folder_lacks_is_a_warning(capsys):
    answer = port(capsys, f"{SCRIPT}--data-dir=./")
    assert "the plan goes by published counts" in answer["warnings"][0]
    assert answer["plan"]["total_steps"] == 46_875


def test_help_is_ours(capsys):
    answer = port(capsys, f"{SCRIPT}--data-dir=./ --help")
    assert answer["command"] == ["phalanx", "train", "--model", "resnet20", "--help"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--size 19", "no network has that size"),
        ("--batch-size 30 --replication-factor 4", "give a multiple of 4"),
        ("--num-ipus 3 --replication-factor 2", "give a multiple of 2"),
        ("--norm GROUP", "--norm-groups, --norm-type"),
        ("--momentum 0.9", "no such option"),
        ("--dataset MNIST", "no such choice"),
    ],
)
def test_mistakes_are_told(options, said, capsys):
    assert main(["port", SCRIPT + options]) == 2
    assert said in capsys.readouterr().err
