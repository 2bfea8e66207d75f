"""The networks of older programs in plain numpy, by their own names, layouts and padding.

Nothing here knows of our tables: every network asks for its variables as its program did, and
computes as it did, so that a name or a transposition that is wrong gives another result.
"""

from collections.abc import Callable

import numpy as np

Array = np.ndarray


class Variables:
    """Makes a variable when it is first asked for."""

    def __init__(self, dtype: str = "float32", seed: int = 7):
        self.arrays: dict[str, Array] = {}
        self._random, self._dtype = np.random.default_rng(seed), dtype

    def __call__(self, name: str, *shape: int, like: str = "shift") -> Array:
        draw = self._random.normal(size=shape)
        fan_in = int(np.prod(shape[:-1])) or 1
        made = {
            "kernel": draw * (1.5 / fan_in) ** 0.5,  # inputs first, outputs last
            "filters": draw * (1.5 / (np.prod(shape[1:]) or 1)) ** 0.5,  # outputs first
            "scale": 1 + 0.2 * draw,
            "shift": 0.2 * draw,
        }[like]
        return self._keep(name, made)

    def mean(self, name: str, x: Array) -> Array:
        """A running mean; near the real one, else the image would soon drown in constants."""
        draw = self._random.normal(size=x.shape[-1])
        return self._keep(name, x.mean((0, 1, 2)) + 0.2 * x.std((0, 1, 2)) * draw)

    def variance(self, name: str, x: Array) -> Array:
        """A running variance near the real one, but never small, which would amplify rounding."""
        draw = self._random.normal(size=x.shape[-1])
        return self._keep(name, (x.var((0, 1, 2)) + 0.3 * x.var()) * (0.6 + 0.2 * draw**2))

    def _keep(self, name: str, made: Array) -> Array:
        assert name not in self.arrays, f"{name} twice"
        self.arrays[name] = made.astype(self._dtype)
        return self.arrays[name].astype(np.float64)


# --- what they are made of: images are [N, H, W, C], kernels [H, W, I / groups, O] ---


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def swish(x: Array) -> Array:
    return x * sigmoid(x)


def pad(x: Array, size: int, stride: int, padding: str, value: float = 0.0) -> Array:
    """SAME as TensorFlow has it, or as many pixels on every side."""
    if padding == "SAME":
        totals = [max((-(-e // stride) - 1) * stride + size - e, 0) for e in x.shape[1:3]]
        (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in totals)
    else:
        top = bottom = left = right = int(padding)
    return np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=value)


def conv(x: Array, kernel: Array, stride: int = 1, padding: str = "SAME", groups: int = 1) -> Array:
    size, outputs = kernel.shape[0], kernel.shape[3]
    x = pad(x, size, stride, padding)
    high, wide = ((edge - size) // stride + 1 for edge in x.shape[1:3])
    images = x.reshape(*x.shape[:3], groups, -1)
    result = np.zeros((len(x), high, wide, groups, outputs // groups))
    for i in range(size):
        for j in range(size):
            rows, columns = (
                slice(k, k + stride * (n - 1) + 1, stride) for k, n in ((i, high), (j, wide))
            )
            weights = kernel[i, j].reshape(-1, groups, outputs // groups)
            result += np.einsum(
                "nhwgi,igo->nhwgo", images[:, rows, columns], weights, optimize=True
            )
    return result.reshape(len(x), high, wide, outputs)


def max_pool(x: Array, padding: str = "SAME") -> Array:
    x = pad(x, 3, 2, padding, value=-np.inf)
    high, wide = ((edge - 3) // 2 + 1 for edge in x.shape[1:3])
    windows = [
        x[:, i : i + 2 * high - 1 : 2, j : j + 2 * wide - 1 : 2] for i in range(3) for j in range(3)
    ]
    return np.max(windows, axis=0)


def batch_norm(
    x: Array, scale: Array, shift: Array, mean: Array, variance: Array, eps: float
) -> Array:
    return (x - mean) / np.sqrt(variance + eps) * scale + shift


def group_norm(
    x: Array, scale: Array, shift: Array, groups: int, eps: float, *, strided: bool
) -> Array:
    """Strided: channels g, g+G, g+2G... are group g; else neighbours are together."""
    channels = x.shape[-1]
    group = np.arange(channels) % groups if strided else np.arange(channels) // (channels // groups)
    result = np.empty_like(x)
    for g in range(groups):
        part = x[..., group == g]
        mean = part.mean((1, 2, 3), keepdims=True)
        variance = part.var((1, 2, 3), keepdims=True)
        result[..., group == g] = (part - mean) / np.sqrt(variance + eps)
    return result * scale + shift


# --- TensorFlow 1 ---


def tf1_norm(
    v: Variables, scope: str, x: Array, norm: str, *, groups: int, eps: float, earlier: bool = False
) -> Array:
    channels, own = x.shape[-1], "batch_normalization" if earlier else "batch_norm"
    if norm == "group":
        shift = v(f"{scope}/GroupNorm/beta", channels)
        scale = v(f"{scope}/GroupNorm/gamma", channels, like="scale")
        return group_norm(x, scale, shift, groups, eps, strided=True)
    shift = v(f"{scope}/{own}/beta", channels)
    scale = v(f"{scope}/{own}/gamma", channels, like="scale")
    mean = v.mean(f"{scope}/{own}/moving_mean", x)
    variance = v.variance(f"{scope}/{own}/moving_variance", x)
    return batch_norm(x, scale, shift, mean, variance, eps)


def tf1_conv(
    v: Variables, name: str, x: Array, size: int, stride: int, out: int, groups: int = 1,
    *, padding: str = "SAME",
) -> Array:  # fmt: skip
    kernel = v(name, size, size, x.shape[-1] // groups, out, like="kernel")
    return conv(x, kernel, stride, padding, groups)


def tf1_resnet(
    v: Variables, x: Array, *, counts: tuple[int, ...], filters: tuple[int, ...], bottleneck: bool,
    norm: str, large: bool, groups: int = 1, factor: int = 1, shortcut: str = "B",
    later: bool = False, earlier: bool = False, classes: int = 5,
) -> Array:  # fmt: skip
    """Blocks b1/0 with the steps 1, 2, 3 and p, or in later versions stage1/unit1 with conv1.

    Earlier versions padded by half the kernel's size.
    """
    eps = 1.53e-5 if norm == "group" else 1e-5
    of_norm = 32 if large else 16
    short = {"group": "gn", "batch": "bn"}[norm]

    def conv_norm(
        x: Array, block: str, step: str, size: int, stride: int, out: int, groups: int = 1
    ) -> Array:
        place = {"conv": f"all/{block}/{step}/conv/conv2d/kernel", "norm": f"all/{block}/{step}"}
        if not step:
            place = {"conv": f"all/{block}/conv/conv2d/kernel", "norm": f"all/{block}"}
        if later:
            number = {"p": "sc", "": "0"}.get(step, step)
            first = "1sc" if step == "p" else number
            place = {
                "conv": f"all/{block}/conv{first}/weight",
                "norm": f"all/{block}/{short}{number}",
            }
        padding = str((size - 1) // 2) if earlier else "SAME"
        x = tf1_conv(v, place["conv"], x, size, stride, out, groups, padding=padding)
        return tf1_norm(v, place["norm"], x, norm, groups=of_norm, eps=eps, earlier=earlier)

    x = relu(
        conv_norm(
            x, "stage0" if later else "b0", "", 7 if large else 3, 2 if large else 1, filters[0]
        )
    )
    x = max_pool(x) if large else x
    for stage, (count, width) in enumerate(zip(counts, filters, strict=True), start=1):
        out = width * 4 if bottleneck else width
        for unit in range(count):
            stride = 2 if stage > 1 and unit == 0 else 1
            block = f"stage{stage}/unit{unit + 1}" if later else f"b{stage}/{unit}"
            if bottleneck:
                y = relu(conv_norm(x, block, "1", 1, 1, width * factor))
                y = relu(conv_norm(y, block, "2", 3, stride, width * factor, groups))
                y = conv_norm(y, block, "3", 1, 1, out)
            else:
                y = relu(conv_norm(x, block, "1", 3, stride, out))
                y = conv_norm(y, block, "2", 3, 1, out)
            if unit == 0 and (shortcut == "B" or bottleneck):
                x = conv_norm(x, block, "p", 1, stride, out)
            elif unit == 0:
                x = x[:, ::stride, ::stride]
                x = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, out - x.shape[-1])))
            x = relu(x + y)
    dense = "all/fc1" if later else "all/fc1/dense"
    weight = v(f"{dense}/{'weight' if later else 'kernel'}", x.shape[-1], classes, like="kernel")
    return x.mean((1, 2)) @ weight + v(f"{dense}/bias", classes)


MBCONV = (  # kernel, repeats, out, stride
    (3, 1, 16, 1), (3, 2, 24, 2), (5, 2, 40, 2), (3, 3, 80, 2), (5, 3, 112, 1), (5, 4, 192, 2),
    (3, 1, 320, 1),
)  # fmt: skip


def round8(channels: float) -> int:
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def tf1_efficientnet_cifar(
    v: Variables, x: Array, *, norm: str, group_dim: int, expand: int, later: bool = False
) -> Array:
    def block_norm(x: Array, scope: str) -> Array:
        return tf1_norm(v, f"all/{scope}", x, norm, groups=4, eps=1e-3)

    def conv_norm(x: Array, scope: str, size: int, stride: int, out: int, groups: int = 1) -> Array:
        x = tf1_conv(v, f"all/{scope}/conv/conv2d/kernel", x, size, stride, out, groups)
        return block_norm(x, scope)

    def squeeze(x: Array, scope: str, out: int) -> Array:
        name = f"all/{scope}/conv2d"
        y = tf1_conv(v, f"{name}/kernel", x, 1, 1, out)
        return y + v(f"{name}/bias", out)

    x = swish(conv_norm(x, "block0", 3, 1, round8(32 * 0.5)))
    for stage, (size, repeats, filters, stride) in enumerate(MBCONV, start=1):
        for unit in range(repeats):
            block, inp, out = f"block{stage}{'abcd'[unit]}", x.shape[-1], round8(filters * 0.5)
            step = stride if unit == 0 and stage != 2 else 1
            wide = inp * (1 if stage == 1 else expand)
            y = swish(conv_norm(x, f"{block}/a", 1, 1, wide)) if stage > 1 else x
            groups = max(wide // group_dim, 1)
            y = swish(conv_norm(y, f"{block}/b", size, step, wide, groups))
            places = [f"{block}/SE/1/conv", f"{block}/SE/2/conv"]
            if later:
                places = [f"{block}/b/{block}/SE/{block}/b/{n}" for n in (1, 2)]
            mean = y.mean((1, 2), keepdims=True)
            narrow = swish(squeeze(mean, places[0], max(1, inp // 4)))
            y = y * sigmoid(squeeze(narrow, places[1], wide))
            y = conv_norm(y, f"{block}/c", 1, 1, out)
            x = x + y if step == 1 and inp == out else y
    x = swish(conv_norm(x, "Top", 1, 1, round8(1280 * 0.5)))
    weight = v("all/Top/logits/dense/kernel", x.shape[-1], 10, like="kernel")
    return x.mean((1, 2)) @ weight + v("all/Top/logits/dense/bias", 10)


# --- Keras, as the TensorFlow 2 program has it ---


def keras_layer(
    v: Variables, name: str, x: Array, size: int, stride: int, out: int, **more: str
) -> Array:
    """A convolution and its norm, the kernel [H, W, I, O]."""
    norm, padding = more.get("norm", name.replace("_conv", "_bn")), more.get("padding", "SAME")
    kernel = v(f"{name}/kernel", size, size, x.shape[-1], out, like="kernel")
    x = conv(x, kernel, stride, padding)
    if more.get("bias"):
        x = x + v(f"{name}/bias", out)
    if norm.endswith("gn"):
        scale = v(f"{norm}/gamma", out, like="scale")
        return group_norm(x, scale, v(f"{norm}/beta", out), 16, 1.001e-5, strided=True)
    return batch_norm(
        x, v(f"{norm}/gamma", out, like="scale"), v(f"{norm}/beta", out),
        v.mean(f"{norm}/moving_mean", x), v.variance(f"{norm}/moving_variance", x), 1.001e-5,
    )  # fmt: skip


def keras_cifar_resnet8(v: Variables, x: Array, *, norm: str = "bn") -> Array:
    x = relu(keras_layer(v, "conv1_conv", x, 3, 1, 16, norm=f"conv1_{norm}"))
    for stage, out in ((2, 16), (3, 32), (4, 64)):
        name, stride = f"conv{stage}_block1_layer", 1 if stage == 2 else 2
        first = f"{name}1_conv" + ("_ds" if stride == 2 else "")
        y = relu(keras_layer(v, first, x, 3, stride, out, norm=f"{name}1_{norm}"))
        y = keras_layer(v, f"{name}2_conv", y, 3, 1, out, norm=f"{name}2_{norm}")
        x = x[:, ::stride, ::stride]
        x = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, out - x.shape[-1])))
        x = relu(x + y)
    weight = v("fc_layer/kernel", 64, 10, like="kernel")
    return x.mean((1, 2)) @ weight + v("fc_layer/bias", 10)


def keras_resnet(
    v: Variables, x: Array, counts: tuple[int, ...], *, stem: str, inner: str = "SAME",
    early: bool = False, bias: str = "",
) -> Array:  # fmt: skip
    """stem, inner: how strided convolutions are padded; early: the stride is in the first 1x1."""
    if stem == "3":
        x = relu(keras_layer(v, "conv1_conv", x, 7, 2, 64, padding="3", bias=bias))
        x = max_pool(x, "1")
    else:
        x = max_pool(relu(keras_layer(v, "conv1_conv", x, 7, 2, 64)))
    for stage, (count, width) in enumerate(zip(counts, (64, 128, 256, 512), strict=True), start=2):
        for unit in range(1, count + 1):
            name = f"conv{stage}_block{unit}"
            stride = 2 if stage > 2 and unit == 1 else 1
            first, second = (stride, 1) if early else (1, stride)
            shortcut = x
            if unit == 1:
                shortcut = keras_layer(v, f"{name}_0_conv", x, 1, stride, 4 * width, bias=bias)
            x = relu(keras_layer(v, f"{name}_1_conv", x, 1, first, width, bias=bias))
            x = relu(
                keras_layer(v, f"{name}_2_conv", x, 3, second, width, padding=inner, bias=bias)
            )
            x = keras_layer(v, f"{name}_3_conv", x, 1, 1, 4 * width, bias=bias)
            x = relu(x + shortcut)
    weight = v("predictions/kernel", 2048, 6, like="kernel")
    return x.mean((1, 2)) @ weight + v("predictions/bias", 6)


def efficientnet_b0(
    x: Array,
    layer: Callable[[Array, str, int, int, int, int], Array],
    squeeze: Callable[[Array, str, int], Array],
) -> Array:
    """EfficientNet-B0 up to its features.

    layer: of an image, the layer's name, size, stride, outputs and groups; squeeze: of a vector.
    """
    x, number = swish(layer(x, "stem", 3, 2, 32, 1)), 0
    for stage, (size, repeats, out, stride) in enumerate(MBCONV, start=1):
        for unit in range(repeats):
            block, inp = f"{stage}{'abcd'[unit]} {number}", x.shape[-1]
            step, wide = stride if unit == 0 else 1, inp * (1 if stage == 1 else 6)
            y = swish(layer(x, f"{block} expand", 1, 1, wide, 1)) if stage > 1 else x
            y = swish(layer(y, f"{block} dw", size, step, wide, wide))
            narrow = swish(squeeze(y.mean((1, 2), keepdims=True), f"{block} se_reduce", inp // 4))
            y = y * sigmoid(squeeze(narrow, f"{block} se_expand", wide))
            y = layer(y, f"{block} project", 1, 1, out, 1)
            x, number = (x + y if step == 1 and inp == out else y), number + 1
    return swish(layer(x, "top", 1, 1, 1280, 1)).mean((1, 2))


def keras_efficientnet_b0(v: Variables, x: Array) -> Array:
    def layer(x: Array, place: str, size: int, stride: int, out: int, groups: int) -> Array:
        block, _, part = place.rpartition(" ")
        name = f"block{block.split()[0]}_" if block else ""
        conv_name = {"dw": f"{name}dwconv"}.get(part, f"{name}{part}_conv")
        norm = {"dw": f"{name}bn"}.get(part, f"{name}{part}_bn")
        if part == "dw":
            kernel = v(f"{conv_name}/depthwise_kernel", size, size, out, 1)
            x = conv(x, kernel.transpose(0, 1, 3, 2), stride, "SAME", groups)
        else:
            x = conv(
                x, v(f"{conv_name}/kernel", size, size, x.shape[-1], out, like="kernel"), stride
            )
        return batch_norm(
            x, v(f"{norm}/gamma", out, like="scale"), v(f"{norm}/beta", out),
            v.mean(f"{norm}/moving_mean", x), v.variance(f"{norm}/moving_variance", x), 1e-3,
        )  # fmt: skip

    def squeeze(x: Array, place: str, out: int) -> Array:
        name = f"block{place.split(maxsplit=1)[0]}_{place.rsplit(maxsplit=1)[-1]}"
        y = conv(x, v(f"{name}/kernel", 1, 1, x.shape[-1], out, like="kernel"))
        return y + v(f"{name}/bias", out)

    features = efficientnet_b0(x, layer, squeeze)
    return features @ v("predictions/kernel", 1280, 6, like="kernel") + v("predictions/bias", 6)


# --- efficientnet_pytorch: kernels [O, I / groups, H, W] ---


def lukemelas_b0(v: Variables, x: Array, *, eps: float, wrap: str = "") -> Array:
    """wrap: what stands behind a convolution's name where its outputs are kept."""

    def layer(x: Array, place: str, size: int, stride: int, out: int, groups: int) -> Array:
        block, _, part = place.rpartition(" ")
        names = {
            "stem": ("_conv_stem", "_bn0"), "top": ("_conv_head", "_bn1"),
            "expand": ("_expand_conv", "_bn0"), "dw": ("_depthwise_conv", "_bn1"),
            "project": ("_project_conv", "_bn2"),
        }[part]  # fmt: skip
        path = f"_blocks.{block.split()[1]}." if block else ""
        conv_name, norm = (path + name for name in names)
        inputs = x.shape[-1] // groups
        filters = v(f"{conv_name}{wrap}.weight", out, inputs, size, size, like="filters")
        x = conv(x, filters.transpose(2, 3, 1, 0), stride, "SAME", groups)
        return batch_norm(
            x, v(f"{norm}.weight", out, like="scale"), v(f"{norm}.bias", out),
            v.mean(f"{norm}.running_mean", x), v.variance(f"{norm}.running_var", x), eps,
        )  # fmt: skip

    def squeeze(x: Array, place: str, out: int) -> Array:
        name = f"_blocks.{place.split()[1]}._{place.rsplit(maxsplit=1)[-1]}"
        filters = v(f"{name}.weight", out, x.shape[-1], 1, 1, like="filters")
        return conv(x, filters.transpose(2, 3, 1, 0)) + v(f"{name}.bias", out)

    features = efficientnet_b0(x, layer, squeeze)
    return features @ v("_fc.weight", 6, 1280, like="filters").T + v("_fc.bias", 6)


# --- PopART: filters [O, I / groups, H, W], the dense layer [I, O] ---


def popart_resnet(
    v: Variables, x: Array, *, counts: tuple[int, ...], filters: tuple[int, ...], bottleneck: bool,
    norm: str, large: bool, shortcut: str = "B", groups: int = 1, factor: int = 1,
) -> Array:  # fmt: skip
    def conv_norm(x: Array, scope: str, size: int, stride: int, out: int, groups: int = 1) -> Array:
        weights = v(f"{scope}/conv/weights", out, x.shape[-1] // groups, size, size, like="filters")
        x = conv(x, weights.transpose(2, 3, 1, 0), stride, str(size // 2), groups)
        if norm == "NONE":
            return x + v(f"{scope}/conv/bias", out)
        place = f"{scope}/" + {"GROUP": f"group_norm/{out}", "BATCH": "batch_norm"}[norm]
        scale, shift = v(f"{place}/scale", out, like="scale"), v(f"{place}/biases", out)
        if norm == "GROUP":
            return group_norm(x, scale, shift, 32, 1e-5, strided=False)
        return batch_norm(
            x, scale, shift, v.mean(f"{place}/mean", x), v.variance(f"{place}/var", x), 1e-5
        )

    x = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))  # a fourth channel of zeros
    x = relu(conv_norm(x, "initial_block", 7 if large else 3, 2 if large else 1, filters[0]))
    x = max_pool(x, "1") if large else x
    for stage, (count, width) in enumerate(zip(counts, filters, strict=True), start=1):
        out = width * 4 if bottleneck else width
        for unit in range(count):
            stride, scope = 2 if stage > 1 and unit == 0 else 1, f"b{stage}/{unit}"
            if bottleneck:
                y = relu(conv_norm(x, f"{scope}/1", 1, stride, width * factor))
                y = relu(conv_norm(y, f"{scope}/2", 3, 1, width * factor, groups))
                y = conv_norm(y, f"{scope}/3", 1, 1, out)
            else:
                y = relu(conv_norm(x, f"{scope}/1", 3, stride, out))
                y = conv_norm(y, f"{scope}/2", 3, 1, out)
            more = out - x.shape[-1]
            if (more and shortcut == "B") or shortcut == "C":
                x = conv_norm(x, f"{scope}/shortcut/residual", 1, stride, out)
            elif more:
                x = np.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, more)))
            x = relu(x + y)
    weight = v("classifier/fc/weights", x.shape[-1], 10, like="kernel")
    return x.mean((1, 2)) @ weight + v("classifier/fc/biases", 10)
