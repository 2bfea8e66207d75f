"""A training run in plain torch and timm, compiled: the other side of scripts/converge.py.

    python scripts/plain_timm.py RECIPE.json OUT.json

RECIPE.json is written by converge.py. The images are those of class folders, read by torchvision's
loader in as many processes as there are cores; bfloat16 autocast, channels_last, torch's fused
SGD, torch.compile with CUDA graphs. Scores and checkpoints come as often as on the other side.
Needs timm, torchvision and a CUDA device. Nothing of Phalanx is used.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_loader(recipe: dict[str, Any], split: str) -> DataLoader[Any]:
    """Batches of bytes, with random crops for training and centre crops for scoring."""
    size = recipe["image_size"]
    if split == "train":
        steps = [
            transforms.RandomResizedCrop(size, scale=recipe["crop_scale"]),
            transforms.RandomHorizontalFlip(),
        ]
    else:
        steps = [transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size)]
    images = datasets.ImageFolder(
        Path(recipe["data_dir"]) / split, transforms.Compose([*steps, transforms.PILToTensor()])
    )
    training = split == "train"
    workers = recipe["workers"] or os.cpu_count() or 1
    return DataLoader(
        images,
        batch_size=recipe["batch_size"],
        shuffle=training,
        drop_last=training,
        num_workers=workers if training else min(4, workers),
        persistent_workers=True,
        prefetch_factor=4,
        pin_memory=True,
    )


def on_device(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images, channels_last, and their labels."""
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    for pixels, labels in loader:
        images = pixels.to("cuda", non_blocking=True, memory_format=torch.channels_last)
        yield (images.float() - mean) / std, labels.to("cuda", non_blocking=True)


def build_optimizer(model: nn.Module, recipe: dict[str, Any]) -> torch.optim.SGD:
    """SGD with Nesterov momentum; norms and biases do not decay."""
    weights = [*model.parameters()]
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": recipe["decay"]},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=recipe["momentum"], nesterov=True, fused=True)


def rate_at(step: int, total: int, warm: int, peak: float) -> float:
    """Half a cosine, multiplied by a ramp while it warms up."""
    rate = peak * 0.5 * (1 + math.cos(math.pi * step / total))
    return rate * step / warm if step < warm else rate


@torch.inference_mode()
def score(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Top-1 accuracy."""
    model.eval()
    right, count = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    for images, labels in on_device(loader):
        with torch.autocast("cuda", torch.bfloat16):
            right += (model(images).argmax(1) == labels).sum()
        count += len(labels)
    model.train()
    return int(right) / count


def train(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train once; returns the scores, and the seconds of training alone."""
    torch.manual_seed(recipe["seed"])
    torch.backends.cudnn.benchmark = True
    loaders = {split: open_loader(recipe, split) for split in ("train", "val")}
    made = timm.create_model(recipe["model"], num_classes=len(loaders["train"].dataset.classes))
    model = made.to("cuda", memory_format=torch.channels_last).train()
    optimizer = build_optimizer(model, recipe)
    forward = torch.compile(model, mode="reduce-overhead") if recipe["compiled"] else model
    per_epoch = len(loaders["train"])
    total, warm = recipe["epochs"] * per_epoch, recipe["warmup_epochs"] * per_epoch
    step, busy_s, scores = 0, 0.0, {}
    for epoch in range(1, recipe["epochs"] + 1):
        begin = time.perf_counter()
        for images, labels in on_device(loaders["train"]):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, total, warm, recipe["lr"])
            with torch.autocast("cuda", torch.bfloat16):
                logits = forward(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=recipe["smoothing"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        torch.cuda.synchronize()
        if epoch > 1:  # in the first one, kernels are compiled
            busy_s += time.perf_counter() - begin
        if epoch % recipe["every"] == 0 or epoch == recipe["epochs"]:
            scores[step] = score(model, loaders["val"])
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(recipe["run_dir"]) / f"step-{step}.pt")
    timed = (total - per_epoch) * recipe["batch_size"]
    return {"scores": scores, "top1": scores[step], "images_per_s": timed / busy_s}


def main() -> None:
    """Train once, and write the result."""
    recipe = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(train(recipe)), encoding="utf-8")


if __name__ == "__main__":
    main()
