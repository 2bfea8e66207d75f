"""What other trainers call the values of our options.

Values are in lower case, without hyphens, underscores, dots and spaces. An answer up to its first
comma or semicolon is our value; one that begins with "there is no" is a sentence.
"""

import re

_FLOAT16 = "16.32, with --half-type float16 --auto-loss-scaling"
_BFLOAT16 = "16.32, with --half-type bfloat16, which is the default"
_RAND_AUGMENT = "rand-augment, with its published number and strength of changes"
_NO_POLICY = "there is no such policy; use rand-augment or trivial-augment"
_NO_RULE = "there is no such optimizer; the nearest is adamw"
_NO_TPU = "there is no support for it; use auto, cpu, cuda or mps"
_CUDA = "cuda, or cuda:0 for the first one"
_COSINE = "cosine"
_ONE_CYCLE = "cosine, with --warmup-epoch 25%"
_STEP = "step, with --lr-epoch-decay 30,60,90"

OTHER_VALUES: dict[str, dict[str, str]] = {
    "precision": {
        "16": _FLOAT16,
        "16mixed": _FLOAT16,
        "fp16": _FLOAT16,
        "float16": _FLOAT16,
        "half": _FLOAT16,
        "amp": _FLOAT16,
        "mixedfloat16": _FLOAT16,
        "bf16": _BFLOAT16,
        "bf16mixed": _BFLOAT16,
        "bfloat16": _BFLOAT16,
        "mixedbfloat16": _BFLOAT16,
        "mixed": "16.32",
        "16true": "16.16, with --half-type float16",
        "bf16true": "16.16, with --half-type bfloat16, which is the default",
        "32": "32.32",
        "32true": "32.32",
        "fp32": "32.32",
        "float32": "32.32",
        "full": "32.32",
        "tf32": "32.32",
        "64": "there is no 64-bit precision; use 32.32",
        "64true": "there is no 64-bit precision; use 32.32",
        "float64": "there is no 64-bit precision; use 32.32",
    },
    "half-type": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
    },
    "optimizer": {
        "adam": "adamw, with --weight-decay 0 to be Adam; its L2 decay is --l2-regularization",
        "adamwtorch": "adamw",
        "fusedadamw": "adamw",
        "nag": "nesterov",
        "sgdnesterov": "nesterov",
        "sgdm": "momentum",
        "rmsproptf": "rmsprop_tf",
        "rmsproptensorflow": "rmsprop_tf",
        "larc": "lars",
        "fusedlamb": "lamb",
        "auto": "there is no automatic choice; sgd is the default",
        "nadam": _NO_RULE,
        "nadamw": _NO_RULE,
        "radam": _NO_RULE,
        "adamax": _NO_RULE,
        "adagrad": _NO_RULE,
        "adadelta": _NO_RULE,
        "adafactor": _NO_RULE,
        "lion": _NO_RULE,
        "ranger": _NO_RULE,
        "muon": _NO_RULE,
    },
    "lr-schedule": {
        "stepped": "step",
        "steplr": _STEP,
        "multistep": _STEP,
        "multisteplr": _STEP,
        "piecewise": _STEP,
        "piecewiseconstant": _STEP,
        "cos": _COSINE,
        "cosineannealing": _COSINE,
        "cosineannealinglr": _COSINE,
        "cosinelr": _COSINE,
        "cosinedecay": _COSINE,
        "cosineannealingwarmrestarts": "there is no schedule with restarts; cosine falls once",
        "onecycle": _ONE_CYCLE,
        "onecyclelr": _ONE_CYCLE,
        "1cycle": _ONE_CYCLE,
        "exp": "exponential",
        "exponentiallr": "exponential",
        "exponentialdecay": "exponential",
        "poly": "polynomial",
        "polynomiallr": "polynomial",
        "polynomialdecay": "polynomial",
        "polynomialdecaylr": "polynomial",
        "linear": "polynomial, with --lr-power 1",
        "none": "constant",
        "const": "constant",
        "fixed": "constant",
        "constantlr": "constant",
        "plateau": "there is no schedule that watches the loss; use step or cosine",
        "reducelronplateau": "there is no schedule that watches the loss; use step or cosine",
        "tanh": "there is no such schedule; cosine is the nearest",
    },
    "auto-augment": {
        "ra": _RAND_AUGMENT,
        "randaug": _RAND_AUGMENT,
        "randaugment": _RAND_AUGMENT,
        "randm9mstd05": _RAND_AUGMENT,
        "randm9mstd05inc1": _RAND_AUGMENT,
        "randm7mstd05inc1": _RAND_AUGMENT,
        "tawide": "trivial-augment",
        "trivialaugment": "trivial-augment",
        "trivialaugmentwide": "trivial-augment",
        "imagenet": _NO_POLICY,
        "autoaugment": _NO_POLICY,
        "original": _NO_POLICY,
        "v0": _NO_POLICY,
        "augmix": _NO_POLICY,
    },
    "norm-type": {
        "bn": "batch",
        "batchnorm": "batch",
        "gn": "group",
        "groupnorm": "group",
        "layernorm": "group, with --norm-num-groups 1",
        "instancenorm": "group, which with one channel a group is instance norm",
    },
    "loss": {
        "ce": "cross-entropy",
        "crossentropy": "cross-entropy",
        "categoricalcrossentropy": "cross-entropy",
        "sparsecategoricalcrossentropy": "cross-entropy",
        "softmax": "cross-entropy",
        "binarycrossentropy": "bce",
        "bcewithlogits": "bce",
        "focal": "there is no focal loss; use cross-entropy or bce",
    },
    "device": {
        "gpu": _CUDA,
        "gpus": _CUDA,
        "0": "cuda:0",
        "1": "cuda:1",
        "ipu": _NO_TPU,
        "tpu": _NO_TPU,
        "xpu": _NO_TPU,
        "hpu": _NO_TPU,
    },
    "data": {
        "imagefolder": "folder",
        "dir": "folder",
        "directory": "folder",
        "imagenet1k": "imagenet",
        "ilsvrc2012": "imagenet",
        "webdataset": "tar",
        "wds": "tar",
        "tfrecords": "tfrecord",
        "fakedata": "generated, or synthetic for noise that is made on the device",
        "fake": "generated, or synthetic for noise that is made on the device",
        "random": "generated, or synthetic for noise that is made on the device",
    },
    "padding": {
        "valid": "there is no convolution without padding; use symmetric or same",
        "tf": "same",
    },
    "normalization-location": {
        "ipu": "device",
        "gpu": "device",
        "accelerator": "device",
        "cpu": "host",
    },
    "determinism": {
        "true": "strict",
        "1": "strict",
        "false": "seeded, or off for the fastest kernels",
        "0": "seeded, or off for the fastest kernels",
    },
    "validation-mode": {
        "epoch": "during",
        "false": "none",
        "no": "none",
    },
    "weight-avg-strategy": {
        "swa": "mean",
        "ema": "exponential",
        "exp": "exponential",
    },
    "warmup-mode": {
        "linear": "ramp",
        "constant": "there is no constant warm-up; use ramp or shift",
    },
}  # fmt: skip


def describe_other_value(option: str, value: str) -> str | None:
    """What another trainer's value of an option is called here; None if it is unknown.

    >>> describe_other_value("precision", "16-mixed")
    'it is 16.32 here, with --half-type float16 --auto-loss-scaling'
    """
    plain = re.sub(r"[-_.\s]", "", value.lower())
    answer = OTHER_VALUES.get(option, {}).get(plain)
    return answer and (answer if answer.startswith("there is no") else describe_our_name(answer))


def describe_our_name(answer: str) -> str:
    """A sentence with our name, and what an answer adds to it.

    >>> describe_our_name("--mixup-alpha"), describe_our_name("--keep, the newest ones")
    ('it is --mixup-alpha here', 'it is --keep here, the newest ones')
    """
    end = min((answer.find(mark) for mark in ",;" if mark in answer), default=len(answer))
    return f"it is {answer[:end]} here{answer[end:]}"
