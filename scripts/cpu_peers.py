"""Phalanx compared with plain torch and onnxruntime on a CPU: training and inference, alternating.

    python scripts/cpu_peers.py [train:MODEL:BATCH[:SIZE] | infer:MODEL:BATCH[:SIZE] ...]
                                [--pairs 10] [--seconds 1] [--compile] [--out FILE]

Training: the step of `phalanx train` and a plain loop over the same network, with fused SGD, in the
memory format that is faster for it; --compile also tries torch.compile on both sides (two to four
minutes per model), and each side uses its best. Inference: the forward of `phalanx bench infer`
and onnxruntime on the same weights, exported to one ONNX file; logits are compared before anything
is timed. Blocks alternate; a row is the median of the paired ratios, ours over theirs, with its
95 % interval. Both sides have the same number of threads (OMP_NUM_THREADS, else the cores).

Needs onnx, onnxscript and onnxruntime for inference. Use an idle machine.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.score import open_untrained_model
from phalanx.assemble.session import Session
from phalanx.bench.paired_ratio import measure_pairs
from phalanx.bench.result import collect_bench_environment
from phalanx.bench.synthetic_steps import build_synthetic_step
from phalanx.config.read import read_settings
from phalanx.data.loading.stage_rates import measure_rate
from phalanx.engine.step import compute_logits
from phalanx.models.build import build_model
from phalanx.plan.machine import count_threads
from phalanx.plan.model import build_variant, choose_image_size

_JOBS = (
    *("train:resnet8:64:32", "train:resnet50:16:128"),
    *("infer:resnet8:1:32", "infer:resnet50:1", "infer:resnet50:8", "infer:efficientnet_b0:1"),
)
_ROUNDS = 3  # to find the fastest of several settings
_CLASSES, _MOST_ERROR = 1000, 1e-4  # largest error of logits, relative to the largest
_Work = Callable[[], int]


class Job(NamedTuple):
    """A row of the table."""

    kind: str
    model: str
    batch: int
    size: int | None

    @classmethod
    def read(cls, text: str) -> "Job":
        """The job described by a text such as infer:resnet50:8:224."""
        kind, model, batch, *size = text.split(":")
        if kind not in ("train", "infer"):
            sys.exit(f"{text}: expected train:... or infer:...")
        return cls(kind, model, int(batch), int(size[0]) if size else None)

    def flags(self) -> dict[str, str]:
        """The options of its run."""
        given = {"model": self.model, "data": "synthetic", "device": "cpu"}
        given |= {"batch-size": str(self.batch), "valid-batch-size": str(self.batch)}
        given["norm-type"] = "batch"
        return given | ({"image-size": str(self.size)} if self.size else {})


def block(step: _Work, seconds: float) -> _Work:
    """A block of as many steps as take about that many seconds."""
    images = step()
    count = max(1, round(measure_rate(step, min(seconds, 0.5)) * seconds / images))

    def work() -> int:
        return sum(step() for _ in range(count))

    return work


# --- training ---


def pair_training(job: Job, seconds: float, *, compiled: bool) -> tuple[_Work, _Work, str]:
    """Our best step, the peer's best one, and their descriptions."""
    ours = {"as it comes": own_step(job)}
    theirs = {
        "eager": plain_step(job, torch.contiguous_format),
        "eager, channels_last": plain_step(job, torch.channels_last),
    }
    if compiled:
        ours["--compile"] = own_step(job, compile="true")
        theirs["compiled, channels_last"] = plain_step(job, torch.channels_last, compiled=True)
    own, plain = (find_fastest(steps, seconds) for steps in (ours, theirs))
    return ours[own], theirs[plain], f"plain torch, {plain}; ours {own}"


def find_fastest(steps: dict[str, _Work], seconds: float) -> str:
    """The name of the fastest, from alternating rounds."""
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS if len(steps) > 1 else 0):
        for name, step in steps.items():
            rates[name].append(measure_rate(step, seconds / 2))
    return max(steps, key=lambda name: median(rates[name] or [0.0]))


def own_step(job: Job, **more: str) -> _Work:
    """The step of `phalanx train`."""
    settings = read_settings("synthetic-resnet50", {**job.flags(), **more})
    plan, _ = plan_run(settings)
    return build_synthetic_step(settings.config, plan)


def plain_step(job: Job, layout: torch.memory_format, *, compiled: bool = False) -> _Work:
    """What anybody would write in ten lines, with images in memory."""
    config = read_settings("synthetic-resnet50", job.flags()).config
    network = build_model(build_variant(config), num_classes=_CLASSES)
    network = network.train().to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9, fused=True)
    size = choose_image_size(config)
    images = torch.randn(job.batch, 3, size, size).contiguous(memory_format=layout)
    labels = torch.arange(job.batch) % _CLASSES
    model: Callable[[Tensor], Tensor] = torch.compile(network) if compiled else network

    def step() -> int:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return job.batch

    return step


# --- inference ---


def pair_inference(job: Job, folder: Path) -> tuple[_Work, _Work, str]:
    """Our forward pass, onnxruntime's with the same weights, and a description."""
    import onnxruntime

    session = open_untrained_model(read_settings("synthetic-resnet50", job.flags()))
    give_statistics(session)
    model = session.find_scoring_model()
    size = session.plan.image_size
    images = torch.randn(job.batch, 3, size, size)
    file = export(session.model, images, folder / f"{job.model}-{job.batch}.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    peer = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (name,) = (one.name for one in peer.get_inputs())
    ready, host = images.contiguous(memory_format=torch.channels_last), images.numpy()

    @torch.inference_mode()
    def ours() -> int:
        compute_logits(model, ready, session.options).cpu()
        return job.batch

    def theirs() -> int:
        peer.run(None, {name: host})
        return job.batch

    with torch.inference_mode():
        wanted = compute_logits(model, ready, session.options).numpy()
    error = np.abs(peer.run(None, {name: host})[0] - wanted).max() / np.abs(wanted).max()
    if error > _MOST_ERROR:
        sys.exit(f"{job}: logits differ by {error:.2g} of the largest: not the same model")
    return ours, theirs, f"onnxruntime {onnxruntime.__version__}, logits within {error:.1e}"


@torch.no_grad()
def give_statistics(session: Session) -> None:
    """Give the norms statistics of noise, so that logits are neither zero nor huge."""
    size = session.plan.image_size
    session.model.train()
    for _ in range(3):
        session.model(torch.randn(8, 3, size, size))
    session.model.eval()


def export(model: nn.Module, images: Tensor, file: Path) -> str:
    """The model as an ONNX file for batches of this size."""
    torch.onnx.export(model.eval(), (images,), file, dynamo=True, verbose=False)
    return str(file)


# --- the table ---


def measure(job: Job, words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    torch.set_num_threads(count_threads())
    if job.kind == "train":
        ours, theirs, peer = pair_training(job, words.seconds, compiled=words.compile)
    else:
        ours, theirs, peer = pair_inference(job, folder)
    blocks = [block(step, words.seconds) for step in (ours, theirs)]
    ratio = measure_pairs(*blocks, pairs=words.pairs, done=lambda pair: None)
    return {
        "job": ":".join(str(part) for part in job if part is not None),
        "peer": peer,
        "ours": round(median(ratio.ours), 3),
        "theirs": round(median(ratio.theirs), 3),
        "ratio": round(ratio.median, 4),
        "interval95": [round(end, 4) for end in ratio.interval95],
        "pairs": words.pairs,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", default=_JOBS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block")
    parser.add_argument("--compile", action="store_true", help="try torch.compile, too")
    parser.add_argument("--out", type=Path, help="write the rows as JSON, with the environment")
    words = parser.parse_args()
    rows = []
    print(
        "| what | ours, images/s | theirs | ratio (95 % interval) | peer |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for text in words.jobs:
            row = measure(Job.read(text), words, Path(folder))
            low, high = row["interval95"]
            print(
                f"| {row['job']} | {row['ours']:,} | {row['theirs']:,} | {row['ratio']:.3f} "
                f"({low:.3f} to {high:.3f}) | {row['peer']} |",
                flush=True,
            )
            rows.append(row)
    if words.out:
        environment = collect_bench_environment("cpu")
        words.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
