"""Every option of TensorFlow 2's train.py once: what it does to the config, or why nothing."""

import pytest
from small_ports import check_effect, find_last_row, find_tried, port

from phalanx.config.read import read_settings
from phalanx.dialects.tf2 import TF2

RESNET50 = "--dataset imagenet --model-name resnet50 --micro-batch-size 16 "
SPLITS = "--pipeline-splits conv2_block2_out conv3_block1_out --gradient-accumulation-count 8 "
LARS = "'{momentum: 0.9, weight_decay: 5e-5, eeta: 0.002, epsilon: 0}'"
RMSPROP = "'{momentum: 0.5, base_decay_exponent: -10, epsilon: 1e-3}'"
COSINE = "'{initial_learning_rate: 0.001, epochs_to_total_decay: 7}'"

EFFECTS = {  # a command's options, the last of them the one that is tried, and what it sets
    "--dataset mnist": {"data": "mnist", "normalization-location": "none"},
    "--dataset cifar100": {"data": "cifar100", "normalization": "per-image"},
    "--dataset imagenet": {"data": "imagenet", "crop-scale": "0.05,1", "image-size": 224},
    "--dataset-path /mnt/data": {"data": "cifar10"},
    "--synthetic-data cpu": {"data": "generated", "iterations": 50_000, "image-size": 32},
    "--synthetic-data host": {"data": "generated"},
    RESNET50 + "--synthetic-data ipu": {
        "data": "synthetic", "iterations": 80_072, "image-size": 224
    },
    "--accelerator-side-preprocess True --eight-bit-transfer": {"eight-bit-io": True},
    "--eight-bit-transfer False": {"eight-bit-io": False},
    "--accelerator-side-preprocess False": {"normalization-location": "host"},
    "--model-name cifar_resnet20": {"model": "resnet20", "zero-init-residual": False},
    "--micro-batch-size 8 --model-name resnet34": {"model": "resnet34", "stage1-projection": True},
    RESNET50 + "--model-name resnet50": {"zero-init-residual": True, "norm-eps": 1.001e-5},
    "--norm-layer '{name: group_norm, num_groups: 8}'": {
        "norm-type": "group", "norm-num-groups": 8
    },
    "--norm-layer '{name: batch_norm}'": {"batchnorm-momentum": 0.01},
    "--norm-layer '{name: custom_batch_norm, momentum: 0.9}'": {"batchnorm-momentum": 0.1},
    "--stable-norm": {"disable-stable-batchnorm": False},
    "--num-replicas 4 --dbn-replica-group-size 2": {"bn-span": 2},
    "--seed 7": {"seed": 7},
    "--deterministic": {"determinism": "strict"},
    "--training False": {"training": False, "validation-mode": "after"},
    "--micro-batch-size 8": {"batch-size": 8},
    "--gradient-accumulation-count 4": {"gradient-accumulation": 4},
    "--micro-batch-size 3 --num-replicas 2 --global-batch-size 12": {"gradient-accumulation": 2},
    "--num-replicas 3": {"replicas": 3},
    "--num-epochs 4": {"epochs": 4},
    "--num-epochs 3 --weight-updates-per-epoch 10": {"steps": 30},
    "--synthetic-data cpu --weight-updates-per-epoch 10": {"iterations": 10, "epochs": 1},
    f"--optimizer-params {LARS} --optimizer lars": {
        "optimizer": "lars", "momentum": 0.9, "trust-decay": 5e-5, "trust-coefficient": 0.002,
        "optimizer-eps": 1e-7,
    },
    f"--micro-batch-size 64 --optimizer-params {RMSPROP} --optimizer rmsprop": {
        "optimizer": "rmsprop_tf", "rmsprop-decay": 1 - 2**-10 * 64, "rmsprop-start": 0,
        "momentum": 0.5, "optimizer-eps": 1e-3,
    },
    "--optimizer sgd": {"optimizer": "sgd", "momentum": 0},
    "--optimizer-params '{momentum: 0.9}'": {"optimizer": "momentum", "momentum": 0.9},
    "--loss-scaling 128": {"loss-scaling": 128},
    "--auto-loss-scaling": {"auto-loss-scaling": True},
    "--weight-decay 1e-4": {"weight-decay": 1e-4, "l2-regularization": 0},
    "--l2-regularization 1e-4": {"l2-regularization": 1e-4, "weight-decay": 0},
    f"--num-epochs 7 --lr-schedule-params {COSINE} --lr-schedule cosine": {
        "lr-schedule": "cosine", "lr-per-image": 0.001, "lr-decay-length": "7ep"
    },
    "--lr-schedule-params '{initial_learning_rate: 0.002}'": {"lr-per-image": 0.002},
    "--num-epochs 9 --lr-warmup-params '{warmup_mode: mask, warmup_epochs: 2}'": {
        "warmup-mode": "mask", "warmup-epoch": "2ep"
    },
    f"--num-epochs 7 --lr-schedule cosine --lr-schedule-params {COSINE} --lr-staircase": {
        "lr-staircase": True
    },
    "--label-smoothing 0.1": {"label-smoothing": 0.1, "smoothing-over": "all"},
    "--micro-batch-size 64 --logs-per-epoch 1": {
        "logs-per-epoch": "1", "device-iterations": 781
    },
    "--ckpts-per-epoch 1/4 --num-epochs 8": {"ckpts-per-epoch": "1/4"},
    "--ckpts-per-epoch 0": {"ckpts-per-epoch": "0", "validation-mode": "during"},
    "--first-ckpt-epoch 2 --num-epochs 4": {"first-ckpt-epoch": 2},
    "--checkpoint-output-dir /mnt/runs": {"run-dir": "/mnt/runs"},
    "--checkpoint-input-dir other": {"validation-mode": "none"},
    "--validation off": {"validation-mode": "none"},
    "--validation": {"validation-mode": "after"},
    "--validation-micro-batch-size 25": {"valid-batch-size": 25},
    RESNET50 + SPLITS + "--pipeline-validation-model": {"pipeline-validation-model": True},
    "--wandb": {"wandb": True, "wandb-project": "tf2-resnet50"},
    "--wandb --wandb-run-name mine": {"wandb-run-name": "mine"},
    "--wandb --wandb-tags a b": {"wandb-tags": "a,b"},
    "--precision 16.32": {"precision": "16.32", "enable-stochastic-rounding": False},
    "--precision 32.32": {"precision": "32.32"},
    "--stochastic-rounding OFF": {"enable-stochastic-rounding": False},
    "--stochastic-rounding RI": {"enable-stochastic-rounding": True},
    "--half-partials": {"half-partials": True},
    "--recomputation y": {"enable-recompute": True},
    RESNET50 + SPLITS: {"pipeline-splits": "conv2_block2_out,conv3_block1_out"},
    RESNET50 + SPLITS + "--pipeline-schedule Interleaved": {"pipeline-schedule": "Interleaved"},
    RESNET50 + SPLITS + "--device-mapping 0 0 0": {"shards": 1},
    "--max-cross-replica-buffer-size 1048576": {"bucket-mib": 1},
    "--optimizer-state-offloading": {"offload-optimizer": True},
    "--fp-exceptions": {"fp-exceptions": True},
    "--config resnet8_test_lars": {"optimizer": "lars", "epochs": 50},
}  # fmt: skip
REASONS = {  # what changes nothing in the config, and a part of why
    "--fused-preprocessing": "one kernel",
    "--shuffle False": "always shuffled",
    "--pipeline-num-parallel 48": "--workers",
    "--prefetch-depth 3": "copied while the device works",
    "--config-path mine.yml": "phalanx port --configs",
    "--ckpt-all-instances": "one copy is kept",
    "--clean-dir False": "--keep",
    "--validation-num-replicas 2": "all devices",
    "--mlperf-logging": "the same figures",
    "--sweep": "phalanx sweep",
    "--target-accuracy 0.7": "phalanx sweep",
    "--nanoo": "--auto-loss-scaling",
    "--accelerator-side-reduction": "on the devices",
    "--compile-only": "phalanx plan",
    "--on-demand False": "not attached",
    "--internal-exchange-optimization-target memory": "IPU's compiler",
    "--max-reduce-many-buffer-size 216": "IPU's compiler",
    "--conv-dithering": "IPU's compiler",
    "--gather-conv-output False": "IPU's compiler",
    "--min-remote-tensor-size 128": "IPU's compiler",
    "--scheduling-algorithm CHOOSE_BEST": "IPU's compiler",
    "--pipeline-schedule Grouped": "only a pipeline",
}
MEMORY = "--available-memory-proportion 15 30"


def test_every_option_is_tried():
    names = {row.name for row in TF2.scripts["train.py"].options}
    assert len(names) == 73
    assert find_tried(*EFFECTS, *REASONS, MEMORY) == names


@pytest.mark.parametrize("options", EFFECTS)
def test_an_option_has_its_effect(options, capsys):
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py {options}")
    check_effect(answer, EFFECTS[options])


@pytest.mark.parametrize("options", REASONS)
def test_an_option_without_effect_says_why(options, capsys):
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py {options}")
    row = find_last_row(answer)
    assert row["new"] == ""
    assert REASONS[options] in row["why"]
    assert answer["resolved"] == read_settings("cifar10_config").config.flat()


def test_memory_for_convolutions_is_a_share_in_percent(capsys):
    answer = port(capsys, f"python3 train.py --num-epochs 1 {MEMORY}")
    assert answer["variables"]["CUDNN_CONV_WSCAP_DBG"] == "270"


def test_a_folder_is_where_the_data_is(capsys):
    answer = port(capsys, "python3 train.py --dataset-path /mnt/data --num-epochs 2")
    assert answer["command"][-4:] == ["--data-dir", "/mnt/data", "--epochs", "2"]


def test_other_checkpoints_are_scored_afterwards(capsys):
    answer = port(capsys, "python3 train.py --checkpoint-input-dir other --num-epochs 2")
    assert answer["then"] == ["phalanx validate other --all"]
    same = "--checkpoint-input-dir ./c --checkpoint-output-dir ./c --clean-dir False"
    answer = port(capsys, f"python3 train.py {same}")
    assert answer["then"] == []
    assert answer["resolved"]["validation-mode"] == "after"
