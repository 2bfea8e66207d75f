"""The memory of stages: what the plan predicts and what ranks take, as a table.

    python scripts/measure_stage_memory.py [--image-size 160] [--batch-size 16] [--threads 1]

Each row is a real run of two steps on ranks of this machine's CPU, with a process for each stage.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SPLITS = {2: "layer2/0", 4: "layer2/0,layer3/0,layer4/0"}
CASES = (  # stages, accumulation, schedule
    (2, 16, "Grouped"),
    (2, 16, "Interleaved"),
    (4, 16, "Grouped"),
    (4, 16, "Interleaved"),
    (4, 8, "Grouped"),
    (4, 64, "Grouped"),
)


def measure(folder: Path, stages: int, accumulation: int, schedule: str, *more: str) -> list[dict]:
    """What was predicted and measured for each stage of a run."""
    run = folder / f"{stages}-{accumulation}-{schedule}"
    words = ["train", "generated-resnet50", "--norm-type", "batch", "--steps", "2"]
    words += ["--pipeline-splits", SPLITS[stages], "--pipeline-schedule", schedule]
    words += ["--gradient-accumulation", str(accumulation), "--devices", str(stages)]
    words += ["--device", "cpu", "--validation-mode", "none", "--ckpts-per-epoch", "0"]
    words += ["--run-dir", str(run), *more]
    subprocess.run([sys.executable, "-m", "phalanx", *words], check=True, stdout=subprocess.DEVNULL)
    return json.loads((run / "summary.json").read_text())["memory_by_stage"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, default in (("--image-size", "160"), ("--batch-size", "16"), ("--threads", "1")):
        parser.add_argument(flag, default=default)
    given = parser.parse_args()
    more = [word for name, text in vars(given).items() for word in (f"--{name}", text)]
    more = [word.replace("_", "-") for word in more]
    print("| stages | micro-batches | schedule | stage | predicted MiB | measured MiB | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for stages, accumulation, schedule in CASES:
            rows = measure(Path(name), stages, accumulation, schedule, *more)
            for stage, row in enumerate(rows):
                predicted, measured = row["predicted"] / 2**20, row["measured"] / 2**20
                cells = stages, accumulation, schedule, stage, f"{predicted:.0f}", f"{measured:.0f}"
                print(f"| {' | '.join(map(str, cells))} | {predicted / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
