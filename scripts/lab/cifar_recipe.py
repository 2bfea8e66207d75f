"""What each idea of airbench contributes: the recipe of cifar10-94 in plain torch, varied.

    python scripts/lab/cifar_recipe.py DIR [--names ours,ours-shift2,...] [--seeds 0,1]
        [--epochs 24] [--seconds 60] [--out FILE.jsonl]

DIR holds CIFAR-10's binary files. `ours` is what the preset does, `paper` all of airbench94 (K.
Jordan 2024) at its own 9.9 epochs; the others are `ours` with one or two ideas of the paper. Each
run is scored with the image alone, with its mirror image, and over six crops. One CUDA graph per
step; on a CPU only a few steps are run, as a test. Nothing of Phalanx is used.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
LOSS_SCALE = 1024.0
LOOKAHEAD_STEPS = 5


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on; the defaults are those of the preset."""

    epochs: float = 24.0
    batch: int = 1000
    lr: float = 1.5
    momentum: float = 0.85
    l2: float = 1.33e-3
    bias_scale: float = 64.0
    bias_decays: bool = False
    norm_weights: bool = True  # are trained, without decay
    stem_bias_epochs: float = 0.0  # in which the first layer has a trainable bias
    shift: int = 4
    reflects: bool = False
    alternates: bool = False  # mirrored in every other epoch, not at random
    lookahead: bool = False
    ema: float = 0.0
    start: float = 0.0  # learning rate at the start, as a share of the peak
    end: float = 0.0
    half: torch.dtype = torch.bfloat16


OURS = Recipe()
PAPER = Recipe(
    epochs=9.9,
    batch=1024,
    bias_decays=True,
    norm_weights=False,
    stem_bias_epochs=3.0,
    shift=2,
    reflects=True,
    alternates=True,
    lookahead=True,
    start=0.2,
    end=0.07,
    half=torch.float16,
)
RECIPES = {
    "ours": OURS,
    "paper": PAPER,
    "ours-shift2": replace(OURS, shift=2),
    "ours-reflect2": replace(OURS, shift=2, reflects=True),
    "ours-alternating": replace(OURS, alternates=True),
    "ours-fixed-weights": replace(OURS, norm_weights=False),
    "ours-bias-decay": replace(OURS, bias_decays=True),
    "ours-stem-bias": replace(OURS, stem_bias_epochs=3.0),
    "ours-ends": replace(OURS, start=0.2, end=0.07),
    "ours-float16": replace(OURS, half=torch.float16),
    "ours-lookahead": replace(OURS, lookahead=True),
    "ours-ema": replace(OURS, ema=0.98),
    "ours-reflect2-alternating": replace(OURS, shift=2, reflects=True, alternates=True),
}


class Pair(nn.Module):
    """Convolution, pool, norm, GELU, convolution, norm, GELU; begins as an identity."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out, momentum=0.4)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out, momentum=0.4)
        for conv in (self.conv1, self.conv2):
            nn.init.normal_(conv.weight, 0, math.sqrt(2 / (9 * out)))
            nn.init.dirac_(conv.weight.data[: conv.in_channels])

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with half the edge."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Network(nn.Module):
    """Whitening, three pairs, global max-pool, linear."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 2)
        nn.init.zeros_(self.stem.bias)
        self.pairs = nn.Sequential(Pair(24, 64), Pair(64, 256), Pair(256, 256))
        self.head = nn.Linear(256, 10, bias=False)
        patches = images.cpu().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5)
        rows = patches.reshape(-1, 12).double()
        variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
        filters = (directions / (variances + 5e-4).sqrt()).T.flip(0).reshape(12, 3, 2, 2).float()
        self.stem.weight = nn.Parameter(torch.cat([filters, -filters]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.pairs(F.gelu(self.stem(x))).amax((2, 3))) / 9


class Step:
    """One step on static memory, so that a graph can replay it."""

    def __init__(self, network: Network, recipe: Recipe) -> None:
        self._network, self._recipe = network, recipe
        shape = (recipe.batch, 32, 32, 3)
        self.images = torch.zeros(shape, dtype=recipe.half, device=DEVICE)
        self.labels = torch.zeros(recipe.batch, dtype=torch.int64, device=DEVICE)
        self.lr = torch.zeros((), device=DEVICE)
        norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.weight.requires_grad_(recipe.norm_weights)
        network.stem.bias.requires_grad_(recipe.stem_bias_epochs > 0)
        biases = [norm.bias for norm in norms]
        weights = [norm.weight for norm in norms if recipe.norm_weights]
        known = {id(w) for w in (*biases, *weights)}
        trained = [w for w in network.parameters() if w.requires_grad]
        others = [w for w in trained if id(w) not in known]
        decay = recipe.l2 / recipe.bias_scale if recipe.bias_decays else 0.0
        self._groups = [
            (others, 1.0, recipe.l2),
            (weights, 1.0, 0.0),
            (biases, recipe.bias_scale, decay),
        ]
        self._groups = [group for group in self._groups if group[0]]
        self._velocities = [[torch.zeros_like(w) for w in group[0]] for group in self._groups]
        self.replay = self._capture() if DEVICE == "cuda" else self._run

    def _run(self) -> None:
        recipe = self._recipe
        with torch.autocast(DEVICE, dtype=recipe.half, cache_enabled=False):
            logits = self._network(self.images.permute(0, 3, 1, 2))
        loss = F.cross_entropy(logits.float(), self.labels, label_smoothing=0.2) * LOSS_SCALE
        weights = [weight for group in self._groups for weight in group[0]]
        gradients = [*torch.autograd.grad(loss, weights)]
        with torch.no_grad():
            for (own, scale, l2), velocity in zip(self._groups, self._velocities, strict=True):
                mine = torch._foreach_mul(gradients[: len(own)], 1 / LOSS_SCALE)
                del gradients[: len(own)]
                plain = [weight.data for weight in own]
                torch._foreach_add_(mine, plain, alpha=l2)
                torch._foreach_mul_(velocity, recipe.momentum)
                torch._foreach_add_(velocity, mine)
                torch._foreach_add_(mine, velocity, alpha=recipe.momentum)
                torch._foreach_mul_(mine, self.lr * -scale)
                torch._foreach_add_(plain, mine)

    def _capture(self) -> Any:
        state = self._network.state_dict()
        before = {name: tensor.clone() for name, tensor in state.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        for name, tensor in state.items():
            tensor.copy_(before[name])
        for velocity in self._velocities:
            torch._foreach_zero_(velocity)
        return graph.replay


def load(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Normalised images [N, 3, 32, 32] and labels."""
    rows = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint8) for name in names])
    rows = rows.reshape(-1, 3073)
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()).to(DEVICE).float() / 255
    mean, std = (torch.tensor(v, device=DEVICE).view(3, 1, 1) for v in (MEAN, STD))
    return (images - mean) / std, torch.from_numpy(rows[:, 0].astype(np.int64)).to(DEVICE)


def augment(images: Tensor, mirrored: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """All images of an epoch, mirrored and shifted, as [N, 32, 32, 3]."""
    count, shift = len(images), recipe.shift
    images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)
    mean, std = (torch.tensor(v, device=DEVICE).view(3, 1, 1) for v in (MEAN, STD))
    black = mean / std  # minus this is black after normalisation
    if recipe.reflects:
        padded = F.pad(images, (shift,) * 4, "reflect")
    else:
        padded = F.pad(images + black, (shift,) * 4) - black
    top, left = torch.randint(2 * shift + 1, (2, count, 1), generator=generator, device=DEVICE)
    edge, index = torch.arange(32, device=DEVICE), torch.arange(count, device=DEVICE)
    rows, columns = (edge + top)[:, :, None], (edge + left)[:, None, :]
    return padded.permute(0, 2, 3, 1)[index[:, None, None], rows, columns]


def rate_at(recipe: Recipe, step: int, total: int) -> float:
    """A triangular schedule."""
    warm = int(total * 0.23)
    if step < warm:
        return recipe.lr * (recipe.start + (1 - recipe.start) * step / warm)
    return recipe.lr * (1 - (1 - recipe.end) * (step - warm) / (total - warm))


@torch.inference_mode()
def score(network: Network, images: Tensor, labels: Tensor, half: torch.dtype) -> list[float]:
    """Accuracies: of the image, with its mirror image, over six crops."""

    def both(x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return network(x).float() + network(x.flip(3)).float()

    network.eval()
    right = torch.zeros(3, device=DEVICE)
    with torch.autocast(DEVICE, dtype=half):
        for x, y in zip(images.split(1000), labels.split(1000), strict=True):
            wide = F.pad(x, (1,) * 4, "reflect")
            mirrored = both(x)
            crops = mirrored + (both(wide[:, :, :32, :32]) + both(wide[:, :, 2:, 2:])) / 2
            answers = (network(x).float(), mirrored, crops)
            right += torch.stack([(answer.argmax(1) == y).sum() for answer in answers])
    return [round(100 * number / len(labels), 2) for number in right.tolist()]


def train(recipe: Recipe, seed: int, train_set: tuple[Tensor, Tensor]) -> tuple[Network, float]:
    """Train once; returns the network and the seconds it took."""
    images, labels = train_set
    torch.manual_seed(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = Network(images[:: max(1, len(images) // 2048)])
    network = made.to(DEVICE, memory_format=torch.channels_last).train()
    step, per_epoch = Step(network, recipe), len(images) // recipe.batch
    total, done, epoch = math.ceil(recipe.epochs * per_epoch), 0, 0
    coins = torch.rand(len(images), generator=generator, device=DEVICE) < 0.5
    state = [t for t in network.state_dict().values() if t.is_floating_point()]
    slow = [tensor.clone() for tensor in state]
    began = time.perf_counter()
    while done < total:
        fresh = torch.rand(len(images), generator=generator, device=DEVICE) < 0.5
        mirrored = coins ^ (epoch % 2 == 1) if recipe.alternates else fresh
        order = torch.randperm(len(images), generator=generator, device=DEVICE)
        x = augment(images, mirrored, recipe, generator).to(recipe.half)[order]
        y = labels[order]
        for first in range(0, min(per_epoch, total - done) * recipe.batch, recipe.batch):
            step.images.copy_(x[first : first + recipe.batch])
            step.labels.copy_(y[first : first + recipe.batch])
            step.lr.fill_(rate_at(recipe, done, total))
            kept = network.stem.bias.detach().clone()
            step.replay()
            done += 1
            if done > recipe.stem_bias_epochs * per_epoch:
                network.stem.bias.data.copy_(kept)
            follow(slow, state, recipe, done, total)
        epoch += 1
    if recipe.lookahead or recipe.ema:
        torch._foreach_copy_(state, slow)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return network, time.perf_counter() - began


@torch.no_grad()
def follow(slow: list[Tensor], state: list[Tensor], recipe: Recipe, done: int, total: int) -> None:
    """Move the slow weights towards the others; with lookahead these are then reset to them."""
    if recipe.lookahead and done % LOOKAHEAD_STEPS == 0:
        kept = 0.95**LOOKAHEAD_STEPS * (done / total) ** 3
        torch._foreach_lerp_(slow, state, 1 - kept)
        torch._foreach_copy_(state, slow)
    elif recipe.ema:
        torch._foreach_lerp_(slow, state, 1 - min(recipe.ema, (1 + done) / (10 + done)))


def main() -> None:
    """Print a line of JSON for each run, and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--names", type=lambda text: text.split(","), default=[*RECIPES])
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[0, 1])
    parser.add_argument("--epochs", type=float, default=24.0, help="of all but `paper`")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("cifar_recipe.jsonl"))
    words = parser.parse_args()
    began = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    train_set = load(words.dir, [f"data_batch_{number}" for number in range(1, 6)])
    images, labels = load(words.dir, ["test_batch"])
    found: dict[str, list[list[float]]] = {}
    for seed in words.seeds:
        for name in words.names:
            if time.perf_counter() - began > words.seconds:
                break
            recipe = RECIPES[name]
            if name != "paper":
                recipe = replace(recipe, epochs=words.epochs)
            if DEVICE == "cpu":
                recipe = replace(recipe, batch=32, epochs=0.002, half=torch.bfloat16)
                images, labels = images[:200], labels[:200]
            network, seconds = train(recipe, seed, train_set)
            top1 = score(network, images, labels, recipe.half)
            found.setdefault(name, []).append(top1)
            row = {"name": name, "seed": seed, "top1": top1, "seconds": round(seconds, 2)}
            print(json.dumps(row), flush=True)
            with words.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **asdict(recipe), "half": str(recipe.half)}) + "\n")
    for name, scores in found.items():
        print(f"{name:26} n={len(scores)} {np.mean(scores, 0).round(2).tolist()}", flush=True)


if __name__ == "__main__":
    main()
