"""TensorFlow's names: the variables of the TensorFlow 1 programs, and Keras' layers."""

from dataclasses import replace

from phalanx.port_weights.naming import Naming

_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_KERNEL = {"weight": "kernel", "bias": "bias"}
_KERNELS = {"conv": _KERNEL, "norm": _NORM, "dense": _KERNEL}
_LAYOUTS = {"conv": "HWIO", "dense": "IO"}

# --- TensorFlow 1: variables ---

_IGNORED = {
    r"/(Momentum|RMSProp|Adam|Adagrad|LARS\w*|momentum|rms|mom|ms)(_\d+)?$": "optimizer state",
    r"(^|/)(global_step|learning_rate|loss_scal\w*|iteration\w*|beta[12]_power)$": "a counter",
    r"/\w*accum\w*(_\d+)?$": "gradients that were being accumulated",
}
_V1_NORMS = {
    "batch": {"norm": "batch_norm", "short": "bn"},
    "group": {"norm": "GroupNorm", "short": "gn"},
}


def _variables(
    title: str,
    program: str,
    *,
    layers: dict[tuple[str, str], str],
    tensors: dict[str, dict[str, str]],
) -> Naming:
    """A table of TensorFlow 1's."""
    return Naming(
        title=title,
        family="EfficientNet" if program == "tensorflow1_efficientnet" else "ResNet",
        program=program,
        layers=layers,
        tensors=tensors,
        layouts=_LAYOUTS,
        ignored=_IGNORED,
        norm_words=_V1_NORMS,
    )


_V1_RESNET = _variables(
    "variables of TensorFlow 1's ResNet and ResNeXt",
    "tensorflow1",
    layers={
        ("conv", "stem"): "b0/conv/conv2d",
        ("norm", "stem"): "b0/{norm}",
        ("conv", "block"): "b{stage}/{index}/{step}/conv/conv2d",
        ("norm", "block"): "b{stage}/{index}/{step}/{norm}",
        ("conv", "projection"): "b{stage}/{index}/p/conv/conv2d",
        ("norm", "projection"): "b{stage}/{index}/p/{norm}",
        ("dense", "head"): "fc1/dense",
    },
    tensors=_KERNELS,
)
_V1_RESNET_EARLIER = replace(
    _V1_RESNET,
    title="variables of TensorFlow 1's earlier ResNet and ResNeXt",
    program="tensorflow1_earlier",
    norm_words={**_V1_NORMS, "batch": {"norm": "batch_normalization"}},
)
_WEIGHT = {"weight": "weight", "bias": "bias"}
_V1_RESNET_LATER = _variables(
    "variables of TensorFlow 1's later ResNet and ResNeXt",
    "tensorflow1_later",
    layers={
        ("conv", "stem"): "stage0/conv0",
        ("norm", "stem"): "stage0/{short}0/{norm}",
        ("conv", "block"): "stage{stage}/unit{index1}/conv{step}",
        ("norm", "block"): "stage{stage}/unit{index1}/{short}{step}/{norm}",
        ("conv", "projection"): "stage{stage}/unit{index1}/conv1sc",
        ("norm", "projection"): "stage{stage}/unit{index1}/{short}sc/{norm}",
        ("dense", "head"): "fc1",
    },
    tensors={"conv": _WEIGHT, "norm": _NORM, "dense": _WEIGHT},
)


def _v1_efficientnet(title: str, squeeze: str) -> Naming:
    """EfficientNet's table; `squeeze` is where squeeze-and-excite's two convolutions are."""
    block = "block{stage1}{letter}"
    letters = {"expand": "a", "depthwise": "b", "project": "c"}
    rows = {
        (kind, part): f"{block}/{letter}/" + {"conv": "conv/conv2d", "norm": "{norm}"}[kind]
        for part, letter in letters.items()
        for kind in ("conv", "norm")
    }
    ends = {
        ("conv", "stem"): "block0/conv/conv2d",
        ("norm", "stem"): "block0/{norm}",
        ("conv", "top"): "Top/conv/conv2d",
        ("norm", "top"): "Top/{norm}",
        ("dense", "head"): "Top/logits/dense",
    }
    inner = {
        ("conv", part): squeeze.replace("BLOCK", block).replace("STEP", step)
        for part, step in (("reduce", "1"), ("widen", "2"))
    }
    layers = {**ends, **rows, **inner}
    return _variables(title, "tensorflow1_efficientnet", layers=layers, tensors=_KERNELS)


TENSORFLOW1_NAMINGS = (
    _V1_RESNET,
    _V1_RESNET_EARLIER,
    _V1_RESNET_LATER,
    _v1_efficientnet("variables of TensorFlow 1's EfficientNet", "BLOCK/SE/STEP/conv/conv2d"),
    _v1_efficientnet(
        "variables of TensorFlow 1's later EfficientNet",
        "BLOCK/b/BLOCK/SE/BLOCK/b/STEP/conv2d",
    ),
)

# --- Keras: layers ---

_KERAS_NORMS = {"batch": {"short": "bn"}, "group": {"short": "gn"}}
_BLOCK = "conv{stage1}_block{index1}_"
_KERAS_RESNET = Naming(
    title="Keras layers of ResNet",
    program="keras",
    family="ResNet",
    layers={
        ("conv", "stem"): "conv1_conv",
        ("norm", "stem"): "conv1_{short}",
        ("conv", "block"): _BLOCK + "{step}_conv",
        ("norm", "block"): _BLOCK + "{step}_{short}",
        ("conv", "projection"): _BLOCK + "0_conv",
        ("norm", "projection"): _BLOCK + "0_{short}",
        ("dense", "head"): "predictions",
    },
    tensors=_KERNELS,
    layouts=_LAYOUTS,
    norm_words=_KERAS_NORMS,
)
_KERAS_CIFAR = Naming(
    title="Keras layers of the small ResNet",
    program="keras_small",
    family="ResNet",
    layers={
        ("conv", "stem"): "conv1_conv",
        ("norm", "stem"): "conv1_{short}",
        ("conv", "block"): _BLOCK + "layer{step}_conv{strided}",
        ("norm", "block"): _BLOCK + "layer{step}_{short}",
        ("dense", "head"): "fc_layer",
    },
    tensors=_KERNELS,
    layouts=_LAYOUTS,
    norm_words=_KERAS_NORMS,
)
_MBCONV = "block{stage1}{letter}_"
_KERAS_EFFICIENTNET = Naming(
    title="Keras layers of EfficientNet",
    program="keras_efficientnet",
    family="EfficientNet",
    layers={
        ("conv", "stem"): "stem_conv",
        ("norm", "stem"): "stem_{short}",
        ("conv", "expand"): _MBCONV + "expand_conv",
        ("norm", "expand"): _MBCONV + "expand_{short}",
        ("conv", "depthwise"): _MBCONV + "dwconv",
        ("norm", "depthwise"): _MBCONV + "{short}",
        ("conv", "reduce"): _MBCONV + "se_reduce",
        ("conv", "widen"): _MBCONV + "se_expand",
        ("conv", "project"): _MBCONV + "project_conv",
        ("norm", "project"): _MBCONV + "project_{short}",
        ("conv", "top"): "top_conv",
        ("norm", "top"): "top_{short}",
        ("dense", "head"): "predictions",
    },
    tensors={**_KERNELS, "depthwise conv": {"weight": "depthwise_kernel", "bias": "bias"}},
    layouts={**_LAYOUTS, "depthwise conv": "HWC1"},
    norm_words=_KERAS_NORMS,
    ignored={r"^normalization(_\d+)?/(mean|variance|count)$": "the input's normalisation"},
)

KERAS_NAMINGS = (_KERAS_RESNET, _KERAS_CIFAR, _KERAS_EFFICIENTNET)
