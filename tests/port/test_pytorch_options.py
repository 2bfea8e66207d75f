"""Every option of PyTorch's train.py once: what it does to the config, or why nothing."""

import pytest
from small_ports import check_effect, find_last_row, find_tried, port

from phalanx.config.read import read_settings
from phalanx.dialects.pytorch import LIGHTNING, PYTORCH

BASE = "python3 train_lightning.py --data imagenet --model resnet50 "
STEPS = "--lr-schedule step --lr-epoch-decay 3 6 "
B0 = "--model efficientnet-b0 "

EFFECTS = {  # options of a command, the last of them the one that is tried, and what it sets
    "--config resnet50_mk2_pipelined": {"batch-size": 16, "gradient-accumulation": 256},
    "--seed 7": {"seed": 7},
    "--batch-size 8": {"batch-size": 8},
    "--model resnext101": {"model": "resnext101_32x8d", "zero-init-residual": True},
    "--model efficientnet-b4": {"model": "efficientnet_b4", "zero-init-residual": False},
    "--data cifar10": {"data": "cifar10", "image-size": 224},
    "--data generated": {"data": "generated", "iterations": 100, "image-size": 224},
    "--data synthetic": {"data": "synthetic", "iterations": 100},
    "--imagenet-data-path /mnt/imagenet": {"data": "imagenet"},
    "--gradient-accumulation 8 --pipeline-splits layer2/0 layer3/0": {
        "pipeline-splits": "layer2/0,layer3/0", "enable-recompute": True
    },
    "--replicas 4": {"replicas": 4},
    "--device-iterations 16": {"device-iterations": 16},
    "--precision 16.32": {"precision": "16.32", "half-type": "float16"},
    "--precision 32.32": {"precision": "32.32"},
    "--half-partial": {"half-partials": True},
    "--gradient-accumulation 32": {"gradient-accumulation": 32},
    "--lr 0.3": {"lr": 0.3},
    "--epoch 5": {"epochs": 5},
    "--norm-type none": {"norm-type": "none"},
    "--norm-type group --norm-num-groups 16": {"norm-num-groups": 16},
    "--batchnorm-momentum 0.01": {"batchnorm-momentum": 0.01},
    "--norm-eps 1e-3": {"norm-eps": 1e-3},
    "--full-precision-norm": {"full-precision-norm": True},
    "--norm-type group --enable-fast-groupnorm": {"enable-fast-groupnorm": True},
    "--disable-stable-batchnorm": {"disable-stable-batchnorm": True},
    "--validation-mode none": {"validation-mode": "none"},
    "--validation-mode during --validation-frequency 2": {"validation-frequency": "2"},
    "--validation-mode during": {"validation-mode": "during", "validation-frequency": "4"},
    "--disable-metrics": {"disable-metrics": True},
    "--enable-recompute": {"enable-recompute": True},
    "--recompute-mode auto": {"enable-recompute": True},
    "--enable-recompute --recompute-checkpoints .*conv.* .*bn.*": {
        "recompute-checkpoints": ".*conv.*,.*bn.*"
    },
    "--offload-optimizer": {"offload-optimizer": True},
    "--lr-schedule cosine": {"lr-schedule": "cosine"},
    "--lr-schedule step": {"lr-schedule": "constant"},  # nothing says where it falls
    "--lr 0.1 --lr-schedule exponential": {  # at every step, without --lr-scheduler-freq
        "lr": 0.05, "lr-decay": "0.5", "lr-decay-period": "1st"
    },
    STEPS + "--lr-decay 0.2": {"lr-decay": "0.2"},
    "--lr-decay 0.4 --lr-epoch-decay 3 6": {"lr-schedule": "step", "lr-epoch-decay": "3,6"},
    "--warmup-epoch 2": {"warmup-epoch": "2ep", "warmup-mode": "ramp"},
    "--lr-schedule cosine --lr-scheduler-freq 16": {"lr-scheduler-freq": "16"},
    "--lr 0.1 --lr-schedule exponential --lr-decay 0.97 --lr-scheduler-freq 0.424": {
        "lr": 0.097, "lr-scheduler-freq": "0.424", "lr-decay-period": None
    },
    "--checkpoint-path /mnt/run": {"run-dir": "/mnt/run"},
    "--checkpoint-save-freq 5": {"ckpts-per-epoch": "1/5"},
    "--checkpoint-save-freq 100": {"ckpts-per-epoch": "1/10"},  # of ten epochs: at the end
    "--optimizer sgd_combined": {"optimizer": "sgd_combined", "momentum": 0},
    "--optimizer adamw": {
        "optimizer": "adamw", "weight-decay": 1e-4, "l2-regularization": 0, "optimizer-eps": 1e-8
    },
    "--momentum 0.8": {"momentum": 0.8},
    "--optimizer rmsprop --optimizer-eps 0.001": {"optimizer-eps": 0.001},
    "--optimizer rmsprop_tf --rmsprop-decay 0.9": {"rmsprop-decay": 0.9},
    "--loss-scaling 64": {"loss-scaling": 64},
    "--loss-scaling 128 --initial-loss-scaling 16": {"initial-loss-scaling": 16},
    "--auto-loss-scaling": {"auto-loss-scaling": True},
    "--optimizer sgd_combined --loss-velocity-scaling-ratio 2": {"loss-velocity-scaling-ratio": 2},
    "--enable-stochastic-rounding": {"enable-stochastic-rounding": True},
    "--precision 16.32 --enable-stochastic-rounding": {"enable-stochastic-rounding": False},
    "--enable-fp-exceptions": {"fp-exceptions": True},
    "--weight-decay 5e-5": {"l2-regularization": 5e-5, "weight-decay": 0},
    "--wandb": {"wandb": True, "wandb-project": "pytorch-cnn"},
    "--logs-per-epoch 4": {"logs-per-epoch": "4"},
    "--label-smoothing 0.1": {"label-smoothing": 0.1, "smoothing-over": "all"},
    "--weight-avg-strategy mean": {"weight-avg-strategy": "mean", "weight-avg-n": -1},
    "--weight-avg-strategy exponential --weight-avg-exp-decay 0.9": {"weight-avg-exp-decay": 0.9},
    "--weight-avg-strategy mean --weight-avg-N 3": {"weight-avg-n": 3},
    B0 + "--efficientnet-expand-ratio 4": {"efficientnet-expand-ratio": 4},
    B0 + "--efficientnet-group-dim 16": {"efficientnet-group-dim": 16},
    "--profile": {"profile": "trace"},
    "--use-bbox-info": {"use-bbox-info": True},
    "--eight-bit-io": {"eight-bit-io": True, "normalization-location": "device"},
    "--eight-bit-io --normalization-location host": {"normalization-location": "device"},
    "--normalization-location host": {"normalization-location": "host"},
    "--normalization-location ipu": {"normalization-location": "device"},
    "--dataloader-rebatch-size 64": {"dataloader-rebatch-size": 64},
    "--dataloader-worker 14": {"workers": 14},
    "--data generated --device-iterations 4 --iterations 25": {"iterations": 100},
    "--model-cache-path /mnt/cache": {"model-cache-path": "/mnt/cache"},
    "--webdataset-memory-cache-ratio 0.5": {"dataset-cache": True},
    "--batch-size 4 --mixup-alpha 0.2": {"mixup-alpha": 0.2},
    "--batch-size 4 --cutmix-lambda-high 1 --cutmix-lambda-low 0.6": {"cutmix-lambda-low": 0.6},
    "--batch-size 4 --cutmix-lambda-high 0.9": {"cutmix-lambda-high": 0.9},
    "--batch-size 4 --cutmix-lambda-high 1 --cutmix-disable-prob 0.3": {"cutmix-disable-prob": 0.3},
    "--checkpoint-input-dir /mnt/w.safetensors": {"init-weights": "/mnt/w.safetensors"},
    "--half-res-training": {"image-size": 160},
    "--model efficientnet-b4 --half-res-training": {"image-size": 252},
}  # fmt: skip
REASONS = {  # what changes nothing in the config, and a part of why
    "--iterations 50": "only generated and synthetic",
    "--webdataset-percentage-to-use 100": "all images",
    "--webdataset-percentage-to-use 10": "all of them",
    "--wandb-weight-histogram": "histograms",
    "--input-image-padding": "fourth channel",
    "--image-quality 95": "compressed",
    "--enable-optimizer-rts": "--offload-optimizer",
    "--compile-only": "phalanx plan",
    "--offline-target-ipu-version ipu2": "absent devices",
    "--exchange-memory-target balanced": "IPU's compiler",
    "--num-io-tiles 64": "no tiles",
    "--fine-tune-epoch 2": "no layer is frozen",
    "--fine-tune-lr 0.25": "no layer is frozen",
    "--fine-tune-micro-batch-size 4": "no layer is frozen",
    "--fine-tune-gradient-accumulation 4": "no layer is frozen",
    "--fine-tune-first-trainable-layer layer4": "no layer is frozen",
    "--available-memory-proportion 0.3": "cuDNN and cuBLAS",
    "--efficientnet-group-dim 16": "only an EfficientNet",
    "--norm-num-groups 8": "only --norm-type group",
    "--rmsprop-decay 0.9": "only rmsprop",
    "--loss-velocity-scaling-ratio 2": "only sgd_combined",
    "--validation-frequency 2": "only --validation-mode during",
    "--weight-avg-N 3": "mean or exponential",
    "--lr-decay 0.3": "exponential one",
}


def ported(capsys, options: str) -> dict:
    """The answer for a command whose options come last, over those of BASE."""
    if "--config" in options:
        return port(capsys, f"python3 train_lightning.py {options}")
    return port(capsys, BASE + options)


def test_every_option_is_tried():
    names = {row.name for row in LIGHTNING.scripts["train_lightning.py"].options}
    assert len(names) == 84
    assert find_tried(*EFFECTS, *REASONS) == names
    assert names == {row.name for row in PYTORCH.scripts["train.py"].options}


@pytest.mark.parametrize("options", EFFECTS)
def test_an_option_has_its_effect(options, capsys):
    answer = ported(capsys, options)
    check_effect(answer, EFFECTS[options])
    is_said = any(f"--{name}" in find_last_row(answer)["new"] for name in EFFECTS[options])
    assert is_said or options.startswith("--config")


@pytest.mark.parametrize("options", REASONS)
def test_an_option_without_effect_says_why(options, capsys):
    plain = ported(capsys, "")
    answer = ported(capsys, options)
    assert REASONS[options] in find_last_row(answer)["why"]
    assert answer["resolved"] == plain["resolved"]
    assert answer["command"] == plain["command"]


def test_defaults_that_differ_become_options(capsys):
    answer = port(capsys, "python3 train_lightning.py")
    resolved = answer["resolved"]
    expected = {
        "model": "resnet18", "data": "cifar10", "batch-size": 1, "precision": "16.16",
        "optimizer": "sgd", "momentum": 0.0, "lr": 0.01, "lr-schedule": "constant", "epochs": 10.0,
        "l2-regularization": 1e-4, "weight-decay": 0.0, "loss-scaling": 1.0, "norm-type": "batch",
        "logs-per-epoch": "1", "validation-mode": "after", "epoch-tail": "drop",
        "half-type": "float16", "enable-stochastic-rounding": False, "warmup-epoch": "0ep",
    }  # fmt: skip
    assert {name: resolved[name] for name in expected} == expected
    own = read_settings("pl/resnet50").config.flat()
    assert any(own[name] != value for name, value in expected.items())


def test_memory_for_convolutions_is_a_share(capsys):
    answer = ported(capsys, "--available-memory-proportion 0.1 0.3")
    assert answer["variables"]["CUDNN_CONV_WSCAP_DBG"] == "270"


def test_data_is_where_it_was(capsys):
    answer = ported(capsys, "--imagenet-data-path=/mnt/imagenet")
    assert answer["command"][3:5] == ["--data-dir", "/mnt/imagenet"]
    answer = port(capsys, "python3 train_lightning.py --imagenet-data-path /mnt/imagenet")
    assert "--data-dir" not in answer["command"]
    assert any("--data cifar10 does not read it" in text for text in answer["warnings"])


def test_one_checkpoint_is_not_averaged(capsys):
    answer = ported(capsys, "--epoch 1 --weight-avg-strategy mean")
    assert answer["problem"] is None
    assert answer["resolved"]["weight-avg-strategy"] == "none"
