"""What two changes are worth on a CPU: channels_last gradients, and scoring with folded norms.

    python scripts/lab/cpu_passes.py train:resnet8:64:28 score:efficientnet_b0:64 [--rounds 9]

train:MODEL:BATCH:SIZE compares plain steps with those whose pools and shortcuts return gradients in
NCHW order, as torch's `mean` and slices do. score:MODEL:BATCH compares folded models, in parts that
fit the caches and whole, with the modules. Passes alternate; figures are medians of paired ratios.
Threads: OMP_NUM_THREADS.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.assemble.torch_setup import _keep_freed_memory
from phalanx.catalog.models import MODELS
from phalanx.inference import folded_model
from phalanx.models import efficientnet, layers, resnet
from phalanx.models.build import build_model, initialise_weights

_CLASSES, _SECONDS = 10, 0.4


def average_in_nchw(x: Tensor) -> Tensor:
    """The mean as it was: its gradient is contiguous."""
    return x.mean((2, 3))


def slice_in_nchw(self: resnet.SliceAndPad, x: Tensor) -> Tensor:
    """The shortcut as it was."""
    return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def build(name: str) -> nn.Module:
    """A network in channels_last."""
    model = build_model(MODELS[name], num_classes=_CLASSES)
    initialise_weights(model, 0, zero_residual=False)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def use_gradients(average: Callable[[Tensor], Tensor], shortcut: object) -> None:
    """Use these functions in all networks."""
    layers.average_over_pixels = efficientnet.average_over_pixels = average
    resnet.SliceAndPad.forward = shortcut  # type: ignore[assignment,method-assign]


def compare(passes: dict[str, Callable[[], object]], rounds: int) -> str:
    """The ratio of the first pass's time to each pass's."""
    for run in passes.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            run()  # the first may find another pass's data in the caches
            started, count = time.perf_counter(), 0
            while time.perf_counter() - started < _SECONDS:
                run()
                count += 1
            times[name].append((time.perf_counter() - started) / count)
    first = next(iter(times.values()))
    ratio = {n: median(a / b for a, b in zip(first, t, strict=True)) for n, t in times.items()}
    return ", ".join(f"{n} {median(t) * 1e3:.1f} ms ({ratio[n]:.3f})" for n, t in times.items())


def compare_training(name: str, batch: int, size: int, rounds: int) -> str:
    """Steps with gradients in NCHW order and with ours."""
    ours = (layers.average_over_pixels, resnet.SliceAndPad.forward)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch) % _CLASSES

    def make(average: Callable[[Tensor], Tensor], shortcut: object) -> Callable[[], object]:
        model = build(name).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

        def step() -> None:
            use_gradients(average, shortcut)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    found = compare({"NCHW": make(average_in_nchw, slice_in_nchw), "ours": make(*ours)}, rounds)
    use_gradients(*ours)
    return found


@torch.inference_mode()
def compare_scoring(name: str, batch: int, rounds: int) -> str:
    """The modules, a folded model with the batch as a whole, and in parts."""
    size, model = MODELS[name].image_size, build(name).eval()
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    folded, in_parts = folded_model.fold_model(model, None), folded_model._count_images_at_once
    assert folded is not None

    def score(count: Callable[[Tensor], int]) -> None:
        folded_model._count_images_at_once = count
        folded(images)

    passes: dict[str, Callable[[], object]] = {
        "modules": lambda: model(images),
        "folded, whole": lambda: score(lambda _: batch),
        "folded, in parts": lambda: score(in_parts),
    }
    return compare(passes, rounds)


def main() -> None:
    """Print a line per job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    _keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for job in given.jobs:
        kind, name, *numbers = job.split(":")
        run = {"train": compare_training, "score": compare_scoring}[kind]
        print(f"{job}: {run(name, *map(int, numbers), given.rounds)}", flush=True)


if __name__ == "__main__":
    main()
