"""Build every model on the meta device and print how long the slowest take.

python scripts/time_builds.py [--repeat 5]
"""

import argparse
from time import perf_counter

import torch

from phalanx.catalog.models import MODELS
from phalanx.models.build import build_model

SHOWN = 5


def build_time(name: str) -> float:
    """Seconds for one model."""
    begin = perf_counter()
    with torch.device("meta"):
        build_model(MODELS[name], num_classes=1000)
    return perf_counter() - begin


def main() -> None:
    """Time all, the slowest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeats = range(parser.parse_args().repeat)
    times = {name: sorted(build_time(name) for _ in repeats) for name in MODELS}
    slowest = sorted(MODELS, key=lambda name: times[name][-1], reverse=True)
    print(f"{len(MODELS)} models, {len(repeats)} builds each; seconds, fastest and slowest build")
    for name in slowest[:SHOWN]:
        print(f"{name:<24}{times[name][0]:.3f}  {times[name][-1]:.3f}")


if __name__ == "__main__":
    main()
