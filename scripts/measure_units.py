"""Time the units of a model, and check how balanced stages are that were chosen without timing.

python scripts/measure_units.py MODEL [BATCH [IMAGE_SIZE [REPEATS]]]

One thread, forward and backward of each unit alone, CPU time, the minimum of all repeats.
"Uneven" is the time of the costliest stage divided by the average: 1.00 is ideal.
"""

import sys
import time

import torch

from phalanx.catalog.models import MODELS
from phalanx.config.read import read_settings
from phalanx.models.build import build_model
from phalanx.models.cost import count_units
from phalanx.models.stage_cost import estimate_costs
from phalanx.models.units import UnitModel
from phalanx.plan.pipeline import Pipeline, choose_starts

CLASSES = 1000


def time_units(model: UnitModel, x: torch.Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds of each unit's forward and backward pass."""
    inputs = {}
    with torch.no_grad():
        for unit in model.units:
            inputs[unit], x = x, model.run_unit(unit, x)
    best = dict.fromkeys(inputs, (float("inf"), float("inf")))
    for _ in range(repeats):
        for unit, images in inputs.items():
            own = images.clone().requires_grad_(unit != "stem")
            start = time.process_time()
            output = model.run_unit(unit, own)
            middle = time.process_time()
            gradient = torch.randn_like(output)
            second = time.process_time()
            output.backward(gradient)
            took = middle - start, time.process_time() - second
            best[unit] = min(best[unit][0], took[0]), min(best[unit][1], took[1])
    return best


def measure_unevenness(name: str, costs: dict[str, float], times: dict[str, float], stages: int):
    """The time of the costliest stage over the average, for stages chosen by costs."""
    flags = {"model": name, "shards": str(stages), "pipeline": "true", "data": "synthetic"}
    starts = choose_starts(read_settings("imagenet-resnet50", flags).config, costs)
    parts = Pipeline(starts=starts, schedule="Grouped").split_units([*costs])
    sums = [sum(times[unit] for unit in part) for part in parts]
    return max(sums) / (sum(sums) / stages)


def main() -> None:
    """Print the units, then how uneven stages are."""
    torch.set_num_threads(1)
    name, batch, size, repeats = (
        *sys.argv[1:5],
        *("resnet50", "8", "224", "5")[len(sys.argv) - 1 :],
    )
    batch, size, repeats = int(batch), int(size), int(repeats)
    variant = MODELS[name]
    model = build_model(variant, num_classes=CLASSES).train().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    timed = time_units(model, images, repeats)
    counts = count_units(variant, num_classes=CLASSES, batch=batch, image_size=size)
    print(f"{name}, {batch} images of {size} x {size}, torch {torch.__version__}")
    print(f"{'unit':<12}{'M MACs':>9}{'M kept':>9}{'forward ms':>12}{'backward ms':>13}")
    for unit in counts:
        forward, backward = timed[unit.name]
        macs, kept = unit.macs * batch / 1e6, unit.activation_bytes / 4e6
        print(f"{unit.name:<12}{macs:9.1f}{kept:9.2f}{1e3 * forward:12.2f}{1e3 * backward:13.2f}")
    forward, backward = (sum(column) for column in zip(*timed.values(), strict=True))
    print(f"backward over forward: {backward / forward:.2f}")
    times = {unit: sum(took) for unit, took in timed.items()}
    ways = {
        "MACs": {unit.name: float(unit.macs) for unit in counts},
        "estimate": estimate_costs(variant, num_classes=CLASSES, image_size=size),
        "timed": times,
    }
    for way, costs in ways.items():
        found = {n: measure_unevenness(name, costs, times, n) for n in (2, 4, 8)}
        text = ", ".join(f"{value:.2f} for {stages}" for stages, value in found.items())
        print(f"uneven, stages chosen by {way}: {text}")


if __name__ == "__main__":
    main()
