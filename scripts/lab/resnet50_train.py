"""Training runs to a score: the lab's fastest step, its baseline and a compiled module.

    python scripts/lab/resnet50_train.py --pack /work/shared/data/tiny-imagenet-100
    python scripts/lab/resnet50_train.py --out DIR [--seconds 340]

The first writes carry/tiny.tar.gz, as many photographs of each class as may be carried; the second
trains on it. All arms see the same photographs in the same order, cropped and flipped alike, from
the same weights, by the same recipe: SGD with Nesterov's momentum, a cosine with warm-up, label
smoothing, no decay of norms and biases. The photographs lie decoded on the device; cropping is one
kernel that writes the layout each stem wants, and belongs to the measured time. One step is one
CUDA graph. Every arm is scored by the same plain module with the weights and running statistics
that the arm arrived at.

Arms are variants of resnet50_step.py, `small+rows` and `baseline` by default, and `compiled`:
timm's ResNet-50 (or the same network written out below) in channels_last with autocast,
torch.compile and torch's fused SGD. The number of epochs is what fits into --seconds for three
seeds (two for `compiled`).
DIR/resnet50_train.json has every run's score, ten points of its loss, and its images/s.
"""

# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import argparse
import contextlib
import io
import math
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from resnet50_step import LAST_NORM, VARIANTS, Network, Report, compare, compile_now
from step_kernels import INTERPRETED, launcher
from torch import Tensor, nn

PACKED = Path("carry/tiny.tar.gz")
PACKED_BYTES = 54_000_000  # with the repository less than 64 MiB
PIXELS = 64  # of a photograph's side
COLOURS = ((0.485, 0.456, 0.406, 0.0), (0.229, 0.224, 0.225, 1.0))
RATE, DECAY, MOMENTUM, SMOOTHING = 0.2, 1e-4, 0.9, 0.1
SMALLEST_CROP = 0.3  # of the photograph's area
ARMS = ("small+rows", "baseline", "compiled")
SEEDS = 3
COMPILED_SEEDS = 2  # the slowest arm, and no news
MOST_EPOCHS = 40
POINTS = 10  # of a loss curve


# --- photographs ---


def pack(source: Path, target: Path) -> None:
    """Copy the validation set and as many training photographs of each class as fit."""
    target.parent.mkdir(exist_ok=True)
    total = sum(path.stat().st_size for path in source.glob("train-*.tar.gz"))
    room = PACKED_BYTES - (source / "val.tar.gz").stat().st_size
    share = room / total
    counts: dict[str, int] = {}
    with tarfile.open(target, "w:gz", compresslevel=9) as out:
        for path in sorted(source.glob("*.tar.gz")):
            with tarfile.open(path) as archive:
                for member in archive:
                    if not member.isfile():
                        continue
                    part, label, name = member.name.split("/")
                    number = int(name.rpartition("_")[2].partition(".")[0])
                    if part == "train" and number >= 500 * share:
                        continue
                    counts[part] = counts.get(part, 0) + 1
                    body = archive.extractfile(member)
                    assert body is not None
                    small = tarfile.TarInfo(f"{part}/{label}/{name}")
                    small.size = member.size
                    out.addfile(small, body)
    print(f"{target}: {counts}, {target.stat().st_size / 2**20:.1f} MiB")


def decode(bodies: list[bytes]) -> bytes:
    """The pixels of several JPEGs, one after the other."""
    from PIL import Image

    pixels = []
    for body in bodies:
        image = Image.open(io.BytesIO(body)).convert("RGB")
        assert image.size == (PIXELS, PIXELS), image.size
        pixels.append(image.tobytes())
    return b"".join(pixels)


def load(path: Path, most: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pixels [N, 64, 64, 3] and labels of each part, at most so many; processes share the work."""
    parts: dict[str, list[tuple[str, bytes]]] = {"train": [], "val": []}
    with tarfile.open(path) as archive:
        for member in archive:
            part, label, _ = member.name.split("/")
            body = archive.extractfile(member)
            assert body is not None
            parts[part].append((label, body.read()))
    classes = {name: i for i, name in enumerate(sorted({label for label, _ in parts["train"]}))}
    found = {}
    with get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        for part, all_pairs in parts.items():
            pairs = all_pairs[:: max(1, len(all_pairs) // most)][:most]
            chunks = [[body for _, body in pairs[i : i + 256]] for i in range(0, len(pairs), 256)]
            pixels = bytearray(b"".join(pool.map(decode, chunks)))
            image = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, PIXELS, PIXELS, 3)
            found[part] = image, torch.tensor([classes[label] for label, _ in pairs])
    return found


@triton.jit
def crop(
    images, order, boxes, step, colours, out, COUNT, N, SIDE, S, CELLS,
    CHANNELS: tl.constexpr, QUADS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Cuts the boxes of one step's photographs, enlarges them to S x S and normalises.

    out is [N, S, S, CHANNELS], or, QUADS, [N, CELLS, CELLS, 2 x 2 pixels, 4] of an image with a
    margin of four pixels before it, as Stem wants it. A box is top, left, height, width, flip.
    """
    slot, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, 4)
    if QUADS:
        cell = slot // 4
        n = cell // (CELLS * CELLS)
        y = 2 * ((cell // CELLS) % CELLS) + (slot % 4) // 2 - 4
        x = 2 * (cell % CELLS) + slot % 2 - 4
    else:
        n, y, x = slot // (S * S), (slot // S) % S, slot % S
    ok, inside = slot < COUNT, (slot < COUNT) & (y >= 0) & (y < S) & (x >= 0) & (x < S)
    row = tl.load(step) * N + n
    box = boxes + row * 5
    top, left = tl.load(box, mask=ok, other=0.0), tl.load(box + 1, mask=ok, other=0.0)
    high, wide = tl.load(box + 2, mask=ok, other=1.0), tl.load(box + 3, mask=ok, other=1.0)
    x = tl.where(tl.load(box + 4, mask=ok, other=0.0) > 0, S - 1 - x, x)
    last = (SIDE - 1).to(tl.float32)
    fy = tl.minimum(tl.maximum(top + (y.to(tl.float32) + 0.5) * high / S - 0.5, 0.0), last)
    fx = tl.minimum(tl.maximum(left + (x.to(tl.float32) + 0.5) * wide / S - 0.5, 0.0), last)
    y0, x0 = fy.to(tl.int32), fx.to(tl.int32)
    down, right = (fy - y0.to(tl.float32))[:, None], (fx - x0.to(tl.float32))[:, None]
    y1, x1 = tl.minimum(y0 + 1, SIDE - 1), tl.minimum(x0 + 1, SIDE - 1)
    which = tl.load(order + row, mask=ok, other=0).to(tl.int64)
    photo = images + which[:, None] * (SIDE * SIDE * 3) + c[None, :]
    real = inside[:, None] & (c < 3)[None, :]
    v00 = tl.load(photo + (y0 * SIDE + x0)[:, None] * 3, mask=real, other=0).to(tl.float32)
    v01 = tl.load(photo + (y0 * SIDE + x1)[:, None] * 3, mask=real, other=0).to(tl.float32)
    v10 = tl.load(photo + (y1 * SIDE + x0)[:, None] * 3, mask=real, other=0).to(tl.float32)
    v11 = tl.load(photo + (y1 * SIDE + x1)[:, None] * 3, mask=real, other=0).to(tl.float32)
    upper, lower = v00 + (v01 - v00) * right, v10 + (v11 - v10) * right
    value = (upper + (lower - upper) * down) / 255
    value = (value - tl.load(colours + c)[None, :]) / tl.load(colours + 4 + c)[None, :]
    value = tl.where(real, value, 0.0).to(out.dtype.element_ty)
    tl.store(out + slot[:, None] * CHANNELS + c[None, :], value, mask=ok[:, None] & (c < CHANNELS))


@dataclass
class Feed:
    """Photographs on the device with the order and boxes of every step of a run."""

    images: Tensor
    labels: Tensor
    order: Tensor  # [steps, batch]
    boxes: Tensor  # [steps, batch, 5]
    step: Tensor  # [1], which is next
    colours: Tensor

    def fetch(self, out: Tensor, size: int, form: str) -> Tensor:
        """Write one step's images into out, and return their labels."""
        quads, batch = form == "quads", self.order.shape[1]
        cells = (size + 6) // 2
        channels = 4 if quads else out.shape[1]
        count = out.numel() // channels
        args = (self.images, self.order, self.boxes, self.step, self.colours, out)
        numbers = (count, batch, self.images.shape[1], size, cells)
        options = {"CHANNELS": channels, "QUADS": quads, "B": 256}
        crop[(triton.cdiv(count, 256),)](*args, *numbers, **options)
        row = self.order.index_select(0, self.step).view(-1)
        return self.labels.index_select(0, row)


def draw(feed: Feed, seed: int) -> None:
    """A new order and new boxes for every step: the same for one seed."""
    steps, batch, count = *feed.order.shape, len(feed.images)
    generator = torch.Generator().manual_seed(seed)
    needed = steps * batch
    rows = [torch.randperm(count, generator=generator) for _ in range(-(-needed // count))]
    feed.order.copy_(torch.cat(rows)[:needed].view(steps, batch))
    area, ratio, top, left, flip = torch.rand(5, steps, batch, generator=generator)
    area = SMALLEST_CROP + (1 - SMALLEST_CROP) * area
    shape = torch.exp((2 * ratio - 1) * math.log(4 / 3)).sqrt()
    side = PIXELS * area.sqrt()
    high, wide = (side / shape).clamp_max(PIXELS), (side * shape).clamp_max(PIXELS)
    box = (top * (PIXELS - high), left * (PIXELS - wide), high, wide, (flip < 0.5).float())
    feed.boxes.copy_(torch.stack(box, 2))
    feed.step.zero_()


def make_feed(images: Tensor, labels: Tensor, steps: int, batch: int) -> Feed:
    """Room for the order and boxes of so many steps."""
    device = images.device
    order = torch.zeros(steps, batch, dtype=torch.int32, device=device)
    boxes = torch.zeros(steps, batch, 5, device=device)
    step = torch.zeros(1, dtype=torch.long, device=device)
    return Feed(images, labels, order, boxes, step, torch.tensor(COLOURS, device=device))


def whole_photos(feed: Feed, batch: int) -> Feed:
    """The same for scoring: every photograph once, uncut."""
    count = len(feed.images)
    steps = -(-count // batch)
    whole = make_feed(feed.images, feed.labels, steps, batch)
    whole.order.view(-1)[:count] = torch.arange(count, device=feed.images.device)
    whole.boxes[..., 2:4] = PIXELS
    return whole


# --- the plain network, with timm's names ---


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut."""

    def __init__(self, into: int, width: int, stride: int, short: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(into, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None
        if short:
            conv = nn.Conv2d(into, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        added = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + added)


class PlainNetwork(nn.Module):
    """ResNet-50 as timm and torchvision have it."""

    def __init__(self, classes: int, depths: tuple[int, ...]):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        into = 64
        for stage, depth in enumerate(depths):
            width, blocks = 64 * 2**stage, []
            for i in range(depth):
                stride = 2 if stage and not i else 1
                blocks.append(Bottleneck(into, width, stride, i == 0))
                into = 4 * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages, self.fc = len(depths), nn.Linear(into, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def make_module(classes: int, depths: tuple[int, ...]) -> tuple[str, nn.Module]:
    """timm's ResNet-50 where it is installed, else the one above; and whose it is."""
    own = PlainNetwork(classes, depths)
    try:
        import timm

        module = timm.create_model("resnet50", num_classes=classes)
        module.load_state_dict(own.state_dict())
    except Exception as problem:  # noqa: BLE001  whatever is wrong with it, the other will do
        print(f"without timm: {str(problem)[:160]}", flush=True)
        return "own", own
    return f"timm {timm.__version__}", module


def initial_state(classes: int, depths: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """timm's initial weights: He's for convolutions, the last norm of a block at zero."""
    torch.manual_seed(1000 + seed)
    net = PlainNetwork(classes, depths)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
    return {name: value.clone() for name, value in net.state_dict().items()}


def views(net: Network) -> Iterator[tuple[str, Tensor]]:
    """The lab network's float32 weights and running statistics by timm's names."""

    def master(half: Tensor) -> Tensor:
        return net.weights.p.as_strided(half.size(), half.stride(), half.storage_offset())

    def norm_views(name: str, norm: Any) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"{name}.weight", norm.weight), (f"{name}.bias", norm.bias))
        yield from ((f"{name}.running_mean", norm.running[0]),)
        yield from ((f"{name}.running_var", norm.running[1]),)

    yield "conv1.weight", master(net.stem.weight)
    yield from norm_views("bn1", net.stem_norm)
    for block in net.blocks:
        stage, index = block.convs[0].name.split(".")[:2]
        prefix = f"layer{int(stage) + 1}.{index}."
        for j, (conv, norm) in enumerate(zip(block.convs, block.norms, strict=True)):
            yield f"{prefix}conv{j + 1}.weight", master(conv.weight)
            yield from norm_views(f"{prefix}bn{j + 1}", norm)
        if block.short:
            yield f"{prefix}downsample.0.weight", master(block.short[0].weight)
            yield from norm_views(f"{prefix}downsample.1", block.short[1])
    yield "fc.weight", master(net.fc)
    yield "fc.bias", net.bias


# --- arms ---


@triton.jit
def update_scheduled(p, m, g, q, decays, rate, n, momentum, decay, unscale, B: tl.constexpr):
    """torch's SGD with Nesterov's momentum over flat weights; q is their 16-bit copy."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    ok = i < n
    weight = tl.load(p + i, mask=ok)
    gradient = tl.load(g + i, mask=ok) * unscale
    gradient += tl.load(decays + i, mask=ok).to(tl.float32) * decay * weight
    velocity = tl.load(m + i, mask=ok) * momentum + gradient
    weight -= tl.load(rate) * (gradient + momentum * velocity)
    tl.store(m + i, velocity, mask=ok)
    tl.store(p + i, weight, mask=ok)
    tl.store(q + i, weight.to(q.dtype.element_ty), mask=ok)


class Arm:
    """A way to train; `feed`, `rates` and `losses` belong to the run in progress."""

    name = ""

    def __init__(self, feed: Feed, words: argparse.Namespace):
        self.feed, self.words, self.size = feed, words, words.size
        device, steps = feed.images.device, len(feed.order)
        self.rates, self.losses = (torch.zeros(steps, device=device) for _ in range(2))
        self.rate = torch.zeros((), device=device)
        self.replay: Callable[[], None] = self.step

    def step(self) -> None:
        """Fetch, gradients, update, and on to the next."""
        raise NotImplementedError

    def record(self, loss: Tensor) -> None:
        """Keep a step's loss and go on."""
        self.losses.index_copy_(0, self.feed.step, loss.detach().float().view(1))
        self.feed.step.add_(1)

    def reset(self, state: dict[str, Tensor]) -> None:
        """Start from these weights."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The weights and running statistics now."""
        raise NotImplementedError

    def take_rate(self) -> None:
        """The rate of this step."""
        self.rate.copy_(self.rates.index_select(0, self.feed.step)[0])

    def capture(self) -> None:
        """Make the step a graph; where that fails, it stays as it is."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.forget_gradients()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
            self.replay = graph.replay
        except Exception as problem:  # noqa: BLE001  slower, but it trains
            print(f"no graph for {self.name}: {str(problem)[:300]}", flush=True)
            torch.cuda.synchronize()
            self.feed.step.zero_()

    def forget_gradients(self) -> None:
        """So that a graph makes its own."""


class LabArm(Arm):
    """A variant of resnet50_step.py."""

    def __init__(self, name: str, feed: Feed, words: argparse.Namespace):
        super().__init__(feed, words)
        self.name = name
        (variant,) = (v for v in VARIANTS if v.name == name)
        device = str(feed.images.device.type)
        classes, depths = words.classes, words.depths
        self.net = Network(variant, words.half, device=device, depths=depths, classes=classes)
        self.net.smoothing = SMOOTHING
        self.decays = torch.zeros(self.net.weights.used, dtype=torch.uint8, device=device)
        for _, value in views(self.net):
            if value.ndim > 1:
                start = value.storage_offset()
                self.decays[start : start + value.numel()] = 1
        batch = feed.order.shape[1]
        plain = torch.zeros(batch, self.size, self.size, 3, dtype=words.half, device=device)
        plain = plain.permute(0, 3, 1, 2)
        feed.fetch(plain, self.size, "plain")
        self.x = self.net.arrange(plain)  # chooses the stem's form
        if self.net.form == "plain":
            self.x = plain

    def fetch(self) -> Tensor:
        """This step's images into self.x; returns their labels."""
        return self.feed.fetch(self.x, self.size, self.net.form)

    def step(self) -> None:
        """See Arm."""
        labels = self.fetch()
        self.take_rate()
        loss = self.net.gradients(self.x, labels.long())
        w = self.net.weights
        n = w.used
        tensors = (w.p, w.m, w.g, w.q, self.decays, self.rate)
        numbers = (n, MOMENTUM, DECAY, 1 / self.net.scale)
        update_scheduled[(triton.cdiv(n, 2048),)](*tensors, *numbers, B=2048)
        self.record(loss)

    def reset(self, state: dict[str, Tensor]) -> None:
        """See Arm."""
        for name, value in views(self.net):
            value.copy_(state[name])
        w = self.net.weights
        w.m.zero_()
        w.g.zero_()
        w.q[: w.used].copy_(w.p[: w.used])

    def state(self) -> dict[str, Tensor]:
        """See Arm."""
        return {name: value.clone() for name, value in views(self.net)}


class CompiledArm(Arm):
    """A plain module under autocast and torch.compile, with torch's fused SGD."""

    name = "compiled"

    def __init__(self, module: nn.Module, feed: Feed, words: argparse.Namespace):
        super().__init__(feed, words)
        device = feed.images.device
        self.module = module.to(device).to(memory_format=torch.channels_last).train()
        batch = feed.order.shape[1]
        x = torch.zeros(batch, self.size, self.size, 3, dtype=words.half, device=device)
        self.x = x.permute(0, 3, 1, 2)
        parameters = list(self.module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if device.type == "cuda" else {}
        options: Any = {"momentum": MOMENTUM, "nesterov": True, **fused}
        self.optimizer = torch.optim.SGD(groups, lr=self.rate, **options)
        self.scale = 1024.0 if words.half == torch.float16 else 1.0
        self.run = torch.compile(self.loss) if device.type == "cuda" else self.loss

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """The scaled loss."""
        logits = self.module(x)
        return F.cross_entropy(logits.float(), labels, label_smoothing=SMOOTHING) * self.scale

    def step(self) -> None:
        """See Arm."""
        labels = self.feed.fetch(self.x, self.size, "plain").long()
        self.take_rate()
        with autocast(self.x):
            loss = self.run(self.x, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.scale != 1:
            torch._foreach_mul_([p.grad for p in self.module.parameters()], 1 / self.scale)
        self.optimizer.step()
        self.record(loss / self.scale)

    def forget_gradients(self) -> None:
        """See Arm."""
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self, state: dict[str, Tensor]) -> None:
        """See Arm."""
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                value.copy_(state[name])
            for kept in self.optimizer.state.values():
                if kept.get("momentum_buffer") is not None:
                    kept["momentum_buffer"].zero_()

    def state(self) -> dict[str, Tensor]:
        """See Arm."""
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def autocast(x: Tensor) -> Any:
    """autocast to x's type, without keeping casts, which a graph would not make anew."""
    if x.dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, dtype=x.dtype, cache_enabled=False)


# --- runs ---


def schedule(steps: int) -> Tensor:
    """Linear warm-up over a twentieth, then a cosine to zero."""
    warm = max(1, steps // 20)
    up = torch.arange(1, warm + 1) / warm
    down = (1 + torch.cos(torch.arange(1, steps - warm + 1) / (steps - warm) * math.pi)) / 2
    return RATE * torch.cat([up, down])


@torch.no_grad()
def score(module: nn.Module, state: dict[str, Tensor], feed: Feed, words: Any) -> dict[str, float]:
    """Top-1, top-5 and loss of the plain module over all photographs of a feed."""
    module.load_state_dict({**module.state_dict(), **state})
    module.eval()
    batch = feed.order.shape[1]
    x = torch.zeros(batch, words.size, words.size, 3, dtype=words.half, device=feed.images.device)
    x = x.permute(0, 3, 1, 2)
    total, seen, count = torch.zeros(3, dtype=torch.float64), 0, len(feed.images)
    for i in range(len(feed.order)):
        feed.step.fill_(i)
        labels = feed.fetch(x, words.size, "plain").long()
        with autocast(x):
            logits = module(x).float()
        valid = min(batch, count - seen)
        logits, labels, seen = logits[:valid], labels[:valid], seen + valid
        hits = logits.topk(5, 1).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        parts = (hits[:, 0].sum(), hits.sum(), loss)
        total += torch.tensor([float(part) for part in parts], dtype=torch.float64)
    first, five, loss_sum = (total / count).tolist()
    return {
        "top1": round(100 * first, 2),
        "top5": round(100 * five, 2),
        "val_loss": round(loss_sum, 4),
    }


def curve(losses: Tensor) -> list[float]:
    """The mean loss of each tenth of a run."""
    return [round(float(part.mean()), 4) for part in losses.tensor_split(POINTS)]


def train(arm: Arm, seed: int, steps: int, words: argparse.Namespace) -> dict[str, Any]:
    """One run of so many steps; the arm keeps its weights."""
    arm.reset(initial_state(words.classes, words.depths, seed))
    draw(arm.feed, seed)
    arm.rates.zero_()
    arm.rates[:steps].copy_(schedule(steps))
    arm.losses.zero_()
    synchronize(words)
    begin = time.perf_counter()
    for _ in range(steps):
        arm.replay()
    synchronize(words)
    seconds = time.perf_counter() - begin
    losses = arm.losses[:steps].float().cpu()
    return {
        "arm": arm.name,
        "seed": seed,
        "steps": steps,
        "images_per_s": round(steps * words.batch / seconds),
        "train_loss": curve(losses),
        "first_losses": [round(value, 4) for value in losses[:3].tolist()],
        "not_finite": int((~losses.isfinite()).sum()),
    }


def synchronize(words: argparse.Namespace) -> None:
    """Wait for the device."""
    if words.device == "cuda":
        torch.cuda.synchronize()


def prepare_lab(
    names: list[str],
    state: dict[str, Tensor],
    feed: Feed,
    words: argparse.Namespace,
    report: Report,
) -> list[Arm]:
    """The lab's arms that could be made, with tiles chosen; their gradients are compared."""
    if words.device == "cuda":
        launcher.mode = "record"
        for name in names:
            report.attempt(f"record {name}", lambda n=name: LabArm(n, feed, words).step())
        torch.cuda.synchronize()
        compile_now("lab arms")
        launcher.mode = "tune"
    arms: list[Arm] = []
    gradients: dict[str, Tensor] = {}
    for name in names:
        feed.step.zero_()
        arm = report.attempt(f"make {name}", LabArm, name, feed, words)
        if arm is None:
            continue
        arm.reset(state)
        arm.net.gradients(arm.x, arm.fetch().long())  # measures tiles and algorithms
        arm.net.gradients(arm.x, arm.fetch().long())
        found = {key: grad.clone() for key, _, grad in arm.net.parameters()}
        row = {"arm": name, "form": arm.net.form}
        if gradients:
            row["gradients_against_first"] = compare(found, gradients)
        gradients = gradients or found
        arms.append(arm)
        report.add("prepared", row)
    return arms


def prepare(words: argparse.Namespace, feed: Feed, report: Report) -> tuple[list[Arm], nn.Module]:
    """The arms that could be made, tuned and captured, and the module that scores."""
    names = words.arms.split(",")
    state = initial_state(words.classes, words.depths, 0)
    for name in state:  # at zero, most gradients would be, too
        if name.endswith("bn3.weight"):
            state[name].fill_(LAST_NORM)
    draw(feed, 0)
    arms = prepare_lab([n for n in names if n != "compiled"], state, feed, words, report)
    origin, module = make_module(words.classes, words.depths)
    _, judge = make_module(words.classes, words.depths)
    judge = judge.to(words.device).to(memory_format=torch.channels_last)
    if "compiled" in names:
        begin = time.perf_counter()
        arm = CompiledArm(module, feed, words)
        arm.reset(state)
        feed.step.zero_()
        if report.attempt("compile", lambda: arm.step() or True):
            arms.append(arm)
            seconds = round(time.perf_counter() - begin)
            report.add("prepared", {"arm": "compiled", "of": origin, "seconds": seconds})
    for arm in arms if words.device == "cuda" else ():
        feed.step.zero_()
        report.attempt(f"capture {arm.name}", arm.capture)
    return arms, judge


def step_ms(arm: Arm, words: argparse.Namespace, repeats: int) -> float:
    """Milliseconds of a step, by the clock."""
    arm.feed.step.zero_()
    synchronize(words)
    begin = time.perf_counter()
    for _ in range(repeats):
        arm.replay()
    synchronize(words)
    return (time.perf_counter() - begin) / repeats * 1e3


def count_seeds(name: str, words: argparse.Namespace) -> int:
    """Runs of an arm."""
    return min(words.seeds, COMPILED_SEEDS) if name == "compiled" else words.seeds


def count_steps(arms: list[Arm], words: argparse.Namespace, report: Report) -> int:
    """Steps of a run: whole epochs, as many as the time that is left allows."""
    repeats = 20 if words.device == "cuda" else 1
    ms = {arm.name: round(step_ms(arm, words, repeats), 3) for arm in arms}
    rows = {name: {"ms": value, "images_per_s": round(words.batch / value * 1e3)}
            for name, value in ms.items()}  # fmt: skip
    report.add("step", rows)
    runs = {name: count_seeds(name, words) for name in ms}
    left = words.seconds - (time.perf_counter() - report.begin) - 8 - 1.5 * sum(runs.values())
    epoch = len(arms[0].feed.images) // words.batch
    fit = 0.96 * left * 1e3 / sum(ms[name] * runs[name] for name in ms) / epoch
    epochs = words.epochs or max(1, min(int(fit), MOST_EPOCHS))
    report.add("plan", {"epochs": epochs, "steps": epochs * epoch, "runs": runs})
    return min(epochs * epoch, len(arms[0].feed.order))


def measure(words: argparse.Namespace) -> None:
    """All runs, seed by seed, in rotating order."""
    data = load(words.data, words.images)  # before CUDA starts: the processes are forks
    report = Report(words.out, "train")
    report.path, report.begin = words.out / "resnet50_train.json", words.begin
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    device = words.device
    parts = {name: [t.to(device) for t in pair] for name, pair in data.items()}
    counts = {name: len(pair[0]) for name, pair in parts.items()}
    about = {"images": counts, "size": words.size, "batch": words.batch, "dtype": str(words.half)}
    recipe = {"rate": RATE, "decay": DECAY, "momentum": MOMENTUM, "smoothing": SMOOTHING}
    report.add("set", {**about, **recipe, "smallest_crop": SMALLEST_CROP})
    most = MOST_EPOCHS * counts["train"] // words.batch + 64
    feed = make_feed(*parts["train"], min(most, words.most_steps), words.batch)
    scored = make_feed(*parts["val"], 1, words.batch)
    scored = whole_photos(scored, words.batch)
    arms, judge = prepare(words, feed, report)
    steps = count_steps(arms, words, report)
    for seed in range(words.seeds):
        for arm in arms[seed % len(arms) :] + arms[: seed % len(arms)]:
            if seed >= count_seeds(arm.name, words):
                continue
            guess = step_ms(arm, words, 1) * steps / 1e3 + 2
            if time.perf_counter() - report.begin + guess > words.seconds:
                print(f"no time for {arm.name} with seed {seed}", flush=True)
                continue
            row = report.attempt(f"{arm.name} {seed}", train, arm, seed, steps, words)
            if row is not None:
                row |= score(judge, arm.state(), scored, words)
                report.add("runs", row)
    summarise(report)


def summarise(report: Report) -> None:
    """Scores by arm, and how far the arms differ with the same seed."""
    runs = report.data.get("runs", [])
    names = list(dict.fromkeys(row["arm"] for row in runs))
    for name in names:
        own = [row for row in runs if row["arm"] == name]
        row: dict[str, Any] = {"arm": name, "seeds": len(own)}
        row["images_per_s"] = round(median(r["images_per_s"] for r in own))
        for key in ("top1", "top5", "val_loss"):
            values = [r[key] for r in own]
            spread = round(max(values) - min(values), 4)
            row[key] = {"mean": round(mean(values), 4), "spread": spread, "all": values}
        points = zip(*(r["train_loss"] for r in own), strict=True)
        row["train_loss"] = [round(mean(values), 3) for values in points]
        report.add("summary", row, 1000)
    by = {(row["arm"], row["seed"]): row for row in runs}
    for name in names[1:]:
        pairs = [(by[name, s], by[names[0], s]) for n, s in by if n == name and (names[0], s) in by]
        if pairs:
            gaps = {key: [round(a[key] - b[key], 4) for a, b in pairs]
                    for key in ("top1", "val_loss")}  # fmt: skip
            last = [round(a["train_loss"][-1] - b["train_loss"][-1], 4) for a, b in pairs]
            gaps["last_train_loss"] = last
            report.add("difference", {"arms": f"{name} - {names[0]}", **gaps})
    print("failed:", report.data["failed"] or "nothing", flush=True)


def main() -> None:
    """Pack, or train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, help="the folder of tiny-imagenet-100")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--data", type=Path, default=PACKED)
    parser.add_argument("--seconds", type=float, default=340, help="all in all")
    parser.add_argument("--arms", default=",".join(ARMS), help="variants, and `compiled`")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=10**6, help="of each part, at most")
    parser.add_argument("--most-steps", type=int, default=10**6)
    parser.add_argument("--depths", default="3,4,6,3")
    words = parser.parse_args()
    words.begin = time.perf_counter()
    if words.pack:
        pack(words.pack, PACKED)
        return
    words.depths = tuple(int(depth) for depth in words.depths.split(","))
    words.half, words.classes = getattr(torch, words.dtype), 100
    words.out.mkdir(parents=True, exist_ok=True)
    if words.device == "cpu" and not INTERPRETED:
        sys.exit("on a CPU, set TRITON_INTERPRET=1")
    measure(words)


if __name__ == "__main__":
    main()
