"""The recipe of the preset cifar10-fast in plain torch, to compare scores.

    python scripts/plain_cifar.py DIR [--seeds 0,1,2] [--epochs 24]

DIR holds CIFAR-10's binary files. Needs a CUDA device. Nothing of Phalanx is used.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCH, PEAK, WARM_UP, DECAY, SMOOTHING = 512, 0.6, 5, 5e-4, 0.1


def conv(inp: int, out: int) -> nn.Sequential:
    """3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    """Two such convolutions, added to the input."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        return x + self.inner(x)


class ResNet9(nn.Module):
    """The network of that recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(3, 64),
            *(conv(64, 128), nn.MaxPool2d(2), Residual(128)),
            *(conv(128, 256), nn.MaxPool2d(2)),
            *(conv(256, 512), nn.MaxPool2d(2), Residual(512)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(512, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x)) * 0.125


def load(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Normalised images and labels on the GPU."""
    rows = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
    rows = rows.reshape(-1, 3073)
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()).cuda().float() / 255
    mean, std = (torch.tensor(v, device="cuda").view(3, 1, 1) for v in (MEAN, STD))
    images = ((images - mean) / std).contiguous(memory_format=torch.channels_last)
    return images, torch.from_numpy(rows[:, 0].astype(np.int64)).cuda()


def augment(images: Tensor) -> Tensor:
    """Shift each image by up to four pixels, mirror every other; black is the paper's mean here."""
    count = len(images)
    black = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2, count, 1), device="cuda")
    edge = torch.arange(32, device="cuda")
    mirrored = torch.rand(count, 1, device="cuda") < 0.5
    columns = torch.where(mirrored, 31 - edge, edge) + left
    rows = edge + top
    index = torch.arange(count, device="cuda")[:, None, None]
    found = black.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)


def rate_at(step: int, total: int, warm: int) -> float:
    """A triangular schedule."""
    return PEAK * step / warm if step < warm else PEAK * (total - step) / (total - warm)


def train(train_set: tuple[Tensor, Tensor], valid_set: tuple[Tensor, Tensor], epochs: int) -> dict:
    """Train once; returns score and seconds."""
    model = ResNet9().cuda().to(memory_format=torch.channels_last)
    norms = {
        id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()
    }
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if id(p) not in norms], "weight_decay": DECAY},
        {"params": [p for p in weights if id(p) in norms], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True)
    images, labels = train_set
    total = epochs * len(labels) // BATCH
    warm = -(-WARM_UP * len(labels) // BATCH)
    torch.cuda.synchronize()
    begin, order = time.perf_counter(), torch.empty(0, dtype=torch.int64, device="cuda")
    model.train()
    for step in range(total):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(labels), device="cuda")])
        now, order = order[:BATCH], order[BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, total, warm)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(augment(images[now]))
        F.cross_entropy(logits.float(), labels[now], label_smoothing=SMOOTHING).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    model.eval()
    right = 0
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        for shown, wanted in zip(valid_set[0].split(1000), valid_set[1].split(1000), strict=True):
            answer = model(shown).float() + model(shown.flip(3)).float()
            right += int((answer.argmax(1) == wanted).sum())
    return {"top1": right / len(valid_set[1]), "seconds": round(seconds, 2)}


def main() -> None:
    """Print a line of JSON for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=24)
    asked = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    train_set = load(asked.dir, [f"data_batch_{number}.bin" for number in range(1, 6)])
    valid_set = load(asked.dir, ["test_batch.bin"])
    for seed in map(int, asked.seeds.split(",")):
        torch.manual_seed(seed)
        print(json.dumps({"seed": seed, **train(train_set, valid_set, asked.epochs)}), flush=True)


if __name__ == "__main__":
    main()
