"""Where the peak memory of scoring comes from: kernels being tried, the graph, or the run itself.

    python scripts/lab/scoring_memory.py [--model resnet50] [--batch 256]

Prints, for each phase, the GiB in use after it and the peak during it; once with cuDNN's
benchmarking of algorithms, and once without.
"""

import argparse
import gc

import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.engine.step import compute_logits

GIB = 2**30


def report(phase: str) -> None:
    """Print one row, and reset the peak."""
    torch.cuda.synchronize()
    used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    print(f"{phase:28} {used / GIB:8.2f} {peak / GIB:8.2f} {reserved / GIB:10.2f}", flush=True)
    torch.cuda.reset_peak_memory_stats()


@torch.inference_mode()
def measure(model: str, batch: int) -> None:
    """The phases of one scoring model."""
    flags = {"model": model, "half-type": "float16", "batch-size": str(max(batch, 8))}
    flags |= {"image-size": "224", "device": "cuda", "precision": "16.32"}
    settings = read_settings("synthetic-resnet50", flags)
    plan, dataset = plan_run(settings)
    print(f"{'phase':28} {'in use':>8} {'peak':>8} {'reserved':>10}")
    with Session(settings.config, plan, classes=dataset.classes) as session:
        report("session")
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        images = images.to(memory_format=torch.channels_last)
        report("images")
        scoring = session.find_scoring_model()
        report("folded weights")
        for phase in ("first batch: trial, capture", "second batch: replay", "third batch"):
            compute_logits(scoring, images, session.options)
            report(phase)


def main() -> None:
    """Measure with benchmarking and without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    words = parser.parse_args()
    measure(words.model, words.batch)
    gc.collect()
    torch.cuda.empty_cache()
    real = torch.backends.cudnn.flags
    torch.backends.cudnn.flags = lambda **given: real(**{**given, "benchmark": False})
    print("\nwithout cuDNN's trials")
    measure(words.model, words.batch)


if __name__ == "__main__":
    main()
