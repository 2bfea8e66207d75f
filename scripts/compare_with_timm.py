"""Load random timm and torchvision weights into our models and back; compare logits and gradients.

    python scripts/compare_with_timm.py [--device cuda] [--only NAME]...

Needs timm and torchvision. Everything in float32, without TF32. Differences are relative: the
largest difference of any logit over the largest logit; of a gradient, norm of the difference over
norm, the worst of all parameters. Prints a Markdown table; exits with 1 if a logit is off by more
than 1e-4. The controls load the same weights into a network that differs in one respect, which the
comparison must detect.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, Variant
from phalanx.models.build import build_model
from phalanx.models.weights import load_tensors, read_weights

CLASSES, BATCH, BAR = 100, 4, 1e-4
FULL_SIZE = ("resnet", "resnext", "efficientnet_b", "efficientnet_lite")

TIMM = {  # timm's name: (ours, what differs from our default)
    **{name: (name, {}) for name in MODELS if name.startswith(FULL_SIZE) and timm.is_model(name)},
    "resnet50_gn": ("resnet50", {"norm": Norm(type="group")}),
    "tf_efficientnet_b0": ("efficientnet_b0", {"padding": "same", "norm": Norm(eps=1e-3)}),
    "tf_efficientnet_b4": ("efficientnet_b4", {"padding": "same", "norm": Norm(eps=1e-3)}),
    "tf_efficientnet_lite0": ("efficientnet_lite0", {"padding": "same", "norm": Norm(eps=1e-3)}),
}
CONTROLS = {  # timm's name: (ours, what is made wrong)
    "resnet50": ("resnet50", {"stride_in": "1x1"}),
    "efficientnet_b0": ("efficientnet_b0", {"norm": Norm(eps=1e-3)}),
}
TORCHVISION = {
    **{f"resnet{size}": (f"resnet{size}", {}) for size in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": ("resnext50_32x4d", {}),
    "resnext101_32x8d": ("resnext101_32x8d", {}),
    **{f"efficientnet_b{size}": (f"efficientnet_b{size}", {}) for size in range(5)},
    **{
        f"efficientnet_b{size}": (f"efficientnet_b{size}", {"norm": Norm(eps=1e-3)})
        for size in (5, 6, 7)
    },
}


@dataclass(frozen=True)
class Difference:
    """How much two models differ on the same images."""

    evaluated: float  # logits with running statistics
    trained: float  # logits with the batch's statistics
    gradient: float
    parameter: str  # with the worst gradient


def shake(model: nn.Module, seed: int) -> None:
    """Randomise the norms: initial values are all ones and zeros, or all zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            middle = 1.0 if name.endswith(("weight", "running_var")) else 0.0
            drawn = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(middle + 0.2 * (drawn - 0.5))


def outcome(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Logits in evaluation and training mode, and the gradients of the latter."""
    model.eval()
    with torch.inference_mode():
        evaluated = model(images)
    model.train()
    model.zero_grad(set_to_none=True)
    trained = model(images)
    F.cross_entropy(trained, labels).backward()
    return evaluated, trained.detach(), {n: p.grad for n, p in model.named_parameters()}


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, divided by the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def differ(ours: nn.Module, theirs: nn.Module, rename: Any, size: int, device: str) -> Difference:
    """Compare both models on the same images; `rename` maps their parameter names to ours."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, size, size, generator=generator).to(device)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator).to(device)
    a, b = (outcome(model, images, labels) for model in (ours, theirs))
    gradients = {
        name: float((a[2][rename(name)] - g).norm() / g.norm().clamp_min(1e-12))
        for name, g in b[2].items()
    }
    worst = max(gradients, key=gradients.__getitem__)
    return Difference(apart(a[0], b[0]), apart(a[1], b[1]), gradients[worst], worst)


def variant_named(name: str, changes: dict[str, Any]) -> Variant:
    """Our variant for a comparison, without dropout or drop-path."""
    return replace(MODELS[name], drop_path=0.0, dropout=0.0, **changes)


def compare_timm(name: str, device: str) -> tuple[str, Variant, Difference]:
    """Compare after loading timm's weights by name, and ours into timm's with strict=True."""
    return compare_with(*TIMM[name], name, device)


def compare_control(name: str, device: str) -> tuple[str, Variant, Difference]:
    """The same, with a network that differs from timm's."""
    return compare_with(*CONTROLS[name], name, device)


def compare_with(
    ours_name: str, changes: dict[str, Any], name: str, device: str
) -> tuple[str, Variant, Difference]:
    """Compare one of our variants with one of timm's models."""
    variant = variant_named(ours_name, changes)
    theirs = timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, drop_path_rate=0.0)
    shake(theirs, seed=0)
    ours = build_model(variant, num_classes=CLASSES)
    load_tensors(ours, theirs.state_dict(), where=name)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    size = variant.image_size
    return ours_name, variant, differ(ours.to(device), theirs.to(device), lambda n: n, size, device)


def compare_torchvision(name: str, device: str) -> tuple[str, Variant, Difference]:
    """Compare after loading torchvision's weights, through a .pth file as they are published."""
    ours_name, changes = TORCHVISION[name]
    variant = variant_named(ours_name, changes)
    options = {"dropout": 0.0, "stochastic_depth_prob": 0.0} if "eff" in name else {}
    theirs = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
    shake(theirs, seed=0)
    ours = build_model(variant, num_classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pth"
        numbered = {n: torch.full((1,), float(i)) for i, n in enumerate(theirs.state_dict())}
        torch.save(numbered, path)
        order = {int(t.item()): n for n, t in read_weights(path, ours.state_dict()).items()}
        torch.save(theirs.state_dict(), path)
        load_tensors(ours, read_weights(path, ours.state_dict()), where=name)
    names = {n: order[i] for i, n in enumerate(theirs.state_dict())}
    size = variant.image_size
    return (
        ours_name,
        variant,
        differ(ours.to(device), theirs.to(device), names.__getitem__, size, device),
    )


def main() -> int:
    """Compare all models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", default=[])
    words = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(
        f"timm {timm.__version__}, torchvision {torchvision.__version__}, "
        f"torch {torch.__version__}, {words.device}, float32, batch {BATCH}\n"
    )
    print(
        "| library | its model | ours | pixels | logits, evaluating | logits, training "
        "| gradients, worst parameter |\n|---|---|---|---:|---:|---:|---|"
    )
    failed = []
    sides = {
        "timm": (TIMM, compare_timm),
        "torchvision": (TORCHVISION, compare_torchvision),
        "control": (CONTROLS, compare_control),
    }
    for library, (table, compare) in sides.items():
        for name in table:
            if words.only and name not in words.only:
                continue
            ours, variant, found = compare(name, words.device)
            print(
                f"| {library} | {name} | {ours} | {variant.image_size} | {found.evaluated:.1e} "
                f"| {found.trained:.1e} | {found.gradient:.1e} ({found.parameter}) |",
                flush=True,
            )
            close = max(found.evaluated, found.trained) <= BAR
            if close == (library == "control"):
                failed.append(f"{library} {name}")
    print(f"\nnot as they should be: {failed}" if failed else "\nall as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
